# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Triton's `triton_python_backend_utils`, strict where Triton crashes or hangs.

It records violations: a response after the final, a second final, `is_cancelled` after the final, which takes the real
server down, and tensors that Triton would free without Python's global lock. A test asserts that there are none.
"""

from __future__ import annotations

import copy
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import torch

FINAL = 1


class TritonError(Exception):
    """Named codes, as in Triton."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, text, code=INTERNAL):
        super().__init__(text)
        self.text, self._code = text, code

    def message(self):
        return self.text

    def code(self):
        return self._code


class Tensor:
    """Holds a numpy array, or a torch tensor given by DLPack."""

    def __init__(self, name, array):
        self._name, self.array, self.torch = name, array, None

    @classmethod
    def from_dlpack(cls, name, tensor):
        made = cls(name, None)
        made.torch = torch.from_dlpack(tensor)
        return made

    def name(self):
        return self._name

    def shape(self):
        return list(self.array.shape if self.torch is None else self.torch.shape)

    def as_numpy(self):
        return self.array if self.torch is None else self.torch.numpy()

    def __dlpack__(self, **options):
        if 0 in self.shape():
            raise BufferError("DLPack of Triton cannot carry tensors without elements")
        return self.torch.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.torch.__dlpack_device__()


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self._tensors, self._error = list(output_tensors), error

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error

    def output_tensors(self):
        return list(self._tensors)

    def prune(self):
        """Let go of the tensors as Triton does of those that the request did not ask for; True if others hold them."""
        references = [weakref.ref(tensor) for tensor in self._tensors]
        self._tensors = [copy.copy(tensor) for tensor in self._tensors]
        return all(reference() is not None for reference in references)


class Sender:
    """Records what was sent, and every breach of Triton's rules."""

    def __init__(self):
        self.responses, self.finals, self.violations = [], 0, []
        self.cancelled = False
        self.cancel_queries = 0
        self.fault = None
        self.done = threading.Event()

    def send(self, response=None, flags=0):
        if self.fault is not None and not flags:
            raise self.fault
        if self.finals:
            self.violations.append("sent after the final")
        if response is not None:
            if not response.prune():
                self.violations.append("freed tensors without Python's global lock")
            self.responses.append(response)
        if flags & FINAL:
            self.finals += 1
            self.done.set()

    def is_cancelled(self):
        self.cancel_queries += 1
        if self.finals:
            self.violations.append("is_cancelled after the final")
        return self.cancelled

    @property
    def error(self):
        return next((r.error() for r in self.responses if r.has_error()), None)

    def outputs(self):
        return [{t.name(): t for t in r.output_tensors()} for r in self.responses if not r.has_error()]


class Request:
    def __init__(self, inputs=(), request_id="r1", parameters="", outputs=("META", "ROWS"), timeout=0):
        self._inputs, self._id, self._parameters, self._outputs = list(inputs), request_id, parameters, outputs
        self._timeout = timeout
        self.sender = Sender()

    def inputs(self):
        return self._inputs

    def request_id(self):
        return self._id

    def parameters(self):
        return self._parameters

    def timeout(self):
        return self._timeout

    def requested_output_names(self):
        return list(self._outputs)

    def get_response_sender(self):
        return self.sender


class MetricFamily:
    GAUGE, COUNTER = "gauge", "counter"

    def __init__(self, name, description, kind):
        self.name, self.description, self.kind = name, description, kind
        self.metrics = []

    def Metric(self, labels):  # noqa: N802 - Triton's name
        self.metrics.append(Metric(labels))
        return self.metrics[-1]


class Metric:
    def __init__(self, labels):
        self.labels, self.values = labels, []
        self.fault = None

    def set(self, value):
        if self.fault is not None:
            raise self.fault
        self.values.append(value)

    def increment(self, value):
        if self.fault is not None:
            raise self.fault
        assert value > 0, "a counter never goes back"
        self.values.append((self.values[-1] if self.values else 0) + value)


def text_tensor(name, *values):
    """A BYTES tensor of `values` (bytes or str)."""
    return Tensor(name, np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_))


class PbUtils(SimpleNamespace):
    """The module."""

    def __init__(self):
        self.families = []
        super().__init__(
            TritonError=TritonError,
            Tensor=Tensor,
            InferenceResponse=InferenceResponse,
            TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        )
        outer = self

        class Family(MetricFamily):
            def __init__(self, **fields):
                super().__init__(**fields)
                outer.families.append(self)

        self.MetricFamily = Family

    @staticmethod
    def get_input_tensor_by_name(request, name):
        return next((tensor for tensor in request.inputs() if tensor.name() == name), None)

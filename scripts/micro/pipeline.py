# SPDX-License-Identifier: Apache-2.0
"""Whole replies by the three stages as they are served, each in a process of its own, but without Triton.

The rest of `triton-omni bench`'s times is Triton's: its ensemble, the Python backend's shared memory and DLPack, gRPC.
Here queues of `torch.multiprocessing` carry the messages, tensors on a GPU as CUDA IPC handles.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing

from .figures import READY, WITHOUT_TRITON
from .plan import Plan, repeated
from .replies import MODELS, ONE_TOKEN, chat, chat_of, parameters, reply_figures

STAGES = ("thinker", "talker", "token2wav")
START_S = 600.0
POLL_S = 0.05
FINAL = 1

Packed = dict[str, Any]
"""A response on its way: by tensor name an array (host), a tensor (GPU), or under `error` a sentence."""


class PipelineError(RuntimeError):
    """A stage did not start, or a reply ended with an error."""


class PlainTensor:
    """The part of Triton's tensors that the adapters need."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self.value = name, value

    @classmethod
    def from_dlpack(cls, name: str, tensor: Tensor) -> PlainTensor:
        """A tensor on its device; on the host as an array, which is cheaper to send, where NumPy has the dtype."""
        return cls(name, tensor if tensor.is_cuda or tensor.dtype is torch.bfloat16 else tensor.numpy())

    def name(self) -> str:
        """Its name."""
        return self._name

    def shape(self) -> Sequence[int]:
        """Its shape."""
        return tuple(self.value.shape)

    def as_numpy(self) -> Any:
        """A host tensor."""
        return self.value

    def __dlpack__(self, **options: Any) -> Any:
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.value.__dlpack_device__()


class _Metric:
    """Takes metrics and shows them nowhere."""

    GAUGE, COUNTER = "gauge", "counter"

    def __init__(self, **_: Any) -> None:
        pass

    def Metric(self, **_: Any) -> _Metric:  # noqa: N802 - Triton's name
        return self

    def set(self, _: float) -> None:
        """Forget it."""

    def increment(self, _: float) -> None:
        """The same."""


class _Error:
    INTERNAL = INVALID_ARG = NOT_FOUND = UNAVAILABLE = CANCELLED = UNKNOWN = UNSUPPORTED = 0

    def __init__(self, text: str, _code: int = 0) -> None:
        self.text = text


class _Response:
    def __init__(self, output_tensors: Sequence[PlainTensor], error: _Error | None = None) -> None:
        self._tensors, self.error = output_tensors, error

    def output_tensors(self) -> Sequence[PlainTensor]:
        """Its tensors."""
        return self._tensors


@dataclass
class _Request:
    """One request of a stage; what it answers goes to `put`."""

    tensors: Packed
    put: Callable[[Packed], None]

    def inputs(self) -> list[PlainTensor]:
        return [PlainTensor(name, value) for name, value in self.tensors.items()]

    def requested_output_names(self) -> Sequence[str]:
        return ()

    def request_id(self) -> str:
        return "pipeline"

    def parameters(self) -> str:
        return "{}"

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> _Request:
        return self

    def send(self, response: _Response | None = None, flags: int = 0) -> None:
        del flags  # an ensemble's next stage hears nothing of finals
        if response is not None and response.error is not None:
            self.put({"error": response.error.text})
        elif response is not None:
            self.put({tensor.name(): tensor.value for tensor in response.output_tensors()})

    def is_cancelled(self) -> bool:
        return False


PLAIN_UTILS = SimpleNamespace(
    Tensor=PlainTensor,
    InferenceResponse=_Response,
    TritonError=_Error,
    MetricFamily=_Metric,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
)
"""Stands in for `triton_python_backend_utils`."""


def serve(model: str, started: Any, stage: str, inbox: Any, send_queue: Any) -> None:
    """A stage's process: takes requests from one queue and answers into the other, until it is given None."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from triton_omni.stub import launch

    os.environ[launch.CHECKPOINT_VARIABLE] = model
    start = getattr(launch, f"start_{stage}")
    adapter = start(PLAIN_UTILS, {"model_instance_device_id": "0"}, MODELS / stage / "1")
    started.put(stage)
    while (tensors := inbox.get()) is not None:
        if "error" in tensors:
            send_queue.put(tensors)
        else:
            adapter.execute([_Request(tensors, send_queue.put)])
    launch.end_process(adapter.close)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@dataclass(frozen=True)
class _Reply:
    """Seconds from the request to the first text, to the first samples, and to the end."""

    first_text_s: float
    first_audio_s: float
    whole_s: float
    info: Mapping[str, Any]


class Pipeline:
    """The three processes and the queues between them."""

    def __init__(self, model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._queues: list[Any] = [context.SimpleQueue() for _ in range(len(STAGES) + 1)]
        started: Any = context.Queue()
        places = zip(STAGES, self._queues, self._queues[1:], strict=False)
        self._processes = [context.Process(target=serve, args=(model, started, *place)) for place in places]
        for process in self._processes:
            process.start()
        try:
            self._wait_for_stages(started)
        except PipelineError:
            self.close()
            raise

    def _wait_for_stages(self, started: Any) -> None:
        deadline = time.monotonic() + START_S
        waiting = set(STAGES)
        while waiting:
            if not started.empty():
                waiting.remove(started.get())
            elif time.monotonic() > deadline or not all(process.is_alive() for process in self._processes):
                raise PipelineError(f"{', '.join(sorted(waiting))} did not start")
            time.sleep(POLL_S)

    def ask(self, messages: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]) -> _Reply:
        """One reply.

        Raises:
            PipelineError: it ended with an error.
        """
        request = {"messages": messages, "sampling_parameters": parameters}
        begin = time.perf_counter()
        self._queues[0].put({name: np.array([json.dumps(value).encode()], object) for name, value in request.items()})
        text = audio = 0.0
        while True:
            answer = self._queues[-1].get()
            now = time.perf_counter() - begin
            if "error" in answer:
                raise PipelineError(answer["error"])
            text = text or (now if answer["text_output"][0] else 0.0)
            audio = audio or (now if len(answer["audio_output"]) else 0.0)
            if answer["info"][0]:
                return _Reply(text, audio, now, json.loads(answer["info"][0]))

    def prompt_of(self, tokens: int) -> list[dict[str, str]]:
        """See `chat_of`."""

        async def count(text: str) -> int:
            return int(self.ask(chat(text), ONE_TOKEN).info["usage"]["prompt_tokens"])

        return chat_of(tokens, count)

    def close(self) -> None:
        """Stop the stages, the first one first; one that does not end is ended."""
        for queue, process in zip(self._queues, self._processes, strict=False):
            queue.put(None)
            process.join(timeout=20)
            process.kill()
            process.join()


def pipeline(plan: Plan, _at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Replies of fixed lengths, one after another: times to first text, to first audio, and to the end."""
    stages = Pipeline(plan.model)
    try:
        yield READY
        messages = stages.prompt_of(plan.prompt_tokens)
        replies: list[_Reply] = []

        def one() -> float:
            replies.append(stages.ask(messages, parameters(plan)))
            return replies[-1].whole_s

        whole = repeated(plan, one)
        usage = replies[-1].info["usage"]
        lengths = {name: usage[name] for name in ("prompt_tokens", "reply_tokens", "codes")}
        timed = [(reply.first_text_s, reply.first_audio_s, reply.whole_s) for reply in replies[-len(whole) :]]
        yield from reply_figures(WITHOUT_TRITON, timed, lengths)
    finally:
        stages.close()

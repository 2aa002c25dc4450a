# SPDX-License-Identifier: Apache-2.0
"""Answers Triton requests: one response sender a request, a few sending threads a stage.

Triton's `send` blocks, so no engine thread ever calls it. It waits for Triton's process without Python's global lock,
so that the sends of several threads overlap. A response sender guards the rule that a request gets exactly one final,
and that nobody asks Triton whether a request is cancelled after its final (that would crash the server).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from triton_omni.core.errors import InternalError, OmniError
from triton_omni.session.answer import Sent
from triton_omni.stub.tensors import write_tensors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class SendingThread:
    """Runs sends in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name}-send", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Run `job` after those already put."""
        self._jobs.put(job)

    def close(self) -> None:
        """Send what was put, then end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a response could not be sent")
            # The job holds a response's tensors, which an idle thread would keep alive.
            del job


class TritonResponseSender:
    """`stage.ResponseSender` over one Triton request.

    Args:
        threads: one of these sends, the first unless the response sender is bound to a slot.
    """

    def __init__(self, pb_utils: Any, request: Any, threads: Sequence[SendingThread]) -> None:
        self._pb_utils = pb_utils
        self._sender = request.get_response_sender()
        self._threads = threads
        self._thread = threads[0]
        self._lock = threading.Lock()
        self._claim = threading.Lock()
        self._finished = False
        self._final_sent = False
        # Used by the sending thread: True if every response has left.
        self._whole = True

    def bind(self, slot: int) -> None:
        """Send on the thread of this slot."""
        self._thread = self._threads[slot % len(self._threads)]

    def send(
        self,
        tensors: Mapping[str, Sent],
        ready: torch.cuda.Event | None = None,
        lost: Callable[[], object] | None = None,
    ) -> None:
        """Send one response."""
        if not self._finished:
            self._thread.put(lambda: self._send(tensors, ready, lost))

    def conclude(self, tensors: Mapping[str, Sent], then: Callable[[], None], lost: Callable[[], bool]) -> None:
        """Send the last response and the empty final if every response has left; else see `ResponseSender.conclude`."""
        if self._claim_final():
            self._thread.put(lambda: self._conclude(tensors, then, lost))

    def answer(self, tensors: Mapping[str, Sent], then: Callable[[], None] | None = None) -> None:
        """Send one response as the final, the only response of a model that is not decoupled."""
        if self._claim_final():
            self._thread.put(lambda: self._send_final(functools.partial(self._response, tensors), then))

    def finish(self, ready: torch.cuda.Event | None = None, then: Callable[[], None] | None = None) -> None:
        """Send the empty final."""
        if self._claim_final():
            self._thread.put(lambda: self._send_final(None, then, ready))

    def fail(self, error: OmniError, then: Callable[[], None] | None = None) -> None:
        """Send an error as the final."""
        if self._claim_final():
            self._thread.put(lambda: self._send_final(functools.partial(self._error, error), then))

    def if_cancelled(self, then: Callable[[], None]) -> None:
        """Ask Triton on the sending thread whether the client is gone, and run `then` if so."""

        def ask() -> None:
            if self.is_cancelled():
                then()

        self._thread.put(ask)

    def is_cancelled(self) -> bool:
        """True if Triton says that the client is gone; False after the final response. Waits for Triton's process."""
        with self._lock:
            return not self._final_sent and bool(self._sender.is_cancelled())

    def _response(self, tensors: Mapping[str, Sent]) -> Any:
        try:
            return self._pb_utils.InferenceResponse(output_tensors=write_tensors(self._pb_utils, tensors))
        except Exception:
            logger.exception("an answer could not be written")
            return self._error(InternalError("the answer could not be written"))

    def _error(self, error: OmniError) -> Any:
        triton_error = self._pb_utils.TritonError(
            error.to_text(), getattr(self._pb_utils.TritonError, error.triton_code)
        )
        return self._pb_utils.InferenceResponse(output_tensors=[], error=triton_error)

    def _claim_final(self) -> bool:
        """Return True if the caller is the first to end this request. It does not use `_lock`, which is held while
        Triton sends.
        """
        with self._claim:
            first, self._finished = not self._finished, True
            return first

    def _send(
        self, tensors: Mapping[str, Sent], ready: torch.cuda.Event | None, lost: Callable[[], object] | None
    ) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            self._pass_on(self._pb_utils.InferenceResponse(output_tensors=write_tensors(self._pb_utils, tensors)))
        except Exception:
            logger.exception("a response could not be sent")
            self._whole = False
            if lost is not None:
                lost()

    def _conclude(self, tensors: Mapping[str, Sent], then: Callable[[], None], lost: Callable[[], bool]) -> None:
        if self._whole:
            self._send(tensors, None, None)
        if self._whole:
            self._send_final(None, then)
            return
        # Reset before `lost`, whose caller may fail the request at once.
        self._finished = False
        if not lost() and self._claim_final():
            error = InternalError("a part of the reply could not be sent")
            self._send_final(functools.partial(self._error, error), then)

    def _send_final(
        self,
        response: Callable[[], Any] | None,
        then: Callable[[], None] | None = None,
        ready: torch.cuda.Event | None = None,
    ) -> None:
        # Triton waits for the final and the other stages for `then`, also when the device is lost.
        with contextlib.ExitStack() as always:
            if then is not None:
                always.callback(then)
            always.callback(self._send_flag, response)
            if ready is not None:
                ready.synchronize()

    def _send_flag(self, response: Callable[[], Any] | None) -> None:
        sent = () if response is None else (response(),)
        with self._lock:
            self._final_sent = True
            self._pass_on(*sent, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _pass_on(self, *response: Any, flags: int = 0) -> None:
        # `send` removes the outputs that the request did not ask for, and does not hold Python's global lock then. With
        # the last reference it would free Python objects, which ends a process of Python 3.12.
        held = [each.output_tensors() for each in response]
        self._sender.send(*response, flags=flags)
        held.clear()

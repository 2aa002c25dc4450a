# SPDX-License-Identifier: Apache-2.0
"""`qwen2_5_omni_unary`: collects the ensemble's stream into one response, many requests at a time.

It is a client of its own server's gRPC endpoint, not a BLS. Triton builds the tensors of BLS responses on a thread
without the GIL, which crashes a busy model. BLS calls also cannot be cancelled, and lose late errors. A closed HTTP
connection is invisible to everybody on this Triton: the request's deadline bounds it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc  # type: ignore[import-untyped]
from tritonclient.utils import serialize_byte_tensor  # type: ignore[import-untyped]

from triton_omni.core import errors
from triton_omni.core.endpoint import OWN_CHANNEL
from triton_omni.core.errors import DeadlineExceeded, InternalError, OmniError, Overloaded
from triton_omni.core.settings import UnarySettings
from triton_omni.request.parse import MAX_PARAMETERS_BYTES, RequestDefaults
from triton_omni.request.strict_json import parse_json
from triton_omni.session.answer import WAV_HEADER_BYTES, Answer, is_account, to_base64, wav_header
from triton_omni.session.ledger_table import OPEN_REQUESTS, PID, create_table
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.stage import lost_error
from triton_omni.stub.request_parameters import read_id, read_parameters
from triton_omni.stub.response_sender import SendingThread, TritonResponseSender
from triton_omni.stub.tensors import bound_strings, read_strings

TOLD_WITHIN_S: Final = 2.0
"""Seconds in which the surviving stages should answer a request that lost a stage."""
ENSEMBLE: Final = "qwen2_5_omni"
CANCEL_POLL_S: Final = 0.05
SETTLED_WITHIN_S: Final = 1.0
LATE_END_S: Final = 2.0
LATE_TIMEOUT_S: Final = 5.0
"""Seconds in which the stages should answer a request whose deadline has passed."""
RETRY_AFTER_MS: Final = 250
_LONGEST_US: Final = 2**63 - 1
"""Largest `timeout`: Triton stores it as unsigned 64 bits and reads it as signed."""

_LENGTH_BYTES: Final = 4
"""Bytes of the length before each string of a BYTES tensor."""
_CHANNEL_OPTIONS: Final = (
    *OWN_CHANNEL,
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)

logger = logging.getLogger(__name__)


class DeathWatch:
    """Detects that a stage died during one request, from now on, if no other stage answers it.

    The process that would answer may have died too, or have ended its own part just before. Every session open at the
    death is lost, so no healthy request is cut off.

    Args:
        board: that of the server; None = nothing is known of its stages.
    """

    def __init__(self, board: StageBoard | None) -> None:
        self._board = board
        self._epochs = 0 if board is None else board.epochs()
        self._seen: float | None = None

    def error(self) -> OmniError | None:
        """Return the error that ends the request, if it should have ended by itself; else None."""
        lost = [] if self._board is None else self._board.lost_since(self._epochs)
        if not lost:
            return None
        if self._seen is None:
            self._seen = time.monotonic()
        return lost_error(lost[0]) if time.monotonic() - self._seen > TOLD_WITHIN_S else None


@dataclass
class Collected:
    """Responses of the stream so far."""

    text: list[str] = field(default_factory=list)
    audio: list[np.ndarray[tuple[int], np.dtype[np.float32]]] = field(default_factory=list)
    encoded: list[bytes] = field(default_factory=list)
    info: str = ""

    def append_response(self, response: Any) -> None:
        """Add one response of the stream; the empty final has no outputs."""
        result = InferResult(response)
        if result.get_output("text_output") is None:
            return
        self.text.append(_text(result, "text_output"))
        if len(audio := result.as_numpy("audio_output")):
            self.audio.append(audio)
        if encoded := _text(result, "audio_base64"):
            self.encoded.append(base64.b64decode(encoded))
        if is_account(info := _text(result, "info")):
            self.info = info

    def to_answer(self) -> Answer:
        """The whole reply; streamed WAV chunks become one file whose header tells the true length."""
        if not self.info:
            raise InternalError("the stream ended without its last response", stage="unary")
        encoded = b"".join(self.encoded)
        sample_rate = json.loads(self.info)["sample_rate"]
        if encoded.startswith(wav_header(sample_rate)):
            samples = encoded[WAV_HEADER_BYTES:]
            encoded = wav_header(sample_rate, len(samples)) + samples
        audio = np.concatenate(self.audio) if self.audio else None
        return Answer(text="".join(self.text), audio=audio, audio_base64=to_base64(encoded), info=self.info)


class OpenRequests:
    """Counts in the ledger the requests that only this process can end; thread-safe."""

    def __init__(self, board: StageBoard | None) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._count = 0
        self._add(0)

    def open(self) -> None:
        """Count one more request, before anything is done for it."""
        self._add(1)

    def close(self) -> None:
        """Count one less: it has had its last response."""
        self._add(-1)

    def _add(self, number: int) -> None:
        with self._lock:
            self._count += number
            if self._board is not None:
                self._board.set_word(OPEN_REQUESTS, self._count, "unary")


class UnaryModel:
    """Serves unary requests.

    Args:
        pb_utils: Triton's `triton_python_backend_utils`.
        settings: how many requests run at once; further ones are refused as overloaded.
        grpc_url: `HOST:PORT` of this server.
        table: name of its ledger, made here unless a stage has made it; empty = it has none.
        timeout_s: the thinker's deadline of a request that names none, in seconds.
    """

    def __init__(
        self,
        pb_utils: Any,
        settings: UnarySettings,
        grpc_url: str,
        table: str = "",
        timeout_s: float = RequestDefaults.timeout_s,
    ) -> None:
        bound_strings(pb_utils)
        self._timeout_s = timeout_s
        self._pb_utils = pb_utils
        self._settings = settings
        self._grpc_url = grpc_url
        self._board = _open_board(table) if table else None
        self._open_requests = OpenRequests(self._board)
        self._sending = SendingThread("unary")
        self._running: set[asyncio.Task[None]] = set()
        self._places = threading.BoundedSemaphore(settings.max_requests)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni-unary", daemon=True)
        self._thread.start()
        self._channel = asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def execute(self, requests: Sequence[Any]) -> None:
        """Take requests; each is answered through its own sender."""
        for request in requests:
            sender = TritonResponseSender(self._pb_utils, request, (self._sending,))
            self._open_requests.open()
            try:
                self._accept(request, sender)
            except OmniError as error:
                error.stage = error.stage or "unary"
                sender.fail(error, self._open_requests.close)

    def close(self) -> None:
        """Stop after the running requests; the stages end them when they close."""
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._sending.close()
        if self._board is not None:
            self._board.set_word(OPEN_REQUESTS, 0, "unary")
            self._board.set_word(PID, 0, "unary")
            self._board.close()

    def _accept(self, request: Any, sender: TritonResponseSender) -> None:
        message = to_message(request)
        if not self._places.acquire(blocking=False):
            limit = f"all {self._settings.max_requests} unary requests are in use"
            raise Overloaded(limit, stage="unary", retry_after_ms=RETRY_AFTER_MS)
        self._loop.call_soon_threadsafe(self._start, message, sender)

    # On the event loop's thread.

    async def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._grpc_url, options=_CHANNEL_OPTIONS)

    async def _drain(self) -> None:
        await asyncio.gather(*self._running)
        await self._channel.close()

    def _start(self, message: Any, sender: TritonResponseSender) -> None:
        task = self._loop.create_task(self._serve(message, sender))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, message: Any, sender: TritonResponseSender) -> None:
        try:
            timeout_s = asked_timeout_s(message, self._timeout_s)
            collected = await self._unless_cancelled(self._collect(message), sender, timeout_s)
            end = functools.partial(sender.answer, collected.to_answer().to_tensors(), self._open_requests.close)
        except OmniError as error:
            end = functools.partial(sender.fail, error, self._open_requests.close)
        except Exception:
            logger.exception("unary request %s failed", message.id)
            failure = InternalError("the reply could not be collected", stage="unary")
            end = functools.partial(sender.fail, failure, self._open_requests.close)
        # The client may ask again as soon as it has the answer.
        self._places.release()
        end()

    async def _unless_cancelled(self, collecting: Any, sender: TritonResponseSender, timeout_s: float) -> Collected:
        """Return the reply. If the client goes away, or if a stage died or the deadline passed and no stage reports it,
        cancel the stream, which the stages notice.
        """
        watch, end = DeathWatch(self._board), time.monotonic() + timeout_s + LATE_TIMEOUT_S
        task: asyncio.Task[Collected] = self._loop.create_task(collecting)
        while not (await asyncio.wait({task}, timeout=CANCEL_POLL_S))[0]:
            error = watch.error()
            if sender.is_cancelled():
                error = errors.Cancelled("the request was cancelled", stage="unary")
            elif error is None and time.monotonic() > end:
                error = DeadlineExceeded(f"timeout: {timeout_s:g} s have passed", stage="unary")
            if error is not None:
                task.cancel()
                await asyncio.wait({task})
                raise error
        return task.result()

    async def _collect(self, message: Any) -> Collected:
        collected = Collected()
        stream = self._stub.ModelStreamInfer(_once(message))
        try:
            while (answer := await _next(stream, collected)) is not grpc.aio.EOF:
                # A stage may die between the last response of a whole reply and the stream's end.
                if answer.error_message and not collected.info:
                    await _settle(stream)
                    raise errors.parse(answer.error_message)
                if not answer.error_message:
                    collected.append_response(answer.infer_response)
        except grpc.aio.AioRpcError as error:
            cause = f"{error.code().name}: {error.details()}"
            raise InternalError(f"the stream from {self._grpc_url} broke: {cause}", stage="unary") from error
        finally:
            stream.cancel()
        return collected


def asked_timeout_s(message: Any, default_s: float) -> float:
    """Return the thinker's deadline for an ensemble's request: the sooner of its two timeouts, or the default.

    A timeout that the thinker will refuse counts as not given.
    """
    given = [message.parameters["timeout"].int64_param / 1e6] if "timeout" in message.parameters else []
    for one, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        if one.name == "sampling_parameters" and raw[_LENGTH_BYTES:]:
            given += _timeout_in(raw[_LENGTH_BYTES:])
    allowed = [seconds for seconds in given if 0 < seconds <= RequestDefaults.max_timeout_s]
    return min(allowed, default=default_s)


def _timeout_in(parameters: bytes) -> list[float]:
    try:
        tree = parse_json(parameters, "sampling_parameters", max_bytes=MAX_PARAMETERS_BYTES)
    except OmniError:
        return []
    seconds = tree.get("timeout") if isinstance(tree, dict) else None
    return [seconds] if isinstance(seconds, int | float) else []


def _open_board(table: str) -> StageBoard:
    create_table(table)
    board = StageBoard(table)
    board.set_word(PID, os.getpid(), "unary")
    return board


async def _next(stream: Any, collected: Collected) -> Any:
    """Return the next answer. After a whole reply it waits only briefly, since the process that ends the stream may
    have died.
    """
    if not collected.info:
        return await stream.read()
    try:
        return await asyncio.wait_for(stream.read(), LATE_END_S)
    except TimeoutError:
        return grpc.aio.EOF


async def _settle(stream: Any) -> None:
    """Wait for the end of a stream that brought an error: Triton 24.10 never frees the request of one that is cancelled
    in the moment before.
    """
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stream.code(), SETTLED_WITHIN_S)


def to_message(request: Any) -> Any:
    """Return the ensemble's gRPC request (`ModelInferRequest`) with a Triton request's inputs, id and parameters.

    Raises:
        BadRequest, TooLarge: as `read_id`, `read_parameters` and `read_strings` do.
    """
    message = service_pb2.ModelInferRequest(model_name=ENSEMBLE, id=read_id(request))
    parameters = read_parameters(request)
    for tensor in request.inputs():
        array = read_strings(tensor)
        message.inputs.add(name=tensor.name(), datatype="BYTES", shape=array.shape)
        message.raw_input_contents.append(serialize_byte_tensor(array).item() if array.size else b"")
    _set_parameters(message, parameters)
    if timeout_us := request.timeout():
        message.parameters["timeout"].int64_param = min(timeout_us, _LONGEST_US)
    return message


def _set_parameters(message: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            message.parameters[name].int64_param = value
        elif isinstance(value, float):
            message.parameters[name].double_param = value
        else:
            message.parameters[name].string_param = value


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message


def _text(result: InferResult, name: str) -> str:
    return bytes(result.as_numpy(name).reshape(-1)[0]).decode()

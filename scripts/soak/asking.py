# SPDX-License-Identifier: Apache-2.0
"""Asks one planned request the way it is to take, and tells how it ended."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2_grpc  # type: ignore[import-untyped]
from tritonclient.utils import deserialize_bytes_tensor  # type: ignore[import-untyped]

from triton_omni_client import (
    NO_RETRY,
    AudioDelta,
    BadRequest,
    Cancelled,
    HttpClient,
    OmniClient,
    OmniClientError,
    Overloaded,
    Reply,
    Timeout,
    TooLarge,
)
from triton_omni_client.audio import Waveform, empty_waveform
from triton_omni_client.errors import from_text
from triton_omni_client.messages import MODEL, UNARY_MODEL, Info
from triton_omni_client.protocol import to_grpc
from triton_omni_client.settling import LATE_END_S

from .plan import Planned, Way

Outcome = Literal["finished", "refused", "cancelled", "timed out", "failed"]

LONGEST_S = 100.0
"""After this a client gives up; the server's own deadline is earlier, so whoever waits so long was lost."""


@dataclass(frozen=True)
class Ended:
    """How one request ended, as its client saw it. Times in seconds since the run began."""

    planned: Planned
    outcome: Outcome
    began: float
    ended: float
    first_audio_s: float | None = None
    """From the request to its first speech."""
    reply: tuple[str, int] | None = None
    """Text and number of samples of a whole reply."""
    error: OmniClientError | None = None
    heard: str = ""
    """Text of a whole reply, and that of a gRPC stream until its cancel."""
    told: int | None = None
    """Number of samples of a whole reply by the server's account."""
    speech: Waveform = field(default_factory=empty_waveform, repr=False)
    """Speech of a whole reply to a known question; others keep none."""

    @property
    def is_hung(self) -> bool:
        """True if the client gave up waiting."""
        return self.ended - self.began >= LONGEST_S


@dataclass
class Heard:
    """A reply so far."""

    text: str = ""
    pieces: list[Waveform] = field(default_factory=list)
    """Speech in the order in which it came."""
    first_audio_s: float | None = None
    info: Info | None = None
    """The server's account, which is the last of a whole reply."""

    @property
    def speech(self) -> Waveform:
        """The whole speech."""
        return np.concatenate(self.pieces) if self.pieces else empty_waveform()


class Asker:
    """Asks one server; any number of threads may use it at once.

    Args:
        grpc_url, http_url: `HOST:PORT` of the server.
    """

    def __init__(self, grpc_url: str, http_url: str) -> None:
        self._began = time.monotonic()
        self._host, _, self._port = http_url.rpartition(":")
        self._client = OmniClient(grpc_url, timeout=LONGEST_S, retry=NO_RETRY)
        self._http = HttpClient(f"http://{http_url}", timeout=LONGEST_S, retry=NO_RETRY)
        self._channel = grpc.insecure_channel(grpc_url, options=[("grpc.max_receive_message_length", -1)])
        self._unary = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._ways: Mapping[Way, Callable[[Planned, Heard], None]] = {
            "grpc stream": self._grpc_stream,
            "http stream": self._http_stream,
            "grpc unary": self._grpc_unary,
            "http unary": self._http_unary,
        }

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._channel.close()

    def now(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._began

    def is_ready(self) -> bool:
        """True if the server and its model take requests."""
        return self._client.ready()

    def ask(self, planned: Planned) -> Ended:
        """Ask and wait for the end, which is always told."""
        began, heard = self.now(), Heard()
        error: OmniClientError | None = None
        try:
            self._ways[planned.way](planned, heard)
        except OmniClientError as raised:
            error = _alone(raised)
        outcome = _outcome(planned, heard, error)
        ended = Ended(planned, outcome, began, self.now(), heard.first_audio_s, error=error, heard=heard.text)
        return ended if outcome != "finished" else _with_reply(ended, heard)

    def _grpc_stream(self, planned: Planned, heard: Heard) -> None:
        stream, begin = self._client.stream(planned.request), time.monotonic()
        cancel_at = begin + planned.wait_s if planned.fate == "cancelled" else None
        if planned.fate == "slow":
            time.sleep(planned.wait_s)
        with closing(stream):
            for delta in stream:
                if isinstance(delta, AudioDelta) and heard.first_audio_s is None and planned.fate != "slow":
                    heard.first_audio_s = time.monotonic() - begin
                if cancel_at is not None and time.monotonic() > cancel_at:
                    break
        _record_reply(stream.reply(), heard)

    def _http_stream(self, planned: Planned, heard: Heard) -> None:
        begin = time.monotonic()
        connection = http.client.HTTPConnection(self._host, int(self._port), timeout=LONGEST_S)
        with closing(connection):
            try:
                connection.request("POST", f"/v2/models/{MODEL}/generate_stream", _body(planned))
                answer = connection.getresponse()
                if planned.fate == "cancelled":
                    time.sleep(planned.wait_s)
                    return
                for line in answer:
                    _hear(line, heard, begin)
                    if heard.info is not None and connection.sock is not None:
                        connection.sock.settimeout(LATE_END_S)
            except TimeoutError as error:
                if heard.info is None:
                    raise Timeout("no answer") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise OmniClientError(f"{type(error).__name__}: {error}") from error

    def _grpc_unary(self, planned: Planned, heard: Heard) -> None:
        message = to_grpc(planned.request, UNARY_MODEL)
        message.parameters.clear()
        call = self._unary.ModelInfer.future(message, timeout=LONGEST_S)
        if planned.fate == "cancelled":
            time.sleep(planned.wait_s)
            call.cancel()
            return
        try:
            answer = call.result()
        except grpc.RpcError as error:
            raise from_text(error.details() or str(error.code())) from error
        found = dict(zip((output.name for output in answer.outputs), answer.raw_output_contents, strict=True))
        heard.text = found["text_output"][4:].decode()
        heard.pieces = [np.frombuffer(found["audio_output"], np.float32)]
        heard.info = Info.from_json(found["info"][4:].decode())

    def _http_unary(self, planned: Planned, heard: Heard) -> None:
        _record_reply(self._http.unary(planned.request), heard)


def _record_reply(reply: Reply, heard: Heard) -> None:
    heard.text, heard.pieces, heard.info = reply.text, [reply.audio], reply.info


def _with_reply(ended: Ended, heard: Heard) -> Ended:
    speech = heard.speech
    kept = speech if ended.planned.known is not None else empty_waveform()
    told = None if heard.info is None else heard.info.samples
    return replace(ended, reply=(heard.text, len(speech)), told=told, speech=kept)


def _body(planned: Planned) -> bytes:
    request = planned.request
    fields: dict[str, Any] = {"id": request.request_id}
    for tensor in request.to_tensors():
        values = [_as_text(element) for element in deserialize_bytes_tensor(tensor.data)]
        fields[tensor.name] = values if tensor.name == "media" else values[0]
    return json.dumps(fields).encode()


def _as_text(element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return f"data:application/octet-stream;base64,{base64.b64encode(element).decode()}"


def _hear(line: bytes, heard: Heard, begin: float) -> None:
    """Take one line of a server-sent event stream, or of the answer that stands for one."""
    if not line.strip():
        return
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise from_text(event["error"])
    samples = np.atleast_1d(np.array(event["audio_output"], np.float32))
    if len(samples) and heard.first_audio_s is None:
        heard.first_audio_s = time.monotonic() - begin
    heard.text += event["text_output"]
    heard.pieces.append(samples)
    if event["info"]:
        heard.info = Info.from_json(event["info"])


def _alone(error: OmniClientError) -> OmniClientError:
    """Without what led to it: a run keeps its errors, and frames of a traceback keep the bytes of their request."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _outcome(planned: Planned, heard: Heard, error: OmniClientError | None) -> Outcome:
    if error is None:
        if heard.info is not None:
            return "finished"
        return "cancelled" if planned.fate == "cancelled" else "failed"
    if isinstance(error, Overloaded | BadRequest | TooLarge):
        return "refused"
    if isinstance(error, Timeout):
        return "timed out"
    return "cancelled" if isinstance(error, Cancelled) else "failed"

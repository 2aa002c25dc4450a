# SPDX-License-Identifier: Apache-2.0
"""Triton's protocol (KServe v2) for one request: tensors to and from gRPC messages and HTTP bodies.

Pure but for the protobuf types: no channel, no socket. Also the one place that maps codes of gRPC
and HTTP to this client's errors.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2  # type: ignore[import-untyped]

from .errors import (
    BadRequest,
    Cancelled,
    ConnectionFailed,
    Internal,
    OmniClientError,
    Overloaded,
    Timeout,
    TooLarge,
    from_text,
    shortened,
)
from .messages import MODEL, OUTPUTS, UNARY_MODEL, Delta, Info, Request, Tensor
from .outputs import OutputDecoder
from .parsing import parsed

MAX_MESSAGE_BYTES = 1 << 30
"""Largest gRPC message sent or taken: 1 GiB, room for the media a request may bring (gRPC's own: 4 MiB)."""

LONGEST_WAIT_S = 1e8
"""Maximum seconds of any call, three years. gRPC and sockets count nanoseconds in 64 bits and take a longer time for a
past one.
"""

_UNPACKED_ALONE = 1
"""Bits of gRPC's algorithms of compression; the lowest is none."""

HEADER_LENGTH = "Inference-Header-Content-Length"
"""HTTP header that says where the JSON of a body ends and the raw tensors begin."""

_HEADER_DIGITS = 6
"""Maximum digits of the length of an answer's JSON, which describes four tensors."""

EVENT = b"data:"
"""Prefix of a data line of server-sent events."""

_TRACEPARENT = "traceparent"

_MODELS = f"{MODEL} streams, {UNARY_MODEL} answers once"
_UNKNOWN_MODEL = re.compile(r"Request for unknown model: '(?P<model>[^']*)' is not found")
_STREAMS_ONLY = "doesn't support models with decoupled transaction policy"
_NOT_CONNECTED = "failed to connect to all addresses"
_OTHER_PROTOCOL = re.compile(rf"^{_NOT_CONNECTED}; .*(?:Socket closed$|Trying to connect an http1\.x server)")
_NO_SOCKET = re.compile(
    rf"^{_NOT_CONNECTED}; .*?(?:ipv[46]:)?(?P<where>\S+): "
    r"Failed to connect to remote host: (?:connect: )?(?P<cause>.+)$"
)

_NO_SUCH_PATH = ("Not Found", "Method Not Allowed")
"""Answers of Triton's HTTP and metrics ports to an unknown path."""
_MEDIUM = re.compile(
    r"\b(?:medium (?P<number>[0-9]{1,4}) \((?:image|audio|video)\)|media\[(?P<element>[0-9]{1,4})\](?=: ))"
)
"""How the server names a medium of a request: as such, or as an element of `media` where it is not looked into."""

_GRPC_ERRORS: dict[grpc.StatusCode, type[OmniClientError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.NOT_FOUND: BadRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    grpc.StatusCode.UNAVAILABLE: ConnectionFailed,
}
_HTTP_ERRORS: dict[int, type[OmniClientError]] = {
    400: BadRequest,
    404: BadRequest,
    413: TooLarge,
    429: Overloaded,
    502: ConnectionFailed,
    503: ConnectionFailed,
    504: Timeout,
}


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """gRPC channel options of both clients; a broken connection is tried again within a second.

    The least reconnect back-off is, in spite of its name, how long gRPC waits for one attempt to connect. Messages are
    taken unpacked alone, since gRPC unpacks one whole before it looks at its length: a thousandfold.
    """
    return [
        ("grpc.compression_enabled_algorithms_bitset", _UNPACKED_ALONE),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def from_grpc(error: grpc.RpcError) -> OmniClientError:
    """The error that a failed call means; the machine-readable part wins over the code of gRPC."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Timeout("the reply was not complete when its timeout had passed")
    details = shortened(error.details() or error.code().name)
    return refusal(_cause(details), _GRPC_ERRORS.get(error.code(), Internal))


def refusal(text: str, otherwise: type[OmniClientError] = Internal) -> OmniClientError:
    """The error that a text of the server means; `otherwise` is the class of one that does not say.

    Triton's own texts about a model of another name are the caller's to mend, unless the model is a public one, which
    a server may miss for a while.
    """
    text = shortened(text)
    found = _UNKNOWN_MODEL.search(text)
    if found is not None and found["model"] not in (MODEL, UNARY_MODEL):
        return BadRequest(f"the server has no model {found['model']!r}; {_MODELS}")
    if _STREAMS_ONLY in text:
        return BadRequest(f"this model answers in streams, by gRPC or generate_stream; {_MODELS}")
    return from_text(text, otherwise=otherwise)


def _cause(details: str) -> str:
    """Return the reason why gRPC could not connect, without its list of tried addresses."""
    if _OTHER_PROTOCOL.search(details):
        return "what listens there is not gRPC; Triton's HTTP port is asked as http://HOST:PORT"
    found = _NO_SOCKET.search(details)
    return details if found is None else f"{unquote(found['where'])}: {found['cause']}"


class SharedRegion(Protocol):
    """Registered shared memory that holds a tensor's bytes."""

    name: str
    size: int


def to_grpc(request: Request, model: str, shared: Mapping[str, SharedRegion] | None = None) -> Any:
    """The `ModelInferRequest` of a stream of one request.

    Args:
        request: what to ask.
        model: whom.
        shared: tensors, by name, whose bytes the server reads from shared memory instead of the message.

    The empty final response is asked for: without it, a stream whose last response was sent before
    the final flag was known has no end that a client could see.
    """
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.traceparent:
        message.parameters[_TRACEPARENT].string_param = request.traceparent
    for tensor in request.to_tensors():
        added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if shared and (region := shared.get(tensor.name)) is not None:
            added.parameters["shared_memory_region"].string_param = region.name
            added.parameters["shared_memory_byte_size"].int64_param = region.size
        else:
            message.raw_input_contents.append(tensor.data)
    return message


def with_media_names(error: OmniClientError, request: Request) -> OmniClientError:
    """An error that names the media of its request as the caller does, who may not know their numbers."""

    def name(found: re.Match[str]) -> str:
        number = int(found["number"] or found["element"])
        return request.media_names[number] if number < len(request.media_names) else found[0]

    error.message = _MEDIUM.sub(name, error.message)
    error.args = (error.message,)
    return error


class StreamReader:
    """The responses of one streamed request, in order, to deltas; knows when the request has ended."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._decoder = OutputDecoder(request.audio_format)
        self.final = False
        """The server has said that nothing follows."""
        self.whole = False
        """Nothing can be missing: the reply's `info` has come, or the final response."""

    def feed(self, response: Any) -> list[Delta]:
        """The deltas of one `ModelStreamInferResponse`.

        Raises:
            OmniClientError: the server's error (nothing follows), or an answer outside of the contract.
        """
        if response.error_message:
            raise self._named(refusal(response.error_message))
        inferred = response.infer_response
        if inferred.parameters["triton_final_response"].bool_param:
            self.final = self.whole = True
        return self._decoded(_outputs_of(inferred))

    def _named(self, error: OmniClientError) -> OmniClientError:
        return with_media_names(error, self._request)

    def _decoded(self, outputs: Mapping[str, Tensor]) -> list[Delta]:
        deltas = self._decoder.feed(outputs)
        self.whole = self.whole or any(isinstance(delta, Info) for delta in deltas)
        return deltas

    def end(self) -> None:
        """To be called when the call has ended.

        Raises:
            ConnectionFailed: before the reply was whole.
        """
        if not self.whole:
            raise ConnectionFailed("the stream ended before the reply was complete")


def _outputs_of(inferred: Any) -> dict[str, Tensor]:
    if len(inferred.raw_output_contents) < len(inferred.outputs):
        raise Internal(f"{len(inferred.outputs)} outputs, {len(inferred.raw_output_contents)} of them with data")
    pairs = zip(inferred.outputs, inferred.raw_output_contents, strict=False)
    return {out.name: Tensor(out.name, out.datatype, tuple(out.shape), data) for out, data in pairs}


def to_http(request: Request) -> tuple[dict[str, str], bytes]:
    """Headers and body of a `POST .../infer`: JSON, then the raw tensors, media unchanged."""
    tensors = request.to_tensors()
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in tensors
    ]
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in OUTPUTS]
    head: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
    if request.request_id:
        head["id"] = request.request_id
    if request.traceparent:
        head["parameters"] = {_TRACEPARENT: request.traceparent}
    text = json.dumps(head).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return headers, b"".join([text, *(tensor.data for tensor in tensors)])


def from_http(request: Request, status: int, headers: Mapping[str, str], body: bytes) -> list[Delta]:
    """The deltas of the one answer to `to_http`.

    Raises:
        OmniClientError: the server's error, or an answer outside of the contract.
    """
    if status != 200:
        raise with_media_names(http_refusal(status, body), request)
    length = headers.get(HEADER_LENGTH, "")
    if not length.isdecimal():
        raise Internal(f"the answer has no {HEADER_LENGTH} header: not an answer of Triton's /infer")
    if len(length) > _HEADER_DIGITS:
        raise Internal(f"the answer's JSON is of {length[:20]} bytes, more than {10**_HEADER_DIGITS - 1}")
    head, data = body[: int(length)], body[int(length) :]
    return OutputDecoder(request.audio_format).feed(_http_outputs(head, data))


def http_refusal(status: int, body: bytes) -> OmniClientError:
    """The error that an answer with another status than 200 means."""
    text = _http_error(status, body)
    if text in _NO_SUCH_PATH:
        return BadRequest(
            f"there is no Triton at this URL (HTTP status {status}): http://HOST:PORT of Triton is wanted"
        )
    return refusal(text, _HTTP_ERRORS.get(status, Internal))


def _http_error(status: int, body: bytes) -> str:
    try:
        return str(parsed(body.removeprefix(EVENT))["error"])
    except (ValueError, KeyError, TypeError):
        # Not Triton's answer but a proxy's: its page says less than its status.
        return f"HTTP status {status}"


def _http_outputs(head: bytes, data: bytes) -> dict[str, Tensor]:
    try:
        outputs: Sequence[Mapping[str, Any]] = parsed(head)["outputs"]
        found, at = {}, 0
        for out in outputs:
            size = _size(out["parameters"]["binary_data_size"])
            found[out["name"]] = Tensor(out["name"], out["datatype"], tuple(out["shape"]), data[at : at + size])
            at += size
    except (ValueError, KeyError, TypeError) as error:
        raise Internal(f"the answer is outside of Triton's protocol: {error!r:.200}") from error
    if at != len(data):
        raise Internal(f"the answer names {at} bytes of tensors and holds {len(data)}")
    return found


def _size(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"binary_data_size is {value!r:.80}")
    return value


def to_generate(request: Request) -> tuple[dict[str, str], bytes]:
    """Headers and body of a `POST .../generate_stream`: JSON alone, media as data URIs."""
    fields: dict[str, Any] = {t.name: t.text() for t in request.to_tensors() if t.name != "media"}
    if request.media:
        fields["media"] = [f"data:;base64,{base64.b64encode(medium).decode()}" for medium in request.media]
    if request.request_id:
        fields["id"] = request.request_id
    if request.traceparent:
        fields["parameters"] = {_TRACEPARENT: request.traceparent}
    return {"Content-Type": "application/json"}, json.dumps(fields).encode()


class EventReader(StreamReader):
    """`StreamReader` of the server-sent events of `generate_stream`."""

    def feed(self, response: bytes) -> list[Delta]:
        """Return the deltas of one event: the JSON after `data:`.

        Raises:
            OmniClientError: the server's error (nothing follows), or an answer outside of the contract.
        """
        try:
            event: dict[str, Any] = dict(parsed(response))
            outputs = {name: _event_output(name, event[name]) for name in OUTPUTS if name in event}
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise Internal(f"an event is outside of Triton's protocol: {error!r:.200}") from error
        if "error" in event:
            raise self._named(refusal(str(event["error"])))
        return self._decoded(outputs)


def _event_output(name: str, value: Any) -> Tensor:
    """A tensor of JSON: of one element the element itself, of none an empty list or text."""
    if OUTPUTS[name] == "BYTES":
        return Tensor.of_bytes(name, [value.encode()] if value else [])
    with np.errstate(over="ignore"):  # what becomes infinite so is refused with its tensor
        samples = np.atleast_1d(np.asarray([] if value == "" else value, "<f4"))
    return Tensor(name, "FP32", samples.shape, samples.tobytes())

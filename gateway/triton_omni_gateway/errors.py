# SPDX-License-Identifier: Apache-2.0
"""Every error a caller can see, in OpenAI's form, and how the errors of Triton's client map to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from triton_omni_client import OmniClientError

INVALID = "invalid_request_error"
SERVER = "server_error"
RATE = "rate_limit_error"
CONTEXT_LENGTH = "context_length_exceeded"
"""OpenAI's code of a prompt that is too long, by which programs know that a shorter one may do."""
_RETRY_MS = 1000
_NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""Official clients retry 5xx by themselves; a request that took its whole time once would do so again."""
SOON: Mapping[str, str] = {"Retry-After": "1"}
"""Headers of an answer that is another one in a second."""
_MEANINGS: Mapping[str, tuple[int, str, Mapping[str, str]]] = {
    "bad_request": (400, INVALID, {}),
    "too_large": (413, INVALID, {}),
    CONTEXT_LENGTH: (400, INVALID, {}),
    "cancelled": (499, SERVER, _NO_RETRY),
    "timeout": (504, SERVER, _NO_RETRY),
    "internal": (500, SERVER, {}),
}
"""Status, OpenAI's `type` and headers by the code of the client's error, or by OpenAI's where it has one of its own."""
_OF_THE_REQUEST = ("bad_request", "too_large")
OF_THE_SERVER = ("overloaded", "internal", "connection_failed")
"""Codes of errors that mean something else where no server is ready."""


class Refusal(NamedTuple):
    """A refusal of the server in its caller's words."""

    message: str
    param: str | None = None
    """The key at fault."""
    code: str | None = None
    """OpenAI's, where it has one of its own for this."""


Naming = Callable[[str], Refusal]
"""Puts a refusal in its caller's words; see `field_names.py`."""


@dataclass(eq=False)
class GatewayError(Exception):
    """An answer other than 200.

    Args:
        status: HTTP status.
        message: what was wrong, the value seen, the limit, what to do.
        kind: OpenAI's `type`.
        code: OpenAI's `code`, for programs.
        param: the request's key that is at fault, as the caller wrote it; None = no single one is.
        headers: sent with the answer.
    """

    status: int
    message: str
    kind: str = INVALID
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients read, also as an event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class CutOff(Exception):
    """Raised where a begun answer is incomplete and its form has no place for an error: the connection must be
    closed.
    """


class ClientGone(Exception):
    """The caller closed its connection; there is nobody to answer."""


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> GatewayError:
    """A 400: the request is wrong in itself."""
    return GatewayError(400, message, code=code, param=param)


def unauthorized(message: str) -> GatewayError:
    """A 401 of a caller who may not call."""
    return GatewayError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def wrong_key(authorization: str) -> GatewayError:
    """A 401: no key, or none of ours."""
    if authorization:
        return unauthorized("Incorrect API key provided.")
    return unauthorized("No API key provided: send `Authorization: Bearer KEY`.")


def too_large(limit: int) -> GatewayError:
    """A 413: a body over `limit` bytes."""
    return GatewayError(413, f"The request's body is over this gateway's limit of {limit} bytes.", code="too_large")


def overloaded(message: str, retry_after_ms: int | None = None) -> GatewayError:
    """A 429 with `Retry-After` in whole seconds, and in milliseconds for clients that know the finer header."""
    return GatewayError(429, message, RATE, "overloaded", headers=_retry_headers(retry_after_ms))


def _retry_headers(retry_after_ms: int | None) -> dict[str, str]:
    wait = _RETRY_MS if retry_after_ms is None else retry_after_ms
    return {"Retry-After": str(max(1, math.ceil(wait / 1000))), "retry-after-ms": str(wait)}


def broken(request_id: str, who: str = "gateway") -> GatewayError:
    """A 500: a fault of the gateway itself, or of Triton, whose own words are for the log."""
    said = f"The {who} failed; the gateway's log has the cause under {request_id}."
    return GatewayError(500, said, SERVER, "internal")


def _unavailable(error: OmniClientError) -> GatewayError:
    """A 503: no server takes requests."""
    said = (
        "No triton-omni server takes requests now: it starts, restarts a stage or stops. Send the request again later."
    )
    return GatewayError(503, said, SERVER, error.code, headers=_retry_headers(error.retry_after_ms))


def _lost(error: OmniClientError) -> GatewayError:
    """A 503: the server or a stage of it ended with the request under way; it may be sent again."""
    who = f"The stage {error.stage} of the Triton server" if error.stage else "The Triton server, or a stage of it,"
    said = f"{who} ended while the request was under way. Send the request again."
    return GatewayError(503, said, SERVER, error.code, headers=_retry_headers(error.retry_after_ms))


def stopping() -> GatewayError:
    """A 503: the gateway ends before the answer is there; another one may take over."""
    return GatewayError(503, "The gateway is stopping; send the request again.", SERVER, "stopping", headers=SOON)


def from_client(
    error: OmniClientError, naming: Naming = Refusal, request_id: str = "", *, is_ready: bool = True
) -> GatewayError:
    """Translate an error of Triton's client for a caller of HTTP.

    Args:
        error: of the client, or of its Triton server.
        naming: puts a refusal in the words of the request's caller.
        request_id: under which the log has it.
        is_ready: whether a server takes requests now.
    """
    if error.code in OF_THE_SERVER and not is_ready:
        return _unavailable(error)
    if error.code == "connection_failed":
        return _lost(error)
    if error.code == "internal" and (error.retry_after_ms is not None or (error.by_triton and error.stage)):
        return _lost(error)
    if error.code == "internal" and error.by_triton:
        return broken(request_id, "Triton server")
    told = Refusal(error.message)
    if error.code in _OF_THE_REQUEST:
        told = naming(told.message)
    if error.code == "overloaded":
        return overloaded(told.message, error.retry_after_ms)
    code = told.code or error.code
    status, kind, headers = _MEANINGS.get(code, _MEANINGS["internal"])
    return GatewayError(status, told.message, kind, code, told.param, headers)

# SPDX-License-Identifier: Apache-2.0
"""Every error this client raises, and the reader of the machine-readable part of an error text.

Triton loses error codes on its way, so the server ends each error text in a fixed part:
``no free session [omni:overloaded;stage=thinker;retry_after_ms=250]``.
Knows nothing of gRPC or HTTP; `protocol.py` maps their codes to these classes.
"""

from __future__ import annotations

import re
from typing import ClassVar

_LONGEST_TEXT, _KEPT_END = 4096, 1024
"""Maximum characters of an error text; of a longer one the end is kept, which is machine-readable."""
_LONGEST_RETRY_DIGITS = 10
_TAIL = re.compile(r"\[omni:(?P<code>[a-z_]+)(?P<fields>(?:;[a-z_]+=[^;\]]*)*)\]$")
_ENSEMBLE = re.compile(r"^in ensemble '[^']*', ")
"""Triton's prefix of a stage's error."""
_DEAD_STAGE = re.compile(r"Stub process '(?P<stage>\w+?)(?:_\d+)+' is not healthy")
"""Triton's message about a request whose stage died as it was handed over."""


class OmniClientError(Exception):
    """Base of every error of this client.

    Args:
        message: what was wrong, without the machine-readable part.
        stage: the stage that refused or failed, where the server named one.
        retry_after_ms: when a retry makes sense, in milliseconds, where the server said so.
    """

    code: ClassVar[str] = "internal"
    by_triton: bool = False
    """True if the message is Triton's or gRPC's own; it tells of the inside of a server and not of a request."""

    def __init__(self, message: str, *, stage: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.retry_after_ms = retry_after_ms


class BadRequest(OmniClientError):
    """The request is wrong in itself; sending it again cannot help."""

    code = "bad_request"


class TooLarge(OmniClientError):
    """The request, or a message of it, exceeds a limit of the deployment or of this client."""

    code = "too_large"


class Overloaded(OmniClientError):
    """The server has no free session; `retry_after_ms` says when to try again."""

    code = "overloaded"


class Cancelled(OmniClientError):
    """The request was cancelled before it finished."""

    code = "cancelled"


class Timeout(OmniClientError):
    """The deadline of the request passed, at the server or here."""

    code = "timeout"


class Internal(OmniClientError):
    """A fault of the server, or an answer that is outside of the contract."""


class ConnectionFailed(OmniClientError):
    """The server could not be reached, or the connection broke."""

    code = "connection_failed"


_BY_CODE: dict[str, type[OmniClientError]] = {
    kind.code: kind for kind in (BadRequest, TooLarge, Overloaded, Cancelled, Timeout, Internal)
}


def from_text(text: str, *, otherwise: type[OmniClientError] = Internal) -> OmniClientError:
    """Read a server's error text into the class that its machine-readable part names.

    Args:
        text: the error text as it came over gRPC or HTTP.
        otherwise: the class of a text without that part (an error of Triton itself).
    """
    text = _ENSEMBLE.sub("", shortened(text)).rstrip()
    found = _TAIL.search(text)
    if found is None:
        return _without_code(text, otherwise)
    fields = dict(field.split("=", 1) for field in found["fields"].split(";") if field)
    return _BY_CODE.get(found["code"], Internal)(
        text[: found.start()].rstrip(),
        stage=fields.get("stage"),
        retry_after_ms=_milliseconds(fields.get("retry_after_ms", "")),
    )


def shortened(text: str) -> str:
    """An error text of bounded length: patterns are looked for in it, and each costs more than its length."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - _KEPT_END - 1]}…{text[-_KEPT_END:]}"


def _milliseconds(text: str) -> int | None:
    """The number in a text; None for one that no wait can be."""
    is_number = text.isdecimal() and text.isascii() and len(text) <= _LONGEST_RETRY_DIGITS
    return int(text) if is_number else None


def _without_code(text: str, otherwise: type[OmniClientError]) -> OmniClientError:
    """An error of Triton itself; the one that is no fault of the request names the stage that died."""
    dead = _DEAD_STAGE.search(text)
    error = otherwise(text) if dead is None else Internal(text, stage=dead["stage"])
    error.by_triton = True
    return error

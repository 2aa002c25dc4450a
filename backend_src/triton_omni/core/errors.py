# SPDX-License-Identifier: Apache-2.0
"""The errors a client can see, and the machine-readable part that carries them through Triton.

Triton loses error codes on the way to a client, so the code travels at the end of the text:
``no free session [omni:overloaded;stage=thinker;retry_after_ms=250]``.
This module knows nothing of Triton; `stub/adapter.py` maps `OmniError.triton_code` once.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

ErrorCode = Literal["bad_request", "too_large", "overloaded", "cancelled", "timeout", "internal"]
StageName = Literal["thinker", "talker", "token2wav", "unary"]

_TAIL = re.compile(r"\s*\[omni:(?P<code>[a-z_]+)(?P<fields>(?:;[a-z_]+=[^;\]]*)*)\]\s*$")


class OmniError(Exception):
    """Base of every error that reaches a client.

    Args:
        message: what was wrong, the value seen, the limit, what to do.
        stage: the stage that refused or failed, filled in by the stage when the raiser does not know it.
        retry_after_ms: when a retry makes sense, in milliseconds.
    """

    code: ClassVar[ErrorCode] = "internal"
    triton_code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, stage: StageName | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.retry_after_ms = retry_after_ms

    def to_text(self) -> str:
        """The message with its machine-readable end, as sent to the client."""
        fields = [f"omni:{self.code}"]
        if self.stage is not None:
            fields.append(f"stage={self.stage}")
        if self.retry_after_ms is not None:
            fields.append(f"retry_after_ms={self.retry_after_ms}")
        return f"{self.message} [{';'.join(fields)}]"


class BadRequest(OmniError):
    """The request is wrong in itself; sending it again cannot help."""

    code = "bad_request"
    triton_code = "INVALID_ARG"


class TooLarge(OmniError):
    """The request exceeds a stated limit of this deployment."""

    code = "too_large"
    triton_code = "INVALID_ARG"


class Overloaded(OmniError):
    """No free session or queue place; `retry_after_ms` says when to try again."""

    code = "overloaded"
    triton_code = "UNAVAILABLE"


class Cancelled(OmniError):
    """The client went away or asked to stop."""

    code = "cancelled"
    triton_code = "CANCELLED"


class DeadlineExceeded(OmniError):
    """The request's own deadline passed."""

    code = "timeout"
    triton_code = "UNAVAILABLE"


class InternalError(OmniError):
    """A fault of ours; the cause is in the server's log under the request id."""


_BY_CODE: dict[str, type[OmniError]] = {
    kind.code: kind for kind in (BadRequest, TooLarge, Overloaded, Cancelled, DeadlineExceeded, InternalError)
}


def from_code(
    code: str, message: str, *, stage: StageName | None = None, retry_after_ms: int | None = None
) -> OmniError:
    """Build the error class for a machine-readable `code`; an unknown code is an `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message, stage=stage, retry_after_ms=retry_after_ms)


def parse(text: str) -> OmniError:
    """Read an error text back into its class; a text without the machine-readable part is internal."""
    found = _TAIL.search(text)
    if found is None:
        return InternalError(text)
    fields = dict(part.split("=", 1) for part in found["fields"].split(";") if part)
    retry = fields.get("retry_after_ms", "")
    stage = fields.get("stage")
    return from_code(
        found["code"],
        text[: found.start()],
        stage=stage if stage in ("thinker", "talker", "token2wav", "unary") else None,  # type: ignore[arg-type]
        retry_after_ms=int(retry) if retry.isdigit() else None,
    )

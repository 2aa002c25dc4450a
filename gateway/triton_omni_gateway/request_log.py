# SPDX-License-Identifier: Apache-2.0
"""One line of the log for each request: who asked for what, how and why it ended, and how long it took."""

from __future__ import annotations

import logging
import secrets
from contextvars import ContextVar
from typing import Any, Final

from starlette.requests import Request
from starlette.types import Scope

from triton_omni_client import Info, Timings

from .connection import CLIENT_GONE
from .errors import GatewayError
from .replies import finish_reason

LONGEST_PATH = 200
"""Characters of a method or path in the log; a caller may send 32 KiB of it with each request."""
REQUESTS = "triton_omni_gateway.requests"
"""Name of the logger of these lines."""
HTTP, SOCKETS = "uvicorn.error.http", "uvicorn.error.sockets"
"""Names of the loggers that uvicorn gets for connections."""
_REQUEST: Final[ContextVar[str]] = ContextVar("request", default="")
"""The request whose task this is; empty in those of none."""
logger = logging.getLogger(REQUESTS)


class Named(logging.Filter):
    """Puts the id of the request in front of a line that its task writes without it: libraries do not know it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """True: no line is held back."""
        request_id, text = _REQUEST.get(), record.getMessage()
        if request_id not in text:
            record.msg, record.args = f"{request_id}: {text}", ()
        return True


def new_request_id() -> str:
    """An id of 96 random bits."""
    return f"req_{secrets.token_hex(12)}"


def name_lines(request_id: str) -> None:
    """From here on name a request in the lines of this task, and of those that it starts."""
    _REQUEST.set(request_id)


def note_end(http: Request, info: Info | None) -> None:
    """Note why a reply ended, and which stages' limits cut it off."""
    facts = _facts(http.scope)
    if facts.get("reason") != "length":
        facts["reason"] = finish_reason(info)
    if facts["reason"] == "length" and info is not None:
        cut = [stage for stage, reason in info.finish_reason.items() if reason == "length"]
        facts["cut_by"] = ",".join(cut) or facts.get("cut_by")


def note_times(http: Request, timings: Timings) -> None:
    """Note the times of the first reply that was asked for."""
    facts = _facts(http.scope)
    for name, seconds in (("first_text", timings.first_text), ("first_audio", timings.first_audio)):
        if seconds is not None:
            facts.setdefault(name, round(seconds, 3))


def note_error(scope: Scope, error: GatewayError) -> None:
    """Note why a request was refused or failed."""
    _facts(scope)["reason"] = error.code or error.kind


def note_forced_end(scope: Scope, reason: str) -> None:
    """Note why a session was ended by the gateway; what ended it first counts."""
    _facts(scope).setdefault("reason", reason)


def log_request(scope: Scope, status: int, seconds: float, key: str) -> None:
    """Write the line of a request that has ended.

    Args:
        scope: of the request.
        status: of its answer, or what became of it.
        seconds: from its head to the end of its answer.
        key: name of the caller's API key; empty where callers have none.
    """
    facts: dict[str, Any] = {
        "request": scope["state"]["request_id"],
        "method": scope["method"][:LONGEST_PATH],
        "path": scope["path"][:LONGEST_PATH],
        "status": status,
        "reason": "caller_left" if status == CLIENT_GONE else None,
        "key": key or None,
        "peer": (scope.get("client") or ("",))[0],
        "seconds": round(seconds, 3),
        **_facts(scope),
    }
    _write(facts)


def log_response(response_id: str, status: str, reason: str, seconds: float, timings: Timings | None) -> None:
    """Write the line of a response that has ended, with the id of its session's request.

    Args:
        response_id: of the response.
        status: how it ended.
        reason: why.
        seconds: from its beginning to its end.
        timings: of the reply; None where no server was asked.
    """
    first_text, first_audio = (None, None) if timings is None else (timings.first_text, timings.first_audio)
    _write(
        {
            "request": _REQUEST.get(),
            "response": response_id,
            "response_status": status,
            "reason": reason,
            "seconds": round(seconds, 3),
            "first_text": None if first_text is None else round(first_text, 3),
            "first_audio": None if first_audio is None else round(first_audio, 3),
        }
    )


def _write(facts: dict[str, Any]) -> None:
    """Write a line of those facts that are known; as JSON each is a member."""
    told = {name: value for name, value in facts.items() if value is not None}
    line = " ".join(f"{name}={ascii(value)[1:-1] if isinstance(value, str) else value}" for name, value in told.items())
    logger.info("%s", line, extra=told)


def log_unread(client: tuple[str, int] | None, error: GatewayError, method: str = "-", path: str = "-") -> str:
    """Write the line of what was refused before the application saw it; returns the id that it got."""
    request_id = new_request_id()
    scope = {"state": {"request_id": request_id}, "method": method, "path": path, "client": client}
    note_error(scope, error)
    log_request(scope, error.status, 0.0, "")
    return request_id


def _facts(scope: Scope) -> dict[str, Any]:
    facts: dict[str, Any] = scope["state"].setdefault("facts", {})
    return facts

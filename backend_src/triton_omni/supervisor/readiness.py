# SPDX-License-Identifier: Apache-2.0
"""A server's readiness, and its drain: it refuses new requests, reports not ready, and finishes open ones.

Triton reports a server as not ready only if a model could not be loaded. So this module has it load a model of a
backend that does not exist. Unloading a model that never loaded does not make the server ready again. So the model
first gets the stages' backend, and is loaded.

Triton by itself would lose every open reply: at a stop it closes its HTTP port and refuses requests between stages.
So it is stopped last. This module knows no process and no signal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from triton_omni.core.arguments import say
from triton_omni.core.logs import LastingFailure
from triton_omni.session.ledger_table import DRAINING, ENDING, LEAVING, Field
from triton_omni.supervisor.model_control import ModelControlError

NO_BACKEND: Final = "none"
MISSING_BACKEND: Final = f"for backend '{NO_BACKEND}'"
"""Part of Triton's refusal, in its answer and in its log."""
_STANDSTILL_MODEL, _DRAINING_MODEL = "standstill", "draining"
_SAID_WITHIN_S: Final = 2.0
_IDLE_MODEL: Final = """\
import os


class TritonPythonModel:
    def execute(self, requests):
        return []

    def finalize(self):
        # As the stages end: newer versions of Triton end the interpreter with a fatal error of Python's in the log.
        os._exit(0)
"""
_CPU: Final = "instance_group [{ kind: KIND_CPU }]\n"


class Loads(Protocol):
    """Loads and unloads models, see `model_control.py`; both raise `ModelControlError`."""

    def load(self, model: str) -> None:
        """Put `model` into service."""

    def unload(self, model: str) -> None:
        """Take `model` out of service."""


def say_unready(control: Loads, repository: Path, model: str) -> None:
    """Make the server not ready.

    Args:
        repository: that of tritonserver, which is written to.
        model: a name that no model has.

    Raises:
        ModelControlError: Triton did not come to look for the backend; the server may still be ready.
    """
    _write(repository / model, NO_BACKEND)
    try:
        control.load(model)
    except ModelControlError as error:
        if MISSING_BACKEND not in str(error):
            raise


def say_ready(control: Loads, repository: Path, model: str) -> None:
    """Undo `say_unready` of the same model; the server is ready a second or two later.

    Raises:
        ModelControlError: Triton could not load it; the server is still not ready.
    """
    _write(repository / model, "python", _CPU)
    (repository / model / "1" / "model.py").write_text(_IDLE_MODEL)
    control.load(model)
    control.unload(model)


def _write(folder: Path, backend: str, rest: str = "") -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(f'name: "{folder.name}"\nbackend: "{backend}"\n{rest}')


class Readiness:
    """Readiness that one server reports from its start to its end.

    Args:
        control, repository: as in `say_unready`.

    Attributes:
        on_fault: called at each failure, on a thread of its own.
    """

    def __init__(self, control: Loads, repository: Path) -> None:
        self._control, self._repository = control, repository
        self._said: bool | None = True
        """What the server reports; None = unknown, after a failure."""
        self._failure = LastingFailure()
        self._is_left = False
        """True if the stop went on before Triton had answered."""
        self._telling: threading.Thread | None = None
        self._ending: threading.Thread | None = None
        self.on_fault: Callable[[], None] = lambda: None

    def set_ready(self, ready: bool) -> None:
        """Make the server report this, unless it does. Returns at once and may be called often: a thread calls Triton,
        which answers slowly, once at a time.
        """
        if ready == self._said or (self._telling is not None and self._telling.is_alive()):
            return
        self._telling = threading.Thread(target=self._change, args=(ready,), name="readiness", daemon=True)
        self._telling.start()

    def end(self) -> None:
        """Make the server not ready, for good; returns when it is so.

        It waits `_SAID_WITHIN_S` at most, so that a stalled Triton cannot delay its own stop.
        """
        words = (False, _DRAINING_MODEL)
        self._ending = threading.Thread(target=self._tell, args=words, name="readiness-end", daemon=True)
        self._ending.start()
        self._ending.join(_SAID_WITHIN_S)
        self._is_left = self._ending.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until nothing is written to the repository any more."""
        for thread in (self._telling, self._ending):
            if thread is not None:
                thread.join(timeout_s)

    def _change(self, ready: bool) -> None:
        # A call that failed may have had its effect: its answer was late, or the connection broke.
        self._said = ready if self._tell(ready, _STANDSTILL_MODEL) else None

    def _tell(self, ready: bool, model: str) -> bool:
        tell, wanted = (say_ready, "ready") if ready else (say_unready, "not ready")
        try:
            tell(self._control, self._repository, model)
        except (ModelControlError, OSError) as error:
            if self._is_left:  # the server's end cut the call off
                return False
            # The next `set_ready` tries again. A failure that lasts is counted each time and reported once.
            self.on_fault()
            report = f"readiness: the server could not be made {wanted}: {error}"
            if self._failure.begins(report):
                say(report)
            return False
        if self._failure.ends():
            say(f"readiness: the server was made {wanted}")
        return True


# --- the end of a server ----------------------------------------------------------------------------------------------


_POLL_S = 0.05
_SETTLED_S = 0.2
"""Seconds for the server to write last responses to the clients, after their sessions have ended."""


class Sessions(Protocol):
    """State of the open sessions, see `ledger_view.py`."""

    def set_word(self, declared: Field, value: int) -> None:
        """Set a field of the server's ledger."""

    def open_sessions(self) -> int:
        """Return the number of open sessions."""


def drain(
    sessions: Sessions, seconds: float, given_up: Callable[[], bool], tell: Callable[[], None] = lambda: None
) -> bool:
    """Refuse new sessions and wait until the last one is over.

    Args:
        seconds: maximum wait.
        given_up: polled; True ends the wait.
        tell: reports the drain; called once new sessions are refused.

    Returns:
        True if all are over.
    """
    sessions.set_word(LEAVING, DRAINING)
    tell()
    return _await_none(sessions, seconds, given_up)


def end_sessions(sessions: Sessions, seconds: float, given_up: Callable[[], bool]) -> bool:
    """End the open sessions with an error, and wait until their clients have it; otherwise as `drain`."""
    sessions.set_word(LEAVING, ENDING)
    return _await_none(sessions, seconds, given_up)


def _await_none(sessions: Sessions, seconds: float, given_up: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    none_since: float | None = None
    while True:
        now = time.monotonic()
        if sessions.open_sessions():
            none_since = None
        elif now - (none_since := none_since or now) >= _SETTLED_S:
            return True
        if given_up() or (now > deadline and none_since is None):
            return False
        time.sleep(_POLL_S)

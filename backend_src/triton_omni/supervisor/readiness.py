# SPDX-License-Identifier: Apache-2.0
"""A server's readiness, and its end: it takes nothing new, says that it is not ready, and finishes what it has begun.

Triton calls a server ready whose models are loaded or unloaded, and not ready one that has a model that could not be
loaded. So it is asked to load one, of a backend that does not exist. To unload what was never loaded changes nothing:
before the server is ready again the model must have been loaded, so it is given the backend that the stages have.

Triton alone loses every reply under way: at a stop it closes its HTTP port and refuses requests between stages. So it
is told last. This module knows no process and no signal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from triton_omni.core.arguments import say
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
        # As the stages end: where Triton ends the interpreter, newer versions log a fatal error of Python's.
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
        repository: tritonserver's own, which is written to.
        model: the name of one that is not there.

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
    """Take back what `say_unready` said with the same model; a second or two until the server is ready.

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
        control, repository: as `say_unready` has them.

    Attributes:
        on_fault: called at each failure, on a thread of its own.
    """

    def __init__(self, control: Loads, repository: Path) -> None:
        self._control, self._repository = control, repository
        self._said, self._failure = True, ""
        self._telling: threading.Thread | None = None
        self._ending: threading.Thread | None = None
        self.on_fault: Callable[[], None] = lambda: None

    def set_ready(self, ready: bool) -> None:
        """Have the server say so, if it does not. Returns at once and may be asked often: Triton takes its time and is
        told on a thread of its own, one word after the other.
        """
        if ready == self._said or (self._telling is not None and self._telling.is_alive()):
            return
        self._telling = threading.Thread(target=self._change, args=(ready,), name="readiness", daemon=True)
        self._telling.start()

    def end(self) -> None:
        """Have the server be not ready for good; returns when it is so.

        A Triton that stands still is not waited for: it must not hold its own stop up.
        """
        words = (False, _DRAINING_MODEL)
        self._ending = threading.Thread(target=self._tell, args=words, name="readiness-end", daemon=True)
        self._ending.start()
        self._ending.join(_SAID_WITHIN_S)

    def join(self, timeout_s: float) -> None:
        """Wait until nothing is written to the repository any more."""
        for thread in (self._telling, self._ending):
            if thread is not None:
                thread.join(timeout_s)

    def _change(self, ready: bool) -> None:
        if self._tell(ready, _STANDSTILL_MODEL):
            self._said, self._failure = ready, ""

    def _tell(self, ready: bool, model: str) -> bool:
        tell = say_ready if ready else say_unready
        try:
            tell(self._control, self._repository, model)
        except (ModelControlError, OSError) as error:
            # The next `set_ready` tries again. A failure that lasts is counted each time and reported once.
            self.on_fault()
            if str(error) != self._failure:
                wanted = "ready" if ready else "not ready"
                say(f"readiness: the server could not be made {wanted}: {error}")
            self._failure = str(error)
            return False
        return True


# --- the end of a server ----------------------------------------------------------------------------------------------


_POLL_S = 0.05
_SETTLED_S = 0.2
"""A session is over when its last response has left its stage; the server then writes it to the client."""


class Sessions(Protocol):
    """State of the open sessions, see `ledger_view.py`."""

    def set_word(self, declared: Field, value: int) -> None:
        """Set a field of the server's ledger."""

    def open_sessions(self) -> int:
        """How many are open."""


def drain(
    sessions: Sessions, seconds: float, given_up: Callable[[], bool], tell: Callable[[], None] = lambda: None
) -> bool:
    """Begin no session any more and wait until the last one is over.

    Args:
        seconds: to wait at most.
        given_up: asked now and then; True ends the wait.
        tell: says so to whoever looks; called when it is so, and whoever then asks is refused.

    Returns:
        Whether all are over.
    """
    sessions.set_word(LEAVING, DRAINING)
    tell()
    return _await_none(sessions, seconds, given_up)


def end_sessions(sessions: Sessions, seconds: float, given_up: Callable[[], bool]) -> bool:
    """End those that are open with an error, and wait until it has been told; as `drain` otherwise."""
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

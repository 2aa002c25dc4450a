# SPDX-License-Identifier: Apache-2.0
"""Makes `/v2/health/ready` false while every model goes on serving, and true again. It knows no stage.

Triton calls a server ready whose models are loaded or unloaded, and not ready one that has a model that could not be
loaded. So it is asked to load one, of a backend that does not exist. To unload what was never loaded changes nothing:
before the server is ready again the model must have been loaded, so it is given the backend that the stages have.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from triton_omni.supervisor.model_control import ModelControlError

NO_BACKEND: Final = "none"
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
    """
    _write(repository / model, NO_BACKEND)
    with contextlib.suppress(ModelControlError):
        control.load(model)


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
        self._telling = threading.Thread(target=self._say, args=(ready,), name="readiness", daemon=True)
        self._telling.start()

    def end(self) -> None:
        """Have the server be not ready for good; returns when it is so.

        A Triton that stands still is not waited for: it must not hold its own stop up.
        """
        words = (self._control, self._repository, _DRAINING_MODEL)
        self._ending = threading.Thread(target=say_unready, args=words, name="readiness-end", daemon=True)
        self._ending.start()
        self._ending.join(_SAID_WITHIN_S)

    def join(self, timeout_s: float) -> None:
        """Wait until nothing is written to the repository any more."""
        for thread in (self._telling, self._ending):
            if thread is not None:
                thread.join(timeout_s)

    def _say(self, ready: bool) -> None:
        say = say_ready if ready else say_unready
        try:
            say(self._control, self._repository, _STANDSTILL_MODEL)
        except (ModelControlError, OSError) as error:
            # The next `tell` tries again. A failure that lasts is counted each time and reported once.
            self.on_fault()
            if str(error) != self._failure:
                wanted = "ready" if ready else "not ready"
                print(f"readiness: the server could not be made {wanted}: {error}", file=sys.stderr, flush=True)
            self._failure = str(error)
            return
        self._said, self._failure = ready, ""

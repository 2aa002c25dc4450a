# SPDX-License-Identifier: Apache-2.0
"""Watches a server's stages and its unary model, and restarts one that died: Triton does neither.

A stage is dead if its process ended, if its engine failed in a living process, or if its loop has not turned for long;
the supervisor then ends it by force. The ledger tells the other stages, which end the sessions that they share with
it. Unloading the stage makes the server not ready until it is loaded again. A loop that has not turned for some
seconds makes the server not ready earlier (`readiness.py`).

If requests of a dead process would never end, the supervisor ends the whole server at once and starts it again.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from triton_omni.core.arguments import say
from triton_omni.core.errors import StageName
from triton_omni.session.ledger_table import HELD, PID, STACKS_SIGNAL, WATCHED, Field
from triton_omni.supervisor.model_control import ModelControlError
from triton_omni.supervisor.served_repository import UNARY_MODEL

MODELS: Final[Mapping[StageName, str]] = {stage: UNARY_MODEL if stage == "unary" else stage for stage in WATCHED}
"""The Triton model that each watched process serves."""
_LEAVES_WITHIN_S = 10.0
"""A stage whose engine failed ends its requests and its process within this, or by force."""
_WRITES_WITHIN_S = 1.0
"""Seconds in which a process that hangs writes the stacks of its threads."""
_PAUSED_S = 1.0
"""A look that comes so late means that the supervisor itself did not run (`RestartPolicy.look_every_s`)."""


@dataclass(frozen=True)
class RestartPolicy:
    """Limits after which a stage is restarted, and how often it is."""

    attempts: int = 5
    """Maximum starts of one stage within `window_s`; the next one gives the server up."""
    window_s: float = 600.0
    first_wait_s: float = 1.0
    """Seconds before the second start within `window_s`, doubled with each further one. The first is immediate."""
    stalled_after_s: float = 300.0
    """A stage whose loop has not turned for so long is ended. An engine's first steps may compile for minutes."""
    overdue_after_s: float = 30.0
    """The same for a stage with a session past its deadline. token2wav holds errors back as long for other stages."""
    silent_after_s: float = 10.0
    """A server is not ready while a stage's loop has not turned for so long."""
    look_every_s: float = 0.1
    """Maximum seconds between two looks at the stages."""
    whole_server: bool | None = None
    """Restart the whole server if one of its processes dies; None = decide by Triton's version."""

    def wait_s(self, earlier: int) -> float:
        """Return the seconds to wait before a start that has `earlier` ones within the window."""
        return self.first_wait_s * 2 ** (earlier - 1) if earlier else 0.0


class Starts:
    """Counts the starts of a stage or server, and limits them by a policy."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._made: deque[float] = deque()

    def are_exhausted(self) -> bool:
        """True if the window holds the maximum number of starts."""
        now = time.monotonic()
        while self._made and now - self._made[0] > self._policy.window_s:
            self._made.popleft()
        return len(self._made) >= self._policy.attempts

    def count_start(self) -> float:
        """Count a start; return the seconds to wait before it."""
        wait_s = self._policy.wait_s(len(self._made))
        self._made.append(time.monotonic())
        return wait_s

    def sentence(self, what: str, cause: str) -> str:
        """Why `what` is given up."""
        return f"{what} does not stay (starts in {self._policy.window_s:g} s: {self._policy.attempts}): {cause}"


class Board(Protocol):
    """State of the stages' processes, see `ledger_view.py`."""

    def word(self, declared: Field, model: StageName) -> int:
        """A field's word for this model."""

    def set_word(self, declared: Field, value: int, model: StageName) -> None:
        """Set a field's word for this model."""

    def silent_for(self, stage: StageName) -> float:
        """Seconds since its loop last turned."""

    def is_broken(self, stage: StageName) -> bool:
        """True if its engine has failed."""

    def count_fault(self) -> None:
        """Count a start that failed."""

    def holds_overdue(self, stage: StageName) -> bool:
        """True if it still has a session whose deadline has passed."""

    def leaves_open(self, stage: StageName) -> bool:
        """True if requests that only its process could have ended were open when it died."""

    def mark_lost(self, stage: StageName) -> None:
        """Tell the other stages that it died."""


class Control(Protocol):
    """Loads and unloads models, see `model_control.py`; both raise `ModelControlError`."""

    def unload(self, model: str) -> None:
        """Take `model` out of service."""

    def load(self, model: str) -> None:
        """Put `model` into service."""


class Process:
    """A process that is no child of ours. While this is open, its process id cannot be reused.

    Raises:
        ProcessLookupError: it has ended and was collected.
    """

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)

    def ends_within(self, seconds: float) -> bool:
        """Wait until it has ended, `seconds` at most; return whether it has."""
        return bool(select.select([self._handle], [], [], seconds)[0])

    def fileno(self) -> int:
        """Return a descriptor for `select`; it is readable once the process has ended."""
        return self._handle

    def kill(self) -> None:
        """End it by force."""
        self._send(signal.SIGKILL)

    def end_with_stacks(self) -> None:
        """Have it write the stacks of its threads, then end it by force."""
        self._send(STACKS_SIGNAL)
        self.ends_within(_WRITES_WITHIN_S)
        self.kill()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Give the handle back."""
        os.close(self._handle)


@dataclass
class _Watched:
    """One stage; used by one thread at a time: the watching one, or the one that restarts it."""

    starts: Starts
    process: Process | None = None
    restart: threading.Thread | None = None

    @property
    def is_restarting(self) -> bool:
        return self.restart is not None and self.restart.is_alive()


class Silence:
    """Measures how long each stage's loop has not turned; the supervisor polls it several times a second.

    Time in which the supervisor itself did not run does not count: a paused machine or container stops both, and a
    stage that wakes with it is sound.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._looked: float | None = None
        self._awake_since = -math.inf

    def look(self, now: float) -> None:
        """Note the time of a look, in seconds of the monotonic clock."""
        if self._looked is not None and now - self._looked > _PAUSED_S:
            self._awake_since = now
        self._looked = now

    def of(self, stage: StageName) -> float:
        """Return the seconds since the loop last turned, at the last look."""
        awake_for = math.inf if self._looked is None else self._looked - self._awake_since
        return min(self._board.silent_for(stage), awake_for)


class StageRestarter:
    """Watches all stages on one thread, from `start` to `close`, and restarts each on a thread of its own.

    Args:
        tell_ready: called at each look with whether the stages are ready; it must return at once.
        end_server: ends the server at once.
    """

    def __init__(
        self,
        board: Board,
        control: Control,
        policy: RestartPolicy | None = None,
        tell_ready: Callable[[bool], None] | None = None,
        end_server: Callable[[], None] | None = None,
    ) -> None:
        self._board = board
        self._control = control
        self._policy = policy or RestartPolicy()
        self._tell_ready = tell_ready or (lambda ready: None)
        self._end_server = end_server or (lambda: None)
        self._silence = Silence(board)
        self._watched: dict[StageName, _Watched] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stage-watch", daemon=True)
        self.failure: str | None = None
        """Why the server is given up, in one sentence; None = it is not."""
        self.ended_for: str | None = None
        """Why the server was ended and has to be started again; None = it was not."""
        self.deaths = 0
        """Number of deaths that left requests in Triton which never end."""

    @property
    def is_restarting(self) -> bool:
        """True if a stage is being restarted now."""
        return any(watched.is_restarting for watched in self._watched.values())

    def start(self) -> None:
        """Begin to watch the stages that are loaded."""
        for stage in WATCHED:
            if self._board.word(PID, stage):
                self._watched[stage] = _Watched(Starts(self._policy))
                self._follow(stage)
        self._thread.start()

    def close(self) -> None:
        """Restart no stage from now on; a running load ends with the server."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of running loads; to be called when the server has ended."""
        for watched in self._watched.values():
            if watched.restart is not None:
                watched.restart.join(timeout_s)
            if watched.process is not None and not watched.is_restarting:
                watched.process.close()
                watched.process = None

    def _run(self) -> None:
        while not self._stopping.is_set() and self.failure is None:
            self._await_death()
            self._silence.look(time.monotonic())
            self._judge_readiness()
            for stage, watched in self._watched.items():
                # In this order: a restart that gave up sets `failure` before its thread ends.
                if watched.is_restarting or self.failure is not None or self._stopping.is_set():
                    continue
                if (cause := self._cause_of_death(stage, watched)) is not None:
                    self._begin_restart(stage, watched, cause)

    def _await_death(self) -> None:
        """Wait until a process ends that is not being restarted, `look_every_s` at most."""
        living = [watched.process for watched in self._watched.values() if not watched.is_restarting]
        select.select([process for process in living if process is not None], [], [], self._policy.look_every_s)

    def _cause_of_death(self, stage: StageName, watched: _Watched) -> str | None:
        if watched.process is None or watched.process.ends_within(0):
            return "its process ended"
        if self._board.is_broken(stage):
            return "its engine failed"
        stall_limit_s = self._stall_limit_s(stage)
        if self._silence.of(stage) > stall_limit_s:
            watched.process.end_with_stacks()
            watched.process.ends_within(_LEAVES_WITHIN_S)
            return f"it did nothing for {stall_limit_s:g} s and was ended"
        return None

    def _stall_limit_s(self, stage: StageName) -> float:
        """Seconds that its loop may stand still. It looks at the sessions only if that matters."""
        policy = self._policy
        overdue = self._silence.of(stage) > policy.overdue_after_s and self._board.holds_overdue(stage)
        return policy.overdue_after_s if overdue else policy.stalled_after_s

    def _judge_readiness(self) -> None:
        loaded = [stage for stage, watched in self._watched.items() if not watched.is_restarting]
        if any(self._silence.of(stage) > self._policy.silent_after_s for stage in loaded):
            self._tell_ready(False)
        elif len(loaded) == len(self._watched):
            self._tell_ready(True)

    def _begin_restart(self, stage: StageName, watched: _Watched, cause: str) -> None:
        say(f"{stage}: {cause}")
        if not self._lives(watched):
            self._lose(stage, cause)
            if self.ended_for is not None:
                return
        watched.restart = threading.Thread(
            target=self._restart, args=(stage, watched, cause), name=f"restart-{stage}", daemon=True
        )
        watched.restart.start()

    @staticmethod
    def _lives(watched: _Watched) -> bool:
        return watched.process is not None and not watched.process.ends_within(0)

    def _lose(self, stage: StageName, cause: str) -> None:
        """Report a death to the clients: by errors of the other stages, or by the server's end, which breaks their
        connections.
        """
        if self._policy.whole_server or self._board.leaves_open(stage):
            self.deaths += 1
            self._stopping.set()
            self.ended_for = f"{stage}: {cause}"
            self._end_server()
        elif stage != "unary":
            self.deaths += 1
            self._board.mark_lost(stage)

    # On a thread a stage.

    def _restart(self, stage: StageName, watched: _Watched, cause: str) -> None:
        # Load at once, since Triton calls a server with an unloaded model ready; the new process waits.
        self._board.set_word(HELD, 1, stage)
        try:
            self._control.unload(MODELS[stage])
        except ModelControlError as reason:  # Triton refuses no model that is out of service already
            if not self._stopping.is_set():
                say(f"{stage}: it could not be unloaded: {reason}")
        while not self._stopping.is_set():
            if watched.starts.are_exhausted():
                self.failure = watched.starts.sentence(stage, cause)
                return
            opening = threading.Thread(target=self._open, args=(stage, watched), name=f"hold-{stage}", daemon=True)
            opening.start()
            error = self._load(stage)
            opening.join()
            if error is None:
                self._follow(stage)
                say(f"{stage}: started again")
                return
            cause = f"it could not be loaded: {error}"
            say(f"{stage}: {cause}")
            self._board.count_fault()
            self._board.set_word(HELD, 1, stage)

    def _load(self, stage: StageName) -> ModelControlError | None:
        try:
            self._control.load(MODELS[stage])
        except ModelControlError as error:
            return error
        return None

    def _open(self, stage: StageName, watched: _Watched) -> None:
        """Let the new process load once the old one has ended, and so freed its memory, and the wait is over."""
        wait_s = watched.starts.count_start()
        self._end(stage, watched)
        if not self._stopping.wait(wait_s):
            self._board.set_word(HELD, 0, stage)

    def _end(self, stage: StageName, watched: _Watched) -> None:
        """Wait until the old process has ended, by itself or by force."""
        if watched.process is None:
            return
        if not watched.process.ends_within(_LEAVES_WITHIN_S):
            watched.process.kill()
            watched.process.ends_within(_LEAVES_WITHIN_S)
            self._lose(stage, "it did not leave and was ended")
        watched.process.close()
        watched.process = None

    def _follow(self, stage: StageName) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._watched[stage].process = Process(self._board.word(PID, stage))

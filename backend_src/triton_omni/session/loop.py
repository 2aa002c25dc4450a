# SPDX-License-Identifier: Apache-2.0
"""The one thread that owns a stage: its engine, its sessions, and every decision about them.

Other threads only `post` commands. Between commands the loop steps the engine while it has work, and polls the
stage's sessions (ledger, deadlines, held-back messages) once a step and at least every 50 ms when idle.
It knows nothing of engines' kinds, Triton or vLLM.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from triton_omni.core.gpu import settle_thread
from triton_omni.core.logs import LastingFailure
from triton_omni.core.metrics import Doing, LoopClock

IDLE_POLL_S = 0.05

logger = logging.getLogger(__name__)


class Driven(Protocol):
    """Work that the loop drives; every method is called on the loop's thread."""

    def has_work(self) -> bool:
        """True if `step` would advance something now."""

    def step(self) -> None:
        """Advance the engine once and deal with what it gave."""

    def poll(self) -> float:
        """Look after open sessions; return the seconds until it should be called again at the latest."""

    def fail(self, error: Exception) -> None:
        """The engine raised: end what is open with an error and never have work again."""


class StageLoop:
    """Runs a `Driven` on a thread of its own.

    Args:
        name: of the thread.
        driven: what it runs.
        device: of the engine that `driven` steps.
    """

    def __init__(self, name: str, driven: Driven, device: torch.device) -> None:
        self._driven, self._device = driven, device
        self.clock = LoopClock()
        self.waits_for: Doing = "idle"
        """The thing that a turn without work waits for; a `poll` may set it."""
        self._commands: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._awake = False
        self._stopping = False
        self._ended = False
        self._failure, self._failure_to_end = LastingFailure(), LastingFailure()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.post(self.clock.attach)
        self.post(functools.partial(settle_thread, self._device))
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True if the loop still takes commands."""
        return self._thread.is_alive()

    def post(self, command: Callable[[], None]) -> bool:
        """Run `command` on the loop's thread, in the order of posting.

        Returns:
            Whether it will be run; not if the loop has ended.
        """
        with self._changed:
            if not self._ended:
                self._commands.append(command)
                self._changed.notify()
            return not self._ended

    def wake(self) -> None:
        """Have the next turn begin at once: there is something for a poll to see."""
        with self._changed:
            self._awake = True
            self._changed.notify()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the loop after the commands already posted.

        Returns:
            Whether it has ended; if not, an engine step hangs, and nobody else may touch the engine.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self.alive:
            logger.error("%s is still busy after %g s", self._thread.name, timeout_s)
        return not self.alive

    def _run(self) -> None:
        while not self._finished():
            try:
                self._turn()
            except Exception as error:
                # The engine is of no more use, but commands still run, so that every session and message ends.
                if self._failure.begins(repr(error)):
                    logger.exception("the stage's engine failed")
                self._fail(error)
                time.sleep(IDLE_POLL_S)

    def _fail(self, error: Exception) -> None:
        try:
            self._driven.fail(error)
        except Exception as raised:
            if self._failure_to_end.begins(repr(raised)):
                logger.exception("ending the sessions after the engine's failure failed as well")

    def _finished(self) -> bool:
        with self._changed:
            self._ended = self._stopping and not self._commands
            return self._ended

    def _turn(self) -> None:
        self._awake = False
        self.clock.switch("sessions")
        self._run_commands()
        delay = self._driven.poll()
        if self._driven.has_work():
            self.clock.switch("step")
            self._driven.step()
            return
        self.clock.switch(self.waits_for)
        with self._changed:
            if not self._commands and not self._stopping and not self._awake:
                self._changed.wait(min(delay, IDLE_POLL_S))

    def _run_commands(self) -> None:
        # Only what was there at the start of the turn, so that a flood of messages cannot starve the engine.
        for _ in range(len(self._commands)):
            self._commands.popleft()()

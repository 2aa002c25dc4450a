# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C as a request to stop, for while a stream is read, and as the end, for while the command is imported.

Python raises `KeyboardInterrupt` wherever the main thread is. In the middle of gRPC's own code that can leave a
lock taken for ever: the cancel that should follow would hang. In the middle of an import it may be printed and passed
over. Nothing slow is imported here.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

INTERRUPTED: Final = 130
"""The exit code, as a shell has it."""
Stop = Callable[[], object]


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Inside, Ctrl-C ends the process without a word; for where there is nothing to be kept yet.

    Where it is ignored, as in what a script runs in the background, it stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    yield
    signal.signal(signal.SIGINT, before)


def _end(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)


class Interrupts:
    """Inside, the first Ctrl-C calls `stop` on a thread of its own; where none is set, and the second time, it raises.

    For the main thread alone, as signals are.
    """

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.pressed = False
        self._queue: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()  # may be put into by a signal handler
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.stop is None or self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._queue.put(self.stop)

    def _watch(self) -> None:
        while (stop := self._queue.get()) is not None:
            stop()

    def __enter__(self) -> Self:
        self._thread.start()
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._queue.put(None)
        self._thread.join()

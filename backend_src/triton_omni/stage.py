# SPDX-License-Identifier: Apache-2.0
"""What the three stages share: where they answer, how they wait for the device, what waits on a link.

It knows the message protocol's rules (credits, merging) but no engine, no Triton.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from triton_omni.errors import InternalError, OmniError
from triton_omni.wire import Value

logger = logging.getLogger(__name__)

CREDITS: Final = 2
"""Data messages of one session that may be on the way on one link."""

TEXT_INTERVAL_NS: Final = 20_000_000
"""Text that finds no credit leaves by itself, but no more often than this: it must not become a flood of messages."""

CLAIMED_POLL_S: Final = 0.001
"""How soon to look again while another stage claims the device."""

SOON_S: Final = 0.002
"""How soon to look again when a session waits for another stage."""


class Outlet(Protocol):
    """Where one Triton request is answered. Calls only enqueue; a thread of the stage sends, in order.

    `ready` is waited for before a message leaves; `then` runs on the sending thread once it has left.
    """

    def bind(self, slot: int) -> None:
        """Send on the thread of this session's slot: what is bound to one slot leaves in the order of the calls, and
        its `then`s never run side by side. To be called before anything is sent.
        """

    def send(self, tensors: Mapping[str, Value], ready: torch.cuda.Event | None = None) -> None:
        """Send one response."""

    def finish(self, ready: torch.cuda.Event | None = None, then: Callable[[], None] | None = None) -> None:
        """Send the empty final; nothing may follow. A second call does nothing."""

    def fail(self, error: OmniError, then: Callable[[], None] | None = None) -> None:
        """Send an error as the final; nothing may follow."""

    def if_cancelled(self, then: Callable[[], None]) -> None:
        """Ask Triton whether the client is gone, and run `then` if so, both on the sending thread and before what is
        sent later. Not after the final.
        """


@dataclass(frozen=True)
class StageStats:
    """What a stage holds now; every figure is 0 when no session is open."""

    sessions: int
    running: int
    waiting: int
    kv_blocks_used: int
    rows_used: int
    outbox: int
    """Rows or codes that wait for a credit."""


class Stage(Protocol):
    """One stage: `start`, `submit`, `close`, and figures."""

    def start(self) -> None:
        """Begin to serve."""

    def close(self) -> None:
        """End every session and release the device."""

    def stats(self) -> StageStats:
        """Figures of the last poll."""

    @property
    def healthy(self) -> bool:
        """Whether the engine still runs."""


def as_omni_error(error: Exception, label: str) -> OmniError:
    """What a session ends with when handling its message raised; what is not ours is logged under `label`."""
    if isinstance(error, OmniError):
        return error
    logger.error("request %s: handling a message failed", label, exc_info=error)
    return InternalError(f"handling a message failed: {type(error).__name__}")


def record_event(device: torch.device, *, blocking: bool = False) -> torch.cuda.Event | None:
    """Mark the present point of the device's current stream; None on the CPU, where work is done when it returns.

    A thread that waits for a `blocking` one sleeps, where it would keep a core busy otherwise.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
    # Without a stream it would mark the thread's current device, which is device 0 in a thread that chose none.
    event.record(torch.cuda.current_stream(device))
    return event


def leave_default_stream(device: torch.device) -> None:
    """Give the calling thread, which steps an engine, a stream of its own. Nothing to do on the CPU.

    Triton's Python backend exports and copies GPU tensors on CUDA's legacy default stream (`PbTensor::FromDLPack`,
    `PbMemory::CopyBuffer`), from other threads: a message would wait there for the engine's step that was launched
    meanwhile. Streams of torch's pool and the legacy one do not wait for each other.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    # The networks were made on the default stream.
    torch.cuda.synchronize(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@functools.lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def on_side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Do small work beside the engine's stream, on which the next step has been launched already: behind that step a
    message would be late by one. None, and nothing, on the CPU."""
    if device.type != "cuda":
        yield None
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield stream


@dataclass(frozen=True)
class Parcel:
    """What leaves in one message."""

    text: str = ""
    tensor: Tensor | None = None
    ready: torch.cuda.Event | None = None
    tensors_done: bool = False
    last: bool = False


@dataclass
class Outbox:
    """What waits on one link of one session: rows or codes under credits, and text.

    Args:
        largest: rows or codes of one message at most.
        smallest: fewer than this wait for more, unless no more will come.
    """

    largest: int
    smallest: int = 1
    sent: int = 0
    _tensors: list[Tensor] = field(default_factory=list)
    _ready: list[torch.cuda.Event] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _tensors_done: bool = False
    _text_done: bool = False
    _announced: bool = False
    _closed: bool = False
    _text_left_ns: int = 0

    @property
    def held(self) -> int:
        """Rows or codes waiting."""
        return sum(len(tensor) for tensor in self._tensors)

    @property
    def waiting(self) -> bool:
        """Whether something still has to leave."""
        return bool(self._tensors or self._text) or (self._text_done and not self._closed)

    def put(self, tensor: Tensor, ready: torch.cuda.Event | None = None) -> None:
        """Add rows [N, H] or codes [N]; `ready` is the event after which they may be read, by default now."""
        if len(tensor):
            self._tensors.append(tensor)
            ready = ready or record_event(tensor.device)
            if ready is not None:
                self._ready.append(ready)

    def put_text(self, text: str) -> None:
        """Add text."""
        if text:
            self._text.append(text)

    def finish_tensors(self) -> None:
        """No more rows or codes will be put."""
        self._tensors_done = True

    def finish_text(self) -> None:
        """No more text will be put."""
        self._text_done = True

    def take(self, consumed: int, now_ns: int | None = None) -> Parcel | None:
        """What may leave now, given how many data messages the other side has consumed; None = nothing."""
        # What most sessions are at most polls.
        idle = not (self._tensors or self._text or self._tensors_done or self._text_done)
        if self._closed or idle:
            return None
        now = time.monotonic_ns() if now_ns is None else now_ns
        tensor, ready = self._take_tensor(consumed)
        done = self._tensors_done and not self._tensors
        last = done and self._text_done
        news = tensor is not None or last or (done and not self._announced)
        if not news and not (self._text and now - self._text_left_ns >= TEXT_INTERVAL_NS):
            return None
        text, self._text = "".join(self._text), []
        if text:
            self._text_left_ns = now
        self._announced, self._closed = done, last
        return Parcel(text, tensor, ready, done, last)

    def _take_tensor(self, consumed: int) -> tuple[Tensor | None, torch.cuda.Event | None]:
        needed = 1 if self._tensors_done else self.smallest
        if self.held < needed or not self._tensors or self.sent - consumed >= CREDITS:
            return None, None
        joined, ready = self._join()
        leaving, staying = joined[: self.largest], joined[self.largest :]
        self._tensors = [staying] if len(staying) else []
        self._ready = [ready] if ready is not None and len(staying) else []
        self.sent += 1
        return leaving, ready

    def _join(self) -> tuple[Tensor, torch.cuda.Event | None]:
        if len(self._tensors) == 1:
            return self._tensors[0], self._ready[-1] if self._ready else None
        with on_side_stream(self._tensors[0].device) as stream:
            for event in self._ready:
                event.wait()
            joined = torch.cat(self._tensors)
            if stream is not None:
                for tensor in self._tensors:
                    tensor.record_stream(stream)
            return joined, record_event(joined.device)

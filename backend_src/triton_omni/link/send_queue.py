# SPDX-License-Identifier: Apache-2.0
"""Items (rows or codes), text and calls of one session that wait for one link: when they leave, and which leave
together.

A message costs sender and receiver a fixed time, whatever its size; a thousand a second fill a CPU core. So the queue
sends few messages. It never exceeds the credits, sends no codes before they complete a window, and batches more the
busier the link is. It knows no engine, no Triton.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from triton_omni.core.gpu import on_side_stream, record_event
from triton_omni.session.engine import CallPiece

CREDITS: Final = 2
"""Data messages of one session that may be on the way on one link."""

MESSAGE_APART_NS: Final = 20_000_000
"""Minimum nanoseconds between two messages of one session that could also be one."""

SESSION_NS: Final = 4_000_000
"""Minimum nanoseconds of that interval for each session on the link: a message costs sender and receiver a fixed time.
"""


def message_interval_ns(sessions: int) -> int:
    """Return the minimum nanoseconds between two messages of each of `sessions` sessions on a link."""
    return max(MESSAGE_APART_NS, sessions * SESSION_NS)


@dataclass(frozen=True)
class Batch:
    """Content of one message."""

    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    tensor: Tensor | None = None
    ready: torch.cuda.Event | None = None
    tensors_done: bool = False
    last: bool = False


class RingBatch(NamedTuple):
    """Content of one write to the ring, and of its note."""

    start: int
    """Items of the session that left by the ring before."""
    tensor: Tensor | None
    """The next ones; None = no new ones, since there is no room or none waits."""
    ready: torch.cuda.Event | None
    total: int
    """`start`, and what `tensor` has."""
    by_message: int
    """Items that left in messages before."""
    announced: bool
    """True if the next stage is to be told of all of them."""


@dataclass
class SendQueue:
    """Rows or codes (items) and text of one session that wait for the next stage.

    Args:
        largest: maximum items of one message.
        start: number of first items without which the next stage cannot start. They travel in messages.
    """

    largest: int
    start: int = 0
    awaits_begin: bool = False
    """True while the next stage has not said with which item it begins; none leaves."""
    skipped: int = 0
    """First items that did not leave, since the next stage has no need of them; no other count has them."""
    is_urgent: bool = False
    """True while no message waits for the interval."""
    messages: int = 0
    """Number of sent messages with items."""
    held: int = 0
    """Items waiting."""
    given: int = 0
    """Items that left."""
    announced: int = 0
    """Items that left and that a message or a note tells of; those of a ring leave before their note."""
    by_message: int | None = None
    """Items that left in messages before all others leave by the ring; None = all in messages so far."""
    _tensors: list[Tensor] = field(default_factory=list)
    _ready: torch.cuda.Event | None = None
    _text: list[str] = field(default_factory=list)
    _calls: list[CallPiece] = field(default_factory=list)
    _to_skip: int = 0
    _tensors_done: bool = False
    _text_done: bool = False
    _end_announced: bool = False
    _closed: bool = False
    _sizes: deque[int] = field(default_factory=lambda: deque(maxlen=CREDITS))
    """Bytes of the last messages with items."""
    _left_ns: int = 0
    """Monotonic time of the last message, nanoseconds."""

    @property
    def waiting(self) -> bool:
        """True if something still has to leave."""
        return bool(self._tensors or self._text or self._calls) or (self._text_done and not self._closed)

    @property
    def idle(self) -> bool:
        """True if no message can leave, whatever the credits; true for most sessions at most polls."""
        return self._closed or not (self._tensors or self._text or self._calls or self._tensors_done or self._text_done)

    @property
    def all_left(self) -> bool:
        """True if the last item has left."""
        return self._tensors_done and not self._tensors

    @property
    def uses_ring(self) -> bool:
        """True if items leave by the ring, in no message."""
        return self.by_message is not None

    @property
    def placed(self) -> int:
        """Items that left by the ring."""
        return 0 if self.by_message is None else self.given - self.by_message

    def use_ring(self) -> None:
        """Let all later items leave by the ring."""
        self.by_message = self.given if self.by_message is None else self.by_message

    def under_way(self, consumed: int) -> tuple[int, int]:
        """Return the number of data messages that left and are not among the `consumed` ones, and their bytes."""
        messages = max(0, self.messages - consumed)
        return messages, sum(list(self._sizes)[-messages:]) if messages else 0

    def put(self, tensor: Tensor, ready: torch.cuda.Event | None = None) -> None:
        """Add rows [N, H] or codes [N]; `ready` is the event after which they and all before may be read, by default
        now."""
        # `len` of a tensor takes three times as long.
        if count := tensor.shape[0]:
            self._tensors.append(tensor)
            self.held += count
            self._ready = ready or record_event(tensor.device)
            self._skip()

    def begin_at(self, item: int) -> None:
        """The next stage begins with this item: drop those before it, put or not. None may have left."""
        self.awaits_begin, self._to_skip = False, item
        self.start = max(0, self.start - item)
        self._skip()

    def _skip(self) -> None:
        while self._to_skip and self._tensors:
            first = self._tensors.pop(0)
            count = min(self._to_skip, first.shape[0])
            if count < first.shape[0]:
                self._tensors.insert(0, first[count:])
            self.held -= count
            self.skipped += count
            self._to_skip -= count

    def put_text(self, text: str, calls: Sequence[CallPiece] = ()) -> None:
        """Add text, and pieces of calls; no text follows those."""
        if text:
            self._text.append(text)
        self._calls += calls

    def finish_tensors(self) -> None:
        """No more items will be put. If none was, the end gets no message of its own: the first text would wait for the
        interval after it.
        """
        self._tensors_done = True
        self._end_announced |= not (self.given or self.held)

    def finish_text(self) -> None:
        """No more text and calls will be put."""
        self._text_done = True

    def pop_batch(
        self,
        consumed: int,
        *,
        interval_ns: int = 0,
        wanted: int | None = None,
        now_ns: int | None = None,
    ) -> Batch | None:
        """Return the content of the message that may leave now; None = nothing.

        Args:
            consumed: data messages that the other side has consumed.
            interval_ns: minimum nanoseconds since the last message. A full message, the wanted items and the end do not
                wait.
            wanted: number of items, from the first on, below which the other side cannot go on. Fewer stay; as many
                leave at once. None: it can use each item.
            now_ns: monotonic time, nanoseconds; by default now.
        """
        if self.idle:
            return None
        now = time.monotonic_ns() if now_ns is None else now_ns
        is_early = not self.is_urgent and now - self._left_ns < interval_ns
        tensor, ready = self._pop_message() if self._may_leave(consumed, wanted, is_early) else (None, None)
        last = self.all_left and self._text_done
        news = tensor is not None or last or (self.all_left and not self._end_announced)
        if not news and (is_early or not (self._text or self._calls)):
            return None
        text, self._text = "".join(self._text), []
        calls, self._calls = tuple(self._calls), []
        self._left_ns = now
        self._end_announced, self._closed = self.all_left, last
        return Batch(text, calls, tensor, ready, self.all_left, last)

    def _may_leave(self, consumed: int, wanted: int | None, is_early: bool) -> bool:
        if self.uses_ring or self.awaits_begin or not self._tensors or self.messages - consumed >= CREDITS:
            return False
        if self._tensors_done or self.held >= self.largest:
            return True
        if wanted is not None:
            # The next stage has what it wanted, and has not yet said what it wants next.
            return self.given < wanted <= self.given + self.held
        return not is_early

    def pop_ring_batch(self, room: int, places: int, wanted: int | None) -> RingBatch | None:
        """Return what the ring is to carry now; None = nothing. The first of them switches the queue to the ring.

        Items leave as soon as there is room. The next stage is told of them once they complete the wanted ones, are the
        last, or fill half of the places.

        Args:
            room: items that the session's places in the ring still take; 0 also where it has none.
            places: of each session in the ring; 0 = there is no ring.
            wanted: as `pop_batch` has it.
        """
        if not self.uses_ring and (self.given < self.start or room <= 0):
            return None
        self.use_ring()
        start, tensor, ready = self.placed, None, None
        if self.held and room > 0:
            tensor, ready = self.pop_items(room)
        unknown = self.given - self.announced
        is_wanted = wanted is None or self.announced < wanted <= self.given
        announced = unknown > 0 and (is_wanted or self.all_left or 2 * unknown >= places > 0)
        if announced:
            self.announced = self.given
        if tensor is None and not announced:
            return None
        return RingBatch(start, tensor, ready, self.placed, self.by_message or 0, announced)

    def pop_items(self, most: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return the next items, `most` of them, and the event after which they may be read. Some must be held."""
        joined, ready = self._join()
        count = min(most, self.held)
        self.given += count
        self.held -= count
        if not self.held:
            self._tensors, self._ready = [], None
            return joined, ready
        self._tensors, self._ready = [joined[count:]], ready
        return joined[:count], ready

    def _pop_message(self) -> tuple[Tensor, torch.cuda.Event | None]:
        leaving, ready = self.pop_items(self.largest)
        self.messages += 1
        self.announced = self.given
        self._sizes.append(leaving.numel() * leaving.element_size())
        return leaving, ready

    def _join(self) -> tuple[Tensor, torch.cuda.Event | None]:
        if len(self._tensors) == 1:
            return self._tensors[0], self._ready
        # Items that an earlier message did not take were joined on this stream, and need no event.
        with on_side_stream(self._tensors[0].device) as stream:
            if self._ready is not None:
                self._ready.wait()
            joined = torch.cat(self._tensors)
            if stream is not None:
                for tensor in self._tensors:
                    tensor.record_stream(stream)
            return joined, record_event(joined.device)

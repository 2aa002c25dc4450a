# SPDX-License-Identifier: Apache-2.0
"""Items of one session that wait for one link: when they leave, and which leave together.

A message costs sender and receiver a fixed time, whatever its size; a thousand a second fill a CPU core. So the queue
sends few messages. It never exceeds the credits, sends no codes before they complete a window, and batches more the
busier the link is. It knows no engine, no Triton.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from triton_omni.core.metrics import Metric
from triton_omni.core.streams import on_side_stream, record_event

CREDITS: Final = 2
"""Data messages of one session that may be on the way on one link."""

TEXT_APART_NS: Final = 20_000_000
"""Minimum nanoseconds between messages that carry text alone."""

MESSAGE_NS: Final = 2_000_000
"""Nanoseconds of a link's time for one message."""

AT_A_TIME: Final = 4
"""Number of sessions whose messages may leave in a burst, since one step has news of all of them."""


class RateLimit:
    """Spreads the messages of a link's sessions over time, so that no message waits for many others.

    Attributes:
        sessions: how many share the link now.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self._free_ns = 0

    @property
    def apart_ns(self) -> int:
        """Minimum nanoseconds between two messages of one session."""
        return self.sessions * MESSAGE_NS

    def turn_ns(self, now_ns: int) -> int:
        """Return the time in nanoseconds from which a message that is ready now may leave; first come, first served."""
        slot_ns = max(self._free_ns, now_ns)
        self._free_ns = slot_ns + MESSAGE_NS
        return slot_ns - (AT_A_TIME - 1) * MESSAGE_NS


@dataclass(frozen=True)
class Batch:
    """Content of one message."""

    text: str = ""
    tensor: Tensor | None = None
    ready: torch.cuda.Event | None = None
    tensors_done: bool = False
    last: bool = False


@dataclass
class SendQueue:
    """Send queue of one session on one link: rows or codes under credits, and text.

    Args:
        largest: maximum rows or codes of one message.
    """

    largest: int
    messages: int = 0
    """Number of sent messages with rows or codes."""
    held: int = 0
    """Rows or codes waiting."""
    given: int = 0
    """Rows or codes that left."""
    behind: int | None = None
    """Rows or codes that left in messages before the others left by `take_tensor`; None = all in messages."""
    _tensors: list[Tensor] = field(default_factory=list)
    _ready: torch.cuda.Event | None = None
    _text: list[str] = field(default_factory=list)
    _tensors_done: bool = False
    _text_done: bool = False
    _announced: bool = False
    _closed: bool = False
    _turn_ns: int | None = None
    _tensor_left_ns: int = 0
    _sizes: deque[int] = field(default_factory=lambda: deque(maxlen=CREDITS))
    """Bytes of the last messages with rows or codes."""
    _text_left_ns: int = 0

    @property
    def waiting(self) -> bool:
        """True if something still has to leave."""
        return bool(self._tensors or self._text) or (self._text_done and not self._closed)

    @property
    def idle(self) -> bool:
        """True if nothing can leave, whatever the credits; true for most sessions at most polls."""
        return self._closed or not (self._tensors or self._text or self._tensors_done or self._text_done)

    @property
    def past_messages(self) -> bool:
        """True if rows and codes leave by `take_tensor` alone, in no message."""
        return self.behind is not None

    @property
    def placed(self) -> int:
        """Rows or codes that left by `take_tensor`."""
        return 0 if self.behind is None else self.given - self.behind

    def go_past_messages(self) -> None:
        """From now on rows and codes leave by `take_tensor` alone."""
        self.behind = self.given if self.behind is None else self.behind

    def under_way(self, consumed: int) -> tuple[int, int]:
        """Data messages that left and are not among the `consumed` ones, and the bytes of their rows or codes."""
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

    def take(
        self,
        consumed: int,
        *,
        pace: RateLimit | None = None,
        wanted: int | None = None,
        now_ns: int | None = None,
    ) -> Batch | None:
        """Return the batch that may leave now; None = nothing.

        Args:
            consumed: data messages that the other side has consumed.
            pace: of the link; a full message and the end do not wait for it. None: nothing waits for any.
            wanted: rows or codes, from the first on, without which the other side can do nothing: fewer stay, as many
                leave at once, whatever the pace. None: it can use each.
            now_ns: by the monotonic clock.
        """
        if self.idle:
            return None
        now = time.monotonic_ns() if now_ns is None else now_ns
        tensor, ready = self._take_tensor() if self._may_leave(consumed, now, pace, wanted) else (None, None)
        done = self._tensors_done and not self._tensors
        last = done and self._text_done
        news = tensor is not None or last or (done and not self._announced)
        if not news and not self._text_may_leave(consumed, now, pace, wanted):
            return None
        text, self._text = "".join(self._text), []
        self._tensor_left_ns = now if tensor is not None else self._tensor_left_ns
        self._text_left_ns = now if text else self._text_left_ns
        self._announced, self._closed = done, last
        return Batch(text, tensor, ready, done, last)

    def _may_leave(self, consumed: int, now: int, pace: RateLimit | None, wanted: int | None) -> bool:
        if self.past_messages or not (self._tensors and self._has_credit(consumed)):
            return False
        if self._tensors_done or self.held >= self.largest:
            return True
        if wanted is not None:
            # The next stage has what it wanted, and has not yet said what it wants next.
            return self.given < wanted <= self.given + self.held
        return pace is None or self._has_its_turn(now, pace)

    def _has_credit(self, consumed: int) -> bool:
        return self.messages - consumed < CREDITS

    def _has_its_turn(self, now: int, pace: RateLimit) -> bool:
        if self._turn_ns is None and now - self._tensor_left_ns >= pace.apart_ns:
            self._turn_ns = pace.turn_ns(now)
        return self._turn_ns is not None and now >= self._turn_ns

    def _text_may_leave(self, consumed: int, now: int, pace: RateLimit | None, wanted: int | None) -> bool:
        """True if text leaves in a message of its own; False where rows wait for the rate limit alone."""
        rows_follow = self._tensors and wanted is None and not self.past_messages and self._has_credit(consumed)
        # Without rows in the same message it leaves half as often: a message of text alone costs as much as any.
        apart_ns = max(TEXT_APART_NS, pace.apart_ns * (2 if self.past_messages else 1) if pace else 0)
        return bool(self._text) and not rows_follow and now - self._text_left_ns >= apart_ns

    def take_tensor(self, most: int) -> tuple[Tensor, torch.cuda.Event | None] | None:
        """The next rows or codes, `most` of them, and the event after which they may be read; None = there are none."""
        return self._split(most) if self._tensors and most > 0 else None

    def _take_tensor(self) -> tuple[Tensor, torch.cuda.Event | None]:
        leaving, ready = self._split(self.largest)
        self.messages += 1
        self._sizes.append(leaving.numel() * leaving.element_size())
        self._turn_ns = None
        return leaving, ready

    def _split(self, most: int) -> tuple[Tensor, torch.cuda.Event | None]:
        joined, ready = self._join()
        count = min(most, self.held)
        self.given += count
        self.held -= count
        if not self.held:
            self._tensors, self._ready = [], None
            return joined, ready
        self._tensors, self._ready = [joined[count:]], ready
        return joined[:count], ready

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


def link_metrics(sessions: Iterable[tuple[SendQueue, int]]) -> Iterator[Metric]:
    """Yield metrics of one link: items under way, the send queue of each session, consumed data messages."""
    counts = [send_queue.under_way(consumed) for send_queue, consumed in sessions]
    yield Metric("omni_credits_used", sum(messages for messages, _ in counts))
    yield Metric("omni_pool_bytes", sum(size for _, size in counts))

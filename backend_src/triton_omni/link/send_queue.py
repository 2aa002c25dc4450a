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
    _sizes: deque[int] = field(default_factory=lambda: deque(maxlen=CREDITS))
    """Bytes of the last messages with rows or codes."""
    _left_ns: int = 0
    """Monotonic time of the last message, nanoseconds."""

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

    def pop_batch(
        self,
        consumed: int,
        *,
        interval_ns: int = 0,
        wanted: int | None = None,
        now_ns: int | None = None,
    ) -> Batch | None:
        """Return the batch that may leave now; None = nothing.

        Args:
            consumed: data messages that the other side has consumed.
            interval_ns: minimum nanoseconds since the last message. A full message, the wanted items and the end do not
                wait.
            wanted: number of items, from the first on, below which the other side cannot start. Fewer stay; as many
                leave at once. None: it can use each item.
            now_ns: monotonic time, nanoseconds; by default now.
        """
        if self.idle:
            return None
        now = time.monotonic_ns() if now_ns is None else now_ns
        is_early = now - self._left_ns < interval_ns
        tensor, ready = self._take_tensor() if self._may_leave(consumed, wanted, is_early) else (None, None)
        done = self._tensors_done and not self._tensors
        last = done and self._text_done
        news = tensor is not None or last or (done and not self._announced)
        if not news and (is_early or not self._text):
            return None
        text, self._text = "".join(self._text), []
        self._left_ns = now
        self._announced, self._closed = done, last
        return Batch(text, tensor, ready, done, last)

    def _may_leave(self, consumed: int, wanted: int | None, is_early: bool) -> bool:
        if self.past_messages or not self._tensors or self.messages - consumed >= CREDITS:
            return False
        if self._tensors_done or self.held >= self.largest:
            return True
        if wanted is not None:
            # The next stage has what it wanted, and has not yet said what it wants next.
            return self.given < wanted <= self.given + self.held
        return not is_early

    def take_tensor(self, most: int) -> tuple[Tensor, torch.cuda.Event | None] | None:
        """The next rows or codes, `most` of them, and the event after which they may be read; None = there are none."""
        return self._split(most) if self._tensors and most > 0 else None

    def _take_tensor(self) -> tuple[Tensor, torch.cuda.Event | None]:
        leaving, ready = self._split(self.largest)
        self.messages += 1
        self._sizes.append(leaving.numel() * leaving.element_size())
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

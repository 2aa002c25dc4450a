# SPDX-License-Identifier: Apache-2.0
"""Requests and the state of their replies: rows, codes, windows and what a listener has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from triton_omni.core.policy_settings import NS_PER_MS
from triton_omni.core.settings import FRAMES_PER_CODE
from triton_omni.token2wav.chunking import Chunk as Window
from triton_omni.token2wav.chunking import WindowPlan
from triton_omni_client.bench.records import Chunk

MS_PER_FRAME: Final = 10
"""Sound of a mel frame."""


@dataclass(frozen=True)
class Request:
    """A request and the lengths of its reply."""

    at_ms: float
    prompt_tokens: int
    tokens: int
    codes: int


@dataclass
class Reply:
    """State of one reply in all three stages."""

    request: Request
    plan: WindowPlan
    rows: int = 0
    codes: int = 0
    has_talker_prompt: bool = False
    window: int = 0
    given_frames: int = 0
    """Mel frames whose sound was given."""
    launched: bool = False
    """True while the next window is solved."""
    sound_until_ns: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    _ready_ns: int = 0
    wanted: int = field(init=False)
    """Codes that make the next window due."""
    _next: Window = field(init=False)
    """The next window's shape."""

    def __post_init__(self) -> None:
        self._plan_window()

    @property
    def opened_ns(self) -> int:
        """Monotonic time of the opening, nanoseconds."""
        return int(self.request.at_ms * NS_PER_MS) + 1

    @property
    def frames(self) -> int:
        """Mel frames of the next window."""
        return len(self._next.solved)

    @property
    def is_over(self) -> bool:
        """True if all sound was given."""
        return self.given_frames >= self._all_frames

    @property
    def is_silent(self) -> bool:
        """True if no window was launched yet."""
        return not self.sound_until_ns and not self.launched

    @property
    def has_codes(self) -> bool:
        """True if the codes of the next window are there."""
        return self.codes >= self.wanted

    @property
    def is_due(self) -> bool:
        """True if the next window can be launched."""
        return self.has_codes and not self.launched and not self.is_over

    @property
    def has_row(self) -> bool:
        """True if the talker can give a code: its row is there, or the text has ended."""
        is_written = self.rows >= self.request.tokens
        return self.codes < self.request.codes and (self.codes < self.rows or is_written)

    def ready_since_ns(self, now_ns: int) -> int | None:
        """Return since when the first window needs no further row; 0 = it does, None = its codes are there."""
        if self.has_codes:
            return None
        if self.rows >= min(self.wanted, self.request.tokens):
            self._ready_ns = self._ready_ns or now_ns
        return self._ready_ns

    def take_code(self) -> None:
        """Add a code."""
        self.codes += 1

    def take_sound(self, now_ms: float, now_ns: int) -> None:
        """Add the sound of the window that was solved."""
        left = self._all_frames - self.given_frames
        is_final = self.plan.codes_needed(self.window) > self.request.codes
        frames = left if is_final else min(len(self._next.audio), left)
        self.given_frames += frames
        self.window, self.launched = self.window + 1, False
        self._plan_window()
        sound_ms = frames * MS_PER_FRAME
        self.chunks.append(Chunk(at_s=(now_ms - self.request.at_ms) / 1000, seconds=sound_ms / 1000))
        self.sound_until_ns = max(self.sound_until_ns, now_ns) + sound_ms * NS_PER_MS

    @property
    def _all_frames(self) -> int:
        return self.request.codes * FRAMES_PER_CODE

    def _plan_window(self) -> None:
        regular = self.plan.regular_chunks
        self.wanted = min(self.plan.codes_needed(self.window), self.request.codes)
        self._next = regular[min(self.window, len(regular) - 1)]


@dataclass(frozen=True)
class Due:
    """A window as the rules see it (`triton_omni.policy.rules.Window`)."""

    reply: Reply
    deadline_ns: int
    is_first: bool
    frames: int
    is_streamed: bool = True
    flow: str = "rk4"

    @classmethod
    def of(cls, reply: Reply) -> Due:
        """Return a reply's next window."""
        return cls(reply, reply.sound_until_ns or reply.opened_ns, reply.is_silent, reply.frames)

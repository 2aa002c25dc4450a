# SPDX-License-Identifier: Apache-2.0
"""Record of one benchmark request: the time of each piece of the reply, and the end.

Pure: the clock is the caller's. Nothing is computed here; that is `metrics.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.errors import OmniClientError
from triton_omni_client.messages import AudioDelta, Delta, Info, TextDelta

LoadMode = Literal["closed", "open"]

INTERRUPTED = "interrupted"
"""Error code of a request that was cut off because the benchmark was stopped."""


@dataclass(frozen=True)
class Load:
    """How requests were offered: `closed` keeps `value` of them open, `open` starts `value` a second."""

    mode: LoadMode
    value: float

    @property
    def label(self) -> str:
        """For titles: "concurrency 4", "rate 2.5/s"."""
        return f"concurrency {self.value:g}" if self.mode == "closed" else f"rate {self.value:g}/s"


@dataclass(frozen=True)
class Chunk:
    """One piece of a reply's waveform."""

    at_s: float
    """When it came, in seconds after the request's start."""
    seconds: float
    """Its length when played."""


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds; those of its pieces count from `start_s`."""

    index: int
    start_s: float
    """From the run's begin to the request's start: its scheduled arrival (open loop), or its sending (closed loop)."""
    sent_s: float
    """From the run's begin to its sending; later than `start_s` where the load generator was late."""
    end_s: float
    """From `start_s` to the end of its stream, whichever way it ended."""
    warm_up: bool = False
    """Sent before the measurement: kept, but not counted."""
    text_at_s: tuple[float, ...] = ()
    """When each text delta came."""
    chunks: tuple[Chunk, ...] = ()
    error: str | None = None
    """Code of the error that ended it; None where the reply is whole."""
    message: str | None = None
    stage: str | None = None
    """The stage that failed, where the server named one."""
    prompt_tokens: int | None = None
    reply_tokens: int | None = None
    codes: int | None = None
    seed: int | None = None
    finish_reason: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if the reply is whole."""
        return self.error is None


class RecordBuilder:
    """Collects one request's record while its deltas come.

    Args:
        index: its number in the run.
        start_s: scheduled arrival, in seconds after the run's begin.
        sent_s: sending, in seconds after the run's begin.
        warm_up: whether it is to be left out of the figures.
    """

    def __init__(self, index: int, start_s: float, sent_s: float, *, warm_up: bool = False) -> None:
        self._head: dict[str, Any] = {"index": index, "start_s": start_s, "sent_s": sent_s, "warm_up": warm_up}
        self._start_s = start_s
        self._text: list[float] = []
        self._chunks: list[Chunk] = []
        self._info: Info | None = None
        self._failure: dict[str, Any] = {}

    def add(self, delta: Delta, now_s: float) -> None:
        """Take a delta that came `now_s` seconds after the run's begin."""
        at_s = now_s - self._start_s
        if isinstance(delta, TextDelta):
            self._text.append(at_s)
        elif isinstance(delta, AudioDelta):
            self._chunks.append(Chunk(at_s, len(delta.samples) / SAMPLE_RATE))
        elif isinstance(delta, Info):
            self._info = delta

    def fail(self, error: OmniClientError) -> None:
        """The request ended with an error."""
        self._failure = {"error": error.code, "message": error.message, "stage": error.stage}

    def interrupt(self) -> None:
        """The request was cut off by whoever runs the benchmark."""
        self._failure = {"error": INTERRUPTED}

    def build(self, now_s: float) -> RequestRecord:
        """The record of a request whose stream ended `now_s` seconds after the run's begin."""
        return RequestRecord(
            **self._head,
            end_s=now_s - self._start_s,
            text_at_s=tuple(self._text),
            chunks=tuple(self._chunks),
            **self._failure,
            **_account(self._info),
        )


def _account(info: Info | None) -> dict[str, Any]:
    if info is None:
        return {}
    names = ("prompt_tokens", "reply_tokens", "codes", "seed")
    return {name: getattr(info, name) for name in names} | {"finish_reason": dict(info.finish_reason)}

# SPDX-License-Identifier: Apache-2.0
"""The figures of one request, from its record. Pure; None where a request has no such figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .player import play
from .records import RequestRecord


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times of one request as its user saw them. Times count from its start (`RequestRecord.start_s`)."""

    time_to_first_text_s: float | None
    time_to_first_audio_s: float | None
    latency_s: float
    """Until the end of the stream."""
    audio_s: float
    """Length of the speech that came."""
    real_time_factor: float | None
    """`latency_s / audio_s`: below 1 the reply was whole before it could have been played."""
    text_tokens_per_s: float | None
    """Reply tokens over the time until the last text delta. Deltas may hold several tokens, so the time between the
    first and the last would say more of how they were joined than of the model."""
    longest_audio_gap_s: float | None
    """The longest time between two chunks."""
    underruns: int | None
    silence_s: float | None


def metrics_of(record: RequestRecord, *, streamed: bool = True) -> RequestMetrics:
    """The figures of a request; how it would have played is known of a streamed reply alone."""
    audio_s = sum(chunk.seconds for chunk in record.chunks)
    playback = play(record.chunks) if record.chunks and streamed else None
    return RequestMetrics(
        time_to_first_text_s=record.text_at_s[0] if record.text_at_s else None,
        time_to_first_audio_s=record.chunks[0].at_s if record.chunks else None,
        latency_s=record.end_s,
        audio_s=audio_s,
        real_time_factor=record.end_s / audio_s if audio_s else None,
        text_tokens_per_s=_tokens_per_s(record),
        longest_audio_gap_s=max(audio_gaps(record), default=None),
        underruns=playback.underruns if playback else None,
        silence_s=playback.silence_s if playback else None,
    )


def audio_gaps(record: RequestRecord) -> list[float]:
    """Seconds between each two chunks."""
    return _gaps([chunk.at_s for chunk in record.chunks])


def text_gaps(record: RequestRecord) -> list[float]:
    """Seconds between each two text deltas."""
    return _gaps(record.text_at_s)


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def _tokens_per_s(record: RequestRecord) -> float | None:
    if record.reply_tokens is None or not record.text_at_s or record.text_at_s[-1] <= 0:
        return None
    return record.reply_tokens / record.text_at_s[-1]

# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, from its records. Pure.

Distributions are of whole replies alone: a request that failed or was cut off has no latency, it has an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .metrics import RequestMetrics, audio_gaps, metrics_of, text_gaps
from .records import INTERRUPTED, RequestRecord
from .statistics import Distribution, distribution


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one run; warm-up requests are in none of them."""

    requests: int
    """Whole replies, errors and those cut off, together."""
    completed: int
    errors: Mapping[str, int]
    """Requests that failed, by the code of their error."""
    interrupted: int
    duration_s: float
    """From the first start to the last end."""

    sent_per_s: float | None
    """Requests sent a second, from the first sending to the last: in an open loop the rate that came about."""
    requests_per_s: float | None
    audio_seconds_per_s: float | None
    """Seconds of speech a second, over all replies at once: how many listeners the server kept up with."""
    text_tokens_per_s: float | None
    """Reply tokens a second, over all replies at once."""

    underruns: int | None
    """None, as the three below, where replies are not streamed."""
    requests_with_underruns: int | None
    silence_s: float | None
    """Seconds of silence of all simulated players together."""
    silence_share: float | None
    """Silence over the length of all speech."""

    time_to_first_text_s: Distribution
    time_to_first_audio_s: Distribution
    latency_s: Distribution
    text_gap_s: Distribution
    """Times between two text deltas, those of all replies together."""
    audio_gap_s: Distribution
    """Times between two chunks, those of all replies together."""
    longest_audio_gap_s: Distribution
    silence_per_request_s: Distribution
    real_time_factor: Distribution
    text_tokens_per_s_per_request: Distribution
    audio_s: Distribution
    reply_tokens: Distribution
    prompt_tokens: Distribution
    send_delay_s: Distribution
    """How late the load generator sent what was due (open loop)."""


def summarise(records: Sequence[RequestRecord], *, streamed: bool = True) -> Summary:
    """Sum up one run, whose replies came in one response each where they are not `streamed`."""
    measured = [record for record in records if not record.warm_up]
    whole = [record for record in measured if record.ok]
    metrics = [metrics_of(record, streamed=streamed) for record in whole]
    codes = Counter(record.error for record in measured if record.error is not None)
    interrupted = codes.pop(INTERRUPTED, 0)
    duration = _duration(measured)
    tokens = [record.reply_tokens for record in whole]
    return Summary(
        requests=len(measured),
        completed=len(whole),
        errors=dict(sorted(codes.items())),
        interrupted=interrupted,
        duration_s=duration,
        sent_per_s=_sending_rate([record.sent_s for record in measured]),
        requests_per_s=_rate(len(whole), duration),
        audio_seconds_per_s=_rate(sum(figures.audio_s for figures in metrics), duration),
        text_tokens_per_s=None if None in tokens else _rate(sum(t for t in tokens if t is not None), duration),
        **_underruns(metrics, streamed=streamed),
        **_distributions(whole, metrics),
        send_delay_s=distribution(record.sent_s - record.start_s for record in measured),
    )


def _duration(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.start_s + record.end_s for record in records) - min(record.start_s for record in records)


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _sending_rate(sent_s: Sequence[float]) -> float | None:
    """How many were sent after the first, by the time from the first to the last."""
    return _rate(len(sent_s) - 1, max(sent_s) - min(sent_s)) if sent_s else None


def _underruns(metrics: Sequence[RequestMetrics], *, streamed: bool) -> dict[str, Any]:
    """The four figures of the simulated players; requests without speech have no part in them."""
    silence = sum(figures.silence_s or 0.0 for figures in metrics)
    audio = sum(figures.audio_s for figures in metrics)
    found = {
        "underruns": sum(figures.underruns or 0 for figures in metrics),
        "requests_with_underruns": sum(bool(figures.underruns) for figures in metrics),
        "silence_s": silence,
        "silence_share": silence / audio if audio else None,
    }
    return found if streamed else dict.fromkeys(found)


def _distributions(whole: Sequence[RequestRecord], metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    samples: dict[str, list[float | None]] = {
        "time_to_first_text_s": [figures.time_to_first_text_s for figures in metrics],
        "time_to_first_audio_s": [figures.time_to_first_audio_s for figures in metrics],
        "latency_s": [figures.latency_s for figures in metrics],
        "text_gap_s": [gap for record in whole for gap in text_gaps(record)],
        "audio_gap_s": [gap for record in whole for gap in audio_gaps(record)],
        "longest_audio_gap_s": [figures.longest_audio_gap_s for figures in metrics],
        "silence_per_request_s": [figures.silence_s for figures in metrics],
        "real_time_factor": [figures.real_time_factor for figures in metrics],
        "text_tokens_per_s_per_request": [figures.text_tokens_per_s for figures in metrics],
        "audio_s": [figures.audio_s for figures in metrics],
        "reply_tokens": [record.reply_tokens for record in whole],
        "prompt_tokens": [record.prompt_tokens for record in whole],
    }
    return {name: distribution(values) for name, values in samples.items()}

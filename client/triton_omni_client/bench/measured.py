# SPDX-License-Identifier: Apache-2.0
"""Loads for `capacity`, read from reports of `triton-omni bench`: one set-up, in one report or in several. Pure."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from triton_omni_client.errors import BadRequest

from .capacity import Measured, exact
from .report import SCHEMA, SCHEMA_VERSION

_CLOSED = "closed"
_OWN = frozenset({"seed", "ramp_up_s", "timeout", "prompts_from", "profile_export"})
"""Keys in which workloads of one set-up may differ."""
_ONE_LENGTH = Fraction(3, 2)
"""Mean replies of reports that belong together are not longer by this factor: chance alone makes a smaller one."""
_AT_WORK = 0.05
"""Utilisation that a GPU without work never has, 0 to 1."""
_SHOWN = 60
"""Characters of a value that are told."""

Report = Mapping[str, Any]


def measured_loads(report: Report) -> list[Measured]:
    """The closed loops of a report, the smallest first; those that were cut short are left out.

    Raises:
        BadRequest: it is no report of this benchmark, has no such run, is of crowds or speakers, or not of the stream.
    """
    return _by_size(_runs(report))


def loads_together(reports: Mapping[str, Report]) -> list[Measured]:
    """The closed loops of reports of one set-up, by their names; the smallest first.

    Raises:
        BadRequest: as `measured_loads`, or two cannot be of one set-up; the message names them.
    """
    runs: dict[str, list[Measured]] = {}
    for name, report in reports.items():
        try:
            runs[name] = _runs(report)
        except BadRequest as error:
            raise BadRequest(f"{name}: {error.message}") from error
    first, *others = reports
    for name in others:
        if fault := _differs(reports[first], reports[name]) or _differ_in_length(runs[first], runs[name]):
            raise BadRequest(
                f"{name} and {first} do not belong together: {fault}; give reports of one set-up, asked alike"
            )
    return _by_size(itertools.chain.from_iterable(runs.values()))


def gpus_at_work(reports: Mapping[str, Report]) -> int | None:
    """How many GPUs the reports saw at work; None where they tell of none.

    Raises:
        BadRequest: two saw different numbers; the message names them.
    """
    seen = {name: found for name, report in reports.items() if (found := _gpus(report))}
    for (first, before), (name, after) in itertools.pairwise(seen.items()):
        if before != after:
            raise BadRequest(
                f"{name} saw {after} GPUs at work, and {first} {before}: give reports of one set-up, or say --gpus"
            )
    return next(iter(seen.values()), None)


def _gpus(report: Report) -> int:
    used = (name for run in report["runs"] for name, usage in run.get("resources", {}).items() if _works(name, usage))
    return len(set(used))


def _works(name: str, usage: Mapping[str, float]) -> bool:
    return name.startswith("gpu/") and name.endswith("/utilization") and usage["max"] > _AT_WORK


def _differs(first: Report, other: Report) -> str | None:
    """In what two reports are not of one set-up, as far as both tell; of several values the shortest."""
    before, after = _setup(first), _setup(other)
    names = [name for name in before if name in after and before[name] != after[name]]
    return min((f"{name} is {_told(after[name])} and {_told(before[name])}" for name in names), key=len, default=None)


def _setup(report: Report) -> dict[str, Any]:
    """Facts that reports of one set-up share, by name, as far as the report tells them."""
    environment = report.get("environment", {})
    workload = {f"workload.{name}": value for name, value in report.get("workload", {}).items() if name not in _OWN}
    facts = {
        "checkpoint": (environment.get("server") or {}).get("checkpoint"),
        "environment.gpus": sorted(set(environment.get("gpus", []))),
    }
    return {"workload.listens": False} | workload | {name: fact for name, fact in facts.items() if fact}


def _told(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _differ_in_length(first: Sequence[Measured], other: Sequence[Measured]) -> str | None:
    before, after = (statistics.mean(run.reply_s for run in runs) for runs in (first, other))
    if max(before, after) < _ONE_LENGTH * min(before, after):
        return None
    return f"replies have {float(after):.3g} and {float(before):.3g} s of speech"


def _runs(report: Report) -> list[Measured]:
    if report.get("schema") != SCHEMA or report.get("schema_version") != SCHEMA_VERSION:
        raise BadRequest(f"this is no report of `triton-omni bench` ({SCHEMA}, version {SCHEMA_VERSION})")
    workload = report.get("workload", {})
    for asked, option in (("crowds", "--crowds"), ("speaks", "--speak")):
        if workload.get(asked):
            raise BadRequest(f"the report is of {option}, which leaves the server idle: measure without it")
    runs = [run for run in report["runs"] if run["load"]["mode"] == _CLOSED and run["complete"]]
    spoken = [run for run in runs if run["summary"]["audio_seconds_per_s"]]
    if not spoken:
        raise BadRequest("the report has no complete run with speech at a --concurrency")
    if any(run["summary"]["requests_with_underruns"] is None for run in spoken):
        raise BadRequest("the report is of whole replies, which tell nothing of underruns: measure the stream")
    return [_measured(run, listens=bool(workload.get("listens"))) for run in spoken]


def _measured(run: Mapping[str, Any], *, listens: bool) -> Measured:
    summary, places = run["summary"], int(run["load"]["value"])
    p95 = summary["time_to_first_audio_s"]["p95"]
    return Measured(
        streams=places,
        first_audio_p95_s=None if p95 is None else exact(p95),
        underruns=Fraction(summary["requests_with_underruns"], summary["completed"]),
        speech_per_s=_heard_per_s(summary, places) if listens else exact(summary["audio_seconds_per_s"]),
        reply_s=exact(summary["audio_s"]["mean"]),
        failed=sum(summary["errors"].values()),
        replies=int(summary["completed"]),
        all_listened_s=_at_once_s(run["requests"], places) if listens else None,
    )


def _heard_per_s(summary: Mapping[str, Any], listeners: int) -> Fraction:
    """Seconds of speech that all listeners hear a second: each waits for first audio and in gaps, and hears the rest.

    The run's own speech a second has its begin and end in it, where fewer listened.
    """
    heard, first, silence = (
        exact(summary[name]["mean"]) for name in ("audio_s", "time_to_first_audio_s", "silence_per_request_s")
    )
    return listeners * heard / (first + heard + silence)


def _at_once_s(requests: Iterable[Mapping[str, Any]], places: int) -> float:
    """Seconds in which so many places listened at once: from asking until the reply was heard."""
    changes = sorted(itertools.chain.from_iterable(map(_listening, requests)))
    spans = itertools.pairwise(at_s for at_s, _ in changes)
    listening = itertools.accumulate(change for _, change in changes)
    return sum(end - begin for (begin, end), now in zip(spans, listening, strict=False) if now >= places)


def _listening(request: Mapping[str, Any]) -> Iterator[tuple[float, int]]:
    """When a request adds a listener, and when it takes one away, in seconds after the run's begin."""
    metrics, begin = request["metrics"], request["start_s"]
    first = metrics["time_to_first_audio_s"]
    heard = metrics["latency_s"] if first is None else first + metrics["audio_s"] + metrics["silence_s"]
    yield begin, 1
    yield begin + heard, -1


def _by_size(runs: Iterable[Measured]) -> list[Measured]:
    ordered = sorted(runs, key=lambda run: run.streams)
    return [_median([*same]) for _, same in itertools.groupby(ordered, key=lambda run: run.streams)]


def _median(runs: Sequence[Measured]) -> Measured:
    """Runs of one load as one: a request that failed counts in whichever run it was."""
    if len(runs) == 1:
        return runs[0]

    def middle(name: str) -> Any:
        values = [getattr(run, name) for run in runs]
        return None if None in values else statistics.median(values)

    figures = ("first_audio_p95_s", "underruns", "speech_per_s", "reply_s", "all_listened_s")
    return Measured(
        streams=runs[0].streams,
        failed=sum(run.failed for run in runs),
        replies=min(run.replies for run in runs),
        runs=len(runs),
        **{name: middle(name) for name in figures},
    )

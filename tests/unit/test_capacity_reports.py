# SPDX-License-Identifier: Apache-2.0
"""`triton-omni capacity` of listeners and of several reports: what counts, what is refused, GPUs of a set-up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command_line import unframed
from triton_omni_client.bench.capacity import Capacity, Targets, capacity
from triton_omni_client.bench.measured import gpus_at_work, loads_together, measured_loads
from triton_omni_client.bench.records import Chunk, Load, RequestRecord
from triton_omni_client.bench.report import Report, Run
from triton_omni_client.cli import app
from triton_omni_client.errors import BadRequest

FIRST_S, REPLY_S = 0.5, 20.0
TARGETS = Targets(first_audio_p95_s=0.6)
WORKLOAD = {"prompts": ["hello", "why"], "talker": {"max_tokens": 1000}, "token2wav": {}, "seed": 0, "ramp_up_s": 10}
H200 = "NVIDIA H200"
Reports = Mapping[str, Mapping[str, Any]]


def asked(start_s: float, error: str | None = None, silence_s: float = 0.0) -> dict[str, Any]:
    """A request as a report has it."""
    heard = {"time_to_first_audio_s": FIRST_S, "audio_s": REPLY_S, "silence_s": silence_s, "latency_s": 9.0}
    nothing = {"time_to_first_audio_s": None, "audio_s": 0.0, "silence_s": None, "latency_s": 1.0}
    return {"start_s": start_s, "error": error, "metrics": nothing if error else heard}


def listened(places: int, *, rounds: int = 3, ramp_up_s: float = 10.0) -> list[dict[str, Any]]:
    """Requests of places that begin over a ramp and ask again when a reply was heard."""
    begins = [place * ramp_up_s / places for place in range(places)]
    return [asked(begin + number * (FIRST_S + REPLY_S)) for begin in begins for number in range(rounds)]


def run(
    places: int,
    *,
    p95: float = 0.5,
    silent: int = 0,
    errors: int = 0,
    speech: float = 7.0,
    reply_s: float = REPLY_S,
    requests: list[dict[str, Any]] | None = None,
    busy: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A run of 100 replies, on GPUs of these utilisations."""
    return {
        "load": {"mode": "closed", "value": places},
        "complete": True,
        "summary": {
            "completed": 100,
            "errors": {"internal": errors} if errors else {},
            "requests_with_underruns": silent,
            "audio_seconds_per_s": speech,
            "audio_s": {"mean": reply_s},
            "time_to_first_audio_s": {"mean": FIRST_S, "p95": p95},
            "silence_per_request_s": {"mean": 0.0},
        },
        "resources": {f"gpu/{name}/utilization": {"mean": 0.01, "max": most} for name, most in (busy or {}).items()},
        "requests": listened(places) if requests is None else requests,
    }


def report(*runs: dict[str, Any], listens: bool = True, checkpoint: str = "7b", **workload: Any) -> dict[str, Any]:
    return {
        "schema": "triton-omni-bench",
        "schema_version": 2,
        "environment": {"server": {"checkpoint": checkpoint}, "gpus": [H200]},
        "workload": WORKLOAD | {"listens": listens} | workload,
        "runs": list(runs),
    }


def found_of(reports: Reports, gpus: int = 1) -> Capacity:
    return capacity(loads_together(reports), TARGETS, gpus)


def test_satisfied_listeners_are_what_the_servers_hold() -> None:
    reports = {"c": report(run(64, p95=0.9)), "a": report(run(32)), "b": report(run(48))}
    # Of 20.5 s each listener hears 20; the runs' own 7 s of speech a second tell nothing.
    heard = 48 * Fraction(200, 205)
    assert found_of(reports) == Capacity(
        Fraction(48), heard, Fraction(20), "64 at once: first audio p95 0.9 s, over 0.6 s", listens=True
    )
    assert found_of(reports).gpu_hours == Fraction(60_000, 3600) / heard


def test_listeners_that_hear_a_gap_hear_less() -> None:
    gaps = run(8)
    gaps["summary"]["silence_per_request_s"]["mean"] = 19.5
    assert measured_loads(report(gaps))[0].speech_per_s == 4


def test_listeners_after_a_number_that_missed_do_not_count() -> None:
    assert found_of({"a": report(run(32), run(48, silent=1), run(64))}).streams == 32


@pytest.mark.parametrize(
    ("requests", "together_s"),
    [
        (listened(4, rounds=1, ramp_up_s=16), 8.5),  # the last begins after 12 s, the first has heard all after 20.5 s
        (listened(4, rounds=1, ramp_up_s=28), 0),
        ([*listened(4, rounds=1, ramp_up_s=0)[:3], asked(0.0, error="internal")], 1),
        ([*listened(4, rounds=1, ramp_up_s=16)[1:], asked(0.0, silence_s=1.0)], 9.5),
    ],
)
def test_listeners_that_were_not_all_there_are_not_counted(requests: list[dict[str, Any]], together_s: float) -> None:
    said = rf"4 at once, all of them listened at once for {together_s:g} s, less than half a reply: measure with more"
    with pytest.raises(BadRequest, match=said):
        found_of({"a": report(run(4, requests=requests))})


def test_a_target_that_a_part_of_the_listeners_missed_is_told_first() -> None:
    with pytest.raises(BadRequest, match=r"first audio p95 0\.9 s"):
        found_of({"a": report(run(4, p95=0.9, requests=listened(4, rounds=1, ramp_up_s=28)))})


def test_listeners_that_were_all_there_for_half_a_reply_are_counted() -> None:
    assert found_of({"a": report(run(4, requests=listened(4, rounds=1, ramp_up_s=13)))}).streams == 4


def test_a_report_of_listeners_that_the_benchmark_writes_is_read(tmp_path: Path) -> None:
    chunks = (Chunk(0.5, 1.0), Chunk(1.75, 18.5))
    records = [
        RequestRecord(index=number, start_s=20.25 * (number // 2), sent_s=0.0, end_s=9.0, chunks=chunks)
        for number in range(40)
    ]
    Report({}, {"listens": True}, [Run(Load("closed", 2), records)]).write(tmp_path / "bench.json")
    (load,) = measured_loads(json.loads((tmp_path / "bench.json").read_text()))
    assert (load.streams, load.reply_s, load.all_listened_s) == (2, Fraction("19.5"), 20 * 20.25)
    # First audio after 0.5 s and a gap of 0.25 s.
    assert load.speech_per_s == 2 * Fraction(1950, 2025)


def test_of_runs_of_one_load_the_median_of_each_figure_counts() -> None:
    runs = {
        "48.1": report(run(48, p95=0.9, silent=0)),
        "48.2": report(run(48, p95=0.4, silent=8)),
        "48.3": report(run(48, p95=0.5, silent=2)),
    }
    (load,) = loads_together(runs)
    assert (load.runs, load.first_audio_p95_s, load.underruns) == (3, Fraction(1, 2), Fraction(2, 100))
    with pytest.raises(BadRequest, match=r"2 % of replies with underruns \(median of 3 runs\), over 0 %"):
        found_of(runs)
    with pytest.raises(BadRequest, match=r"first audio p95 0\.65 s \(median of 2 runs\), over 0\.6 s"):
        found_of({name: runs[name] for name in ("48.1", "48.2")})
    assert capacity([load], Targets(first_audio_p95_s=0.5, underruns=0.02)).runs == 3


def test_a_request_that_failed_counts_in_whichever_run_it_was() -> None:
    runs = {str(number): report(run(48, errors=errors)) for number, errors in enumerate((0, 0, 2))}
    with pytest.raises(BadRequest, match="48 at once, 2 requests failed"):
        found_of(runs)


def test_runs_of_one_report_are_put_together_too() -> None:
    assert [(load.streams, load.runs) for load in measured_loads(report(run(8), run(1), run(8)))] == [(1, 1), (8, 2)]


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (report(run(48), checkpoint="3b"), 'checkpoint is "3b" and "7b"'),
        (report(run(48), listens=False), "workload.listens is false and true"),
        (report(run(48), token2wav={"preset": "fast"}), 'workload.token2wav is {"preset": "fast"} and {}'),
        (
            report(run(48), talker={"max_tokens": 300}),
            'workload.talker is {"max_tokens": 300} and {"max_tokens": 1000}',
        ),
        (report(run(48), prompts=["Hi"]), 'workload.prompts is ["Hi"] and ["hello", "why"]'),
        (report(run(48), prompts=["a" * 99]), f'workload.prompts is ["{"a" * 58}… and ["hello", "why"]'),
        (report(run(48), prompts=["Hi"], turns=9), 'workload.prompts is ["Hi"] and'),
        (report(run(48), prompts=["Hi"], talker={}), 'workload.talker is {} and {"max_tokens": 1000}'),
        (report(run(48)) | {"environment": {"gpus": ["A100"]}}, 'environment.gpus is ["A100"] and ["NVIDIA H200"]'),
        (report(run(48, reply_s=30)), "replies have 30 and 20 s of speech"),
    ],
)
def test_reports_of_two_set_ups_are_refused_by_name(other: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadRequest) as refused:
        loads_together({"32.json": report(run(32)), "48.json": other})
    assert f"48.json and 32.json do not belong together: {fault}" in refused.value.message
    assert refused.value.message.endswith("; give reports of one set-up, asked alike")


@pytest.mark.parametrize(
    "other",
    [
        report(run(48), seed=7, ramp_up_s=20, prompts_from="other.txt", timeout=9),
        report(run(48)) | {"environment": {}},  # of a server that told nothing of itself
        report(run(48, reply_s=29)),
        report(run(48)) | {"environment": {"server": {"checkpoint": None}, "gpus": [H200, H200]}},
    ],
)
def test_what_may_differ_does_not_keep_reports_apart(other: dict[str, Any]) -> None:
    assert found_of({"32.json": report(run(32)), "48.json": other}).streams == 48


def test_listening_that_an_old_report_does_not_tell_is_none() -> None:
    old = report(run(48))
    del old["workload"]["listens"]
    with pytest.raises(BadRequest, match=r"workload\.listens is false and true"):
        loads_together({"32.json": report(run(32)), "48.json": old})


def test_a_report_that_cannot_be_read_is_named() -> None:
    with pytest.raises(BadRequest, match=r"48\.json: the report is of --crowds"):
        loads_together({"32.json": report(run(32)), "48.json": report(run(48), crowds=True)})


def test_gpus_at_work_are_counted() -> None:
    apart = {"0": 0.9, "1": 0.06, "2": 0.05, "3": 0.0}
    lone = report(run(1, busy={"0": 0.9}), run(8, busy=apart))
    assert gpus_at_work({"a": lone}) == 2
    assert gpus_at_work({"a": lone, "b": report(run(16))}) == 2
    assert gpus_at_work({"a": report(run(8))}) is None
    memory = report(run(8))
    memory["runs"][0]["resources"] = {"gpu/0/memory_mib": {"mean": 9.0, "max": 9.0}}
    assert gpus_at_work({"a": memory}) is None
    with pytest.raises(BadRequest, match="b saw 1 GPUs at work, and a 2: give reports of one set-up, or say --gpus"):
        gpus_at_work({"a": lone, "b": report(run(16, busy={"0": 0.9}))})


def test_gpus_come_in_whole_set_ups() -> None:
    pair = found_of({"a": report(run(82))}, gpus=2)
    assert (pair.streams, pair.speech_per_s) == (41, 40)
    assert [pair.gpus(conversations, 0.5) for conversations in (1, 160, 161, 320, 321)] == [2, 2, 4, 4, 6]


def told(folder: Path, reports: Reports, *options: str) -> Any:
    paths = [folder / f"{name}.json" for name in reports]
    for path, content in zip(paths, reports.values(), strict=True):
        path.write_text(json.dumps(content))
    return CliRunner().invoke(app, ["capacity", *map(str, paths), "--first-audio", "0.6", *options])


BUSY = {"0": 0.9, "1": 0.7}
REPLICAS = {
    "listeners-82": report(run(82, busy=BUSY)),
    "listeners-123.1": report(run(123, p95=0.9, busy=BUSY)),
    "listeners-123.2": report(run(123, p95=0.9, busy=BUSY)),
}
FOR_MANY = ["--conversations", "200", "--speaking", "0.5", "--gpu-hour", "3"]


def test_the_command_takes_several_reports_of_listeners(tmp_path: Path) -> None:
    result = told(tmp_path, REPLICAS, *FOR_MANY, "--json")
    assert "note: 2 GPUs were at work; say --gpus if not all of them were the servers'" in result.stderr
    assert json.loads(result.stdout) == {
        "listeners_per_gpu": 41.0,
        "speech_seconds_per_s_per_gpu": 40.0,
        "replies_an_hour_per_gpu": 7200.0,
        "gpu_hours_of_1000_minutes": 0.416667,
        "cost_of_1000_minutes": 1.25,
        "limited_by": "123 at once: first audio p95 0.9 s (median of 2 runs), over 0.6 s",
        "gpus": 4,
        "cost_an_hour": 12.0,
        "cost_of_1000_minutes_as_used": 2.0,
    }
    rows = [re.split(r"  +", line.strip()) for line in told(tmp_path, REPLICAS).stdout.splitlines()]
    assert rows[1] == ["listeners at once, a GPU", "41", "listeners"]


def test_gpus_that_are_said_go_before_those_that_were_seen(tmp_path: Path) -> None:
    mixed = REPLICAS | {"listeners-64": report(run(64, busy={"0": 0.9}))}
    refused = told(tmp_path, mixed)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert unframed("saw 1 GPUs at work, and") in unframed(refused.stderr)
    result = told(tmp_path, mixed, "--gpus", "1", "--json")
    assert (result.stderr, json.loads(result.stdout)["listeners_per_gpu"]) == ("", 82)


def test_the_command_tells_of_how_many_runs_it_has_the_median(tmp_path: Path) -> None:
    twice = {f"listeners-8.{number}": report(run(8)) for number in (1, 2)}
    assert json.loads(told(tmp_path, twice, "--json").stdout)["median_of_runs"] == 2
    assert "measured by the median of" in told(tmp_path, twice).stdout
    assert "median" not in told(tmp_path, {"listeners-8": report(run(8))}).stdout


def test_the_command_names_the_files_that_do_not_belong_together(tmp_path: Path) -> None:
    result = told(tmp_path, {"a": report(run(8)), "b": report(run(16), checkpoint="3b")})
    assert (result.exit_code, result.stdout) == (2, "")
    said = f"Invalid value for REPORT: {tmp_path}/b.json and {tmp_path}/a.json do not belong together: checkpoint is"
    assert unframed(said) in unframed(result.stderr)

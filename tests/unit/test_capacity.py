# SPDX-License-Identifier: Apache-2.0
"""GPUs and money by a benchmark's report: exact arithmetic by hand, the published figures, refusals, the command."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command_line import unframed
from triton_omni_client.bench.capacity import Capacity, Targets, capacity, exact
from triton_omni_client.bench.measured import measured_loads
from triton_omni_client.bench.records import Chunk, Load, RequestRecord
from triton_omni_client.bench.report import Report, Run
from triton_omni_client.cli import app
from triton_omni_client.errors import BadRequest

DOCS = Path(__file__).parents[2] / "docs"
RECORD = RequestRecord(index=0, start_s=0.0, sent_s=0.0, end_s=10.0, chunks=(Chunk(0.25, 20.0),), reply_tokens=1)
HALF_A_SECOND = Targets(first_audio_p95_s=0.5)


def run(
    streams: int, speech: float, p95: float | None, *, silent: int = 0, errors: int = 0, mode: str = "closed"
) -> dict[str, Any]:
    """A run of 100 replies of 20 s."""
    return {
        "load": {"mode": mode, "value": streams},
        "complete": True,
        "summary": {
            "completed": 100,
            "errors": {"internal": errors} if errors else {},
            "requests_with_underruns": silent,
            "audio_seconds_per_s": speech,
            "audio_s": {"mean": 20.0},
            "time_to_first_audio_s": {"p95": p95},
        },
    }


def report(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"schema": "triton-omni-bench", "schema_version": 2, "runs": list(runs)}


MEASURED = report(run(32, 60.0, 0.9, silent=40), run(1, 5.0, 0.25), run(8, 30.0, 0.4))


@pytest.mark.parametrize(("asked", "option"), [("speaks", "--speak"), ("crowds", "--crowds")])
def test_a_report_of_an_idle_server_is_refused(asked: str, option: str) -> None:
    idle = report(run(8, 40.0, 0.4)) | {"workload": {asked: True}}
    with pytest.raises(BadRequest, match=option):
        measured_loads(idle)
    assert measured_loads(idle | {"workload": {asked: False}})


def test_the_largest_load_within_the_targets_counts() -> None:
    loads = measured_loads(MEASURED)
    assert [load.streams for load in loads] == [1, 8, 32]
    found = capacity(loads, HALF_A_SECOND)
    assert found == Capacity(Fraction(8), Fraction(30), Fraction(20), "32 at once: first audio p95 0.9 s, over 0.5 s")
    assert (
        capacity(loads, Targets(first_audio_p95_s=0.9)).limit == "32 at once: 40 % of replies with underruns, over 0 %"
    )
    largest = capacity(loads, Targets(first_audio_p95_s=0.9, underruns=0.4))
    assert (largest.streams, largest.limit) == (32, None)


def test_a_load_behind_one_that_missed_does_not_count() -> None:
    loads = measured_loads(report(run(1, 5, 0.2), run(8, 30, 0.6), run(16, 40, 0.4)))
    assert capacity(loads, HALF_A_SECOND).streams == 1


def test_speech_and_cost_are_exact() -> None:
    found = capacity(measured_loads(MEASURED), HALF_A_SECOND)
    # 60,000 s of speech at 30 a second are 2,000 s of one GPU.
    assert found.gpu_hours == Fraction(2000, 3600)
    assert found.gpu_hours * exact(3.6) == 2
    assert found.replies_an_hour(20) == 5400
    assert found.replies_an_hour(0.1) == 1_080_000


@pytest.mark.parametrize(("seconds", "is_so"), [(18, True), (22, True), (17.9, False), (22.1, False)])
def test_replies_are_of_one_length_within_a_tenth(seconds: float, is_so: bool) -> None:
    assert capacity(measured_loads(MEASURED), HALF_A_SECOND).is_of_length(seconds) is is_so


def test_the_server_s_gpus_share_what_it_does() -> None:
    found = capacity(measured_loads(MEASURED), HALF_A_SECOND, gpus=3)
    assert (found.streams, found.speech_per_s) == (Fraction(8, 3), 10)
    assert found.gpu_hours == Fraction(6000, 3600)


@pytest.mark.parametrize(
    ("conversations", "speaking", "headroom", "gpus"),
    [
        (1, 0.01, 0.0, 1),
        (300, 0.1, 0.0, 1),  # exactly one; in binary fractions it would be a little more
        (301, 0.1, 0.0, 2),
        (300, 0.1, 0.25, 2),
        (1000, 0.3, 0.0, 10),
        (1000, 0.3, 0.2, 12),
        (1000, 1.0, 0.0, 34),
    ],
)
def test_gpus_for_conversations(conversations: int, speaking: float, headroom: float, gpus: int) -> None:
    found = capacity(measured_loads(MEASURED), HALF_A_SECOND)
    assert found.gpus(conversations, speaking, headroom) == gpus


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((0, 0.5, 0.0), r"conversations must be at least 1 \(got 0\)"),
        ((1, 0.0, 0.0), r"speaking share must be over 0 and at most 1 \(got 0\)"),
        ((1, 1.1, 0.0), r"speaking share must be over 0 and at most 1 \(got 1.1\)"),
        ((1, 0.5, -0.1), r"headroom must be at least 0 \(got -0.1\)"),
    ],
)
def test_conversations_that_cannot_be_are_refused(values: tuple[int, float, float], says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        capacity(measured_loads(MEASURED), HALF_A_SECOND).gpus(*values)


@pytest.mark.parametrize(
    ("only", "reason"),
    [
        (run(4, 10, 0.7), "no load meets the targets: 4 at once, first audio p95 0.7 s, over 0.5 s"),
        (run(4, 10, 0.2, silent=1), "1 % of replies with underruns, over 0 %"),
        (run(4, 10, 0.2, errors=3), "3 requests failed"),
        (run(4, 10, None), "100 replies, and a p95 needs 20: measure with --requests 20 or more"),
    ],
)
def test_where_no_load_meets_the_targets_the_reason_is_told(only: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        capacity(measured_loads(report(only)), HALF_A_SECOND)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {**MEASURED, "schema_version": 1},
        report(),
        report(run(4, 10, 0.2, mode="open")),
        report({**run(4, 10, 0.2), "complete": False}),
        report(run(4, 0.0, None)),
    ],
)
def test_what_is_no_report_with_such_a_run_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"no report of|no complete run with speech at a --concurrency"):
        measured_loads(broken)


def test_a_report_of_whole_replies_is_refused() -> None:
    whole = run(4, 10, 0.2)
    whole["summary"]["requests_with_underruns"] = None
    with pytest.raises(BadRequest, match="nothing of underruns: measure the stream"):
        measured_loads(report(whole))


def test_of_no_loads_there_is_no_capacity() -> None:
    with pytest.raises(BadRequest, match="no load was measured"):
        capacity([], HALF_A_SECOND)


@pytest.mark.parametrize(
    "targets",
    [
        {"first_audio_p95_s": 0},
        {"first_audio_p95_s": float("nan")},
        {"first_audio_p95_s": 1, "underruns": 1.5},
        {"first_audio_p95_s": 1, "underruns": -0.1},
    ],
)
def test_targets_that_cannot_be_are_refused(targets: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match="got"):
        Targets(**targets)


def test_a_report_that_the_benchmark_writes_is_read(tmp_path: Path) -> None:
    written = Report({}, {}, [Run(Load("closed", 2), [RECORD] * 20)])
    written.write(tmp_path / "bench.json")
    (load,) = measured_loads(json.loads((tmp_path / "bench.json").read_text()))
    assert (load.streams, load.speech_per_s, load.reply_s) == (2, 40, 20)
    assert load.first_audio_p95_s == Fraction(1, 4)


def told(tmp_path: Path, *options: str) -> Any:
    (tmp_path / "bench.json").write_text(json.dumps(MEASURED))
    return CliRunner().invoke(app, ["capacity", str(tmp_path / "bench.json"), *options])


def test_the_command_tells_all(tmp_path: Path) -> None:
    options = ["--first-audio", "0.5", "--gpu-hour", "3.6", "--conversations", "1000", "--speaking", "0.3"]
    result = told(tmp_path, *options, "--headroom", "0.2", "--json")
    assert json.loads(result.stdout) == {
        "streams_per_gpu": 8.0,
        "speech_seconds_per_s_per_gpu": 30.0,
        "replies_an_hour_per_gpu": 5400.0,
        "gpu_hours_of_1000_minutes": 0.555556,
        "cost_of_1000_minutes": 2.0,
        "limited_by": "32 at once: first audio p95 0.9 s, over 0.5 s",
        "gpus": 12,
        "cost_an_hour": 43.2,
        # 300 s of speech a second: 60,000 s in 200 s, for which 12 GPUs are paid.
        "cost_of_1000_minutes_as_used": 2.4,
    }
    table = [re.split(r"  +", line.strip()) for line in told(tmp_path, *options).stdout.splitlines()]
    assert table == [
        ["what", "figure", "unit"],
        ["streams at once, a GPU", "8", "streams"],
        ["speech made, a GPU", "30", "s of speech a second"],
        ["replies made, a GPU", "5,400", "replies an hour"],
        ["GPU time of 1,000 min of speech", "0.555556", "GPU hours"],
        ["cost of 1,000 min of speech, full use", "2", "in --gpu-hour's currency"],
        ["GPUs for the conversations", "10", "GPUs"],
        ["cost of an hour of these GPUs", "36", "in --gpu-hour's currency"],
        ["cost of 1,000 min of speech, as used", "2", "in --gpu-hour's currency"],
        ["limited by: 32 at once: first audio p95 0.9 s, over 0.5 s"],
    ]


def test_without_a_price_nothing_is_said_of_cost(tmp_path: Path) -> None:
    result = told(tmp_path, "--first-audio", "0.5", "--conversations", "10")
    assert result.exit_code == 0
    assert "cost" not in result.stdout


def test_replies_of_another_length_are_warned_of(tmp_path: Path) -> None:
    assert "warning" not in told(tmp_path, "--first-audio", "0.5", "--reply-seconds", "21").stderr
    assert (
        "measured with replies of 20 s; measure some of 8 s"
        in told(tmp_path, "--first-audio", "0.5", "--reply-seconds", "8").stderr
    )


def test_the_command_refuses_in_a_line(tmp_path: Path) -> None:
    result = told(tmp_path, "--first-audio", "0.1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no load meets the targets: 1 at once, first audio p95 0.25 s, over " in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--headroom", "0.2"], "--headroom: 0.2 has no effect without --conversations"),
        (["--speaking", "0.3"], "--speaking: 0.3 has no effect without --conversations"),
        (["--conversations", "0"], "'--conversations': '0' is not a whole number from 1 on"),
        (["--conversations", "9", "--speaking", "0"], "'--speaking': '0' is not a number above 0 and up to 1"),
        (["--conversations", "9", "--speaking", "1.5"], "'--speaking': '1.5' is not a number above 0 and up to 1"),
        (["--conversations", "9", "--headroom", "-1"], "'--headroom': '-1' is not a number from 0 on"),
        (["--underruns", "2"], "'--underruns': '2' is not a number from 0 to 1"),
        (["--gpu-hour", "inf"], "'--gpu-hour': 'inf' is not a number from 0 on"),
        (["--gpus", "0"], "'--gpus': '0' is not a whole number from 1 on"),
        (["--reply-seconds", "0"], "'--reply-seconds': '0' is not a number of seconds above 0"),
        (["--first-audio", "nan"], "'--first-audio': 'nan' is not a number of seconds above 0"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_its_value(tmp_path: Path, options: list[str], says: str) -> None:
    result = told(tmp_path, "--first-audio", "0.5", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert unframed(f"Invalid value for {says}") in unframed(result.stderr)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "'REPORT': file"),
        ("[]", "expected a JSON object"),
        ("{", "cannot be read"),
        ("{}", "this is no report of `triton-omni bench`"),
    ],
)
def test_a_report_that_cannot_be_used_is_wrong_usage(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    result = CliRunner().invoke(app, ["capacity", str(tmp_path / "r.json"), "--first-audio", "1"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert unframed(says) in unframed(result.stderr)


def test_the_documented_example_follows_from_the_published_figures() -> None:
    published = re.search(
        r"^\| speech a second, all streams \|(.*)\|$", (DOCS / "benchmarks.md").read_text(), re.MULTILINE
    )
    assert published
    speech = float(published[1].split("|")[-1].removesuffix(" s "))
    section = " ".join((DOCS / "benchmarks.md").read_text().partition("## Capacity")[2].split())
    told = re.search(r"(\d+) streams \S+ take ([\d.]+) GPU hours; 200 conversations need (\d+) GPUs", section)
    assert told
    streams, hours, gpus = told.groups()
    found = Capacity(Fraction(streams), exact(speech), Fraction(20), None)
    assert round(float(found.gpu_hours), 2) == float(hours)
    assert found.gpus(200, 0.3, 0.25) == int(gpus)

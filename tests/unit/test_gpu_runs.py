# SPDX-License-Identifier: Apache-2.0
"""Runs under docs/gpu-runs name machine, date and command; tables of docs/benchmarks.md follow from the runs."""

from __future__ import annotations

import json
import re
import runpy
import statistics
import subprocess
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
TEN = runpy.run_path(str(ROOT / "scripts" / "ten_numbers.py"))
RUNS = sorted((ROOT / "docs" / "gpu-runs").glob("*.json"))
Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Figure(Strict):
    values: Annotated[list[Number], Field(min_length=1)]
    unit: Annotated[str, Field(pattern="^(1|ms|s|dB|GiB)$")]
    part: Text  # of scripts/benchmarks.sh


class Run(Strict):
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    machine: Text
    versions: Annotated[dict[str, Text], Field(min_length=1)]
    state: Text
    command: Text
    notes: list[Text] = []
    figures: Annotated[dict[Text, Figure], Field(min_length=1)]


def read(path: Path) -> Run:
    return Run.model_validate_json(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_names_machine_date_and_a_command_that_exists(path: Path) -> None:
    run = read(path)
    assert path.stem.startswith(date.fromisoformat(run.date).isoformat())
    help_text = subprocess.run(
        [ROOT / "scripts" / "benchmarks.sh", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    parts = help_text.splitlines()[-1].removeprefix("Parts: ").split()
    command, out, *named = run.command.split()
    assert (command, out) == ("scripts/benchmarks.sh", "out")
    assert set(named) == {figure.part for figure in run.figures.values()} <= set(parts)


@pytest.mark.parametrize(
    "change",
    [{"machine": ""}, {"date": "yesterday"}, {"command": ""}, {"figures": {}}, {"figures": {"x": {"values": [1.0]}}}],
)
def test_a_run_without_machine_date_command_or_unit_is_refused(change: dict[str, Any]) -> None:
    whole = json.loads(RUNS[0].read_text(encoding="utf-8"))
    with pytest.raises(ValidationError):
        Run.model_validate_json(json.dumps(whole | change))
    for key in change:
        with pytest.raises(ValidationError):
            Run.model_validate_json(json.dumps({name: value for name, value in whole.items() if name != key}))


def test_ten_numbers_are_those_of_the_runs_named() -> None:
    assert len(TEN["ROWS"]) == 10
    TEN["main"](check=True)


@pytest.mark.parametrize(
    ("column", "text"), [(3, "999"), (4, "148 to 159"), (5, "6"), (6, "`plans`"), (5, "5, fewer than three")]
)
def test_a_number_that_no_run_has_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: int, text: str
) -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    (line,) = (line for line in document.splitlines() if f"`{TEN['ROWS'][0].key}`" in line)
    cells = line.split(" | ")
    cells[column - 1] = text
    (tmp_path / "gpu-runs").symlink_to(ROOT / "docs" / "gpu-runs")
    copy = tmp_path / "benchmarks.md"
    copy.write_text(document.replace(line, " | ".join(cells)), encoding="utf-8")
    monkeypatch.setitem(TEN["main"].__globals__, "DOCUMENT", copy)
    with pytest.raises(SystemExit, match="the ten numbers are not those of their runs"):
        TEN["main"](check=True)
    TEN["main"]()
    assert copy.read_text(encoding="utf-8") == document


@pytest.fixture
def kept_runs(tmp_path: Path) -> Path:
    """Runs of a figure: one with three values, one with one, and one by another part."""
    runs = {
        "2026-11-26-k": ([3, 1, 2.25], "numbers"),
        "2026-12-01-a": ([9], "numbers"),
        "2026-12-02-a": ([5], "served"),
    }
    for name, (values, part) in runs.items():
        figure = {"values": values, "unit": "ms", "part": part}
        (tmp_path / f"{name}.json").write_text(json.dumps({"figures": {"x": figure}}), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ("k", ["2.2", "1.0 to 3.0", "3", "`numbers`", "[k](gpu-runs/2026-11-26-k.json)"]),
        (
            "2026-12-01-a",
            ["9.0", "9.0 to 9.0", "1, fewer than three", "`numbers`", "[01 a](gpu-runs/2026-12-01-a.json)"],
        ),
        (
            "k 2026-12-01-a",
            [
                "2.6",
                "1.0 to 9.0",
                "4",
                "`numbers`",
                "[k](gpu-runs/2026-11-26-k.json) [01 a](gpu-runs/2026-12-01-a.json)",
            ],
        ),
    ],
)
def test_a_row_takes_all_values_of_one_run_or_of_several(kept_runs: Path, runs: str, told: list[str]) -> None:
    assert TEN["cells"](TEN["Row"]("a time", "x", "≤ 2", 1, runs), kept_runs) == ["a time `x`", "≤ 2", *told]


@pytest.mark.parametrize(
    ("key", "runs", "reason"),
    [
        ("x", "z", r"2026-11-26-z\.json does not exist"),
        ("y", "k", r"2026-11-26-k\.json has no figure y"),
        ("x", "k 2026-12-02-a", "x: numbers and served measured it"),
    ],
)
def test_a_row_without_a_run_that_measured_it_is_refused(kept_runs: Path, key: str, runs: str, reason: str) -> None:
    with pytest.raises(typer.BadParameter, match=reason):
        TEN["cells"](TEN["Row"]("a time", key, "≤ 2", 1, runs), kept_runs)


def test_figures_by_load_are_those_of_the_run_linked() -> None:
    rows = {
        "time to first text": "first_text_p50",
        "time to first audio": "first_audio_p50",
        "real-time factor": "real_time_factor_p50",
        "speech a second, all streams": "speech_per_second",
        "underruns a reply": "underruns_per_reply",
    }
    text = DOCUMENT.read_text(encoding="utf-8")
    (target,) = re.findall(r"^\| p50, \[one run\]\(([^)]+)\)", text, re.MULTILINE)
    figures = read(DOCUMENT.parent / target).figures
    for title, name in rows.items():
        (line,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", text, re.MULTILINE)
        for load, cell in zip(("1", "8-together", "32-together"), line.split("|"), strict=True):
            key = f"{name}/7b/balanced/{load}"
            assert [float(cell.split()[0])] == figures[key].values, key


def cells(title: str) -> list[str]:
    """The cells after the first one of a row of the document."""
    (line,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def shown(cell: str, values: list[float]) -> bool:
    """Return True if a cell tells the median of values, in its own unit and precision."""
    number, _, unit = cell.replace(",", "").partition(" ")
    median = statistics.median(values) / (1000 if unit == "s" else 1)
    return number == f"{median:.{-int(Decimal(number).as_tuple().exponent)}f}"


def test_figures_by_listeners_prompts_and_turns_are_those_of_their_run() -> None:
    figures = read(DOCUMENT.parent / "gpu-runs" / "2026-11-28-b.json").figures
    places, turns = cells("listeners of 6 s replies"), ("1", "4", "10")
    rows = {
        title: [f"{figure}/7b/balanced/{count}-listeners-short" for count in places]
        for title, figure in (
            ("first audio p50, ms", "first_audio_p50"),
            ("first audio p95, ms", "first_audio_p95"),
            ("underruns of a reply", "underruns_per_reply"),
        )
    }
    rows["first audio"] = [f"first_audio/7b/balanced/prompt-{length}" for length in ("100", "1k", "8k", "16k")]
    loads = (("first_audio", "turn"), ("first_audio_p95", "32-conversations-turn"))
    states = ("balanced", "balanced-cached")
    for turn in turns:
        rows[turn] = [f"{figure}/7b/{state}/{load}-{turn}" for figure, load in loads for state in states]
    for title, keys in rows.items():
        told = cells(title)[1:] if title in turns else cells(title)
        wrong = [
            key
            for cell, key in zip(told, keys, strict=True)
            if cell != "–" and not shown(cell, figures[key].values)  # noqa: RUF001 - as in the document
        ]
        assert not wrong, title


@pytest.mark.parametrize(
    ("name", "words", "lines"), [("benchmarks.md", 2000, 300), ("benchmarks-history.md", 1500, 120)]
)
def test_documents_stay_short_and_tell_no_figure_that_nobody_can_repeat(name: str, words: int, lines: int) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert len(text.split()) <= words
    assert len(text.splitlines()) <= lines
    assert "not kept" not in " ".join(text.split())

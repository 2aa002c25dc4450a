# SPDX-License-Identifier: Apache-2.0
"""Runs under docs/gpu-runs name machine, date and command; tables of docs/benchmarks.md follow from the runs."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
RUNS = sorted((ROOT / "docs" / "gpu-runs").glob("*.json"))
Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Figure(Strict):
    values: Annotated[list[Number], Field(min_length=1)]
    unit: Annotated[str, Field(pattern="^(1|ms|s|dB)$")]
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


def ten_numbers() -> list[list[str]]:
    """The cells of each row of the first table."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("| figure | target |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def told(row: list[str]) -> tuple[str, list[str], list[Path]]:
    """The figure's key, the numbers of a row (median, least, greatest, how many), and its runs."""
    key = re.findall(r"`([^`]*)`", row[0])[-1]
    numbers = [row[2], *row[3].split(" to "), row[4].partition(",")[0]]
    return key, numbers, [DOCUMENT.parent / target for target in re.findall(r"\]\(([^)]+)\)", row[6])]


def differs(row: list[str]) -> str | None:
    """Return how a row differs from its runs; None if they agree."""
    key, (median, least, greatest, count), paths = told(row)
    figures = [read(path).figures[key] for path in paths]
    values = [value for figure in figures for value in figure.values]
    digits = -int(Decimal(median).as_tuple().exponent)
    found = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    if [median, least, greatest] != found or int(count) != len(values):
        return f"{key}: {found} of {len(values)}"
    if {figure.part for figure in figures} != {row[5].strip("`")}:
        return f"{key}: another part measures it"
    return None if (len(values) < 3) == row[4].endswith(", fewer than three") else f"{key}: too few are not said"


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
    rows = ten_numbers()
    assert len(rows) == 10
    assert [differs(row) for row in rows] == [None] * 10


@pytest.mark.parametrize(
    ("cell", "text"), [(2, "150"), (3, "148 to 159"), (4, "6"), (5, "`plans`"), (4, "5, fewer than three")]
)
def test_a_number_that_no_run_has_is_found(cell: int, text: str) -> None:
    row = ten_numbers()[0]
    row[cell] = text
    assert differs(row) is not None


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

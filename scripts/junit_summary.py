# SPDX-License-Identifier: Apache-2.0
"""Sums up a run of tests from its JUnit XML, for docs/gpu-runs/tests. Several files are shares of one run.

    ./build.sh test tests/reference --junitxml=tests.xml; python scripts/junit_summary.py tests.xml -o summary.json

Run it where the tests ran: it tells the versions and the GPU of its own machine. Failures keep their tracebacks.
"""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args
from xml.etree import ElementTree as ET

import torch
import typer

Outcome = Literal["passed", "failed", "skipped"]
SLOWEST: Final = 10
MOST_TEXT: Final = 4000
"""Characters of a traceback, the last ones."""
_PACKAGES: Final = ("vllm", "torch", "transformers", "pytest")


class Case(NamedTuple):
    """A test."""

    file: str
    name: str
    seconds: float
    outcome: Outcome
    told: str
    """Reason of a skip, traceback of a failure."""


def read_cases(root: ET.Element) -> Iterator[Case]:
    """The tests of JUnit XML as pytest writes it."""
    for found in root.iter("testcase"):
        names = found.get("classname", "").split(".")
        count = next((number for number, name in enumerate(names, 1) if name.startswith("test_")), len(names))
        name = "::".join([*names[count:], found.get("name", "")])
        seconds = float(found.get("time", 0))
        yield Case("/".join(names[:count]) + ".py", name, seconds, *_outcome(found))


def _outcome(found: ET.Element) -> tuple[Outcome, str]:
    for kind in ("failure", "error"):
        if (fault := found.find(kind)) is not None:
            return "failed", f"{fault.get('message', '')}\n{fault.text or ''}"[-MOST_TEXT:]
    skip = found.find("skipped")
    return ("passed", "") if skip is None else ("skipped", skip.get("message", ""))


def summary(cases: Sequence[Case]) -> dict[str, Any]:
    """Counts together and by file, tracebacks of failures, reasons of skips, and the slowest tests."""
    by_file: defaultdict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_file[case.file].append(case)
    slowest = sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]
    return {
        **_counts(cases),
        "files": {file: _counts(found) for file, found in sorted(by_file.items())},
        "failures": {f"{case.file}::{case.name}": case.told for case in cases if case.outcome == "failed"},
        "skips": Counter(case.told for case in cases if case.outcome == "skipped"),
        "slowest": {f"{case.file}::{case.name}": round(case.seconds, 2) for case in slowest},
    }


def _counts(cases: Iterable[Case]) -> dict[str, Any]:
    found = list(cases)
    outcomes = Counter(case.outcome for case in found)
    counted = {outcome: outcomes[outcome] for outcome in get_args(Outcome)}
    return counted | {"seconds": round(sum(case.seconds for case in found), 1)}


def machine() -> dict[str, str]:
    """Versions of this machine, and its GPU."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    # vLLM's builds have names of their own.
    of_module = packages_distributions()
    return {
        "gpu": gpu,
        "python": platform.python_version(),
        **{name: version(of_module[name][0]) for name in _PACKAGES},
    }


def read_report(report: Path) -> ET.Element:
    """The JUnit XML of a file.

    Raises:
        typer.BadParameter: the file is not whole.
    """
    try:
        return ET.parse(report).getroot()
    except ET.ParseError as error:
        raise typer.BadParameter(
            f"{report}: {error}; give the XML of a run that ended", param_hint="REPORTS"
        ) from error


def main(
    reports: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="JUnit XML of pytest")],
    output: Annotated[Path, typer.Option("-o", "--output", help="summary to write (JSON)")],
) -> None:
    """Sum up a run of tests, or the shares of one."""
    roots = [read_report(report) for report in reports]
    begun = roots[0].find("testsuite")
    day = "" if begun is None else begun.get("timestamp", "")[:10]
    cases = [case for root in roots for case in read_cases(root)]
    found = {"date": day, "versions": machine(), **summary(cases)}
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    typer.echo(", ".join(f"{found[outcome]} {outcome}" for outcome in get_args(Outcome)))


if __name__ == "__main__":
    typer.run(main)

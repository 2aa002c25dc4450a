# SPDX-License-Identifier: Apache-2.0
"""Command line of the comparison: `python scripts/compare --variant shipped --variant NAME=JSON -- BENCH OPTIONS`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a folder, `python scripts/compare`, Python puts the folder itself on the path instead of its parent.
    sys.path[0] = str(SCRIPTS)

from compare.balancer import BalancerError  # noqa: E402
from compare.memory import MemoryNotHeld, free_memory, used_memory  # noqa: E402
from compare.running import MeasureFailed, Program, Served, judge, measure, serving  # noqa: E402
from compare.server import HERE  # noqa: E402
from compare.table import compared, judged, resident, resident_table  # noqa: E402
from compare.variants import Load, Variant, parse_load, parse_variant  # noqa: E402
from triton_omni.core.settings import SettingsError  # noqa: E402
from triton_omni.supervisor.machine import ServerError  # noqa: E402
from triton_omni.supervisor.model_folder import model_folder  # noqa: E402
from triton_omni.supervisor.serve import on_signals  # noqa: E402
from triton_omni.supervisor.served_repository import stage_settings  # noqa: E402

console = Console()
Named = TypeVar("Named", Variant, Load)


def main(
    *,
    variant: Annotated[list[str], typer.Option(metavar="NAME[=JSON]", help="what to serve; repeat it", default=...)],
    load: Annotated[list[str] | None, typer.Option(metavar="NAME=OPTIONS", help="a run; repeat it")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(help="after --: options of triton-omni bench or evaluate")
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="judge replies by triton-omni evaluate, and load nothing")
    ] = False,
    mps: Annotated[bool, typer.Option(help="each server under a CUDA MPS daemon of its own")] = False,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", min=0.1, help="all that servers find free on each GPU")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of reports, logs and plots; made anew")] = Path("compare-out"),
    model: Annotated[str | None, typer.Option(envvar="OMNI_MODEL", help="checkpoint: a folder or a hub id")] = None,
) -> None:
    """Measure variants of the served stages one after another with the same loads, and print them beside each other.

    JSON has what a variant changes: {"thinker": {"engine": {"fused_decode": false}}, "replicas": 2}, and in "bench"
    what it is asked beside the others: "--concurrency 64". All loads of a variant are of one start of its servers.
    {"checkout": "../before"} has another checkout, set up by its ./build.sh setup, serve its own code and models.
    With --evaluate the replies of the first variant and its first setting are the reference of all others.
    With --memory another process holds the rest of the GPUs' memory, and a request that fails is a failure.
    Exit code 1: something could not be measured; the rest was.
    """
    if memory is not None and evaluate:
        raise typer.BadParameter("not with --evaluate, which measures no memory", param_hint="--memory")
    variants = _parsed(variant, parse_variant, "--variant")
    program: Program = "evaluate" if evaluate else "bench"
    loads = _parsed(load or [], parse_load, "--load") or [Load(program)]
    if out.exists():
        raise typer.BadParameter(f"{out} exists already", param_hint="--out")
    asked = [(wanted, [run.beside(options or [], wanted.options) for run in loads]) for wanted in variants]
    _check(program, (run for _, runs in asked for run in runs), out)
    checkpoint, measured = model_folder(model), Measured(program, may_fail=memory is None)
    with on_signals(_interrupt), _limited(memory) as before:
        _lay_out(variants, out)
        for wanted, runs in asked:
            measured.add(wanted.name, runs, serving(wanted, checkpoint, out / wanted.name, mps=mps))
    console.print((judged if evaluate else compared)(measured.reports))
    if memory is not None:
        found = resident(measured.reports, before)
        console.print(resident_table(found))
        for name, gib in found.items():
            (out / name / "resident.json").write_text(json.dumps({"resident": gib}))
    for failure in measured.failures:
        console.print(f"error: {failure}", style="red", markup=False)
    if measured.failures:
        raise typer.Exit(1)


@contextmanager
def _limited(memory: float | None) -> Iterator[Mapping[str, float]]:
    """Leave servers that many GiB, or all; gives the MiB in use before they start, by GPU."""
    if memory is None:
        yield {}
        return
    try:
        with free_memory(memory):
            yield used_memory()
    except MemoryNotHeld as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error


@dataclass(frozen=True)
class Measured:
    """Results of all variants and loads."""

    program: Program
    may_fail: bool = True
    """False = a request that ends with an error is a failure."""
    reports: dict[tuple[str, str], Any] = field(default_factory=dict)
    """By variant and load."""
    failures: list[str] = field(default_factory=list)
    references: dict[str, Path] = field(default_factory=dict)
    """Folder of the first evaluation by load."""

    def add(self, variant: str, loads: Sequence[Load], start: AbstractContextManager[Served]) -> None:
        """Start a variant's servers, and measure its loads one after another."""
        try:
            with start as served:
                for load in loads:
                    self._add(variant, load, served)
        except (BalancerError, ServerError) as error:
            self.failures.append(f"{variant}: {error}")

    def _add(self, variant: str, load: Load, served: Served) -> None:
        console.rule(variant if load.name == self.program else f"{variant}, {load.name}")
        try:
            if self.program == "bench":
                self.reports[variant, load.name] = report = measure(served, load)
                failed = sum((Counter(run["summary"]["errors"]) for run in report["runs"]), Counter())
                if failed and not self.may_fail:
                    self.failures.append(f"{variant}, {load.name}: requests failed: {dict(failed)}")
            else:
                self.reports[variant, load.name] = judge(served, load, self.references.get(load.name))
                self.references.setdefault(load.name, served.folder / load.name)
        except MeasureFailed as error:
            self.failures.append(f"{variant}, {load.name}: {error}")


def _parsed(texts: Sequence[str], parse: Callable[[str], Named], option: str) -> list[Named]:
    try:
        found = [parse(text) for text in texts]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
    if len({one.name for one in found}) < len(found):
        raise typer.BadParameter("two have the same name", param_hint=option)
    return found


def _check(program: Program, loads: Iterable[Load], out: Path) -> None:
    """An invalid load is refused before minutes are spent."""
    where = ["-o", str(out / "checked")] if program == "evaluate" else []
    for load in loads:
        check = [sys.executable, "-m", "triton_omni_client", program, "--check", *where, *load.options]
        if code := subprocess.run(check, check=False).returncode:
            raise typer.Exit(code)


def _lay_out(variants: Sequence[Variant], out: Path) -> None:
    """Make each variant's folder; none where a variant of this checkout cannot be served."""
    for variant in variants:
        if variant.checkout != HERE:
            continue  # its own server knows its settings
        try:
            stage_settings(HERE.models, variant.profile)
        except SettingsError as error:
            raise typer.BadParameter(str(error), param_hint="--variant") from error
    for variant in variants:
        (out / variant.name).mkdir(parents=True)


def _interrupt(number: int) -> None:
    """End the run and stop its servers; the exit code as a shell has it."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    typer.run(main)

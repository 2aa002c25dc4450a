# SPDX-License-Identifier: Apache-2.0
"""Command line of the comparison: `python scripts/compare --variant shipped --variant NAME=JSON -- BENCH OPTIONS`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a folder, `python scripts/compare`, Python puts the folder itself on the path instead of its parent.
    sys.path[0] = str(SCRIPTS)

from compare.balancer import BalancerError  # noqa: E402
from compare.running import BenchFailed, measure  # noqa: E402
from compare.table import compared  # noqa: E402
from compare.variants import Variant, parse_variant, write_repository  # noqa: E402
from triton_omni.serving.machine import ServerError  # noqa: E402
from triton_omni.serving.model_folder import model_folder  # noqa: E402
from triton_omni.serving.signals import on_signals  # noqa: E402
from triton_omni.settings import SettingsError  # noqa: E402

console = Console()


def main(
    *,
    variant: Annotated[list[str], typer.Option(metavar="NAME[=JSON]", help="what to serve; repeat it", default=...)],
    options: Annotated[list[str] | None, typer.Argument(help="behind --: options of triton-omni bench")] = None,
    mps: Annotated[bool, typer.Option(help="each server under a CUDA MPS daemon of its own")] = False,
    out: Annotated[Path, typer.Option(help="folder of reports, logs and plots; made anew")] = Path("compare-out"),
    model: Annotated[str | None, typer.Option(envvar="OMNI_MODEL", help="checkpoint: a folder or a hub id")] = None,
    repository: Annotated[Path, typer.Option(help="model repository to serve")] = SCRIPTS.parent / "model_repository",
) -> None:
    """Measure variants of the served stages one after another with the same load, and print them beside each other.

    JSON has what a variant changes: {"thinker": {"engine": {"fused_decode": false}}, "replicas": 2}, and in "bench"
    what it is asked beside the others: "--concurrency 64". Exit code 1: a variant could not be measured; the others
    were.
    """
    variants = _parsed(variant, options or [], out)
    checkpoint = model_folder(model)
    _lay_out(variants, repository, out)
    failures, reports = [], {}
    with on_signals(_interrupt):
        for wanted in variants:
            console.rule(wanted.name)
            try:
                load = [*(options or []), *wanted.options]
                report = measure(wanted, checkpoint, out / wanted.name, load, mps=mps)
            except (BalancerError, BenchFailed, ServerError) as error:
                failures.append(f"{wanted.name}: {error}")
                continue
            reports[wanted.name] = json.loads(report.read_text(encoding="utf-8"))
    console.print(compared(reports))
    for failure in failures:
        console.print(f"error: {failure}", style="red", markup=False)
    if failures:
        raise typer.Exit(1)


def _parsed(texts: Sequence[str], options: Sequence[str], out: Path) -> list[Variant]:
    """What is wrong with the options is told before minutes are spent."""
    try:
        variants = [parse_variant(text) for text in texts]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--variant") from error
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise typer.BadParameter("two have the same name", param_hint="--variant")
    if out.exists():
        raise typer.BadParameter(f"{out} exists already", param_hint="--out")
    for wanted in variants:
        check = [sys.executable, "-m", "triton_omni_client", "bench", "--check", *options, *wanted.options]
        if code := subprocess.run(check, check=False).returncode:
            raise typer.Exit(code)
    return variants


def _lay_out(variants: Sequence[Variant], repository: Path, out: Path) -> None:
    """Write what each variant serves; none of it where one cannot be served."""
    for variant in variants:
        try:
            write_repository(repository, out / variant.name / "repository", variant)
        except SettingsError as error:
            shutil.rmtree(out)
            raise typer.BadParameter(f"{variant.name}: {error}", param_hint="--variant") from error


def _interrupt(number: int) -> None:
    """End the run and stop its servers; the exit code as a shell has it."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni evaluate`: a table to stdout, missed bounds to stderr, report and speech to a folder."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.bench.plots import PlotError
from triton_omni_client.commands.options import StreamUrl, examples
from triton_omni_client.interrupt import INTERRUPTED
from triton_omni_client.messages import MODEL
from triton_omni_client.option_groups import grouped
from triton_omni_client.options import seconds, whole_number
from triton_omni_client.terminal import FAILED, errors, usage_errors

from .options import AskedOptions, BoundOptions
from .plots import write_plots
from .recognising import POCKETSPHINX
from .report import Report, figures_of, read_earlier
from .run import NO_RECOGNISER, Plan, evaluate
from .tables import print_report, progress

EXAMPLES = examples(
    "evaluate --max-word-errors 15 --min-pictures 90",
    'evaluate --setting rk4 --setting euler=\'{"token2wav": {"solver": "euler"}}\' --seeds 3',
    exit_codes="Exit codes: 0 done, 1 a request failed or a bound was missed, 2 wrong usage, 130 interrupted (nothing "
    "is kept).",
)
_NEEDED: Final = {"jiwer": "jiwer", "PIL": "pillow", "soxr": "soxr"}
_OF_ASR: Final = {POCKETSPHINX: {"pocketsphinx": "pocketsphinx"}, NO_RECOGNISER: {}}
_OF_WHISPER: Final = {"torch": "torch", "transformers": "transformers"}

Model = Annotated[str, typer.Option(help="Triton model that streams.")]
Wait = Annotated[float, typer.Option(parser=seconds(), metavar="SECONDS", help="To wait for the server to be ready.")]
Asr = Annotated[
    str,
    typer.Option(metavar="NAME", help="Recogniser: pocketsphinx, a Whisper-like checkpoint of transformers, or none."),
]
AtOnce = Annotated[int, typer.Option(parser=whole_number(1, 64), metavar="N", help="Requests at once.")]
Earlier = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Compare with the first setting of an evaluation made before."),
]
Folder = Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Folder of the report; made anew.")]
Plots = Annotated[bool, typer.Option(help="Write plots, too (PNG).")]
Check = Annotated[bool, typer.Option("--check", help="Ask nothing: check the options and the files they name.")]


@grouped
def evaluate_server(
    *,
    url: StreamUrl = DEFAULT_URL,
    model: Model = MODEL,
    asked: AskedOptions,
    asr: Asr = POCKETSPHINX,
    concurrency: AtOnce = 4,
    reference: Earlier = None,
    bounds: BoundOptions,
    wait: Wait = 0,
    output: Folder = Path("evaluate-out"),
    plots: Plots = True,
    check: Check = False,
) -> None:
    """Judge a server's replies: errors and faults of speech, right answers, and the effect of settings."""
    _check_output(output)
    _check_packages(asr)
    with usage_errors("--reference"):
        earlier = None if reference is None else read_earlier(reference)
    plan = Plan(
        url,
        model,
        asked.chosen(),
        asked.settings(),
        asked.seed_range(),
        asked.voice_names(),
        concurrency,
        asr,
        earlier,
        wait,
        bounds.bounds(),
    )
    if not check:
        with errors(url):
            _evaluate(plan, output, plots=plots)


def _check_output(folder: Path) -> None:
    if folder.exists():
        raise typer.BadParameter(f"{folder} exists already; give another folder", param_hint="-o")
    parent = next(each for each in folder.absolute().parents if each.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise typer.BadParameter(f"{folder}: {parent} is no folder that can be written", param_hint="-o")


def _check_packages(asr: str) -> None:
    """Refuse an evaluation at once if a package is missing."""
    needed = _NEEDED | _OF_ASR.get(asr, _OF_WHISPER)
    if missing := [package for module, package in needed.items() if find_spec(module) is None]:
        said = f"evaluate needs {', '.join(missing)}: pip install {' '.join(missing)}"
        raise typer.BadParameter(said, param_hint="--asr" if asr != POCKETSPHINX else None)


def _evaluate(plan: Plan, folder: Path, *, plots: bool) -> None:
    out, err = Console(), Console(stderr=True)
    try:
        report = evaluate(plan, partial(progress, err))
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED) from error
    settings = {each.setting.name: figures_of(each) for each in report.judgements}
    report.write(folder)
    if plots:
        try:
            write_plots(settings, report.first_replies(), folder, subtitle(report))
        except PlotError as error:
            report.notes.append(str(error))
    print_report(out, settings, report.notes)
    typer.echo(f"written: {folder}", err=True)
    missed = [each.sentence() for each in report.bounds if not each.met]
    for sentence in [*report.failures(), *missed]:
        typer.echo(f"error: {sentence}", err=True)
    if report.failures() or missed:
        raise typer.Exit(FAILED)


def subtitle(report: Report) -> str:
    """Return the plots' line about the origin of their figures."""
    server = report.environment["server"]
    parts = [server["checkpoint"], report.plan.get("recogniser"), str(report.environment["date"])[:10]]
    return " · ".join(part for part in parts if part)

# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni bench`. Tables go to stdout, progress to stderr, the report and its plots to files.

Exit code 0 says that replies were whole at each load (others may have failed: the report counts them), 130 that it was
interrupted: what was measured until then is reported.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from triton_omni_client.address import DEFAULT_URL, http_url
from triton_omni_client.commands.options import StreamUrl, examples
from triton_omni_client.interrupt import INTERRUPTED
from triton_omni_client.messages import MODEL, Media
from triton_omni_client.option_groups import grouped
from triton_omni_client.options import A_FILE, address, seconds
from triton_omni_client.report_file import environment
from triton_omni_client.terminal import FAILED, errors, usage_errors

from .options import CONVERSATION, LISTEN, LoadOptions, ReportOptions, WorkloadOptions
from .plots import PlotError, write_plots
from .profile_export import read_profile_export
from .report import Report
from .resources import default_metrics_url
from .runner import Plan, measure
from .tables import print_report, print_run
from .workload import Workload, perf_analyzer_input

EXAMPLES = examples("bench --concurrency 1,8,32 -o bench.json", "bench --rate 2,4 --requests 100 --voice Ethan")
PERF_ANALYZER_REQUESTS = 64
"""Requests in perf_analyzer's input data where none are asked for; it begins anew after them."""

Model = Annotated[str, typer.Option(help="Triton model that streams.")]
MetricsUrl = Annotated[
    str | None,
    typer.Option(
        parser=address(partial(http_url, example="http://localhost:8002/metrics")),
        metavar="URL",
        help="Triton's metrics. Default: port 8002 of the server's host.",
    ),
]
Wait = Annotated[float, typer.Option(parser=seconds(), metavar="SECONDS", help="To wait for the server to be ready.")]
FromProfileExport = Annotated[
    Path | None,
    typer.Option(**A_FILE, help="Measure nothing: report on a profile export of perf_analyzer."),
]
Check = Annotated[bool, typer.Option("--check", help="Measure nothing: check the options and the files they name.")]
WritePerfAnalyzerInput = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Measure nothing: write these requests as perf_analyzer's input.")
]


@grouped
def bench(
    *,
    url: StreamUrl = DEFAULT_URL,
    model: Model = MODEL,
    load: LoadOptions,
    asked: WorkloadOptions,
    metrics_url: MetricsUrl = None,
    wait: Wait = 0,
    report: ReportOptions,
    from_profile_export: FromProfileExport = None,
    write_perf_analyzer_input: WritePerfAnalyzerInput = None,
    check: Check = False,
) -> None:
    """Measure a server: load it, and report what a listener would have heard."""
    _check_alone(
        {
            "--from-profile-export": from_profile_export is not None,
            "--write-perf-analyzer-input": write_perf_analyzer_input is not None,
            "--check": check,
        }
    )
    if from_profile_export is not None:
        _report_export(from_profile_export, report)
        return
    if write_perf_analyzer_input is not None:
        if load.conversation:
            raise typer.BadParameter("not with --write-perf-analyzer-input", param_hint=CONVERSATION)
        _write_input(write_perf_analyzer_input, asked, load.requests or PERF_ANALYZER_REQUESTS)
        return
    report.check()
    if load.listen and asked.text_only:
        raise typer.BadParameter("not with --text-only: there is nothing to hear", param_hint=LISTEN)
    workload = asked.workload(load.conversation, speaks=load.speak)
    plan = Plan(
        url,
        model,
        metrics_url or default_metrics_url(url),
        load.loads(),
        workload,
        load.requests,
        load.warm_up,
        wait_s=wait,
        ramp_up_s=load.ramp_up,
        listens=load.listen,
        crowds=load.crowds,
        prompt_tokens=asked.prompt_tokens,
    )
    if not check:
        with errors(url):
            _measure(plan, Report(environment(), _described(workload, asked.source) | load.described()), report)


def _check_alone(given: Mapping[str, bool]) -> None:
    """Refuse two of the options that measure nothing: only one of them would be followed."""
    first, *others = [option for option, found in given.items() if found] or [""]
    if others:
        raise typer.BadParameter(f"not with {' or '.join(others)}", param_hint=first)


def _report_export(path: Path, written: ReportOptions) -> None:
    written.check()
    with usage_errors("--from-profile-export"):
        runs, notes = read_profile_export(path)
    out = Console()
    for run in runs:
        print_run(out, run)
    with errors(str(path)):
        _conclude(Report(environment(), {"profile_export": str(path)}, runs, notes), out, written)


def _measure(plan: Plan, report: Report, written: ReportOptions) -> None:
    out, err = Console(), Console(stderr=True)
    complete = False
    try:
        complete = asyncio.run(measure(plan, report, err, lambda run: print_run(out, run)))
    finally:
        if report.runs:
            _conclude(report, out, written)
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if without := [run.load.label for run in report.runs if not run.summary.completed]:
        typer.echo(f"error: not one reply was whole at {', '.join(without)}", err=True)
        raise typer.Exit(FAILED)


def _conclude(report: Report, out: Console, written: ReportOptions) -> None:
    """Write the files, and print what concerns all runs."""
    paths = [written.output]
    if written.plots:
        try:
            paths += write_plots(report.runs, written.output.with_suffix(""), subtitle(report))
        except PlotError as error:
            report.notes.append(str(error))
    report.write(written.output)
    print_report(out, report.runs, report.notes)
    typer.echo("written: " + ", ".join(map(str, paths)), err=True)


def subtitle(report: Report) -> str:
    """Return the plots' line about the origin of their figures."""
    gpus = Counter(report.environment.get("gpus", []))
    parts = [gpu if count == 1 else f"{count} × {gpu}" for gpu, count in gpus.items()]  # noqa: RUF001 - as in print
    if server := report.environment.get("server"):
        parts += [checkpoint] if (checkpoint := server.get("checkpoint")) else []
        parts.append(f"Triton {server['version']}")
    if export := report.workload.get("profile_export"):
        parts.append(f"perf_analyzer, {Path(export).name}")
    return " · ".join([*parts, str(report.environment["date"])[:10]])


def _described(workload: Workload, source: str) -> dict[str, Any]:
    """The workload as the report has it: what was asked, media by their size."""
    script = [{"text": turn.text, "media": _sizes(turn.media)} for turn in workload.script]
    prompts = list(workload.prompts)
    return asdict(replace(workload, media=(), script=())) | {
        "media": _sizes(workload.media),
        "script": script,
        "prompts": prompts,
        "prompts_from": source,
    }


def _sizes(media: Sequence[Media]) -> list[dict[str, Any]]:
    return [{"kind": medium.kind, "bytes": len(medium.data)} for medium in media]


def _write_input(path: Path, asked: WorkloadOptions, requests: int) -> None:
    workload = asked.workload()
    if asked.prompt_tokens is not None:
        raise typer.BadParameter("not with --write-perf-analyzer-input", param_hint="--prompt-tokens")
    try:
        path.write_text(perf_analyzer_input(workload, requests), encoding="utf-8")
    except OSError as error:
        said = f"{path}: cannot be written: {error.strerror}"
        raise typer.BadParameter(said, param_hint="--write-perf-analyzer-input") from error
    typer.echo(f"written: {path}", err=True)

# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni bench`. Tables go to stdout, progress to stderr, the report and its plots to files.

Exit codes: 0 done (requests may have failed: the report counts them), 1 nothing could be measured, 2 wrong usage,
130 interrupted (what was measured until then is reported).
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.errors import BadRequest, ConnectionFailed, OmniClientError
from triton_omni_client.messages import MODEL
from triton_omni_client.options import Files, StageJson, json_object, known_audio_format, read_media

from .plots import PlotError, write_plots
from .profile_export import read_profile_export
from .records import Load
from .report import Report
from .resources import default_metrics_url
from .runner import Plan, measure
from .tables import print_report, print_run
from .workload import BUILT_IN, PROMPTS, Workload, of_length, perf_analyzer_input, read_prompts

FAILED, INTERRUPTED = 1, 130
DEFAULT_CONCURRENCY = "1,4"
DEFAULT_OUTPUT = Path("bench.json")
PROMPT_TOKENS = "--prompt-tokens"
CROWDS = "--crowds"
PERF_ANALYZER_REQUESTS = 64
"""Requests in perf_analyzer's input data where none are asked for; it begins anew after them."""

Url = Annotated[str, typer.Option(envvar="TRITON_OMNI_URL", help="host:port of gRPC.")]
Model = Annotated[str, typer.Option(help="Triton model that streams.")]
Concurrency = Annotated[
    str, typer.Option(metavar="N,…", help=f"Closed loops: requests at once. Default {DEFAULT_CONCURRENCY}.")
]
Rate = Annotated[str, typer.Option(metavar="R,…", help="Open loops: requests a second (Poisson arrivals).")]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Requests a load. Default: 4 a place, or 30 s of a rate; at least 20.")
]
WarmUp = Annotated[
    int | None, typer.Option(min=0, help="Requests before, not counted. Default: one a place, or 1 s of a rate.")
]
RampUp = Annotated[
    float, typer.Option(min=0, help="Seconds over which the places of a closed loop begin. 0: all at once.")
]
Listen = Annotated[
    bool, typer.Option("--listen", help="Closed loops: hear each reply to its end, at its own speed, before the next.")
]
Crowds = Annotated[
    bool, typer.Option(CROWDS, help="Closed loops: all places ask at once, and again when the last was answered.")
]
Prompts = Annotated[Path | None, typer.Option(help="Text file of prompts, one a line. Default: built-in ones.")]
PromptWords = Annotated[int | None, typer.Option(min=1, help="Cut or repeat each prompt to N words.")]
PromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Cut or repeat each prompt to N tokens, as the server counts them.")
]
System = Annotated[str | None, typer.Option(help="System prompt. Default: the server's own.")]
Images = Annotated[Files, typer.Option(help="Image to show with each prompt; may be repeated.")]
Audios = Annotated[Files, typer.Option(help="Audio to play with each prompt; may be repeated.")]
Videos = Annotated[Files, typer.Option(help="Video to show with each prompt; may be repeated.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest reply, in tokens.")]
TalkerMaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest speech, in codes (50 a second).")]
FixedLengths = Annotated[
    bool, typer.Option("--fixed-lengths", help="Replies of exactly --max-tokens tokens and --talker-max-tokens codes.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the arrivals; request number i has this seed plus i.")]
Voice = Annotated[str | None, typer.Option(help="Speaker.")]
TextOnly = Annotated[bool, typer.Option("--text-only", help="Ask for no speech.")]
AudioFormatName = Annotated[str, typer.Option(help="How audio travels: f32, pcm16 or wav.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds for one reply.")]
MetricsUrl = Annotated[str, typer.Option(help="Triton's metrics. Default: port 8002 of the server's host.")]
Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for the server to be ready.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Report to write (JSON); the plots lie beside it.")]
Plots = Annotated[bool, typer.Option(help="Write plots (PNG).")]
FromProfileExport = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Measure nothing: report on a profile export of perf_analyzer.")
]
Check = Annotated[bool, typer.Option("--check", help="Measure nothing: check the options and the files they name.")]
WritePerfAnalyzerInput = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Measure nothing: write these requests as perf_analyzer's input.")
]


def bench(
    *,
    url: Url = DEFAULT_URL,
    model: Model = MODEL,
    concurrency: Concurrency = "",
    rate: Rate = "",
    requests: Requests = None,
    warm_up: WarmUp = None,
    ramp_up: RampUp = 0,
    listen: Listen = False,
    crowds: Crowds = False,
    prompts: Prompts = None,
    prompt_words: PromptWords = None,
    prompt_tokens: PromptTokens = None,
    system: System = None,
    image: Images = None,
    audio: Audios = None,
    video: Videos = None,
    max_tokens: MaxTokens = None,
    talker_max_tokens: TalkerMaxTokens = None,
    fixed_lengths: FixedLengths = False,
    seed: Seed = 0,
    voice: Voice = None,
    text_only: TextOnly = False,
    audio_format: AudioFormatName = "f32",
    timeout: Timeout = None,
    thinker_json: StageJson = "",
    talker_json: StageJson = "",
    token2wav_json: StageJson = "",
    metrics_url: MetricsUrl = "",
    wait: Wait = 0,
    output: Output = DEFAULT_OUTPUT,
    plots: Plots = True,
    from_profile_export: FromProfileExport = None,
    write_perf_analyzer_input: WritePerfAnalyzerInput = None,
    check: Check = False,
) -> None:
    """Measure a server: load it, and report what a listener would have heard."""
    _check_output(output, plots=plots)
    with _errors(url):
        if from_profile_export is not None:
            _report_export(from_profile_export, output, plots)
            return
        _check_lengths(max_tokens, talker_max_tokens, fixed=fixed_lengths, text_only=text_only)
        if prompt_tokens is not None and (prompt_words or write_perf_analyzer_input):
            raise typer.BadParameter("not with --prompt-words or --write-perf-analyzer-input", param_hint=PROMPT_TOKENS)
        workload = Workload(
            prompts=_prompts(prompts, prompt_words),
            media=read_media(image, audio, video),
            system=system,
            seed=seed,
            modalities=("text",) if text_only else None,
            voice=voice,
            audio_format=known_audio_format(audio_format),
            timeout=timeout,
            thinker=_stage("--thinker-json", thinker_json, max_tokens, fixed=fixed_lengths),
            talker=_stage("--talker-json", talker_json, talker_max_tokens, fixed=fixed_lengths),
            token2wav=json_object("--token2wav-json", token2wav_json),
        )
        if write_perf_analyzer_input is not None:
            _write(write_perf_analyzer_input, perf_analyzer_input(workload, requests or PERF_ANALYZER_REQUESTS))
            return
        loads, metrics = _loads(concurrency, rate), metrics_url or default_metrics_url(url)
        _check_places(loads, listen=listen, crowds=crowds, ramp_up=ramp_up)
        plan = Plan(
            url,
            model,
            metrics,
            loads,
            workload,
            requests,
            warm_up,
            wait_s=wait,
            ramp_up_s=ramp_up,
            listens=listen,
            crowds=crowds,
            prompt_tokens=prompt_tokens,
        )
        if check:
            return
        asked = _described(workload, prompts) | {"ramp_up_s": ramp_up, "listens": listen, "crowds": crowds}
        _measure(plan, Report(_environment(), asked), output, plots)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turns the client's errors into one sentence on stderr and exit code 1."""
    try:
        yield
    except OmniClientError as error:
        what = f"no connection to {url}" if isinstance(error, ConnectionFailed) else error.code
        typer.echo(f"error: {what}: {error.message}", err=True)
        raise typer.Exit(FAILED) from error


def _report_export(path: Path, output: Path, plots: bool) -> None:
    runs, notes = read_profile_export(path)
    out = Console()
    for run in runs:
        print_run(out, run)
    _conclude(Report(_environment(), {"profile_export": str(path)}, runs, notes), out, output, plots)


def _measure(plan: Plan, report: Report, output: Path, plots: bool) -> None:
    out, err = Console(), Console(stderr=True)
    complete = False
    try:
        complete = asyncio.run(measure(plan, report, err, lambda run: print_run(out, run)))
    finally:
        if report.runs:
            _conclude(report, out, output, plots)
    if not complete:
        raise typer.Exit(INTERRUPTED)
    if without := [run.load.label for run in report.runs if not run.summary.completed]:
        typer.echo(f"error: not one reply was whole at {', '.join(without)}", err=True)
        raise typer.Exit(FAILED)


def _conclude(report: Report, out: Console, output: Path, plots: bool) -> None:
    """Write the files, and print what concerns all runs."""
    written = [output]
    if plots:
        try:
            written += write_plots(report.runs, output.with_suffix(""), subtitle(report))
        except PlotError as error:
            report.notes.append(str(error))
    report.write(output)
    print_report(out, report.runs, report.notes)
    typer.echo("written: " + ", ".join(str(path) for path in written), err=True)


def subtitle(report: Report) -> str:
    """What the plots say of where their figures come from."""
    parts = list(report.environment.get("gpus", []))
    if server := report.environment.get("server"):
        parts += [checkpoint] if (checkpoint := server.get("checkpoint")) else []
        parts.append(f"Triton {server['version']}")
    if export := report.workload.get("profile_export"):
        parts.append(f"perf_analyzer, {Path(export).name}")
    return " · ".join([*parts, str(report.environment["date"])[:10]])


def _environment() -> dict[str, Any]:
    try:
        client = version("triton-omni-client")
    except PackageNotFoundError:
        client = "unknown"  # run from a source tree that is not installed
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "client_version": client,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def _described(workload: Workload, prompts: Path | None) -> dict[str, Any]:
    """The workload as the report has it: what was asked, media by their size."""
    media = [{"kind": medium.kind, "bytes": len(medium.data)} for medium in workload.media]
    source = BUILT_IN if prompts is None else str(prompts)
    return asdict(workload) | {"media": media, "prompts": list(workload.prompts), "prompts_from": source}


def _loads(concurrency: str, rate: str) -> list[Load]:
    if not concurrency and not rate:
        concurrency = DEFAULT_CONCURRENCY
    closed = [Load("closed", value) for value in _numbers("--concurrency", concurrency, int)]
    return closed + [Load("open", value) for value in _numbers("--rate", rate, float)]


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> Sequence[float]:
    try:
        values = [kind(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 1,8,32", param_hint=option) from error
    if not all(0 < value < float("inf") for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be above 0", param_hint=option)
    return values


def _prompts(path: Path | None, words: int | None) -> Sequence[str]:
    found = PROMPTS if path is None else read_prompts(path)
    return found if words is None else [of_length(prompt, words) for prompt in found]


def _check_places(loads: Sequence[Load], *, listen: bool, crowds: bool, ramp_up: float) -> None:
    """Refuse what the places of closed loops cannot do, or not together."""
    if (listen or crowds) and any(load.mode == "open" for load in loads):
        named = "--listen" if listen else CROWDS
        raise typer.BadParameter("not with --rate, whose requests come when they come", param_hint=named)
    if crowds and (listen or ramp_up):
        raise typer.BadParameter("not with --listen or --ramp-up: a crowd comes at once", param_hint=CROWDS)


def _check_lengths(max_tokens: int | None, talker_max_tokens: int | None, *, fixed: bool, text_only: bool) -> None:
    if fixed and (max_tokens is None or (talker_max_tokens is None and not text_only)):
        needed = "--max-tokens" if text_only else "--max-tokens and --talker-max-tokens"
        raise typer.BadParameter(f"needs {needed}", param_hint="--fixed-lengths")


def _check_output(output: Path, *, plots: bool) -> None:
    """Before anything is measured that could then not be written."""
    faults = {
        "is a folder; give a file in it": output.is_dir(),
        "its folder does not exist": not output.parent.is_dir(),
        "cannot be written": not os.access(output if output.exists() else output.parent, os.W_OK),
        "its folder cannot be written, which the plots need (--no-plots)": plots
        and not os.access(output.parent, os.W_OK),
        f"the report is JSON, not {output.suffix[1:]}; give a name in .json": output.suffix not in ("", ".json"),
    }
    for fault, found in faults.items():
        if found:
            raise typer.BadParameter(f"{output}: {fault}", param_hint="-o")


def _stage(option: str, text: str, max_tokens: int | None, *, fixed: bool) -> dict[str, Any]:
    value = json_object(option, text)
    if max_tokens is None:
        return value
    return value | {"max_tokens": max_tokens} | ({"min_tokens": max_tokens} if fixed else {})


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"{path}: cannot be written: {error.strerror}") from error
    typer.echo(f"written: {path}", err=True)

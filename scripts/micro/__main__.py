# SPDX-License-Identifier: Apache-2.0
"""Command line of the micro benchmark: `python scripts/micro --random-weights tiny`."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a folder, `python scripts/micro`, Python puts the folder itself on the path instead of its parent.
    sys.path[0] = str(SCRIPTS)

from micro.child import MEASUREMENTS, ON_REQUEST  # noqa: E402
from micro.plan import Plan  # noqa: E402
from micro.report import Run, line_of, table, write  # noqa: E402
from triton_omni.core.settings import Quantization, Token2WavSettings  # noqa: E402
from triton_omni_client.options import check_writable  # noqa: E402

console = Console(stderr=True)
SHIPPED = Token2WavSettings()
END_S = 40.0
"""Seconds that a child has to end: a server stops in less."""


class Size(StrEnum):
    """Checkpoints with random weights, some of `synthetic_config.NAMES`."""

    TINY = "tiny"
    B3 = "3b"
    B7 = "7b"
    B7_AWQ = "7b-awq"
    B7_GPTQ = "7b-gptq"


def numbers(text: str, option: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Comma-separated positive numbers of an option."""
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,8,32", param_hint=option) from error
    if min(found) <= 0:
        raise typer.BadParameter(f"{text!r}: every number must be above 0", param_hint=option)
    return found


def chosen(only: str | None) -> list[str]:
    """Measurements by `--only`, in the order of a run."""
    wanted = set(only.split(",")) if only else set(MEASUREMENTS) - ON_REQUEST
    unknown = sorted(wanted - set(MEASUREMENTS))
    if unknown:
        known = ", ".join(MEASUREMENTS)
        raise typer.BadParameter(f"unknown {', '.join(unknown)}; there are {known}", param_hint="--only")
    return [name for name in MEASUREMENTS if name in wanted]


def checkpoint_of(size: Size) -> Path:
    """The cached checkpoint of random weights, made if it is not there (in a child, which frees its memory)."""
    command = [sys.executable, "-m", "triton_omni.checkpoint.synthetic", "--size", size.value]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(made.stdout.strip())


def checkpoint(model: Path | None, size: Size | None) -> str:
    """The folder asked for, else the one that `OMNI_MODEL` names, else the tiny checkpoint."""
    named = os.environ.get("OMNI_MODEL")
    if model is None and size is None and named:
        model = Path(named)
    if model is None:
        return str(checkpoint_of(size or Size.TINY))
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} holds no checkpoint (no config.json)", param_hint="--model")
    return str(model.resolve())


def measure(name: str, plan: Plan, logs: Path, tell: Callable[[dict[str, Any]], None]) -> str | None:
    """Run one child and pass on each line that it tells, with the seconds that it took; why it failed, or None."""
    log, path = logs / f"{name}.log", os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "micro.child", name, json.dumps(plan.to_json()), str(writing)]
    environment = os.environ | {"PYTHONPATH": path}
    with os.fdopen(reading, encoding="utf-8") as lines, log.open("w", encoding="utf-8") as output:
        try:
            child = subprocess.Popen(command, stdout=output, stderr=output, env=environment, pass_fds=[writing])
        finally:
            os.close(writing)
        try:
            before = time.monotonic()
            for line in lines:
                now = time.monotonic()
                tell({**json.loads(line), "took_s": round(now - before, 3)})
                before = now
            child.wait()
        finally:
            _end(child)
    if child.returncode == 0:
        return None
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
    return f"exit code {child.returncode}: {last[-1]}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that has not: it may have a server to stop."""
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def run_all(names: list[str], plan: Plan, run: Run, out: Path) -> None:
    """Every measurement, one after another: nothing else of ours is on the machine while one is timed.

    The report is written after every figure, since whoever runs this may have less time than it takes.
    """
    run.unfinished = list(names)
    with tempfile.TemporaryDirectory(prefix="micro-") as logs:
        for name in names:
            reason = measure(name, plan, Path(logs), functools.partial(take, run, name, out))
            if reason is not None:
                run.failures[name] = reason
            run.unfinished.remove(name)
            write(run.report(), out)


def take(run: Run, name: str, out: Path, line: dict[str, Any]) -> None:
    """Keep, show and write down what a child told."""
    run.take(name, line)
    if "figure" in line:
        print(line_of(line["figure"]), flush=True)
        write(run.report(), out)
    else:
        console.print(f"{name}: {'engine' if 'ready' in line else 'start'} {line['took_s']:.1f} s", highlight=False)


def main(
    *,
    model: Annotated[Path | None, typer.Option(help="checkpoint folder")] = None,
    random_weights: Annotated[Size | None, typer.Option(help="make and use random weights of this size")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write")] = Path("micro.json"),
    only: Annotated[str | None, typer.Option(help="some of those named below, with commas between")] = None,
    batch: Annotated[str, typer.Option(help="sequences that decode together")] = "1,8,32,64",
    windows: Annotated[str, typer.Option(help="streams whose windows fall due together")] = "1,8,32",
    batch_frames: Annotated[
        int, typer.Option(min=1, help="mel frames solved together at most")
    ] = SHIPPED.max_batch_frames,
    seconds: Annotated[str, typer.Option(help="lengths of whole replies")] = "10,30",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    reply_tokens: Annotated[int, typer.Option(min=1, help="of the pipeline's replies")] = 150,
    codes: Annotated[int, typer.Option(min=1, help="of the pipeline's speech")] = 1000,
    steps: Annotated[int, typer.Option(min=1, help="decode steps timed")] = 100,
    repeats: Annotated[int, typer.Option(min=1, max=64, help="windows and replies timed, at most")] = 10,
    seconds_a_figure: Annotated[float, typer.Option(min=0, help="then no further window or reply is begun")] = 8.0,
    warm_up: Annotated[
        int, typer.Option(min=1, max=100, help="steps before; a fifth of it for windows and replies")
    ] = 10,
    enforce_eager: Annotated[bool, typer.Option(help="no CUDA graphs, in plain vLLM neither")] = False,
    torch_compile: Annotated[bool, typer.Option(help="compiled networks, in plain vLLM too")] = False,
    fused_decode: Annotated[bool, typer.Option(help="our fused decode steps, where they can be")] = True,
    steady_decode: Annotated[bool, typer.Option(help="our thinker's steps laid out from the ones before")] = True,
    prefix_caching: Annotated[bool, typer.Option(help="our thinker keeps prompts, of which none is found")] = False,
    quantization: Annotated[Quantization, typer.Option(help="of both thinkers")] = "none",
) -> None:
    """Time each stage alone, against plain vLLM and HF in the same run."""
    # An exception also ends the child that is measuring.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check_writable(out)
    names = chosen(only)
    if model is not None and random_weights is not None:
        raise typer.BadParameter("give --model or --random-weights, not both")
    batches, window_batches = numbers(batch, "--batch", int), numbers(windows, "--windows", int)
    if max(window_batches) > 64:
        raise typer.BadParameter(f"{windows!r}: at most 64 windows share a batch", param_hint="--windows")
    plan = Plan(
        model=checkpoint(model, random_weights),
        batches=batches,
        window_batches=window_batches,
        batch_frames=batch_frames,
        offline_seconds=numbers(seconds, "--seconds", float),
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
        codes=codes,
        steps=steps,
        repeats=repeats,
        seconds_a_figure=seconds_a_figure,
        warm_up=warm_up,
        enforce_eager=enforce_eager,
        torch_compile=torch_compile,
        fused_decode=fused_decode,
        steady_decode=steady_decode,
        prefix_caching=prefix_caching,
        quantization=quantization,
    )
    run = Run(plan, sys.argv)
    run_all(names, plan, run, out)
    report = run.report()
    if report["figures"]:
        Console().print(table(report))
    for name, unequal in report["not_comparable"].items():
        console.print(f"{name}: no ratio, the reference differs in {', '.join(unequal)}")
    for name, reason in report["failures"].items():
        console.print(f"{name} failed: {reason}", markup=False)
    if run.failures:
        raise typer.Exit(1)


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
# Beside an option there is no room for them all.
app.command(epilog=f"Measurements for --only: {', '.join(MEASUREMENTS)}.")(main)

if __name__ == "__main__":
    app()

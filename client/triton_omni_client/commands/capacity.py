# SPDX-License-Identifier: Apache-2.0
"""`triton-omni capacity`: what a benchmark's report means in GPUs and money."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from triton_omni_client.bench.capacity import MINUTES, Capacity, Targets, capacity, exact, measured_loads
from triton_omni_client.errors import BadRequest
from triton_omni_client.terminal import errors, print_json

from .options import AsJson, examples

EXAMPLES = examples(
    "capacity bench.json --first-audio 0.5 --gpu-hour 2.50",
    "capacity bench.json --first-audio 0.8 --underruns 0.05 --conversations 200 --speaking 0.3 --headroom 0.25",
)


def report_capacity(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="JSON report of `triton-omni bench`.")],
    *,
    first_audio: Annotated[float, typer.Option(help="Target: seconds to first audio, p95.")],
    underruns: Annotated[float, typer.Option(help="Target: share of replies that may fall silent, 0 to 1.")] = 0.0,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the server that was measured.")] = 1,
    gpu_hour: Annotated[float | None, typer.Option(min=0, help="Price of a GPU hour, in any currency.")] = None,
    reply_seconds: Annotated[
        float | None, typer.Option(min=0.001, help="Speech of one reply. Default: as measured.")
    ] = None,
    conversations: Annotated[int | None, typer.Option(min=1, help="Conversations at once.")] = None,
    speaking: Annotated[float, typer.Option(help="Share of a conversation in which the model speaks.")] = 0.5,
    headroom: Annotated[float, typer.Option(help="Share of the load to have room for on top.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Tell streams, speech and cost of a GPU within your targets, and GPUs for your conversations; asks no server."""
    with errors(str(report), as_json=as_json):
        found = capacity(
            measured_loads(_read(report)), Targets(first_audio_p95_s=first_audio, underruns=underruns), gpus
        )
        length = float(found.reply_s) if reply_seconds is None else reply_seconds
        told = facts(found, length, gpu_hour)
        if conversations is not None:
            told |= conversing(found, conversations, speaking, headroom, gpu_hour)
    if not found.is_of_length(length):
        measured = f"{float(found.reply_s):g} s"
        typer.echo(f"warning: measured with replies of {measured}; measure some of {length:g} s", err=True)
    if as_json:
        print_json(told)
    else:
        _print(told)


def facts(found: Capacity, reply_s: float, gpu_hour: float | None) -> dict[str, Any]:
    """What one GPU does at full use, rounded to a millionth; costs in the currency of `gpu_hour`."""
    told: dict[str, Any] = {
        "streams_per_gpu": _rounded(found.streams),
        "speech_seconds_per_s_per_gpu": _rounded(found.speech_per_s),
        "replies_an_hour_per_gpu": _rounded(found.replies_an_hour(reply_s)),
        f"gpu_hours_of_{MINUTES}_minutes": _rounded(found.gpu_hours),
    }
    if gpu_hour is not None:
        told[f"cost_of_{MINUTES}_minutes"] = _rounded(found.gpu_hours * exact(gpu_hour))
    return told | {"limited_by": found.limit or "no larger load was measured"}


def conversing(
    found: Capacity, conversations: int, speaking: float, headroom: float, gpu_hour: float | None
) -> dict[str, Any]:
    """GPUs for these conversations, and what their speech costs with all of these GPUs paid for."""
    needed = found.gpus(conversations, speaking, headroom)
    told: dict[str, Any] = {"gpus": needed}
    if gpu_hour is not None:
        hours = MINUTES * 60 / (conversations * exact(speaking) * 3600)
        told |= {
            "cost_an_hour": _rounded(needed * exact(gpu_hour)),
            f"cost_of_{MINUTES}_minutes_as_used": _rounded(hours * needed * exact(gpu_hour)),
        }
    return told


def _rounded(value: Fraction) -> float:
    return round(float(value), 6)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest(f"{path}: expected a JSON object")
    return found


def _print(told: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in told.items():
        table.add_row(name.replace("_", " "), f"{value:g}" if isinstance(value, float) else str(value))
    Console().print(table)

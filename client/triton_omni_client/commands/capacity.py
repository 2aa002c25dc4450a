# SPDX-License-Identifier: Apache-2.0
"""`triton-omni capacity`: what reports of a benchmark mean in GPUs and money."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from triton_omni_client.bench.capacity import MINUTES, Capacity, Targets, capacity, exact
from triton_omni_client.bench.measured import gpus_at_work, loads_together
from triton_omni_client.errors import BadRequest
from triton_omni_client.option_groups import grouped
from triton_omni_client.options import A_FILE, number, seconds, whole_number
from triton_omni_client.terminal import errors, print_json, usage_errors

from .options import AsJson, examples

EXAMPLES = examples(
    "capacity bench.json --first-audio 0.5 --gpu-hour 2.50",
    "capacity listeners-32.json listeners-48.json --first-audio 0.5 --underruns 0.05 --gpus 2",
    "capacity bench.json --first-audio 0.8 --underruns 0.05 --conversations 200 --speaking 0.3 --headroom 0.25",
)


SPEAKING = 0.5
"""Share of a conversation in which the model speaks, where it is not told."""

FirstAudio = Annotated[
    float,
    typer.Option(
        parser=seconds(above=True), metavar="SECONDS", help="Target: time to first audio of 95 % of all replies."
    ),
]
Underruns = Annotated[
    float,
    typer.Option(parser=number(0, 1), metavar="SHARE", help="Target: share of replies that may fall silent, 0 to 1."),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(1),
        metavar="N",
        help="GPUs of the servers that were measured. Default: those that the reports saw at work, or 1.",
    ),
]
GpuHour = Annotated[
    float | None, typer.Option(parser=number(0), metavar="PRICE", help="Price of a GPU hour, in any currency.")
]
ReplySeconds = Annotated[
    float | None,
    typer.Option(parser=seconds(above=True), metavar="SECONDS", help="Speech of one reply. Default: as measured."),
]
Conversations = Annotated[
    int | None, typer.Option(parser=whole_number(1), metavar="N", help="Conversations at once: tell the GPUs for them.")
]
Speaking = Annotated[
    float | None,
    typer.Option(
        parser=number(0, 1, above=True),
        metavar="SHARE",
        help=f"Share of a conversation in which the model speaks, up to 1. Default {SPEAKING}.",
    ),
]
Headroom = Annotated[
    float | None,
    typer.Option(
        parser=number(0), metavar="SHARE", help="Share of the load to have room for on top, from 0 on. Default 0."
    ),
]

_CURRENCY = "in --gpu-hour's currency"
_SHOWN = {
    "streams_per_gpu": ("streams at once, a GPU", "streams"),
    "listeners_per_gpu": ("listeners at once, a GPU", "listeners"),
    "speech_seconds_per_s_per_gpu": ("speech made, a GPU", "s of speech a second"),
    "replies_an_hour_per_gpu": ("replies made, a GPU", "replies an hour"),
    f"gpu_hours_of_{MINUTES}_minutes": (f"GPU time of {MINUTES:,} min of speech", "GPU hours"),
    f"cost_of_{MINUTES}_minutes": (f"cost of {MINUTES:,} min of speech, full use", _CURRENCY),
    "median_of_runs": ("measured by the median of", "runs"),
    "gpus": ("GPUs for the conversations", "GPUs"),
    "cost_an_hour": ("cost of an hour of these GPUs", _CURRENCY),
    f"cost_of_{MINUTES}_minutes_as_used": (f"cost of {MINUTES:,} min of speech, as used", _CURRENCY),
}
"""Label and unit of each figure in the table, by its name in JSON."""


@dataclass(frozen=True, kw_only=True)
class ConversationOptions:
    """Whom the GPUs are for."""

    conversations: Conversations = None
    speaking: Speaking = None
    headroom: Headroom = None

    def check(self) -> None:
        """Refuse options that have no effect without conversations.

        Raises:
            typer.BadParameter: so it does.
        """
        for option, value in (("--speaking", self.speaking), ("--headroom", self.headroom)):
            if value is not None and self.conversations is None:
                raise typer.BadParameter(f"{value:g} has no effect without --conversations", param_hint=option)

    def facts(self, found: Capacity, gpu_hour: float | None) -> dict[str, Any]:
        """GPUs for these conversations, and what their speech costs; nothing where there are none."""
        if self.conversations is None:
            return {}
        speaking = SPEAKING if self.speaking is None else self.speaking
        return conversing(found, self.conversations, speaking, self.headroom or 0.0, gpu_hour)


@grouped
def report_capacity(
    reports: Annotated[
        list[Path],
        typer.Argument(**{**A_FILE, "metavar": "REPORT"}, help="JSON of `triton-omni bench`; several of one set-up."),
    ],
    *,
    first_audio: FirstAudio,
    underruns: Underruns = 0,
    gpus: Gpus = None,
    gpu_hour: GpuHour = None,
    reply_seconds: ReplySeconds = None,
    talks: ConversationOptions,
    as_json: AsJson = False,
) -> None:
    """Compute from reports of `bench` how many streams or listeners a GPU serves in your targets, and their cost.

    Reports of several loads count together; of several runs of a load the median of each figure does.
    """
    talks.check()
    with usage_errors("REPORT"):
        read = {str(path): _read(path) for path in reports}
        loads = loads_together(read)
        used = _used(read) if gpus is None else gpus
    with errors(", ".join(read), as_json=as_json):
        found = capacity(loads, Targets(first_audio_p95_s=first_audio, underruns=underruns), used)
    length = float(found.reply_s) if reply_seconds is None else reply_seconds
    if not found.is_of_length(length):
        measured = f"{float(found.reply_s):g} s"
        typer.echo(f"warning: measured with replies of {measured}; measure some of {length:g} s", err=True)
    told = facts(found, length, gpu_hour) | talks.facts(found, gpu_hour)
    if as_json:
        print_json(told)
    else:
        _print(told)


def facts(found: Capacity, reply_s: float, gpu_hour: float | None) -> dict[str, Any]:
    """Return the facts of one GPU at full use, rounded to a millionth; costs in the currency of `gpu_hour`."""
    told: dict[str, Any] = {
        "listeners_per_gpu" if found.listens else "streams_per_gpu": _rounded(found.streams),
        "speech_seconds_per_s_per_gpu": _rounded(found.speech_per_s),
        "replies_an_hour_per_gpu": _rounded(found.replies_an_hour(reply_s)),
        f"gpu_hours_of_{MINUTES}_minutes": _rounded(found.gpu_hours),
    }
    if gpu_hour is not None:
        told[f"cost_of_{MINUTES}_minutes"] = _rounded(found.gpu_hours * exact(gpu_hour))
    if found.runs > 1:
        told["median_of_runs"] = found.runs
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


def _used(reports: Mapping[str, Mapping[str, Any]]) -> int:
    """GPUs that the reports saw at work; several are told, since others may have used them."""
    used = gpus_at_work(reports) or 1
    if used > 1:
        typer.echo(f"note: {used} GPUs were at work; say --gpus if not all of them were the servers'", err=True)
    return used


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
    table = Table("what", Column("figure", justify="right"), "unit", box=None, pad_edge=False)
    for name, (label, unit) in _SHOWN.items():
        if isinstance(told.get(name), int | float):
            table.add_row(label, f"{told[name]:,g}", unit)
    out = Console(soft_wrap=True)
    out.print(table)
    out.print(f"limited by: {told['limited_by']}", highlight=False, markup=False)

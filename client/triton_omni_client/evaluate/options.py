# SPDX-License-Identifier: Apache-2.0
"""The options of `triton-omni evaluate`: questions, settings and bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from triton_omni_client.options import A_FILE, json_object, number, whole_number
from triton_omni_client.terminal import usage_errors

from .asking import STAGES, Setting
from .bounds import Bound
from .tasks import BUILT_IN, Tasks, read_tasks

OFFLINE: Final = Setting("offline", {"token2wav": {"mode": "offline"}})
"""Each reply in one window, as the published code makes it: the default reference."""
SERVED: Final = Setting("served")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_SEED: Final = 2**62

Counts = whole_number(0)
TaskFile = Annotated[Path | None, typer.Option(**A_FILE, help="What is asked: JSON, as in the built-in mini.json.")]
Count = typer.Option(parser=Counts, metavar="N", help="Only the first N. Default: all of the task file.")
Sentences = Annotated[int | None, Count]
Prompts = Annotated[int | None, Count]
Pictures = Annotated[int | None, Count]
Sounds = Annotated[int | None, Count]
Seeds = Annotated[int, typer.Option(parser=whole_number(1, 100), metavar="N", help="Each question with N seeds.")]
FirstSeed = Annotated[int, typer.Option(parser=whole_number(0, _MAX_SEED), metavar="N", help="The first seed.")]
VoiceNames = Annotated[str, typer.Option(metavar="NAME,…", help="Speakers, in turn. Default: all of the server.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=JSON]",
        help='Options of stages to compare, such as {"token2wav": {"solver": "euler"}}; repeat it. The first is the '
        "reference. Default: offline, then served.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class AskedOptions:
    """Options of the questions."""

    tasks: TaskFile = None
    sentences: Sentences = None
    prompts: Prompts = None
    pictures: Pictures = None
    sounds: Sounds = None
    seeds: Seeds = 1
    seed: FirstSeed = 0
    voices: VoiceNames = ""
    setting: Settings = None

    def chosen(self) -> Tasks:
        """Return the tasks, cut to the numbers asked for.

        Raises:
            typer.BadParameter: the file is wrong, or nothing is asked.
        """
        with usage_errors("--tasks"):
            tasks = read_tasks(self.tasks or BUILT_IN)
        names = ("sentences", "prompts", "pictures", "sounds")
        found = replace(tasks, **{name: getattr(tasks, name)[: getattr(self, name)] for name in names})
        if not any(getattr(found, name) for name in names):
            raise typer.BadParameter("nothing is asked: all numbers are 0", param_hint="--sentences")
        return found

    def settings(self) -> list[Setting]:
        """Return the settings, the reference first.

        Raises:
            typer.BadParameter: one is not readable, or two have the same name.
        """
        if not self.setting:
            return [OFFLINE, SERVED]
        found = [parse_setting(text) for text in self.setting]
        if len({each.name for each in found}) < len(found):
            raise typer.BadParameter("two have the same name", param_hint="--setting")
        return found

    def seed_range(self) -> range:
        """Return the seeds."""
        return range(self.seed, self.seed + self.seeds)

    def voice_names(self) -> list[str]:
        """Return the named speakers; empty = all."""
        return [name.strip() for name in self.voices.split(",") if name.strip()]


def parse_setting(text: str) -> Setting:
    """Parse `NAME` or `NAME={"token2wav": {...}, "talker": {...}, "thinker": {...}}`.

    Raises:
        typer.BadParameter: it is neither.
    """
    name, equals, options = text.partition("=")
    if not _NAME.fullmatch(name):
        said = f"{name!r} is no name of letters, digits, '.', '_' and '-'"
        raise typer.BadParameter(said, param_hint="--setting")
    found: Mapping[str, Any] = json_object(options) if equals else {}
    for stage, chosen in found.items():
        if stage not in STAGES or not isinstance(chosen, dict):
            said = f"{name}: {json.dumps({stage: chosen})[:100]} is no object of options of {', '.join(STAGES)}"
            raise typer.BadParameter(said, param_hint="--setting")
    return Setting(name, found)


def _bound(what: str, unit: str = "%", most: float = 100) -> Any:
    return typer.Option(parser=number(0, most), metavar=unit, help=f"Bound: {what}, in {unit}.")


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """Options of bounds; a field's name is `max_` or `min_` and the figure's."""

    max_word_errors: Annotated[float | None, _bound("most word errors of speech")] = None
    max_text_errors: Annotated[float | None, _bound("most word errors of the text of a sentence")] = None
    max_skipped_words: Annotated[float | None, _bound("most skipped words")] = None
    max_repeated_words: Annotated[float | None, _bound("most repeated words")] = None
    max_clicks: Annotated[float | None, _bound("most chunk boundaries that click")] = None
    max_clipped: Annotated[float | None, _bound("most clipped samples")] = None
    max_mel_distance: Annotated[float | None, _bound("largest mel distance to the reference", "dB")] = None
    min_snr: Annotated[float | None, _bound("least SNR to the reference", "dB")] = None
    min_whole_replies: Annotated[float | None, _bound("fewest whole replies")] = None
    min_right_voices: Annotated[float | None, _bound("fewest replies nearest to their own voice")] = None
    min_pictures: Annotated[float | None, _bound("fewest pictures understood")] = None
    min_sounds: Annotated[float | None, _bound("fewest sounds understood")] = None

    def bounds(self) -> Sequence[Bound]:
        """Return the bounds that were given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return [
            Bound(name.partition("_")[2], limit, is_most=name.startswith("max_"))
            for name, limit in given.items()
            if limit is not None
        ]

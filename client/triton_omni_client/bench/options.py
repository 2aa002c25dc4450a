# SPDX-License-Identifier: Apache-2.0
"""The options of `triton-omni bench` by what they are about: what is asked, how often, and where the report goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from triton_omni_client.commands.options import SamplingOptions, TextOnly
from triton_omni_client.options import (
    A_FILE,
    Audios,
    Images,
    Videos,
    check_writable,
    read_media,
    seconds,
    whole_number,
    with_limits,
)
from triton_omni_client.terminal import usage_errors

from .conversations import read_script, spoken
from .records import Load
from .workload import BUILT_IN, PROMPTS, Workload, of_length, read_prompts

DEFAULT_CONCURRENCY = "1,4"
DEFAULT_OUTPUT = Path("bench.json")
LISTEN = "--listen"
CROWDS = "--crowds"
CONVERSATION = "--conversation"
SPEAK = "--speak"
SCRIPT = "--script"
MAX_FIRST_SEED = 2**62
"""Far below the server's bound, which the seeds of all requests must keep."""

Concurrency = Annotated[
    str, typer.Option(metavar="N,…", help=f"Closed loops: requests at once. Default {DEFAULT_CONCURRENCY}.")
]
Rate = Annotated[str, typer.Option(metavar="R,…", help="Open loops: requests a second (Poisson arrivals).")]
Requests = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(1),
        metavar="N",
        help="Requests a load, or conversations. Default: 4 a place, or 30 s of a rate; at least 20.",
    ),
]
WarmUp = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(0),
        metavar="N",
        help="Requests before, not counted. Default: one a place, or 1 s of a rate.",
    ),
]
RampUp = Annotated[
    float,
    typer.Option(
        parser=seconds(), metavar="SECONDS", help="Over which the places of a closed loop begin. 0: all at once."
    ),
]
Listen = Annotated[
    bool, typer.Option(LISTEN, help="Closed loops: hear each reply to its end, at its own speed, before the next.")
]
Crowds = Annotated[
    bool, typer.Option(CROWDS, help="Closed loops: all places ask at once, and again when the last was answered.")
]
Turns = Annotated[
    int | None,
    typer.Option(
        CONVERSATION,
        parser=whole_number(2),
        metavar="TURNS",
        help="Closed loops: places hold conversations, each turn sent with the whole history. Media: one a turn.",
    ),
]
Speak = Annotated[
    bool,
    typer.Option(SPEAK, help="Conversations: sounds are sent while they are spoken, and times count from their end."),
]
Script = Annotated[
    Path | None,
    typer.Option(**A_FILE, help="JSON file of a conversation's turns: text, and lists of image, audio, video files."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(**A_FILE, help="Text file of prompts, one a line. Default: built-in ones."),
]
PromptWords = Annotated[
    int | None, typer.Option(parser=whole_number(1), metavar="N", help="Cut or repeat each prompt to N words.")
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(1), metavar="N", help="Cut or repeat each prompt to N tokens, as the server counts them."
    ),
]
TalkerMaxTokens = Annotated[
    int | None, typer.Option(parser=whole_number(1), metavar="N", help="Longest speech, in codes (50 a second).")
]
FixedLengths = Annotated[
    bool, typer.Option("--fixed-lengths", help="Replies of exactly --max-tokens tokens and --talker-max-tokens codes.")
]
FirstSeed = Annotated[
    int,
    typer.Option(
        parser=whole_number(0, MAX_FIRST_SEED),
        metavar="N",
        help="Of the arrivals, 0 to 2^62; request number i has this seed plus i.",
    ),
]
Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="Report to write (JSON); the plots lie beside it.")
]
Plots = Annotated[bool, typer.Option(help="Write plots (PNG).")]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How often, and with how many at once."""

    concurrency: Concurrency = ""
    rate: Rate = ""
    requests: Requests = None
    warm_up: WarmUp = None
    ramp_up: RampUp = 0
    listen: Listen = False
    crowds: Crowds = False
    conversation: Turns = None
    speak: Speak = False

    def loads(self) -> list[Load]:
        """The loads, closed loops first.

        Raises:
            typer.BadParameter: no list of numbers, or what their loops cannot do.
        """
        concurrency = self.concurrency or ("" if self.rate else DEFAULT_CONCURRENCY)
        closed = [Load("closed", value) for value in _numbers("--concurrency", concurrency, int)]
        opened = [Load("open", value) for value in _numbers("--rate", self.rate, float)]
        of_places = {
            LISTEN: self.listen,
            CROWDS: self.crowds,
            "--ramp-up": self.ramp_up,
            CONVERSATION: self.conversation,
        }
        if opened and (named := [option for option, given in of_places.items() if given]):
            raise typer.BadParameter("not with --rate, whose requests come when they come", param_hint=named[0])
        if self.crowds and (self.listen or self.ramp_up):
            raise typer.BadParameter("not with --listen or --ramp-up: a crowd comes at once", param_hint=CROWDS)
        if self.crowds and self.conversation:
            raise typer.BadParameter("not with --crowds, which asks single questions", param_hint=CONVERSATION)
        if self.speak and not self.conversation:
            raise typer.BadParameter("needs --conversation", param_hint=SPEAK)
        return closed + opened

    def described(self) -> dict[str, Any]:
        """Return the options that the report holds beside its loads."""
        return {"ramp_up_s": self.ramp_up, "listens": self.listen, "crowds": self.crowds}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(SamplingOptions):
    """Options of the requests."""

    prompts: Prompts = None
    prompt_words: PromptWords = None
    prompt_tokens: PromptTokens = None
    script: Script = None
    image: Images = None
    audio: Audios = None
    video: Videos = None
    talker_max_tokens: TalkerMaxTokens = None
    fixed_lengths: FixedLengths = False
    seed: FirstSeed = 0
    text_only: TextOnly = False

    @property
    def source(self) -> str:
        """Where the prompts are from."""
        return str(self.script or self.prompts or BUILT_IN)

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of the request, as `SamplingOptions` does."""
        return super().request_fields() | {
            "modalities": ("text",) if self.text_only else None,
            "thinker": with_limits("--thinker-json", self.thinker_json, self._limits(self.max_tokens)),
            "talker": with_limits("--talker-json", self.talker_json, self._limits(self.talker_max_tokens)),
        }

    def workload(self, turns: int | None = None, *, speaks: bool = False) -> Workload:
        """The requests, which are turns of conversations if `turns` is given, and speak their sounds if it `speaks`.

        Raises:
            typer.BadParameter: a file cannot be used, or options do not go together.
        """
        self._check_lengths()
        self._check_script(turns)
        with usage_errors("--prompts"):
            prompts = PROMPTS if self.prompts is None else read_prompts(self.prompts)
        with usage_errors():
            media = read_media(self.image, self.audio, self.video)
        if turns is not None and len(media) > turns:
            raise typer.BadParameter(
                f"{len(media)} media for {turns} turns, which show one each", param_hint=CONVERSATION
            )
        with usage_errors(SCRIPT):
            script = () if self.script is None else read_script(self.script)
        if speaks:
            with usage_errors(SPEAK):
                media, script = spoken(media), tuple(replace(turn, media=spoken(turn.media)) for turn in script)
        return Workload(
            prompts=prompts if self.prompt_words is None else [of_length(each, self.prompt_words) for each in prompts],
            media=media,
            turns=turns or 1,
            speaks=speaks,
            script=script,
            system=self.system,
            **self.request_fields(),
        )

    def _limits(self, most: int | None) -> dict[str, int]:
        if most is None:
            return {}
        return {"max_tokens": most} | ({"min_tokens": most} if self.fixed_lengths else {})

    def _check_script(self, turns: int | None) -> None:
        if self.script is None:
            return
        if turns is None:
            raise typer.BadParameter("needs --conversation", param_hint=SCRIPT)
        given = {
            "--prompts": self.prompts,
            "--prompt-words": self.prompt_words,
            "--prompt-tokens": self.prompt_tokens,
            "--image, --audio or --video": self.image or self.audio or self.video,
        }
        if named := [option for option, value in given.items() if value]:
            raise typer.BadParameter(f"not with {named[0]}: the script says what is asked", param_hint=SCRIPT)

    def _check_lengths(self) -> None:
        if self.prompt_tokens is not None and self.prompt_words is not None:
            raise typer.BadParameter("not with --prompt-words", param_hint="--prompt-tokens")
        if self.fixed_lengths and (self.max_tokens is None or (self.talker_max_tokens is None and not self.text_only)):
            needed = "--max-tokens" if self.text_only else "--max-tokens and --talker-max-tokens"
            raise typer.BadParameter(f"needs {needed}", param_hint="--fixed-lengths")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    output: Output = DEFAULT_OUTPUT
    plots: Plots = True

    def check(self) -> None:
        """Refuse what could not be written once everything is measured.

        Raises:
            typer.BadParameter: it could not.
        """
        output = self.output
        check_writable(output)
        faults = {
            "its folder cannot be written, which the plots need (--no-plots)": self.plots
            and not os.access(output.parent, os.W_OK),
            f"the report is JSON, not {output.suffix[1:]}; give a name in .json": output.suffix not in ("", ".json"),
        }
        for fault, found in faults.items():
            if found:
                raise typer.BadParameter(f"{output}: {fault}", param_hint="-o")


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> Sequence[float]:
    try:
        values = [kind(part) for part in text.split(",")] if text else []
    except ValueError as error:
        known = "whole numbers such as 1,8,32" if kind is int else "numbers such as 2,4.5"
        raise typer.BadParameter(f"{text!r} is no list of {known}", param_hint=option) from error
    if not all(0 < value < float("inf") for value in values):
        raise typer.BadParameter(f"{text!r}: every number must be above 0", param_hint=option)
    return values

# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, spelled and explained the same way everywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from triton_omni_client.media import load_media, media_kind
from triton_omni_client.messages import Media
from triton_omni_client.terminal import EXIT_CODES

Url = Annotated[
    str, typer.Option(envvar="TRITON_OMNI_URL", help="host:port of gRPC (streams), or http://host:port (one answer).")
]
StreamUrl = Annotated[str, typer.Option(envvar="TRITON_OMNI_URL", help="host:port of gRPC.")]
Model = Annotated[str, typer.Option(help="Triton model; empty is the one that fits the URL.")]
Voice = Annotated[str | None, typer.Option(help="Speaker; `triton-omni models` may list them.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all sampling.")]
TextOnly = Annotated[bool, typer.Option("--text-only", help="Ask for no speech.")]
VideoSound = Annotated[bool, typer.Option("--video-sound", help="Hear the videos' sound too.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds for one whole reply.")]
System = Annotated[
    str | None, typer.Option(help="System prompt. Default: the model card's, with which speech was trained.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest reply, in tokens.")]
Device = Annotated[str, typer.Option(help="Name or number of the sound device. Default: the system's.")]
Output = Annotated[
    str, typer.Option("-o", "--output", help="WAV file (24 kHz, mono, PCM16) for the reply; - is stdout.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone to stdout, one object a line.")]
Text = Annotated[str, typer.Argument(help="What to say; - reads it from stdin; empty beside files says nothing.")]
Paths = Annotated[
    list[str] | None,
    typer.Argument(help="Images, sounds and videos, told apart by content; - is stdin."),
]


def examples(*commands: str) -> str:
    """The end of a command's help: how it is used, a paragraph a line, and its exit codes."""
    return "\n\n".join(["Examples:", *(f"triton-omni {command}" for command in commands), EXIT_CODES])


def request_options(
    *, voice: str | None, seed: int | None, text_only: bool, timeout: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """The fields of `Request` that these options choose; what is left to the server is None."""
    return {
        "modalities": ("text",) if text_only else None,
        "voice": voice,
        "seed": seed,
        "timeout": timeout,
        "thinker": {} if max_tokens is None else {"max_tokens": max_tokens},
    }


def read_question(text: str, paths: list[str] | None) -> tuple[str, list[Media]]:
    """Text and media of the arguments; at most one of them is stdin.

    Raises:
        typer.BadParameter: stdin twice, a file in the place of the text, or nothing at all.
        BadRequest: a file cannot be read, or is no medium.
    """
    files = paths or []
    if [text, *files].count("-") > 1:
        raise typer.BadParameter("- can be given once: there is one stdin")
    if text and Path(text).is_file():
        raise typer.BadParameter(f'{text} is a file; give the text before it, or "" for none')
    media = [_from_stdin() if path == "-" else load_media(path) for path in files]
    said = sys.stdin.read().strip() if text == "-" else text
    if not said and not media:
        raise typer.BadParameter("give a text, or files, or both")
    return said, media


def _from_stdin() -> Media:
    data = sys.stdin.buffer.read()
    return Media(media_kind(data, "stdin"), data, "stdin")

# SPDX-License-Identifier: Apache-2.0
"""What the commands share: values of options, checked and read, and wrong ones refused by the option's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from .messages import AudioFormat, Media, MediaKind

Files = list[Path] | None
StageJson = Annotated[str, typer.Option(metavar="JSON", help="Parameters of this stage, a JSON object.")]


def read_media(image: Files, audio: Files, video: Files) -> list[Media]:
    """The files of the three options, images first.

    Raises:
        BadRequest: a file cannot be read.
    """
    kinds: list[tuple[MediaKind, Files]] = [("image", image), ("audio", audio), ("video", video)]
    return [Media.from_file(kind, path) for kind, paths in kinds for path in paths or []]


def json_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object, empty when the option was not given.

    Raises:
        typer.BadParameter: something else.
    """
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"expected a JSON object, found {text}", param_hint=option)
    return value


def known_audio_format(text: str) -> AudioFormat:
    """The audio format of this name.

    Raises:
        typer.BadParameter: there is none.
    """
    for known in get_args(AudioFormat):
        if text == known:
            found: AudioFormat = known
            return found
    raise typer.BadParameter(f"{text!r} is none of f32, pcm16, wav", param_hint="--audio-format")

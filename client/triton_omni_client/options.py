# SPDX-License-Identifier: Apache-2.0
"""Parsers of option values that all commands share. Their refusals have the value and the allowed range; typer adds the
option's name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from .containers import is_sound_alone
from .errors import BadRequest
from .messages import AudioFormat, Media, MediaKind
from .terminal import usage_errors

OTHER_FORMATS = frozenset({".aac", ".flac", ".m4a", ".mp3", ".mp4", ".oga", ".ogg", ".opus", ".pcm", ".raw", ".webm"})


def whole_number(least: int, most: int | None = None) -> Callable[[Any], int]:
    """A parser of whole numbers from `least` on, up to `most` where there is one."""
    allowed = f"a whole number from {least}" + (" on" if most is None else f" to {most}")

    def parse(text: Any) -> int:
        with suppress(ValueError):
            value = int(text)
            if least <= value and (most is None or value <= most):
                return value
        raise typer.BadParameter(f"{text!r} is not {allowed}")

    return parse


def number(
    least: float, most: float = math.inf, *, above: bool = False, what: str = "a number"
) -> Callable[[Any], float]:
    """A parser of finite numbers from `least` on, or above it, up to `most`; `what` is what they are called."""
    allowed = f"{what} {'above' if above else 'from'} {least:g}"
    allowed += f" {'and up ' * above}to {most:g}" if most < math.inf else " on" * (not above)

    def parse(text: Any) -> float:
        with suppress(ValueError):
            value = float(text)
            if (least < value if above else least <= value) and value <= most and math.isfinite(value):
                return value
        raise typer.BadParameter(f"{text!r} is not {allowed}")

    return parse


def seconds(*, above: bool = False) -> Callable[[Any], float]:
    """A parser of seconds from 0 on, or above 0."""
    return number(0, above=above, what="a number of seconds")


def json_object(text: str) -> dict[str, Any]:
    """A parser of JSON objects."""
    try:
        value = json.loads(text)
        # Python reads more numbers than JSON has, and gives up on deep nesting.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{text!r:.200} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f'{text!r:.200} is not a JSON object such as {{"top_k": 40}}')
    return value


def audio_format(text: str) -> AudioFormat:
    """A parser of audio formats."""
    for known in get_args(AudioFormat):
        if text == known:
            found: AudioFormat = known
            return found
    raise typer.BadParameter(f"{text!r} is none of {', '.join(get_args(AudioFormat))}")


def wav_name(output: str) -> str:
    """A parser of names of files to write speech to, which must not promise another format."""
    if (suffix := Path(output).suffix.lower()) in OTHER_FORMATS:
        raise typer.BadParameter(f"{output}: speech is written as WAV, not as {suffix[1:]}; give a name in .wav")
    return output


def png_name(output: str) -> str:
    """A parser of names of files to draw to, whose end tells that they are PNG."""
    if output and Path(output).suffix.lower() != ".png":
        raise typer.BadParameter(f"{output}: a picture is written as PNG; give a name in .png")
    return output


def check_writable(output: Path, option: str = "-o") -> None:
    """Refuse a file of an option that could not be written once there is something to write.

    Raises:
        typer.BadParameter: it could not.
    """
    try:
        faults = {
            "is a folder; give a file in it": output.is_dir(),
            "its folder does not exist": not output.parent.is_dir(),
            "cannot be written": not os.access(output if output.exists() else output.parent, os.W_OK),
        }
    except OSError as error:  # a name that is too long, or a folder that may not be searched
        faults = {f"cannot be written: {error.strerror}": True}
    for fault, found in faults.items():
        if found:
            raise typer.BadParameter(f"{output}: {fault}", param_hint=option)


def address(check: Callable[[str], object]) -> Callable[[str], str]:
    """A parser of addresses; `check` raises `BadRequest` for those that are none."""

    def parse(url: str) -> str:
        with usage_errors():
            check(url)
        return url

    return parse


Files = list[Path] | None
A_FILE: Final[dict[str, Any]] = {"exists": True, "dir_okay": False, "readable": True, "metavar": "FILE"}
"""Settings of an option that names a file to read; typer refuses other paths."""
Images = Annotated[Files, typer.Option(**A_FILE, help="Image file of the question; may be repeated.")]
Audios = Annotated[Files, typer.Option(**A_FILE, help="Audio file of the question; may be repeated.")]
Videos = Annotated[Files, typer.Option(**A_FILE, help="Video file of the question; may be repeated.")]
StageJson = Annotated[
    dict[str, Any] | None,
    typer.Option(parser=json_object, metavar="JSON", help="Options of this stage, a JSON object (docs/using.md)."),
]


def read_media(image: Files, audio: Files, video: Files) -> list[Media]:
    """The files of the three options, images first.

    Raises:
        BadRequest: a file cannot be read or is empty, or a video has sound alone.
    """
    kinds: list[tuple[MediaKind, Files]] = [("image", image), ("audio", audio), ("video", video)]
    media = [Media.from_file(kind, path) for kind, paths in kinds for path in paths or []]
    for medium in media:
        if not medium.data:
            raise BadRequest(f"{medium.name}: is empty")
        if medium.kind == "video" and is_sound_alone(medium.data):
            raise BadRequest(f"{medium.name}: it has sound and no pictures; give it by --audio")
    return media


def with_limits(option: str, chosen: Mapping[str, Any] | None, limits: Mapping[str, int]) -> dict[str, Any]:
    """Parameters of a stage: what its option says, and limits that have options of their own.

    Raises:
        typer.BadParameter: both say the same.
    """
    for name in limits:
        if name in (chosen or {}):
            raise typer.BadParameter(f"{name} is there, and another option says it already", param_hint=option)
    return {**(chosen or {}), **limits}

# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, spelled, checked and explained the same way everywhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from triton_omni_client.address import DEFAULT_URL, grpc_address, server_address
from triton_omni_client.conversation import Conversation
from triton_omni_client.errors import BadRequest
from triton_omni_client.media import load_media, media_kind
from triton_omni_client.messages import AudioFormat, Media, Request
from triton_omni_client.options import (
    StageJson,
    address,
    audio_format,
    png_name,
    seconds,
    wav_name,
    whole_number,
    with_limits,
)
from triton_omni_client.terminal import EXIT_CODES, usage_errors

MAX_SEED = 2**63 - 1
"""The server's bound."""

Url = Annotated[
    str,
    typer.Option(
        envvar="TRITON_OMNI_URL",
        parser=address(server_address),
        metavar="URL",
        help="host:port of gRPC (streams), or http://host:port (one answer).",
    ),
]
StreamUrl = Annotated[
    str,
    typer.Option(
        envvar="TRITON_OMNI_URL", parser=address(grpc_address), metavar="HOST:PORT", help="host:port of gRPC."
    ),
]
Model = Annotated[str, typer.Option(help="Triton model; empty is the one that fits the URL.")]
Voice = Annotated[str | None, typer.Option(help="Speaker; `triton-omni models` lists them. Default: the server's.")]
Seed = Annotated[
    int | None, typer.Option(parser=whole_number(0, MAX_SEED), metavar="N", help="Seed of all sampling, 0 to 2^63 - 1.")
]
TextOnly = Annotated[bool, typer.Option("--text-only", help="Ask for no speech.")]
VideoSound = Annotated[bool, typer.Option("--video-sound", help="Hear the videos' sound too.")]
Timeout = Annotated[
    float | None,
    typer.Option(parser=seconds(above=True), metavar="SECONDS", help="For one whole reply. Default: the server's."),
]
System = Annotated[
    str | None, typer.Option(help="System prompt. Default: the model card's, with which speech was trained.")
]
MaxTokens = Annotated[
    int | None, typer.Option(parser=whole_number(1), metavar="N", help="Longest reply, in tokens, 1 or more.")
]
AudioFormatName = Annotated[
    AudioFormat, typer.Option(parser=audio_format, metavar="FORMAT", help="How audio travels: f32, pcm16 or wav.")
]
Device = Annotated[str, typer.Option(help="Name or number of the sound device. Default: the system's.")]
Output = Annotated[
    str,
    typer.Option(
        "-o",
        "--output",
        parser=wav_name,
        metavar="FILE",
        help="WAV file (24 kHz, mono, PCM16) for the reply; - is stdout. Default: none.",
    ),
]
Spectrogram = Annotated[
    str,
    typer.Option(
        parser=png_name,
        metavar="FILE",
        help="PNG file for a mel spectrogram of the reply's speech (needs matplotlib). Default: none.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Ask nothing: check the text, the options and the files they name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone to stdout, one object a line.")]
Text = Annotated[str, typer.Argument(help="Text of the question; - reads it from stdin; empty = the media alone.")]
Paths = Annotated[
    list[str] | None,
    typer.Argument(help="Images, sounds and videos, told apart by content; - is stdin."),
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a reply is made; what is left out is the server's choice."""

    system: System = None
    voice: Voice = None
    seed: Seed = None
    max_tokens: MaxTokens = None
    timeout: Timeout = None
    audio_format: AudioFormatName = "f32"
    thinker_json: StageJson = None
    talker_json: StageJson = None
    token2wav_json: StageJson = None

    def request_fields(self) -> dict[str, Any]:
        """The fields of `Request` that these options choose, but for the system prompt.

        Raises:
            typer.BadParameter: two options say the same.
        """
        limits = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {
            "voice": self.voice,
            "seed": self.seed,
            "timeout": self.timeout,
            "audio_format": self.audio_format,
            "thinker": with_limits("--thinker-json", self.thinker_json, limits),
            "talker": self.talker_json or {},
            "token2wav": self.token2wav_json or {},
        }


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(SamplingOptions):
    """How a question is asked."""

    video_sound: VideoSound = False

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of the request, as `SamplingOptions` does."""
        return super().request_fields() | {"use_audio_in_video": self.video_sound or None}

    def request(self, text: str, media: Sequence[Media]) -> Request:
        """Return a request of one user message, after the system prompt where there is one.

        Raises:
            typer.BadParameter: nothing is asked, or options do not go together.
        """
        if not (text.strip() or media):
            raise typer.BadParameter("the request is empty; give a text, or files, or both", param_hint="text")
        if self.video_sound and not any(medium.kind == "video" for medium in media):
            raise typer.BadParameter("there is no video whose sound could be heard", param_hint="--video-sound")
        chosen = self.request_fields()
        with usage_errors():
            if self.system is None:
                asked = Request.ask(text, media, **chosen)
            else:
                asked = Conversation(system=self.system, cache_salt=None).request(text, media, **chosen)
            asked.check()
        return asked


@dataclass(frozen=True, kw_only=True)
class WrittenOptions(QuestionOptions):
    """How a question is asked whose reply need not be spoken."""

    text_only: TextOnly = False

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of the request, as `SamplingOptions` does."""
        return super().request_fields() | {"modalities": ("text",) if self.text_only else None}

    def check_output(self, output: str, spectrogram: str = "") -> None:
        """Refuse a file for speech that is not asked for.

        Raises:
            typer.BadParameter: so it is.
        """
        for option, file in {"-o": output, "--spectrogram": spectrogram}.items():
            if self.text_only and file:
                said = f"{file}: not with --text-only, whose reply has no speech"
                raise typer.BadParameter(said, param_hint=option)


@dataclass(frozen=True, kw_only=True)
class WhereOptions:
    """Where a reply comes from and where it goes."""

    output: Output = ""
    spectrogram: Spectrogram = ""
    as_json: AsJson = False
    check: Check = False
    url: Url = DEFAULT_URL
    model: Model = ""


def examples(*commands: str, exit_codes: str = EXIT_CODES) -> str:
    """The end of a command's help: how it is used, a paragraph a line, and its exit codes."""
    return "\n\n".join(["Examples:", *(f"triton-omni {command}" for command in commands), exit_codes])


def read_question(text: str, paths: list[str] | None) -> tuple[str, list[Media]]:
    """Text and media of the arguments; at most one of them is stdin.

    Raises:
        typer.BadParameter: stdin twice, a file in the place of the text, or what is no text or no medium.
    """
    files = paths or []
    if [text, *files].count("-") > 1:
        raise typer.BadParameter("- can be given once: there is one stdin")
    if _is_file(text):
        raise typer.BadParameter(f'{text} is a file; give the text before it, or "" for none')
    with usage_errors("files"):
        media = [_medium_of_stdin() if path == "-" else load_media(path) for path in files]
    return read_text(text), media


def read_text(text: str) -> str:
    """A text argument; `-` is what stdin says.

    Raises:
        typer.BadParameter: that is no text.
    """
    return _text_of_stdin() if text == "-" else text


def _is_file(text: str) -> bool:
    with suppress(OSError):  # a text may be too long for a name
        return bool(text) and Path(text).is_file()
    return False


def _medium_of_stdin() -> Media:
    data = sys.stdin.buffer.read()
    return Media(media_kind(data, "stdin"), data, "stdin")


def _text_of_stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _no_text(data, f"byte 0x{data[error.start]:02x} at {error.start}") from error
    if "\0" in text:
        raise _no_text(data, f"byte 0x00 at {data.index(0)}")
    return text.strip()


def _no_text(data: bytes, why: str) -> typer.BadParameter:
    """Return the message about a standard input that stands in the place of a text."""
    try:
        kind = media_kind(data)
    except BadRequest:
        return typer.BadParameter(f"stdin is not text in UTF-8: {why}", param_hint="text")
    said = f'stdin is {kind}, not text; it goes after one, which may be empty: ask "" -'
    return typer.BadParameter(said, param_hint="text")

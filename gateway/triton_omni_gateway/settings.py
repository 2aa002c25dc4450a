# SPDX-License-Identifier: Apache-2.0
"""How a gateway runs, read once and refused early; knows neither HTTP nor Triton."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from triton_omni_client.address import grpc_address
from triton_omni_client.errors import BadRequest

from .realtime.limits import RealtimeLimits

MIB = 1 << 20
PRIORITIES = range(-100, 101)
"""Allowed values of `priority`; the lowest is the most urgent."""
TEXT_MARK = "{input}"
SPEECH_PROMPT = "Read the following text aloud, word for word, and say nothing else:\n\n{input}"

TRANSCRIPTION_PROMPT = "Write down what is said, word by word."
TRANSLATION_PROMPT = "Translate what is said into English, and write down the translation alone."

ALL_ORIGINS = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z]+")
OPENAI_VOICES = tuple(
    "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()  # noqa: SIM905
)
"""Names that programs for OpenAI's API ask for; some allow no others."""
ANY_END = "*"
OPENAI_MODELS = ("gpt-*", "tts-*", "whisper-*")
"""Names of OpenAI's models, which such programs ask for where they are told none."""


class SettingsError(ValueError):
    """A setting that cannot be served with; the message names it."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Settings of one gateway.

    Raises:
        SettingsError: a value is impossible.
    """

    triton_urls: tuple[str, ...] = ("localhost:8001",)
    """`HOST:PORT` of the gRPC endpoint of each Triton server; requests are spread over them."""
    models: tuple[str, ...] = ("qwen2_5_omni", *OPENAI_MODELS)
    """Names that a request's `model` may have; all mean the server's one model. `gpt-*` stands for every name that
    begins so; the first is a whole name, which answers tell for such ones."""
    voices: Mapping[str, str | None] = field(default_factory=lambda: dict.fromkeys(OPENAI_VOICES))
    """Voices of the checkpoint by other names for them; None = its first one. Its own names go before these."""
    min_priority: int = 0
    """The lowest, so most urgent, `priority` that a caller may ask for; by default nobody gets in front of others."""
    max_requests: int = 256
    """Requests under way at once, bodies being read included; the next one is refused with 429."""
    max_connections: int = 1024
    """Open at once; of more, the one that has waited longest for a request is closed."""
    max_peer_connections: int = 256
    """The same of one address."""
    head_timeout_s: float = 10.0
    """Seconds in which a request's head has to arrive, from the connection's beginning or the last answer's end."""
    host_names: tuple[str, ...] = ()
    """Names that a gateway without keys is addressed by, beside `localhost` and IP addresses, in lower case."""
    origins: tuple[str, ...] = ()
    """Origins whose web pages may ask beside the gateway's own, such as `https://app.example`, or `*` for all."""
    max_body_bytes: int = 128 * MIB
    """Maximum bytes of one request's body; refused by its declared length, or once more has come."""
    body_timeout_s: float = 60.0
    """Seconds in which a request's body has to arrive."""
    send_timeout_s: float = 30.0
    """Seconds in which a caller has to take a part of its answer."""
    max_transcripts: int = 1024
    """Spoken replies remembered, so that a later message may name one by its id."""
    transcript_seconds: int = 3600
    """How long they are remembered: `expires_at`."""
    speech_prompt: str = SPEECH_PROMPT
    """Prompt that makes the model read a text aloud; `{input}` is the text's place."""
    realtime: RealtimeLimits = field(default_factory=RealtimeLimits)
    """Bounds of realtime sessions."""

    transcription_prompt: str = TRANSCRIPTION_PROMPT
    """Prompt that makes the model write down what it hears."""
    translation_prompt: str = TRANSLATION_PROMPT
    """Prompt that makes the model write down in English what it hears."""
    window_seconds: float = 30.0
    """Longest part of a recording that the model hears at once; it is cut at its quietest moments."""
    windows_at_once: int = 4
    """Windows of one recording that are asked for at once."""
    max_recording_seconds: int = 7200
    """Longest recording."""
    recording_cpu_seconds: int = 120
    """CPU seconds that one recording may take to decode."""
    recordings_at_once: int = 8
    """Recordings, and realtime turns longer than a window, decoded at once, each with up to 256 MiB; others wait. Short
    WAV files need no decoding here."""

    def __post_init__(self) -> None:
        for url in self.triton_urls:
            try:
                grpc_address(url)
            except BadRequest as error:
                raise SettingsError(f"--url must be the HOST:PORT of Triton's gRPC endpoint (got {url!r})") from error
            if self.triton_urls.count(url) > 1:
                raise SettingsError(f"--url names {url} more than once")
        if not self.triton_urls:
            raise SettingsError("--url names no Triton server")
        if not self.models or not all(self.models):
            raise SettingsError("--model-name must not be empty")
        if self.models[0].endswith(ANY_END):
            said = "the first --model-name is told in answers, so it must be a whole name"
            raise SettingsError(f"{said} (got {self.models[0]!r})")
        if self.min_priority not in PRIORITIES:
            raise SettingsError(f"--min-priority must be {PRIORITIES[0]} to {PRIORITIES[-1]} (got {self.min_priority})")
        for origin in self.origins:
            if origin != ALL_ORIGINS and not _ORIGIN.fullmatch(origin):
                raise SettingsError(f"--allow-origin must be SCHEME://HOST[:PORT] in lower case, or * (got {origin!r})")
        self._check_prompts()
        if self.window_seconds < 1:
            raise SettingsError(f"--window-seconds must be at least 1 (got {self.window_seconds:g})")
        for option in (
            "max_requests",
            "max_connections",
            "max_peer_connections",
            "head_timeout_s",
            "max_body_bytes",
            "body_timeout_s",
            "send_timeout_s",
            "max_transcripts",
            "transcript_seconds",
            "windows_at_once",
            "max_recording_seconds",
            "recording_cpu_seconds",
            "recordings_at_once",
        ):
            if getattr(self, option) <= 0:
                raise SettingsError(f"{option} must be positive (got {getattr(self, option)})")

    def _check_prompts(self) -> None:
        if TEXT_MARK not in self.speech_prompt:
            raise SettingsError(f"--speech-prompt has no {TEXT_MARK}, the place of the text to read")
        if not (self.transcription_prompt and self.translation_prompt):
            raise SettingsError("--transcription-prompt and --translation-prompt must not be empty")

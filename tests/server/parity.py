# SPDX-License-Identifier: Apache-2.0
"""A server's replies against HF's `generate` on the same weights: greedy tokens and codes exact, waveforms close."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from media_samples import audio_file, image_file, picture, video_file
from reference.hf import GREEDY_TALKER, GREEDY_THINKER, HfReference, Reply, Solver
from server.serving import TINY, Served
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.types import Video, VisionSizes
from triton_omni.request.media.video import decode_video
from triton_omni.session.engine import Sampling
from triton_omni.thinker.prompt import DEFAULT_SYSTEM_PROMPT
from triton_omni.token2wav.noise import standard_normal
from triton_omni_client import Reply as ServerReply
from triton_omni_client import Request
from triton_omni_client.messages import MediaKind

GREEDY: Mapping[str, Any] = {
    "thinker": {"temperature": 0, "max_tokens": GREEDY_THINKER.max_tokens},
    "talker": {"temperature": 0, "max_tokens": GREEDY_TALKER.max_tokens},
    "token2wav": {"mode": "offline"},
}
SOLVER = Solver(num_steps=TINY["token2wav"]["diffusion"]["num_steps"])
WAVEFORM_TOLERANCE = 1e-4
ROW_TOLERANCE = 2e-4
"""Hundreds of tokens summed in other orders; rows are of the order of 1. One element of 35,392 differed by 1.2e-4 on an
H100.
"""
SYSTEM = {"role": "system", "content": DEFAULT_SYSTEM_PROMPT}


@dataclass(frozen=True)
class Shown:
    """A medium, as the server gets it and as HF's processor does."""

    kind: MediaKind
    data: bytes
    size: tuple[int, int] | None = None
    """Width and height of a `picture`."""

    @functools.cached_property
    def value(self) -> Any:
        """A PIL image, float samples of 16 kHz, or frames [T, H, W, 3]."""
        if self.kind == "image":
            assert self.size is not None
            return Image.fromarray(picture(*self.size))
        if self.kind == "audio":
            return self.sound
        return self.video.frames

    @functools.cached_property
    def video(self) -> Video:
        """Its frames and how many a second they are."""
        return decode_video(self.data, "mp4", RequestLimits(), VisionSizes(), with_audio=False)

    @functools.cached_property
    def sound(self) -> Any:
        """Its samples of 16 kHz; a video's sound track."""
        if self.kind == "audio":
            return decode_audio(self.data, RequestLimits()).samples
        video = decode_video(self.data, "mp4", RequestLimits(), VisionSizes(), with_audio=True)
        assert video.audio is not None
        return video.audio.samples


def image(width: int, height: int) -> Shown:
    """A picture; png, so that its pixels are what they were."""
    return Shown("image", image_file("png", width, height), (width, height))


def sound(seconds: float) -> Shown:
    """A tone."""
    return Shown("audio", audio_file("wav", seconds=seconds))


def video(seconds: float, *, audio: bool = False, width: int = 64) -> Shown:
    """A film, perhaps with a sound track."""
    return Shown("video", video_file("mp4", seconds=seconds, audio=audio, width=width))


@dataclass(frozen=True)
class Turn:
    """One message: words and media in their order."""

    role: str
    parts: tuple[str | Shown, ...]

    @property
    def message(self) -> dict[str, Any]:
        """With a part for each medium, whose data come elsewhere; for the server and for HF alike."""
        texts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind} for part in self.parts
        ]
        return {"role": self.role, "content": texts}

    @property
    def media(self) -> list[Shown]:
        """In their order."""
        return [part for part in self.parts if isinstance(part, Shown)]


def system(text: str) -> Turn:
    """The caller's system prompt, instead of the model card's."""
    return Turn("system", (text,))


def user(*parts: str | Shown) -> Turn:
    """A user's texts and media."""
    return Turn("user", parts)


def assistant(text: str) -> Turn:
    """An earlier answer."""
    return Turn("assistant", (text,))


@dataclass(frozen=True)
class Chat:
    """A conversation with media."""

    turns: Sequence[Turn]
    heard: bool = False
    """True if the sound of its videos is part of it."""

    @property
    def media(self) -> list[Shown]:
        """All, in their order."""
        return [medium for turn in self.turns for medium in turn.media]

    def request(self, **options: Any) -> Request:
        """For the server."""
        return Request(
            messages=[turn.message for turn in self.turns],
            media=[medium.data for medium in self.media],
            use_audio_in_video=self.heard or None,
            **options,
        )

    def hf_inputs(self, hf: HfReference) -> dict[str, Any]:
        """For HF's `generate`."""
        sounds = {"audio", "video"} if self.heard else {"audio"}
        opening = [] if self.turns[0].role == "system" else [SYSTEM]
        return hf.prepare(
            [*opening, *(turn.message for turn in self.turns)],
            images=[medium.value for medium in self.media if medium.kind == "image"],
            audios=[medium.sound for medium in self.media if medium.kind in sounds],
            videos=[medium.value for medium in self.media if medium.kind == "video"],
            fps=[medium.video.fps for medium in self.media if medium.kind == "video"] or 2.0,
            use_audio_in_video=self.heard,
        )


@dataclass(frozen=True)
class Expected:
    """HF's answer to a request, and its voice."""

    reply: Reply
    voice: str


def hf_reply(
    hf: HfReference,
    inputs: dict[str, Any],
    voice: str,
    *,
    thinker: Sampling = GREEDY_THINKER,
    talker: Sampling = GREEDY_TALKER,
) -> Expected:
    """HF's greedy reply, as codes; the waveform is a function of these and of the seed."""
    return Expected(hf.generate(inputs, voice=voice, thinker=thinker, talker=talker, speak=False), voice)


def noise(seed: int, codes: int) -> torch.Tensor:
    """Our noise of the reply's mel frames, two a code."""
    return standard_normal([(seed, 0, 2 * codes)], 80, torch.device("cpu"))[None]


def hf_details(hf: HfReference, prompt: tuple[int, ...]) -> dict[str, int]:
    """Count the parts of a prompt, by the ids of HF's configuration."""
    config = hf.model.config.thinker_config
    media = {
        "audio_tokens": prompt.count(config.audio_token_id),
        "image_tokens": prompt.count(config.image_token_id),
        "video_tokens": prompt.count(config.video_token_id),
    }
    return {"text_tokens": len(prompt) - sum(media.values()), "cached_tokens": 0, **media}


def assert_equals_hf(server: Served, hf: HfReference, request: Request, expected: Expected) -> None:
    """The reply to `request` is the expected one: prompt ids, positions, rows, reply ids, text, codes and waveform."""
    check_reply(server, hf, request, server.client.stream(request).collect(), expected)


def check_reply(server: Served, hf: HfReference, request: Request, reply: ServerReply, wanted: Expected) -> None:
    """`assert_equals_hf` of a reply that has come."""
    assert request.seed is not None
    expected = wanted.reply
    assert server.records.positions(request.request_id) == expected.thinker.positions.tolist()
    assert server.records.prompt(request.request_id) == expected.thinker.prompt_token_ids
    assert server.records.tokens(request.request_id) == expected.thinker.token_ids
    rows, wanted_rows = server.records.rows(request.request_id), expected.thinker.rows.numpy()
    np.testing.assert_allclose(rows, wanted_rows, rtol=2e-5, atol=ROW_TOLERANCE)
    assert server.records.codes(request.request_id) == expected.talker.codes
    # A character cut off by the end of the reply is never shown, where HF decodes it to a replacement character.
    assert reply.text.rstrip("\ufffd") == expected.thinker.text.rstrip("\ufffd")
    assert reply.info is not None
    assert reply.info.prompt_tokens == len(expected.thinker.prompt_token_ids)
    assert reply.info.prompt_tokens_details == hf_details(hf, expected.thinker.prompt_token_ids)
    assert reply.info.reply_tokens == len(expected.thinker.token_ids)
    assert reply.info.codes == len(expected.talker.codes)
    assert reply.info.samples == len(reply.audio)
    codes = expected.talker.codes
    speech = hf.token2wav(codes, wanted.voice, noise(request.seed, len(codes)), SOLVER)
    np.testing.assert_allclose(reply.audio, speech.waveform.numpy(), rtol=0, atol=WAVEFORM_TOLERANCE)

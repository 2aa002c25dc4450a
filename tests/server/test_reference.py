# SPDX-License-Identifier: Apache-2.0
"""The whole server against HF's `generate` on the same weights: greedy tokens and codes exact, waveforms close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from media_samples import audio_file, image_file, picture, video_file
from reference.hf import GREEDY_TALKER, GREEDY_THINKER, HfReference, Reply
from server.serving import Served
from triton_omni.media import VisionSizes, decode_audio, decode_video
from triton_omni.settings import RequestLimits
from triton_omni.thinker.prompt import DEFAULT_SYSTEM_PROMPT
from triton_omni.token2wav.noise import standard_normal
from triton_omni_client import Media, Request

GREEDY = {
    "thinker": {"temperature": 0, "max_tokens": GREEDY_THINKER.max_tokens},
    "talker": {"temperature": 0, "max_tokens": GREEDY_TALKER.max_tokens},
    "token2wav": {"mode": "offline"},
}
WAVEFORM_TOLERANCE = 1e-4
SYSTEM = {"role": "system", "content": DEFAULT_SYSTEM_PROMPT}
QUESTION = {"type": "text", "text": "what is this?"}
TEXTS = {
    "one letter": "x",
    "one word": "hello",
    "a question": "what is the weather like in Paris today?",
    "many scripts": "naïve café 漢字 emoji 😀",
    "no space": "a" * 100,
    "over several prefill chunks": "Tell me a story about a ship. " * 12,
}
SOUND = audio_file("wav", seconds=1.3)
VIDEO = video_file("mp4", seconds=1.0)


def decoded_sound() -> np.ndarray:
    return decode_audio(SOUND, RequestLimits()).samples


def decoded_frames() -> np.ndarray:
    return decode_video(VIDEO, "mp4", RequestLimits(), VisionSizes(), with_audio=False).frames


@dataclass(frozen=True)
class Shown:
    """A medium before a question, as the server gets it and as HF does."""

    medium: Media

    def hf_inputs(self, hf: HfReference) -> dict[str, Any]:
        messages = [SYSTEM, {"role": "user", "content": [{"type": self.medium.kind}, QUESTION]}]
        if self.medium.kind == "image":
            return hf.prepare(messages, images=[Image.fromarray(picture(112, 84))])
        if self.medium.kind == "audio":
            return hf.prepare(messages, audios=[decoded_sound()])
        return hf.prepare(messages, videos=[decoded_frames()])


SHOWN = {
    "image": Shown(Media("image", image_file("png", 112, 84))),
    "sound": Shown(Media("audio", SOUND)),
    "video": Shown(Media("video", VIDEO)),
}


def noise(seed: int, codes: int) -> torch.Tensor:
    """Our noise of the reply's mel frames, two a code."""
    return standard_normal([(seed, 0, 2 * codes)], 80, torch.device("cpu"))[None]


def hf_details(hf: HfReference, prompt: tuple[int, ...]) -> dict[str, int]:
    """What a prompt is made of, by the ids of HF's configuration."""
    config = hf.model.config.thinker_config
    media = {
        "audio_tokens": prompt.count(config.audio_token_id),
        "image_tokens": prompt.count(config.image_token_id),
        "video_tokens": prompt.count(config.video_token_id),
    }
    return {"text_tokens": len(prompt) - sum(media.values()), **media}


def assert_equals_hf(server: Served, hf: HfReference, request: Request, inputs: dict[str, Any], voice: str) -> Reply:
    """The reply to `request` is HF's to `inputs`: prompt ids, reply ids, text, codes and waveform."""
    assert request.seed is not None
    expected = hf.generate(inputs, voice=voice, speak=False)
    reply = server.client.stream(request).collect()
    assert server.records.prompt(request.request_id) == expected.thinker.prompt_token_ids
    assert server.records.tokens(request.request_id) == expected.thinker.token_ids
    assert server.records.codes(request.request_id) == expected.talker.codes
    # A character cut off by the end of the reply is never shown, where HF decodes it to a replacement character.
    assert reply.text.rstrip("\ufffd") == expected.thinker.text.rstrip("\ufffd")
    assert reply.info is not None
    assert reply.info.prompt_tokens == len(expected.thinker.prompt_token_ids)
    assert reply.info.prompt_tokens_details == hf_details(hf, expected.thinker.prompt_token_ids)
    assert reply.info.reply_tokens == len(expected.thinker.token_ids)
    assert reply.info.codes == len(expected.talker.codes)
    assert reply.info.samples == len(reply.audio)
    speech = hf.token2wav(expected.talker.codes, voice, noise(request.seed, len(expected.talker.codes)))
    np.testing.assert_allclose(reply.audio, speech.waveform.numpy(), rtol=0, atol=WAVEFORM_TOLERANCE)
    return expected


@pytest.mark.parametrize("voice", ["Chelsie", "Ethan"])
@pytest.mark.parametrize("name", TEXTS)
def test_text_gets_hf_tokens_codes_and_waveform(server: Served, hf: HfReference, name: str, voice: str) -> None:
    request = Request(text=TEXTS[name], voice=voice, seed=7, request_id=f"hf {name} {voice}", **GREEDY)
    inputs = hf.prepare([SYSTEM, {"role": "user", "content": TEXTS[name]}])
    expected = assert_equals_hf(server, hf, request, inputs, voice)
    assert len(expected.thinker.token_ids) > 20
    assert len(expected.talker.codes) > 2


@pytest.mark.parametrize("name", SHOWN)
def test_medium_gets_hf_tokens_codes_and_waveform(server: Served, hf: HfReference, name: str) -> None:
    request = Request.ask(
        QUESTION["text"], [SHOWN[name].medium], voice="Chelsie", seed=2**40 + 3, request_id=f"hf {name}", **GREEDY
    )
    assert_equals_hf(server, hf, request, SHOWN[name].hf_inputs(hf), "Chelsie")


def test_media_of_all_kinds_in_one_chat_get_hf_tokens_codes_and_waveform(server: Served, hf: HfReference) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, QUESTION]},
        {"role": "assistant", "content": "a square"},
        {"role": "user", "content": [{"type": "audio"}, {"type": "video"}, {"type": "text", "text": "and these?"}]},
    ]
    inputs = hf.prepare(
        [SYSTEM, *messages],
        images=[Image.fromarray(picture(112, 84))],
        audios=[decoded_sound()],
        videos=[decoded_frames()],
    )
    media = [SHOWN[name].medium.data for name in ("image", "sound", "video")]
    request = Request(messages=messages, media=media, voice="Ethan", seed=5, request_id="hf chat", **GREEDY)
    assert_equals_hf(server, hf, request, inputs, "Ethan")

# SPDX-License-Identifier: Apache-2.0
"""Client and backend share no code; here each reads what the other writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from client_fakes import floats
from triton_omni.core import errors as backend_errors
from triton_omni.core.settings import RequestLimits
from triton_omni.request import parse as backend_request
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from triton_omni.session import answer
from triton_omni.token2wav import open_session
from triton_omni_client import Media, MediaOptions, Request, TalkerOptions, ThinkerOptions, Token2WavOptions, errors
from triton_omni_client.audio import SAMPLE_RATE, WavDecoder, pcm16_from_waveform, wav_header
from triton_omni_client.messages import Tensor

KINDS = {
    backend_errors.BadRequest: errors.BadRequest,
    backend_errors.TooLarge: errors.TooLarge,
    backend_errors.Overloaded: errors.Overloaded,
    backend_errors.Cancelled: errors.Cancelled,
    backend_errors.DeadlineExceeded: errors.Timeout,
    backend_errors.InternalError: errors.Internal,
}


# The types ask for nothing, so each names all of its keys here.
THINKER: ThinkerOptions = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_tokens": 8,
    "min_tokens": 0,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: -1.5},
    "stop": ["\n"],
    "json_schema": {"type": "string"},
}
TALKER: TalkerOptions = {
    "temperature": 0.9,
    "top_p": 0.8,
    "top_k": 3,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "max_tokens": 50,
    "min_tokens": 1,
}
TOKEN2WAV: Token2WavOptions = {
    "mode": "offline",
    "solver": "euler",
    "preset": "fast",
    "num_steps": 4,
    "guidance_scale": 1.0,
    "max_lead_s": 3.0,
}

MEDIA: MediaOptions = {"fps": 0.5, "max_frames": 8, "max_pixels": 200704}


@pytest.mark.parametrize(
    ("here", "there", "named"),
    [
        (ThinkerOptions, backend_request.ThinkerOptions, THINKER),
        (TalkerOptions, backend_request.TalkerOptions, TALKER),
        (Token2WavOptions, backend_request.Token2WavOptions, TOKEN2WAV),
        (MediaOptions, backend_request.MediaOptions, MEDIA),
    ],
    ids=["thinker", "talker", "token2wav", "media"],
)
def test_the_types_of_a_stages_options_have_the_backends_keys(
    here: type, there: type[BaseModel], named: Mapping[str, object]
) -> None:
    assert here.__annotations__.keys() == there.model_fields.keys() == named.keys()


def _elements(tensor: Tensor) -> list[bytes]:
    found, at = [], 0
    while at < len(tensor.data):
        size = int.from_bytes(tensor.data[at : at + 4], "little")
        found.append(tensor.data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def _raw(request: Request) -> RawRequest:
    tensors = {tensor.name: _elements(tensor) for tensor in request.to_tensors()}
    inputs = {name: tensors[name][0] for name in ("text_input", "messages", "sampling_parameters") if name in tensors}
    return RawRequest(media=tensors.get("media", []), request_id="", **inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_of_the_backend_has_its_class_here(kind: type[backend_errors.OmniError]) -> None:
    found = errors.from_text(kind("what: 'was' wrong", stage="talker", retry_after_ms=40).to_text())
    assert type(found) is KINDS[kind]
    assert (found.code, found.message, found.stage, found.retry_after_ms) == (
        kind.code,
        "what: 'was' wrong",
        "talker",
        40,
    )


def test_the_backend_accepts_every_field_that_the_client_can_send() -> None:
    request = Request.ask(
        "what?",
        [Media("image", b"\x89PNG\r\n\x1a\n" + bytes(8))],
        modalities=("text", "audio"),
        voice="Ethan",
        seed=5,
        audio_format="pcm16",
        use_audio_in_video=True,
        mm_processor_kwargs=MEDIA,
        thinker=THINKER,
        talker=TALKER,
        token2wav=TOKEN2WAV,
        priority=-3,
        cache_salt="mine",
        cache=True,
        audio_in_pieces=True,
        prefill_only=True,
        timeout=9.5,
    )
    parsed = parse_request(_raw(request), RequestLimits(), RequestDefaults())
    assert (parsed.modalities, parsed.voice, parsed.seed, parsed.audio_format) == (
        ("text", "audio"),
        "Ethan",
        5,
        "pcm16",
    )
    assert (parsed.timeout_s, parsed.use_audio_in_video, parsed.priority) == (9.5, True, -3)
    assert (parsed.cache_salt, parsed.audio_in_pieces, parsed.prefill_only) == ("mine", True, True)
    assert (parsed.thinker.max_tokens, parsed.talker.top_k, parsed.token2wav.solver) == (8, 3, "euler")
    assert parsed.thinker.logit_bias == {"5": -1.5}
    assert (parsed.thinker.stop, parsed.thinker.json_schema) == (["\n"], {"type": "string"})
    assert parsed.mm_processor_kwargs.model_dump() == MEDIA
    assert len(parsed.media) == 1


def test_the_backend_accepts_a_plain_question() -> None:
    parsed = parse_request(_raw(Request(text="hi")), RequestLimits(), RequestDefaults())
    assert (parsed.modalities, parsed.audio_format, parsed.seed) == (("text", "audio"), "f32", None)


def test_both_round_a_waveform_to_the_same_bytes() -> None:
    waveform = torch.linspace(-1.1, 1.1, 200_001)
    assert pcm16_from_waveform(waveform.numpy()) == open_session.to_pcm16(waveform)


@pytest.mark.parametrize("num_samples", [None, 3])
def test_both_write_the_same_wav_header(num_samples: int | None) -> None:
    size = None if num_samples is None else 2 * num_samples
    header = answer.wav_header(SAMPLE_RATE, size)
    assert header == wav_header(num_samples)
    np.testing.assert_array_equal(WavDecoder().feed(header + b"\xff\x7f"), floats([1]))

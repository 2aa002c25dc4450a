# SPDX-License-Identifier: Apache-2.0
"""Client and backend share no code; here each reads what the other writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from client_fakes import floats
from triton_omni import errors as backend_errors
from triton_omni.request import RawRequest, RequestDefaults, parse_request
from triton_omni.settings import RequestLimits
from triton_omni.token2wav import encoding
from triton_omni_client import Media, Request, errors
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
        thinker={"temperature": 0.5, "max_tokens": 8},
        talker={"top_k": 3},
        token2wav={"solver": "euler", "num_steps": 4},
        timeout=9.5,
    )
    parsed = parse_request(_raw(request), RequestLimits(), RequestDefaults())
    assert (parsed.modalities, parsed.voice, parsed.seed, parsed.audio_format) == (
        ("text", "audio"),
        "Ethan",
        5,
        "pcm16",
    )
    assert (parsed.timeout_s, parsed.use_audio_in_video) == (9.5, True)
    assert (parsed.thinker.max_tokens, parsed.talker.top_k, parsed.token2wav.solver) == (8, 3, "euler")
    assert len(parsed.media) == 1


def test_the_backend_accepts_a_plain_question() -> None:
    parsed = parse_request(_raw(Request(text="hi")), RequestLimits(), RequestDefaults())
    assert (parsed.modalities, parsed.audio_format, parsed.seed) == (("text", "audio"), "f32", None)


def test_both_round_a_waveform_to_the_same_bytes() -> None:
    waveform = torch.linspace(-1.1, 1.1, 200_001)
    assert pcm16_from_waveform(waveform.numpy()) == encoding.to_pcm16(waveform)


@pytest.mark.parametrize("num_samples", [None, 3])
def test_both_write_the_same_wav_header(num_samples: int | None) -> None:
    size = None if num_samples is None else 2 * num_samples
    header = encoding.wav_header(SAMPLE_RATE, size)
    assert header == wav_header(num_samples)
    np.testing.assert_array_equal(WavDecoder().feed(header + b"\xff\x7f"), floats([1]))

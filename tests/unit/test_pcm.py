# SPDX-License-Identifier: Apache-2.0
"""16-bit PCM and WAV headers, read back by the standard library and by libsndfile."""

import base64
import io
import struct
import wave

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_omni.session.answer import WAV_HEADER_BYTES, to_base64, wav_header
from triton_omni.token2wav.open_session import to_pcm16, whole_groups

RATE = 24000


def test_samples_become_little_endian_16_bit():
    samples = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -7.0])
    assert struct.unpack("<6h", to_pcm16(samples)) == (0, 32767, -32767, 16384, 32767, -32767)


@given(st.lists(st.floats(-1, 1, width=32), max_size=50))
def test_a_sample_is_off_by_half_a_step_at_most(samples):
    # fp32 near 32767 has steps of 0.002.
    found = np.frombuffer(to_pcm16(torch.tensor(samples, dtype=torch.float32)), "<i2") / 32767
    assert np.allclose(found, np.float32(samples), rtol=0, atol=0.502 / 32767)


def test_no_samples_are_no_bytes():
    assert to_pcm16(torch.empty(0)) == b""


@pytest.mark.parametrize("rate", [RATE, 16000])
def test_a_header_with_its_length_makes_a_file_that_others_read(rate):
    samples = torch.linspace(-1, 1, 480)
    data = to_pcm16(samples)
    header = wav_header(rate, len(data))
    assert len(header) == WAV_HEADER_BYTES
    with wave.open(io.BytesIO(header + data)) as file:
        assert file.getparams()[:4] == (1, 2, rate, 480)
        assert file.readframes(480) == data
    found, found_rate = soundfile.read(io.BytesIO(header + data), dtype="int16")
    assert found_rate == rate
    assert found.tobytes() == data


@pytest.mark.parametrize("count", [0, 1, 480, 24001])
def test_a_streamed_header_tells_an_unknown_length_and_is_read_to_the_end(count):
    data = to_pcm16(torch.linspace(-1, 1, count))
    header = wav_header(RATE)
    assert struct.unpack("<I", header[40:44]) == (0x7FFFF000,)  # sox's
    found, rate = soundfile.read(io.BytesIO(header + data), dtype="int16")
    assert rate == RATE
    assert found.tobytes() == data
    # The standard library counts frames by the header, and reads those that are there.
    with wave.open(io.BytesIO(header + data)) as file:
        assert file.getnframes() == 0x7FFFF000 // 2
        assert file.readframes(file.getnframes()) == data


def test_the_two_headers_differ_in_lengths_alone():
    streamed, whole = bytearray(wav_header(RATE)), bytearray(wav_header(RATE, 10))
    for header in (streamed, whole):
        header[4:8] = header[40:44] = bytes(4)
    assert streamed == whole


def test_base64_is_read_back():
    assert base64.b64decode(to_base64(bytes(range(256)))) == bytes(range(256))


@given(st.lists(st.binary(max_size=7), max_size=9))
def test_texts_of_whole_groups_are_one_text_when_joined(pieces):
    rest, texts = b"", []
    for piece in pieces:
        whole, rest = whole_groups(rest + piece)
        assert len(rest) < 3
        texts.append(to_base64(whole))
    joined = "".join([*texts, to_base64(rest)])
    assert base64.b64decode(joined, validate=True) == b"".join(pieces)

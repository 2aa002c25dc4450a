# SPDX-License-Identifier: Apache-2.0
"""PCM16 and WAV, to the sample: the decoders, the file writer, and the round trip between them."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from client_fakes import floats
from triton_omni_client.audio import (
    SAMPLE_RATE,
    Pcm16Decoder,
    WavDecoder,
    WavWriter,
    pcm16_from_waveform,
    wav_header,
)
from triton_omni_client.errors import Internal

ALL_VALUES = np.arange(-32768, 32768, dtype=np.int16)


def _wav(samples: NDArray[np.int16], *, rate: int = SAMPLE_RATE, channels: int = 1, width: int = 2) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def _tagged(tag: int) -> bytes:
    """A WAV file whose header says this format."""
    plain = _wav(ALL_VALUES[:8])
    return plain[:20] + struct.pack("<H", tag) + plain[22:]


def _decoded(values: NDArray[np.int16]) -> NDArray[np.float32]:
    return np.maximum(values.astype(np.float32) / np.float32(32767), np.float32(-1))


class _Pipe(io.BytesIO):
    def seekable(self) -> bool:
        return False


def test_pcm16_decodes_every_value_exactly() -> None:
    decoded = Pcm16Decoder().feed(ALL_VALUES.astype("<i2").tobytes())
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded[1:], ALL_VALUES[1:].astype(np.float32) / np.float32(32767))
    assert decoded[0] == -1  # the one value beyond full scale


def test_pcm16_survives_decoding_and_encoding() -> None:
    data = ALL_VALUES[1:].astype("<i2").tobytes()
    assert pcm16_from_waveform(Pcm16Decoder().feed(data)) == data


def test_samples_outside_of_the_range_are_clipped_not_wrapped() -> None:
    assert np.frombuffer(pcm16_from_waveform(floats([1.0, 1.5, -1.0, -9.0])), "<i2").tolist() == [
        32767,
        32767,
        -32767,
        -32767,
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 43, 44, 45, 1000])
@pytest.mark.parametrize("known", [True, False])
def test_a_wav_stream_may_be_cut_anywhere(size: int, known: bool) -> None:
    values = ALL_VALUES[::97]
    data = wav_header(len(values) if known else None) + values.astype("<i2").tobytes()
    decoder = WavDecoder()
    pieces = [decoder.feed(data[at : at + size]) for at in range(0, len(data), size)]
    np.testing.assert_array_equal(np.concatenate(pieces), _decoded(values))


def test_chunks_around_the_samples_of_a_wav_file_are_skipped() -> None:
    extra = struct.pack("<4sI", b"LIST", 3) + b"abc\0"
    plain = _wav(ALL_VALUES[:8])
    decoded = WavDecoder().feed(plain[:36] + extra + plain[36:] + extra)
    np.testing.assert_array_equal(decoded, _decoded(ALL_VALUES[:8]))


@pytest.mark.parametrize("size", [0, 0xFFFF_FFFF])
def test_samples_of_a_length_that_is_not_told_are_read_to_the_end(size: int) -> None:
    data = _wav(ALL_VALUES[:8])
    decoder = WavDecoder()
    pieces = [decoder.feed(part) for part in (data[:40] + struct.pack("<I", size) + data[44:], data[44:])]
    np.testing.assert_array_equal(np.concatenate(pieces), _decoded(np.tile(ALL_VALUES[:8], 2)))


def test_the_extensible_spelling_of_pcm16_is_read() -> None:
    np.testing.assert_array_equal(WavDecoder().feed(_tagged(0xFFFE)), _decoded(ALL_VALUES[:8]))


@pytest.mark.parametrize(
    "data",
    [
        b"OggS" + bytes(40),
        b"RIFF\0\0\0\0AVI " + bytes(40),
        _wav(ALL_VALUES[:8], rate=16_000),
        _wav(ALL_VALUES[:8], channels=2),
        _wav(ALL_VALUES[:8], width=1),
        _tagged(3),
    ],
)
def test_what_is_not_pcm16_mono_24_khz_is_refused(data: bytes) -> None:
    with pytest.raises(Internal, match="expected"):
        WavDecoder().feed(data)


def test_a_written_file_is_read_back_by_others(tmp_path: Path) -> None:
    path = tmp_path / "reply.wav"
    with path.open("wb") as file, WavWriter(file) as writer:
        writer.write(floats([0.5, -0.5]))
        writer.write(floats([0.25]))
    with wave.open(str(path)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (SAMPLE_RATE, 1, 2)
        assert np.frombuffer(reader.readframes(99), "<i2").tolist() == [16384, -16384, 8192]
    assert struct.unpack_from("<I", path.read_bytes(), 4) == (path.stat().st_size - 8,)


def test_a_pipe_gets_a_header_of_unknown_length_and_is_never_sought() -> None:
    pipe = _Pipe()
    with WavWriter(pipe) as writer:
        writer.write(floats([0.5]))
    data = pipe.getvalue()
    assert struct.unpack_from("<I", data, 40) == (0x7FFFF000,)
    np.testing.assert_array_equal(WavDecoder().feed(data), _decoded(np.array([16384], np.int16)))

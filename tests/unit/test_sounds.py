# SPDX-License-Identifier: Apache-2.0
"""Sounds of several seconds in every format: written in one go, joined, damaged, or with headers that lie."""

from __future__ import annotations

import functools
import io
import json
import struct
from collections.abc import Callable

import av
import numpy as np
import pytest
import soxr

import media_samples as samples
from media_samples import encoded_sound
from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media import audio
from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.decode import decode_media
from triton_omni.request.media.files import sniff
from triton_omni.request.media.types import Video, VisionSizes
from triton_omni.request.media.video import decode_video

LIMITS = RequestLimits()
SECONDS = 6


def heard(data: bytes) -> np.ndarray:
    return decode_audio(data, LIMITS).samples


def written(rate: int, seconds: float = SECONDS) -> np.ndarray:
    """Return the samples that `encoded_sound` encodes, at 16 kHz."""
    return np.asarray(soxr.resample(samples.sweep(seconds, rate), rate, 16000))


def decibels(expected: np.ndarray, found: np.ndarray) -> float:
    """Return the decibels of the expected sound over the difference, in the worst second; a sample's shift gives 15."""
    many = min(len(expected), len(found)) // 16000
    pairs = zip(np.split(expected[: many * 16000], many), np.split(found[: many * 16000], many), strict=True)
    return min(float(10 * np.log10(np.mean(a**2) / (np.mean((a - b) ** 2) + 1e-12))) for a, b in pairs)


@functools.cache
def _made(container: str, codec: str, options: str) -> bytes:
    return encoded_sound(container, codec, **json.loads(options))


def made(container: str, codec: str, **options: object) -> bytes:
    """`encoded_sound`, once."""
    return _made(container, codec, json.dumps(options))


def mp3(**options: object) -> bytes:
    return made("mp3", "libmp3lame", **{"bit_rate": 64000, **options})


def opus(**options: object) -> bytes:
    return made("ogg", "libopus", rate=48000, **options)


def vorbis(rate: int = 44100, seconds: float = SECONDS) -> bytes:
    return made("ogg", "vorbis", rate=rate, seconds=seconds)


WHOLE: dict[str, tuple[Callable[[], bytes], int, int, int, float]] = {
    # Writer, rate, samples at 16 kHz, number of those that the encoder put before the sound, decibels.
    "wav": (lambda: made("wav", "pcm_s24le"), 44100, 96000, 0, 95),
    "mp3 vbr": (lambda: mp3(bit_rate=None, options={"q:a": "4"}), 44100, 96000, 0, 24),
    "mp3 abr": (lambda: mp3(options={"abr": "1"}), 44100, 96000, 0, 24),
    "mp3 of a low rate": (lambda: mp3(bit_rate=24000), 44100, 96000, 0, 24),
    "mp3 vbr, piped": (lambda: mp3(bit_rate=None, options={"q:a": "4"}, piped=True), 44100, 96549, 401, 22),
    "mp3 abr, piped": (lambda: mp3(options={"abr": "1"}, piped=True), 44100, 96549, 401, 22),
    "flac, piped": (lambda: made("flac", "flac", piped=True), 44100, 96000, 0, 80),
    "ogg flac": (lambda: made("ogg", "flac"), 44100, 96000, 0, 80),
    "ogg vorbis": (vorbis, 44100, 96000, 0, 33),
    "ogg opus": (opus, 48000, 96000, 0, 33),
    "aac": (lambda: made("adts", "aac", bit_rate=128000), 44100, 96596, 372, 12),
    "m4a": (lambda: made("ipod", "aac", bit_rate=128000), 44100, 96224, 0, 25),
    "m4a of ALAC": (lambda: made("ipod", "alac"), 44100, 96000, 0, 95),
    "webm": (lambda: made("webm", "libopus", rate=48000), 48000, 96000, 0, 33),
    "webm, as a browser records it": (
        lambda: made("webm", "libopus", rate=48000, piped=True),
        48000,
        96000,
        0,
        33,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_sound_is_heard_whole_and_where_it_was(name: str) -> None:
    make, rate, length, before, least = WHOLE[name]
    found = heard(make())
    assert len(found) == length
    assert decibels(written(rate), found[before:]) > least


@pytest.mark.parametrize(("codec", "rate"), [("libopencore_amrnb", 8000), ("libvo_amrwbenc", 16000)])
def test_a_phones_recording_is_heard(codec: str, rate: int) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no {codec}")
    found = heard(encoded_sound("amr", codec, rate=rate, bit_rate=12200, samples=samples.tone(SECONDS, rate)))
    assert len(found) == pytest.approx(96000, abs=500)
    assert abs(np.argmax(np.abs(np.fft.rfft(found[:96000]))) / SECONDS - 440) < 2


class TestHeadersThatLie:
    """A header with a wrong length: the samples that are there count."""

    @pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0xFFFFFFF0, 0x7FFFFFFF])
    def test_of_a_wav(self, size: int) -> None:
        data = bytearray(samples.audio_file("wav", samples=samples.sweep(), rate=44100))
        data[4:8] = data[40:44] = struct.pack("<I", size)
        assert len(heard(bytes(data))) == 96000
        assert decibels(written(44100), heard(bytes(data))) > 60

    @pytest.mark.parametrize("frames", [1, 60, 10_000])
    def test_of_an_mp3(self, frames: int) -> None:
        data = bytearray(mp3(bit_rate=None, options={"q:a": "4"}))
        place = data.index(b"Xing" if b"Xing" in data else b"Info") + 8
        data[place : place + 4] = struct.pack(">I", frames)
        found = heard(bytes(data))
        # A frame is 418 samples at 16 kHz; which one is the last, and ends early, is what the header says.
        assert 95_000 <= len(found) <= 96_549

    @pytest.mark.parametrize("total", [0, 1, 2**36 - 1])
    def test_of_a_flac(self, total: int) -> None:
        data = bytearray(made("flac", "flac"))
        data[21:26] = ((data[21] >> 4) << 36 | total).to_bytes(5)
        assert decibels(written(44100), heard(bytes(data))) > 80

    @pytest.mark.parametrize("make", [opus, vorbis])
    def test_an_ogg_without_its_end(self, make: Callable[[], bytes]) -> None:
        data = make()
        found = heard(data[: data.rindex(b"OggS")])
        assert len(found) > 64000
        assert decibels(written(48000 if make is opus else 44100), found) > 30

    def test_a_sound_over_the_limit_whose_header_says_less(self) -> None:
        limits = LIMITS.model_copy(update={"max_audio_seconds": 5.0})
        data = bytearray(made("flac", "flac"))
        data[21:26] = ((data[21] >> 4) << 36 | 44100).to_bytes(5)
        with pytest.raises(TooLarge, match="longer than 5 seconds"):
            decode_audio(bytes(data), limits)


ID3 = b"ID3\x04\0\0" + bytes([0, 0, 2, 0]) + bytes(256)
CHAINS: dict[str, list[tuple[Callable[[], bytes], int]]] = {
    "vorbis": [(vorbis, 44100), (vorbis, 44100)],
    "vorbis of two rates": [(vorbis, 44100), (lambda: vorbis(22050), 22050), (vorbis, 44100)],
    "opus": [(opus, 48000), (opus, 48000)],
    "flac": [(lambda: made("ogg", "flac"), 44100)] * 2,
    "vorbis and opus": [(vorbis, 44100), (opus, 48000)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_of_a_chained_ogg_every_link_is_heard(name: str) -> None:
    links = CHAINS[name]
    found = heard(b"".join(make() for make, _ in links))
    # Links of one rate are resampled together.
    assert len(found) == 96000 * len(links)
    expected = np.concatenate([written(rate) for _, rate in links])
    assert decibels(expected, found) > 25


@pytest.mark.parametrize("between", [b"", ID3, b"TAG" + bytes(125)], ids=["nothing", "ID3", "ID3v1"])
def test_of_joined_mp3_pieces_every_one_is_heard(between: bytes) -> None:
    first, second = mp3(), mp3(bit_rate=128000)
    found = heard(first + between + second)
    # The second begins with its header as a frame of silence, and what its encoder put before the sound.
    before = round((1152 + 1105) * 16000 / 44100)
    assert len(found) == pytest.approx(2 * 96000 + before, abs=600)
    expected = written(44100)
    assert decibels(expected, found[:96000]) > 24
    second_begins = 96000 + int(np.argmax(np.correlate(found[96000 : 96000 + before + 600 + 48000], expected[:48000])))
    assert decibels(expected[:80000], found[second_begins:]) > 14


def with_noise(data: bytes, first: float, last: float) -> bytes:
    damaged, begin, end = bytearray(data), int(len(data) * first), int(len(data) * last)
    damaged[begin:end] = np.random.default_rng(7).bytes(end - begin)
    return bytes(damaged)


DAMAGED = {
    "mp3": mp3,
    "mp3 vbr": lambda: mp3(bit_rate=None, options={"q:a": "4"}),
    "flac": lambda: made("flac", "flac"),
    "aac": lambda: made("adts", "aac"),
    "vorbis": lambda: vorbis(seconds=20),
    "opus": opus,
    "ogg flac": lambda: made("ogg", "flac"),
    "webm": lambda: made("webm", "libopus", rate=48000),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_left_of_a_damaged_sound_is_heard(name: str) -> None:
    data = DAMAGED[name]()
    whole, found = heard(data), heard(with_noise(data, 0.5, 0.6))
    assert 0.7 * len(whole) < len(found) < len(whole)
    np.testing.assert_allclose(found[:16000], whole[:16000], atol=1e-5)
    # Sound after the damage may be shifted by a part of a sample, and end a frame earlier or later.
    end = found[-9000:-3000]
    place = int(np.argmax(np.correlate(whole[-14000:], end)))
    assert abs(place - 5000) < 200
    assert np.corrcoef(whole[-14000:][place : place + 6000], end)[0, 1] > 0.98


@pytest.mark.parametrize("name", DAMAGED)
def test_a_sound_that_is_mostly_lost_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=r"damaged: \d\d% of the sound is lost, the limit is 50%; encode or send it"):
        heard(with_noise(DAMAGED[name](), 0.25, 0.85))


@pytest.mark.parametrize("name", ["aac", "m4a", "mp3", "flac", "wav", "webm"])
def test_a_cover_or_a_tag_is_no_damage(name: str) -> None:
    make, _, length, *_ = WHOLE[name] if name in WHOLE else (DAMAGED[name], 0, 96000)
    tag = b"ID3\x04\0\0" + bytes([0x00, 0x40, 0, 0]) + bytes(1 << 20)
    data = make()
    if sniff(data) in ("mp3", "aac", "flac"):
        assert sniff(tag + data) == sniff(data)
        assert len(heard(tag + data)) == length
    if sniff(data) == "mp3":
        assert len(heard(data + b"APETAGEX" + bytes(1 << 20))) == pytest.approx(length, abs=1200)


class TestContainers:
    @pytest.mark.parametrize("container", ["webm", "ipod", "mp4", "matroska"])
    def test_one_without_a_video_track_is_a_sound(self, container: str) -> None:
        codec = "libopus" if container in ("webm", "matroska") else "aac"
        part = MediaPart("audio", made(container, codec, rate=48000, seconds=2))
        (audio,) = decode_media([part], LIMITS, with_audio=False)
        assert len(audio.samples) == pytest.approx(32000, abs=400)
        with pytest.raises(BadRequest, match=r"medium 0 \(video\): has no video track"):
            decode_media([MediaPart("video", part.data)], LIMITS, with_audio=False)

    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_one_with_a_video_track_is_none(self, kind: str) -> None:
        with pytest.raises(BadRequest, match=r"medium 0 \(audio\): is a video: send it as one"):
            decode_media([MediaPart("audio", samples.video_file(kind, audio=True))], LIMITS, with_audio=False)

    @pytest.mark.parametrize(("container", "codec"), [("matroska", "wavpack"), ("matroska", "tta"), ("wav", "wmav2")])
    def test_a_codec_that_is_not_listed_is_refused_by_name(self, container: str, codec: str) -> None:
        with pytest.raises(BadRequest, match=f"the codec of its audio track is {codec}; send AAC, MP3, Opus,"):
            heard(made(container, codec, seconds=1, bit_rate=64000))

    @pytest.mark.parametrize("data", [b"\x1aE\xdf\xa3" + bytes(99), b"\0\0\0\x18ftypM4A " + bytes(99), b"fLaC" * 50])
    def test_what_cannot_be_read_is_refused_with_a_cure(self, data: bytes) -> None:
        with pytest.raises(BadRequest, match=r"unreadable audio, damaged or cut off: .*; encode it anew"):
            heard(data)


def audio_packets(data: bytes) -> list[tuple[int, int]]:
    """Return the packets' places in a file, and their sizes."""
    with av.open(io.BytesIO(data)) as source:
        return [(packet.pos, packet.size) for packet in source.demux(audio=0) if packet.pos is not None]


def test_lost_sound_of_a_video_is_silence_and_all_else_stays_where_it_was() -> None:
    data = samples.video_file("mp4", seconds=3, audio=True)
    places = audio_packets(data)
    damaged = bytearray(data)
    for place, size in places[len(places) // 3 : 2 * len(places) // 3]:
        damaged[place : place + size] = b"\xff" * size
    whole, found = (_sound_of(bytes(each)) for each in (data, damaged))
    assert len(found) == pytest.approx(len(whole), abs=16)
    assert not found[20_000:28_000].any()
    np.testing.assert_allclose(found[:14_000], whole[:14_000], atol=1e-4)
    np.testing.assert_allclose(found[36_000:], whole[36_000:], atol=5e-3)


def test_a_video_most_of_whose_sound_is_lost_is_refused() -> None:
    data = bytearray(samples.video_file("mp4", seconds=3, audio=True))
    for place, size in audio_packets(bytes(data))[10:]:
        data[place : place + size] = b"\xff" * size
    with pytest.raises(BadRequest, match="of the sound is lost, the limit is 50%"):
        _sound_of(bytes(data))


def _sound_of(data: bytes) -> np.ndarray:
    video: Video = decode_video(data, "mp4", LIMITS, VisionSizes(), with_audio=True)
    assert video.audio is not None
    return video.audio.samples


def test_a_long_wav_is_opened_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding reads the bytes again that were read to open the file."""
    read: list[int] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            read.append(len(found))
            return found

    data = samples.audio_file("wav", seconds=30)
    monkeypatch.setattr("triton_omni.request.media.files.io.BytesIO", Watched)
    blocks = audio._blocks_of_file(data, "wav", RequestLimits())
    next(blocks)
    assert sum(read) < len(data) / 3
    assert sum(len(block) for _, block in blocks) + 32768 == 480_000

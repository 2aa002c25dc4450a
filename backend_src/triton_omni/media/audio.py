# SPDX-License-Identifier: Apache-2.0
"""Sound to mono float32 at 16 kHz, as the model card's recipe does (librosa: mean of channels, soxr HQ).

Packets are decoded in their order, up to the last one there is: lengths that a header names bound nothing.
Knows FFmpeg, through PyAV, and soxr.
"""

from __future__ import annotations

import errno
import io
import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import cast

import av
import numpy as np
import soxr  # type: ignore[import-untyped]
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.codec.context import Flags2
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from numpy.typing import NDArray

from triton_omni.errors import BadRequest, TooLarge
from triton_omni.media.sniffing import FileType, after_tags, sniff
from triton_omni.media.types import SAMPLE_RATE, Audio
from triton_omni.settings import RequestLimits

MAX_CHANNELS = 8
MAX_RATE = 192_000
MIN_SAMPLES = 480
"""Three mel frames: with fewer the audio encoder has no output position."""
MAX_TRACKS = 16
"""Each gets a decoder when a file is opened."""
CODECS = (
    *("aac", "ac3", "alac", "amrnb", "amrwb", "eac3", "flac", "mp2float", "mp3", "mp3float", "opus", "vorbis"),
    *("adpcm_ima_wav", "adpcm_ms", "gsm_ms", "pcm_alaw", "pcm_mulaw", "pcm_u8"),
    *(f"pcm_{kind}{end}" for kind in ("s16", "s24", "s32", "f32", "f64") for end in ("le", "be")),
)
"""FFmpeg has decoders of hundreds more, which nobody sends and few look after."""
_KNOWN_CODECS = "AAC, MP3, Opus, Vorbis, FLAC, ALAC, AMR, AC-3 or PCM"
LEAST_GAP_S = 0.1
"""Time stamps of packets that follow each other may differ by less from the lengths of these."""

_PACKED_FORMATS = {"wav": {"max_size": "65536"}}
"""Options of a demuxer: packets of a thousand samples, its default, take longer to pass on than to decode."""
_DENSE: tuple[FileType, ...] = ("mp3", "aac", "amr", "flac")
"""Formats in which packets follow each other without anything between."""
_TAGS = (b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN")
_FIRST_PAGE = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")
_PAGE_HEADER = 27

Block = tuple[int, NDArray[np.float32]]
"""A sample rate, and mono samples."""


def decode_audio(data: bytes, limits: RequestLimits) -> Audio:
    """Decode a file of sound, in any format that `sniff` knows.

    Raises:
        BadRequest: unreadable, without sound or with a video track, mostly damaged, too short, not finite, or of an
            unsupported codec, rate or number of channels.
        TooLarge: longer than `limits.max_audio_seconds`, found after that much was decoded.
    """
    kind = sniff(data)
    if kind is None:
        raise BadRequest("unreadable audio: an unknown format")
    tally = Tally()
    audio = finish_audio(_blocks_of_file(data, kind, tally), limits.max_audio_seconds)
    tally.check()
    return audio


class Tally:
    """How many bytes of a track could be decoded, and how many could not."""

    def __init__(self) -> None:
        self.decoded = self.lost = 0

    def check(self) -> None:
        """Refuse a track of which too little is left.

        Raises:
            BadRequest: less than half.
        """
        if self.lost > self.decoded:
            share = 100 * self.lost / (self.lost + self.decoded)
            raise BadRequest(
                f"damaged: {share:.0f} % of the sound cannot be decoded, the limit is 50 %; encode or send it anew"
            )


def decode_track(source: InputContainer, limits_s: float) -> Audio | None:
    """The first sound track of an open video, or None where there is none; what is lost of it is silence.

    Raises:
        BadRequest, TooLarge: as `decode_audio`; longer than `limits_s` seconds.
    """
    if not source.streams.audio:
        return None
    tally = Tally()
    origin = source.streams.video[0].start_time if source.streams.video else None
    time_base = source.streams.video[0].time_base if source.streams.video else None
    began = float(origin * time_base) if origin is not None and time_base is not None else None
    audio = finish_audio(_in_time(_frames(source, tally, None), began, limits_s), limits_s)
    tally.check()
    return audio


def finish_audio(blocks: Iterable[Block], max_seconds: float) -> Audio:
    """Join mono blocks and resample them to 16 kHz, those of each rate together.

    Raises:
        BadRequest: too short, or not finite.
        TooLarge: longer than `max_seconds`.
    """
    runs: list[tuple[int, list[NDArray[np.float32]]]] = []
    seconds = 0.0
    for rate, block in blocks:
        seconds += len(block) / rate
        if seconds > max_seconds + 0.5 / rate:
            raise TooLarge(f"longer than {max_seconds:g} seconds, the limit of this deployment")
        if not runs or runs[-1][0] != rate:
            runs.append((rate, []))
        runs[-1][1].append(block)
    waves = [_resample(np.concatenate(run), rate) for rate, run in runs]
    samples = np.concatenate(waves) if waves else np.zeros(0, np.float32)
    if len(samples) < MIN_SAMPLES:
        raise BadRequest(f"{len(samples)} samples at 16 kHz, at least {MIN_SAMPLES} (30 ms) are needed")
    return Audio(samples)


def _resample(wave: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """librosa's `resample`: soxr HQ, then exactly ceil(n * 16000 / rate) samples."""
    if not np.isfinite(wave).all():
        raise BadRequest("holds samples that are not finite numbers")
    if rate == SAMPLE_RATE or not len(wave):
        return wave
    length = math.ceil(len(wave) * SAMPLE_RATE / rate)
    out = np.asarray(soxr.resample(wave, rate, SAMPLE_RATE, quality="HQ"), dtype=np.float32)[:length]
    return np.pad(out, (0, length - len(out)))


def _blocks_of_file(data: bytes, kind: FileType, tally: Tally) -> Iterator[Block]:
    for piece in ogg_links(data) if kind == "ogg" else [data[after_tags(data) :]]:
        try:
            with _open(piece, kind) as source:
                if any(not stream.disposition & Disposition.attached_pic for stream in source.streams.video):
                    raise BadRequest("is a video: send it as one, with use_audio_in_video where its sound matters")
                if not source.streams.audio:
                    raise BadRequest("has no sound track")
                most = _ogg_vorbis_samples(source, piece) if kind == "ogg" else None
                frames = _frames(source, tally, piece if kind in _DENSE else None)
                yield from _first(map(_mono, frames), most)
        except av.error.FFmpegError as error:
            raise BadRequest(f"unreadable audio: {error.strerror}; encode it anew, for example as wav") from error


def _ogg_vorbis_samples(source: InputContainer, data: bytes) -> int | None:
    """How many samples its last page counts, if it is Vorbis alone: FFmpeg counts those of the first packet, too, which
    has none, and would end a sound of one page too early."""
    stream = source.streams.audio[0]
    if stream.name != "vorbis" or len(source.streams) > 1:
        return None
    stream.codec_context.flags2 |= Flags2.skip_manual
    place = data.rfind(b"OggS") + 6
    return int.from_bytes(data[place : place + 8], "little")


def _first(blocks: Iterable[Block], most: int | None) -> Iterator[Block]:
    left = sys.maxsize if most is None else most
    for rate, block in blocks:
        yield rate, block[:left]
        left = max(0, left - len(block))


def ogg_links(data: bytes) -> Iterator[bytes]:
    """The pieces of a chained Ogg file, each of which is one by itself: they may differ in codec and rate.

    A piece begins with the first pages of its streams, one after another.
    """
    start, follows = 0, 0
    for found in _FIRST_PAGE.finditer(data):
        place = found.start()
        if place not in (start, follows):
            yield data[start:place]
            start = place
        segments = data[place + _PAGE_HEADER - 1 : place + _PAGE_HEADER]
        table = data[place + _PAGE_HEADER : place + _PAGE_HEADER + (segments[0] if segments else 0)]
        follows = place + _PAGE_HEADER + len(table) + sum(table)
    yield data[start:]


def _open(data: bytes, kind: FileType) -> InputContainer:
    options = {"codec_whitelist": ",".join(CODECS), "max_streams": str(MAX_TRACKS), **_PACKED_FORMATS.get(kind, {})}
    return av.open(io.BytesIO(data), mode="r", format=kind, metadata_errors="replace", options=options)


def _frames(source: InputContainer, tally: Tally, dense: bytes | None) -> Iterator[AudioFrame]:
    """What can be decoded of the first sound track; `dense` is the file, where what lies between packets is damage."""
    stream = source.streams.audio[0]
    _check_codec(stream)
    end = 0
    for packet in _packets(source, stream, tally):
        if dense is not None and packet.pos is not None:
            tally.lost += _damage_between(dense, end, packet.pos)
            end = packet.pos + packet.size
        try:
            frames = packet.decode()
        except av.error.FFmpegError as error:
            if error.errno == errno.ENOMEM:
                raise
            tally.lost += packet.size
        else:
            tally.decoded += packet.size
            yield from frames


def _packets(source: InputContainer, stream: AudioStream, tally: Tally) -> Iterator[Packet[AudioStream]]:
    """All packets, up to where the container itself is damaged."""
    packets, end = source.demux(stream), 0
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except av.error.FFmpegError as error:
            if error.errno == errno.ENOMEM:
                raise
            tally.lost += max(0, source.size - end)
            return
        end = packet.pos or end
        yield packet


def _damage_between(data: bytes, end: int, begin: int) -> int:
    """Bytes between two packets that are no tag."""
    return 0 if data.startswith(_TAGS, end) else max(0, begin - end)


def _check_codec(stream: AudioStream) -> None:
    # PyAV has None for a codec that this FFmpeg does not know.
    context = cast("AudioCodecContext | None", stream.codec_context)
    name = "unknown" if context is None else context.name
    if name not in CODECS:
        raise BadRequest(f"the codec of its audio track is {name}; send {_KNOWN_CODECS}")


def _mono(frame: AudioFrame) -> Block:
    """The mean of a frame's channels, as float32 in [-1, 1].

    Raises:
        BadRequest: a rate or a number of channels that costs far more than its seconds suggest.
    """
    rate, channels = frame.sample_rate, frame.layout.nb_channels
    if not 1 <= rate <= MAX_RATE:
        raise BadRequest(f"sample rate {rate} Hz is outside of 1 to {MAX_RATE}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise BadRequest(f"{channels} channels, allowed are 1 to {MAX_CHANNELS}")
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, channels).T
    floats = _floats(samples)
    return rate, floats[0] if channels == 1 else floats.mean(axis=0, dtype=np.float32)


def _floats(samples: NDArray[np.generic]) -> NDArray[np.float32]:
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    if np.issubdtype(samples.dtype, np.integer):
        return samples.astype(np.float32) / np.float32(2 ** (8 * samples.dtype.itemsize - 1))
    return samples.astype(np.float32)


def _in_time(frames: Iterable[AudioFrame], origin: float | None, max_seconds: float) -> Iterator[Block]:
    """Frames at the times of their stamps, counted from `origin` (None = the first one's): silence fills what lacks."""
    seconds = 0.0
    for frame in frames:
        rate, block = _mono(frame)
        if frame.time is not None:
            origin = frame.time if origin is None else origin
            gap = frame.time - origin - seconds
            if gap > LEAST_GAP_S:
                silence = np.zeros(round(min(gap, max_seconds + 1) * rate), np.float32)
                seconds += len(silence) / rate
                yield rate, silence
        seconds += len(block) / rate
        yield rate, block

# SPDX-License-Identifier: Apache-2.0
"""Sound to mono float32 at 16 kHz, as the model card's recipe does (librosa: mean of channels, soxr HQ).

Packets are decoded in order, up to the last one; lengths in a header bound nothing.
Knows FFmpeg, through PyAV, and soxr.
"""

from __future__ import annotations

import errno
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import av
import numpy as np
import soxr  # type: ignore[import-untyped]
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.codec.context import Flags2
from av.container import InputContainer
from av.stream import Disposition
from numpy.typing import NDArray

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.damage import DamageCount, last_ogg_position, ogg_links
from triton_omni.request.media.files import FileType, after_tags, open_file, sniff
from triton_omni.request.media.types import SAMPLE_RATE, Audio

MAX_CHANNELS = 8
MAX_RATE = 192_000
MAX_SAMPLE = 2.0**32
"""Full scale is 1, or 2^31 where integers were written as floats. Squares of far larger samples overflow float32."""
MIN_SAMPLES = 480
"""Three mel frames: with fewer the audio encoder has no output position."""
MAX_TRACKS = 16
"""Maximum tracks of a file; FFmpeg opens a decoder for each."""
CODECS = (
    *("aac", "ac3", "alac", "amrnb", "amrwb", "eac3", "flac", "mp2float", "mp3", "mp3float", "opus", "vorbis"),
    *("adpcm_ima_wav", "adpcm_ms", "gsm_ms", "pcm_alaw", "pcm_mulaw", "pcm_u8"),
    *(f"pcm_{kind}{end}" for kind in ("s16", "s24", "s32", "f32", "f64") for end in ("le", "be")),
)
"""Codecs that are decoded. FFmpeg has hundreds more, which nobody sends and few maintain."""
_KNOWN_CODECS = "AAC, MP3, Opus, Vorbis, FLAC, ALAC, AMR, AC-3 or PCM"
LEAST_GAP_S = 0.1
"""Seconds; a smaller difference between the time stamps of successive packets is no gap."""

_DEMUXER_OPTIONS: dict[FileType, dict[str, str]] = {"wav": {"max_size": "65536", "probesize": "65536"}}
"""Packets of a thousand samples, the default, take longer to pass on than to decode. With its own `probesize` FFmpeg
reads half a minute before it opens the file.
"""

Block = tuple[int, NDArray[np.float32]]
"""A sample rate, and mono samples."""


def decode_audio(data: bytes, limits: RequestLimits) -> Audio:
    """Decode a file of sound, in any format that `sniff` knows.

    Raises:
        BadRequest: unreadable, without sound or with a video track, mostly damaged, too short, too loud, not finite,
            or of an unsupported codec, rate or number of channels.
        TooLarge: longer than `limits.max_audio_seconds`, found after that much was decoded.
    """
    kind = sniff(data)
    if kind is None:
        raise BadRequest("unreadable audio: an unknown format")
    return finish_audio(_blocks_of_file(data, kind, limits), limits.max_audio_seconds)


def decode_track(source: InputContainer, max_seconds: float) -> Audio | None:
    """Decode the first sound track of an open video, with silence for lost parts; None = it has none.

    Raises:
        BadRequest, TooLarge: as `decode_audio`; longer than `max_seconds`.
    """
    if not source.streams.audio:
        return None
    pictures = source.streams.video[0] if source.streams.video else None
    begin = None
    if pictures is not None and pictures.start_time is not None and pictures.time_base is not None:
        begin = float(pictures.start_time * pictures.time_base)
    return finish_audio(_in_time(source, begin, max_seconds), max_seconds)


def finish_audio(blocks: Iterable[Block], max_seconds: float) -> Audio:
    """Join mono blocks and resample them to 16 kHz, those of each rate together.

    Raises:
        BadRequest: too short, too loud, or not finite.
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
    if len(wave) and (peak := float(np.abs(wave).max())) > MAX_SAMPLE:
        raise BadRequest(f"a sample is {peak:.3g}, the limit is {MAX_SAMPLE:g}: scale the sound to -1 to 1")
    if rate == SAMPLE_RATE or not len(wave):
        return wave
    length = math.ceil(len(wave) * SAMPLE_RATE / rate)
    out = np.asarray(soxr.resample(wave, rate, SAMPLE_RATE, quality="HQ"), dtype=np.float32)[:length]
    return np.pad(out, (0, length - len(out)))


def _blocks_of_file(data: bytes, kind: FileType, limits: RequestLimits) -> Iterator[Block]:
    damage = DamageCount(kind, limits.max_audio_seconds)
    for piece in ogg_links(data) if kind == "ogg" else [data[after_tags(data) :]]:
        damage.start_piece(piece)
        try:
            with _open(piece, kind, limits) as source:
                if any(not stream.disposition & Disposition.attached_pic for stream in source.streams.video):
                    raise BadRequest("is a video: send it as one, with use_audio_in_video where its sound matters")
                if not source.streams.audio:
                    raise BadRequest("has no sound track")
                trim = _vorbis_trim(source, piece) if kind == "ogg" else iter
                yield from trim(map(_mono, _frames(source, damage)))
        except av.error.FFmpegError as error:
            raise BadRequest(
                f"unreadable audio, damaged or cut off: {error.strerror}; encode it anew, for example as wav"
            ) from error
    damage.check()


def _vorbis_trim(source: InputContainer, data: bytes) -> Callable[[Iterable[Block]], Iterator[Block]]:
    """Return the function that trims an Ogg file's blocks to those that are sound; it trims Vorbis alone.

    The first packet has no samples, and the last page counts them all. In a file of one page FFmpeg counts some for the
    first packet, and would end the sound too early.
    """
    stream = source.streams.audio[0]
    if stream.name != "vorbis" or len(source.streams) > 1:
        return iter
    stream.codec_context.flags2 |= Flags2.skip_manual
    samples = last_ogg_position(data)
    return lambda blocks: _first(itertools.islice(blocks, 1, None), samples)


def _first(blocks: Iterable[Block], samples: int) -> Iterator[Block]:
    for rate, block in blocks:
        yield rate, block[:samples]
        samples = max(0, samples - len(block))


def _open(data: bytes, kind: FileType, limits: RequestLimits) -> InputContainer:
    options = {"codec_whitelist": ",".join(CODECS), "max_streams": str(MAX_TRACKS), **_DEMUXER_OPTIONS.get(kind, {})}
    return open_file(data, kind, limits, options)


def _frames(source: InputContainer, damage: DamageCount) -> Iterator[AudioFrame]:
    """Yield the frames of the first sound track that can be decoded, up to where the container itself is damaged."""
    stream = source.streams.audio[0]
    _check_codec(stream)
    packets, is_cut = source.demux(stream), False
    while not is_cut:
        try:
            packet = next(packets)
        except StopIteration:
            break
        except av.error.FFmpegError as error:
            _check_memory(error)
            is_cut = True
            continue
        try:
            frames = packet.decode()
        except av.error.FFmpegError as error:
            _check_memory(error)
            damage.count_packet(packet, is_decoded=False)
            continue
        damage.count_packet(packet, is_decoded=True)
        for frame in frames:
            damage.count_frame(frame)
            yield frame
    damage.end(source.size, is_cut=is_cut)


def _check_memory(error: av.error.FFmpegError) -> None:
    if error.errno == errno.ENOMEM:
        raise error


def _check_codec(stream: AudioStream) -> None:
    # PyAV has None for a codec that this FFmpeg does not know.
    context = cast("AudioCodecContext | None", stream.codec_context)
    name = "unknown" if context is None else context.name
    if name not in CODECS:
        raise BadRequest(f"the codec of its audio track is {name}; send {_KNOWN_CODECS}")


def _mono(frame: AudioFrame) -> Block:
    """Return the mean of a frame's channels, as float32 in [-1, 1].

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


def _in_time(source: InputContainer, begin: float | None, max_seconds: float) -> Iterator[Block]:
    """Yield the first sound track by its time stamps from `begin` (None = the first stamp); silence fills gaps."""
    damage, seconds = DamageCount(None, max_seconds), 0.0
    for frame in _frames(source, damage):
        rate, block = _mono(frame)
        if frame.time is not None:
            begin = frame.time if begin is None else begin
            gap = frame.time - begin - seconds
            if gap > LEAST_GAP_S:
                silence = np.zeros(round(min(gap, max_seconds + 1) * rate), np.float32)
                seconds += len(silence) / rate
                yield rate, silence
        seconds += len(block) / rate
        yield rate, block
    damage.check()

# SPDX-License-Identifier: Apache-2.0
"""Damaged, lying and exploding media: decoded within the limits, or refused by number, kind and cause."""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import event, given
from hypothesis import strategies as st

import media_samples as samples
from hostile import files
from hostile.judging import Bounds, judge
from hostile.sizes import cases
from hostile.strategies import INTERESTING, damaged
from triton_omni.core.errors import BadRequest, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaKind, MediaPart
from triton_omni.request.media.decode import decode_media
from triton_omni.request.media.types import Audio, Image, Medium, PixelRange, Video, VisionSizes

LIMITS = RequestLimits(
    max_image_pixels=1 << 20,
    max_audio_seconds=2.0,
    max_video_seconds=4.0,
    max_video_frames=8,
    max_video_pixels=1 << 20,
    max_video_source_pixels=1 << 26,
)
SIZES = VisionSizes(image=PixelRange(28 * 28, 1 << 20), frame=PixelRange(28 * 28, 1 << 18))
BOUNDS = Bounds(seconds=4.0, mebibytes=128.0)
KINDS: tuple[MediaKind, ...] = ("audio", "image", "video")


def decode(kind: MediaKind, data: bytes, bounds: Bounds = BOUNDS, limits: RequestLimits = LIMITS) -> Medium | OmniError:
    """Return the decoded medium or its refusal; an accepted medium is inside the limits."""

    def call() -> tuple[Medium, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of what it can do without
            return decode_media([MediaPart(kind, data)], limits, SIZES, with_audio=True)

    found = judge(call, bounds, named=rf"medium 0 \({kind}\): \S")
    if isinstance(found, OmniError):
        return found
    check_within(found[0], limits)
    return found[0]


def check_within(medium: Medium, limits: RequestLimits) -> None:
    if isinstance(medium, Audio):
        assert medium.samples.dtype == np.float32
        assert 480 <= len(medium.samples) <= (max(limits.max_audio_seconds, limits.max_video_seconds) + 1) * 16000 + 1
        assert np.isfinite(medium.samples).all()
    elif isinstance(medium, Image):
        assert medium.pixels.mode == "RGB"
        assert medium.pixels.width * medium.pixels.height <= SIZES.image.high
    else:
        assert medium.frames.dtype == np.uint8
        assert 2 <= len(medium.frames) <= limits.max_video_frames
        assert medium.frames.size <= 3 * limits.max_video_frames * SIZES.frame.high
        assert 0 < medium.fps <= 240
        if medium.audio is not None:
            check_within(medium.audio, limits)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in files._TRUE[kind]])
def test_the_files_to_be_damaged_are_taken_as_they_are(kind: MediaKind, name: str) -> None:
    assert isinstance(decode(kind, files.true_files(kind)[name]), Audio | Image | Video)


def any_damaged(kind: MediaKind) -> st.SearchStrategy[bytes]:
    whole = st.sampled_from(sorted(files.true_files(kind).items()))
    return whole.flatmap(lambda item: damaged(item[1], INTERESTING, files.TAGS[kind]))


@cases(seeded=300, long=18_000)
@given(st.deferred(lambda: any_damaged("audio")))
def test_damaged_sound(data: bytes) -> None:
    event(type(decode("audio", data)).__name__)


@cases(seeded=300, long=18_000)
@given(st.deferred(lambda: any_damaged("image")))
def test_damaged_picture(data: bytes) -> None:
    event(type(decode("image", data)).__name__)


@cases(seeded=240, long=14_000)
@given(st.deferred(lambda: any_damaged("video")))
def test_damaged_video(data: bytes) -> None:
    event(type(decode("video", data)).__name__)


@cases(seeded=120, long=4_000)
@given(
    st.sampled_from(KINDS),
    st.deferred(lambda: st.sampled_from([data for kind in KINDS for data in files.true_files(kind).values()])),
    st.deferred(lambda: st.sampled_from([data for kind in KINDS for data in files.true_files(kind).values()])),
    st.integers(4, 64),
)
def test_the_head_of_one_format_on_the_body_of_another(kind: MediaKind, head: bytes, body: bytes, size: int) -> None:
    decode(kind, head[:size] + body)
    decode(kind, head[:size] + body[size:])


CHEAP = Bounds(seconds=1.5, mebibytes=24.0)


@dataclass(frozen=True)
class Bomb:
    """A file that asks for far more than its bytes."""

    kind: MediaKind
    make: Callable[[], bytes]
    says: str
    error: type[OmniError] = TooLarge
    bounds: Bounds = CHEAP


def _packed(size: int) -> bytes:
    return b"a\0\0" + zlib.compress(bytes(size), 9)


def _an_hour(container: str, subtype: str) -> bytes:
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 8000, 1, subtype, format=container) as file:
        for _ in range(3600):
            file.write(np.zeros(8000, np.float32))
    return out.getvalue()


def films(kind: str, count: int) -> bytes:
    """A file of so many tracks of one picture each."""
    out = io.BytesIO()
    with av.open(out, mode="w", format=kind) as container:
        streams = [container.add_stream("mpeg4" if kind == "mp4" else "libvpx", rate=8) for _ in range(count)]
        for stream in streams:
            stream.width, stream.height, stream.pix_fmt, stream.thread_count = 32, 32, "yuv420p", 1
        for stream in streams:
            frame = av.VideoFrame.from_ndarray(samples.picture(32, 32), format="rgb24")
            frame.pts, frame.time_base = 0, Fraction(1, 8)
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    return out.getvalue()


BOMBS: Mapping[str, Bomb] = {
    "png of 50,000 x 50,000": Bomb("image", lambda: files.png_of_size(50_000, 50_000), "pixels"),
    "png of 2^31 - 1": Bomb("image", lambda: files.png_of_size(2**31 - 1, 2**31 - 1), "pixels"),
    "png of 50,000 x 20": Bomb("image", lambda: files.png_of_size(50_000, 20), "200 times", BadRequest),
    "jpeg of many scans": Bomb(
        "image", lambda: files.jpeg_of_scans(5000, 1024), "over 100 scans of a jpeg", BadRequest
    ),
    "jpeg of many segments": Bomb(
        "image", lambda: files.jpeg_with(b"\xff\xfe\x00\x02", 70_000), "over 65536 segments of a jpeg", BadRequest
    ),
    "png of many chunks": Bomb(
        "image", lambda: files.png_with(files.png_chunk(b"tEXt", b"a\0b"), 70_000), "over 65536 chunks", BadRequest
    ),
    "webp VP8": Bomb("image", lambda: files.webp_of_size(b"VP8 ", 16383, 16383), "pixels"),
    "webp VP8L": Bomb("image", lambda: files.webp_of_size(b"VP8L", 16384, 16384), "pixels"),
    "webp VP8X": Bomb("image", lambda: files.webp_of_size(b"VP8X", 1 << 24, 1 << 24), "pixels"),
    "gif": Bomb(
        "image", lambda: b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(3000), "found an unknown format", BadRequest
    ),
    "an hour of flac": Bomb("audio", lambda: _an_hour("FLAC", "PCM_16"), "longer than 2 seconds"),
    "an hour of ogg": Bomb("audio", lambda: _an_hour("OGG", "VORBIS"), "longer than 2 seconds"),
    "wav of 0 Hz": Bomb("audio", lambda: files.wav_claiming(rate=0), "medium 0", BadRequest),
    "wav of 4 GHz": Bomb("audio", lambda: files.wav_claiming(rate=2**32 - 1), "medium 0", BadRequest),
    "wav of 65,535 channels": Bomb(
        "audio", lambda: files.wav_claiming(channels=65535, align=65535), "medium 0", BadRequest
    ),
    "mp4 of 100,000,000 samples": Bomb(
        "video", lambda: files.mp4_claiming_samples(100_000_000), "claim 100000000 samples", BadRequest
    ),
    "mp4 fragment of 100,000,000 samples": Bomb(
        "video", lambda: files.mp4_fragment_claiming_samples(100_000_000), "claim 100000000 samples", BadRequest
    ),
    "mp4 of more samples than FFmpeg indexes": Bomb(
        "video", lambda: files.mp4_fragment_claiming_samples(2**32 - 1), "unreadable video", BadRequest
    ),
    "mp4 of many edits": Bomb("video", lambda: files.mp4_of_edits(100_000, seconds=3), "edits of 72 samples"),
    "mp4 of some edits": Bomb("video", lambda: files.mp4_of_edits(200, seconds=3), "limit"),
    "mp4 with packed tables": Bomb(
        "video", lambda: files.mp4_with_box(b"moov", b"\0\0\0\x10cmovxxxxxxxx"), "cmov", BadRequest
    ),
    "mp4 of 400 tracks": Bomb("video", lambda: films("mp4", 400), "400 tracks, the limit is 32", BadRequest),
    "webm of 100 tracks": Bomb("video", lambda: films("webm", 100), "100 tracks, the limit is 32", BadRequest),
    "webm of lengths in eight bytes": Bomb(
        "video",
        lambda: films("webm", 100).replace(b"\x86\x85V_VP8", b"\x86\1\0\0\0\0\0\0\5V_VP8"),
        "100 tracks, the limit is 32",
        BadRequest,
    ),
    "mp4 of a million boxes": Bomb(
        "video", lambda: samples.video_file("mp4") + b"\0\0\0\x08free" * 1_000_000, "outermost boxes", BadRequest
    ),
    "VP9 of 16,000 x 16,000": Bomb("video", lambda: files.vp9_claiming(16_000, 16_000), "no size, or", BadRequest),
    "webm of laced pictures": Bomb(
        "video", lambda: files.webm_of_laced_blocks(8000, sound=False), "more than 8000 packets"
    ),
    "webm of laced sound": Bomb(
        "video",
        lambda: files.webm_of_laced_blocks(1000, sound=True),
        "more than 8000 packets",
        bounds=Bounds(1.5, 160.0),
    ),
    "amr without sound": Bomb("audio", lambda: files.amr_without_sound(10_000), "more than 2000 packets of sound"),
    "aac without sound": Bomb(
        "audio", lambda: b"\xff\xf1\x50\x40\x00\xff\xfc" * 10_000, "more than 2000 packets of sound"
    ),
    "mp3 of damaged frames": Bomb(
        "audio", lambda: b"\xff\xf3\x14\xc4".ljust(24, b"\xff") * 10_000, "more than 2000 packets of sound"
    ),
    "video in which nothing moves": Bomb("video", lambda: files.still_video(1024, 110), "pixels in all frames"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_costs_anything(name: str) -> None:
    bomb = BOMBS[name]
    found = decode(bomb.kind, bomb.make(), bomb.bounds)
    assert isinstance(found, bomb.error), found
    assert bomb.says in found.message


def test_a_file_of_thousands_of_joined_streams_is_refused() -> None:
    limits = LIMITS.model_copy(update={"max_audio_seconds": 20.0})
    found = decode("audio", files.ogg_of_links(3000), Bounds(3.0, 64.0), limits)
    assert isinstance(found, BadRequest)
    assert "over 2000 streams are joined in it" in found.message


UNSEEN: Mapping[str, Callable[[], bytes]] = {
    "png of many profiles": lambda: files.png_with(files.png_chunk(b"iCCP", _packed(1 << 20)), 2000),
    "png of unpacked text": lambda: files.png_with(files.png_chunk(b"zTXt", _packed(1 << 24)), 20),
    "jpeg of EXIF in many segments": lambda: files.jpeg_with(b"\xff\xe1\x40\x02Exif\0\0" + bytes(0x3FFA), 2000),
    "jpeg of many small EXIF segments": lambda: files.jpeg_with(b"\xff\xe1\0\x08Exif\0\0", 60_000),
    "jpeg of fill bytes": lambda: files.jpeg_with(b"\xff", 30 << 20),
    "jpeg of junk between segments": lambda: files.jpeg_with(b"\xff\0", 15 << 20),
    "jpeg before a film": lambda: samples.image_file("jpeg") + b"\xff\xda\0\x08" * 5_000_000,
    "png before chunks": lambda: samples.image_file("png") + files.png_chunk(b"tEXt", b"a\0b") * 500_000,
}
"""Files that hold much beside a picture, which no viewer shows."""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_viewer_shows_costs_nothing(name: str) -> None:
    assert isinstance(decode("image", UNSEEN[name](), Bounds(1.5, 100.0)), Image)


def test_a_wav_that_claims_more_than_it_has_is_what_it_has() -> None:
    found = decode("audio", files.wav_claiming(data=2**32 - 16))
    assert isinstance(found, Audio)
    assert len(found.samples) == 1600


@pytest.mark.parametrize(
    "text", [b"Edelstein jacket and trousers", b"stszstszstszstszstszstszstsz", b"trun trun trun!"]
)
def test_text_that_spells_the_name_of_a_table_is_no_table(text: bytes) -> None:
    assert isinstance(decode("video", files.mp4_with_box(b"udta", text)), Video)


def test_honest_edits_and_samples_are_within_the_limits() -> None:
    limits: Any = LIMITS.model_copy(update={"max_video_seconds": 30.0})
    assert isinstance(decode("video", files.mp4_of_edits(2), limits=limits), Video)

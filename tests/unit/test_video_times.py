# SPDX-License-Identifier: Apache-2.0
"""The pictures taken of a video and their times, by time stamps alone; damaged and turned files."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

import media_samples as samples
from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.timing import Timeline
from triton_omni.request.media.types import PixelRange, Video, VisionSizes
from triton_omni.request.media.video import decode_video

LIMITS = RequestLimits()
SMALL = VisionSizes(frame=PixelRange(28 * 28, 768 * 28 * 28))
KINDS = pytest.mark.parametrize("kind", ["mp4", "webm"])
UNEVEN = [0, 0.5, 1, 1.5, *(2 + number / 20 for number in range(20))]
CANVAS = [round(number / 25 + (0, 0.002, 0.009, -0.001)[number % 4], 3) for number in range(75)]
"""A browser's recording at 25 pictures a second: stamps of whole milliseconds, a few late or early."""


def shown(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as source:
        return [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]


def video(data: bytes, kind: str, *, sizes: VisionSizes = SMALL, limits: RequestLimits = LIMITS) -> Video:
    return decode_video(data, "mp4" if kind == "mp4" else "webm", limits, sizes, with_audio=False)


def filmed(kind: str, times: list[float], *, seconds: float = 1.0, audio: bool = False) -> bytes:
    return samples.video_file(kind, times=times, seconds=seconds, audio=audio, width=84, height=56)


def without_rate(data: bytes) -> bytes:
    """A webm that states no rate, as browsers write it: the element becomes one that nobody reads."""
    assert data.count(b"\x23\xe3\x83") == 1
    return data.replace(b"\x23\xe3\x83", b"\x23\xe3\x7f")


class TestChoice:
    def test_a_stated_rate_that_the_stamps_confirm_is_the_recipe_s(self):
        for rate, total in ((30, 60), (30000 / 1001, 150), (24000 / 1001, 719), (60, 180)):
            stamps = [round(number / rate, 3) for number in range(total)]  # as a webm has them
            timeline = Timeline.of(stamps, stamps[-1] + 1 / rate, rate)
            assert timeline.seconds == total / rate
            count = timeline.count(2.0, 768)
            assert timeline.choose(count) == tuple(torch.linspace(0, total - 1, count).round().long().tolist())

    @pytest.mark.parametrize("stated", [None, 1000.0, 8.0, 24.0])
    def test_a_stated_rate_that_the_stamps_deny_is_ignored(self, stated):
        timeline = Timeline.of(CANVAS, CANVAS[-1] + 0.04, stated)
        assert timeline.seconds == pytest.approx(3.0, abs=0.02)
        assert timeline.choose(6) == (0, 15, 30, 44, 59, 74)

    def test_pictures_of_a_variable_rate_are_those_shown_at_even_times(self):
        timeline = Timeline.of(UNEVEN, 3.0, 8.0)
        assert timeline.seconds == 3.0
        assert timeline.choose(timeline.count(2.0, 768)) == (0, 1, 2, 3, 4, 14)
        assert timeline.choose(timeline.count(4.0, 768)) == (0, 0, 1, 1, 2, 2, 3, 3, 4, 9, 14, 19)
        assert timeline.count(2.0, 5) == 4

    def test_a_still_comes_as_often_as_it_is_shown(self):
        assert Timeline.of([0, 0.2, 0.4], 4.0, 5.0).choose(8) == (0, 2, 2, 2, 2, 2, 2, 2)
        assert Timeline.of([0], 4.0, 8.0).choose(8) == (0,) * 8
        assert Timeline.of([0, 3.0, 3.1], 4.0, None).choose(4) == (0, 0, 0, 1)

    def test_lost_pictures_keep_their_time(self):
        times = [number / 10 for number in range(40) if not 10 <= number < 25]
        timeline = Timeline.of(times, 4.0, 10.0)
        assert timeline.seconds == 4.0
        assert [times[number] for number in timeline.choose(8)] == [0, 0.5, 0.9, 0.9, 0.9, 2.5, 3.0, 3.5]
        # The first one is shown for those before it.
        assert Timeline.of([2.0, 2.5, 3.0, 3.5], 4.0, 2.0).choose(8) == (0, 0, 0, 0, 0, 1, 2, 3)


class TestFiles:
    def test_a_canvas_recorded_at_25_pictures_a_second(self):
        data = without_rate(filmed("webm", CANVAS))
        found = video(data, "webm")
        assert found.fps == 2.0
        np.testing.assert_array_equal(found.frames, np.stack(shown(data))[[0, 15, 30, 44, 59, 74]])

    @KINDS
    @pytest.mark.parametrize("audio", [False, True])
    def test_a_variable_rate(self, kind, audio):
        data = filmed(kind, UNEVEN, seconds=3, audio=audio)
        found = video(data, kind)
        assert found.fps == 2.0
        np.testing.assert_array_equal(found.frames, np.stack(shown(data))[[0, 1, 2, 3, 4, 14]])

    @KINDS
    @pytest.mark.parametrize("times", [[0, 0.2, 0.4], [0, 0.04, 0.5], [0]], ids=["three", "uneven", "one"])
    def test_a_still_screen_lasts_as_long_as_its_sound(self, kind, times):
        data = filmed(kind, times, seconds=4, audio=True)
        found = video(data, kind)
        assert len(found.frames) == 8
        assert len(found.frames) / found.fps == pytest.approx(4.0, abs=0.1)
        last = len(times) - 1
        expected = [last if number or not last else 0 for number in range(8)]
        np.testing.assert_array_equal(found.frames, np.stack(shown(data))[expected])

    @pytest.mark.parametrize(("kind", "rate"), [("webm", 1000), ("webm", 8), ("mp4", 8)])
    def test_the_limit_is_of_time_not_of_pictures(self, kind, rate):
        data = samples.video_file(kind, times=[number * 5.71 for number in range(101)], fps=rate)
        with pytest.raises(TooLarge, match=r"^57\d\.\d seconds of video, the limit is 120; send a part of it$"):
            video(data, kind)
        data = samples.video_file(kind, times=[number * 1.1 for number in range(100)], fps=rate)
        found = video(data, kind)
        assert len(found.frames) / found.fps == pytest.approx(110, abs=0.2)

    def test_more_pictures_than_anybody_sees_are_refused_by_their_stamps(self):
        data = without_rate(filmed("webm", [number / 1000 for number in range(500)]))
        with pytest.raises(BadRequest, match=r"^500 pictures in 0\.5 seconds, allowed are up to 240 a second$"):
            video(data, "webm")

    @KINDS
    def test_a_request_chooses_rate_and_number(self, kind):
        data = filmed(kind, [number / 10 for number in range(60)])
        for sizes, count in ((VisionSizes(fps=1.0), 6), (VisionSizes(fps=5.0), 30), (VisionSizes(max_frames=4), 4)):
            found = video(data, kind, sizes=sizes)
            assert (len(found.frames), found.fps) == (count, pytest.approx(count / 6, rel=0.01))
        few = LIMITS.model_copy(update={"max_video_frames": 10})
        assert len(video(data, kind, sizes=VisionSizes(fps=5.0, max_frames=20), limits=few).frames) == 10

    def test_hidden_pictures_of_vp8_do_not_count(self):
        data = bytearray(vp8_file(24))
        plain = shown(bytes(data))
        for packet in packets(bytes(data))[1::6]:
            at = data.index(packet)
            data[at] &= ~0x10  # show_frame
        found = video(bytes(data), "webm")
        kept = [picture for number, picture in enumerate(plain) if number % 6 != 1]
        assert len(shown(bytes(data))) == len(kept) == 20
        expected = [0, 4, 8, 12, 16, 20]  # at 0, 0.5, 1 ... of 24 pictures in 3 s
        np.testing.assert_array_equal(found.frames, np.stack(plain)[expected])
        assert found.fps == 2.0


def vp8_file(count: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, mode="w", format="webm") as container:
        stream = container.add_stream("libvpx", rate=8)
        stream.width, stream.height, stream.pix_fmt = 84, 56, "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(samples.picture(84, 56, seed=number), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 8)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def packets(data: bytes) -> list[bytes]:
    with av.open(io.BytesIO(data)) as source:
        return [bytes(packet) for packet in source.demux(video=0) if packet.size]


def damaged(data: bytes, numbers: Callable[[int], bool]) -> bytes:
    """The file with some packets of its pictures overwritten, their places and lengths as before."""
    out = bytearray(data)
    for number, packet in enumerate(packets(data)):
        if numbers(number):
            at = out.index(packet)
            out[at : at + len(packet)] = b"\xff" * len(packet)
    return bytes(out)


def decodable(data: bytes) -> list[tuple[float, np.ndarray]]:
    """The pictures that FFmpeg decodes, packet by packet, with their times."""
    found = []
    with av.open(io.BytesIO(data)) as source:
        for packet in source.demux(video=0):
            try:
                found += [(frame.time, frame.to_ndarray(format="rgb24")) for frame in packet.decode()]
            except av.error.InvalidDataError:
                continue
    return sorted(found, key=lambda item: item[0])


class TestDamage:
    @KINDS
    @pytest.mark.parametrize("place", [5, 11, 22])
    def test_one_damaged_packet_leaves_the_rest(self, kind, place):
        data = damaged(samples.video_file(kind, seconds=3, width=84, height=56), lambda number: number == place)
        left = decodable(data)
        assert 12 <= len(left) <= 23
        found = video(data, kind)
        assert found.fps == 2.0
        times = np.array([time for time, _ in left])
        if np.abs(times * 8 - np.arange(len(left))).max() >= 0.5:
            numbers = [max(int(np.searchsorted(times, at + 1e-6, "right")) - 1, 0) for at in np.arange(6) / 2]
            np.testing.assert_array_equal(found.frames, np.stack([left[number][1] for number in numbers]))

    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_a_video_of_which_less_than_half_is_left_is_refused_with_the_count(self, kind):
        data = damaged(samples.video_file(kind, seconds=3), lambda number: number >= 8)
        left = len(decodable(data))
        assert 0 < left < 12
        with pytest.raises(BadRequest, match=rf"^damaged: {left} of 24 pictures can be decoded, at least half"):
            video(data, kind)

    @KINDS
    def test_a_video_without_a_whole_picture_is_refused(self, kind):
        data = damaged(samples.video_file(kind, seconds=1), lambda number: True)
        with pytest.raises(BadRequest, match=r"damaged|no frame that can be decoded"):
            video(data, kind)


def oriented(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An mp4 with the display matrix (a, b, c, d)."""
    out = bytearray(data)
    place = data.index(b"tkhd") + 44  # past the box's name, version, times, id, duration, layer and volume
    a, b, c, d = (value << 16 for value in matrix)
    out[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(out)


class TestTracks:
    @KINDS
    def test_a_film_with_its_sound_and_text_that_spells_a_track_is_taken(self, kind):
        data = samples.video_file(kind, audio=True)
        spelled = data + b"\0\0\0\x10udtatrak----" * 20 if kind == "mp4" else data
        assert video(spelled, kind).frames.shape[0] == 4

    def test_a_codec_that_no_camera_writes_is_refused_by_name(self):
        out = io.BytesIO()
        with av.open(out, mode="w", format="mp4") as container:
            stream = container.add_stream("mpeg2video", rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            frame = av.VideoFrame.from_ndarray(samples.picture(), format="rgb24")
            container.mux([*stream.encode(frame), *stream.encode(None)])
        with pytest.raises(BadRequest, match=r"^the codec of its video track is mpeg2video, allowed are h264, hevc, "):
            video(out.getvalue(), "mp4")


class TestOrientation:
    @pytest.mark.parametrize(
        ("matrix", "shown_as"),
        [
            ((1, 0, 0, 1), lambda picture: picture),
            ((0, 1, -1, 0), lambda picture: np.rot90(picture, -1)),
            ((-1, 0, 0, -1), lambda picture: np.rot90(picture, 2)),
            ((0, -1, 1, 0), lambda picture: np.rot90(picture, 1)),
            ((-1, 0, 0, 1), np.fliplr),
            ((1, 0, 0, -1), np.flipud),
            ((0, 1, 1, 0), lambda picture: picture.transpose(1, 0, 2)),
            ((0, -1, -1, 0), lambda picture: np.rot90(picture, 2).transpose(1, 0, 2)),
        ],
        ids=["as is", "90", "180", "270", "mirrored", "upside down", "transposed", "transversed"],
    )
    def test_a_display_matrix_is_a_matrix(self, matrix, shown_as):
        data = samples.video_file(width=84, height=56)
        plain = shown(data)
        found = video(oriented(data, matrix), "mp4")
        np.testing.assert_array_equal(found.frames[0], shown_as(plain[0]))

    @pytest.mark.parametrize("matrix", [(0, 0, 0, 0), (1, 1, -1, 1)])
    def test_a_matrix_that_is_none_of_the_eight_refuses_nothing(self, matrix):
        data = samples.video_file(width=84, height=56)
        assert video(oriented(data, matrix), "mp4").frames.shape[1:3] in ((56, 84), (84, 56))

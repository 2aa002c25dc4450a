# SPDX-License-Identifier: Apache-2.0
"""Decoded media against the codecs' own libraries, and every way in which a file can be too large, broken or a lie."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress

import av
import numpy as np
import pytest
import soxr
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as hf_smart_resize

import media_samples as samples
from triton_omni.core.errors import BadRequest, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media import audio
from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.decode import decode_media
from triton_omni.request.media.files import sniff
from triton_omni.request.media.image import decode_image
from triton_omni.request.media.timing import frame_count
from triton_omni.request.media.types import Audio, PixelRange, VisionSizes, smart_resize
from triton_omni.request.media.video import decode_video, resize_frame

LIMITS = RequestLimits(
    max_image_pixels=1 << 20, max_audio_seconds=2.0, max_video_seconds=4.0, max_video_frames=8, max_video_pixels=1 << 22
)
SIZES = VisionSizes()
SMALL = VisionSizes(frame=PixelRange(28 * 28, 768 * 28 * 28))


def video(data, *, kind="mp4", limits=LIMITS, sizes=SMALL, with_audio=False):
    return decode_video(data, kind, limits, sizes, with_audio=with_audio)


class TestSniffing:
    @pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
    def test_sound_files(self, kind):
        assert sniff(samples.audio_file(kind)) == kind

    @pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
    def test_pictures(self, kind):
        assert sniff(samples.image_file(kind)) == kind

    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_videos(self, kind):
        assert sniff(samples.video_file(kind)) == kind

    @pytest.mark.parametrize("data", [b"", b"R", b"RIFF", b"RIFF1234AVI ", b"GIF89a", b"%PDF-1.7", b"\xff", b"#EXTM3U"])
    def test_anything_else(self, data):
        assert sniff(data) is None

    def test_an_mp3_with_a_tag(self):
        assert sniff(b"ID3\x04" + samples.audio_file("mp3")) == "mp3"

    def test_an_aac_stream_is_no_mp3(self):
        assert sniff(b"\xff\xf1\x50\x80") == "aac"


class TestErrorsNameTheMedium:
    def test_index_kind_and_reason(self):
        parts = [MediaPart("audio", samples.audio_file()), MediaPart("image", b"GIF89a")]
        with pytest.raises(BadRequest, match=r"medium 1 \(image\): must be one of png, jpeg, webp; found an unknown"):
            decode_media(parts, LIMITS, with_audio=False)

    def test_a_file_of_another_kind_is_refused_by_what_it_is(self):
        with pytest.raises(BadRequest, match=r"medium 0 \(image\): must be one of .*; found wav"):
            decode_media([MediaPart("image", samples.audio_file("wav"))], LIMITS, with_audio=False)

    def test_the_class_of_the_error_is_kept(self):
        long = MediaPart("audio", samples.audio_file("wav", seconds=2.5))
        with pytest.raises(TooLarge, match=r"medium 0 \(audio\): longer than 2 seconds"):
            decode_media([long], LIMITS, with_audio=False)

    def test_media_come_back_in_order(self):
        parts = [
            MediaPart("video", samples.video_file(audio=True)),
            MediaPart("audio", samples.audio_file()),
            MediaPart("image", samples.image_file()),
        ]
        decoded = decode_media(parts, LIMITS, with_audio=True)
        assert [type(item).__name__ for item in decoded] == ["Video", "Audio", "Image"]
        assert decoded[0].audio is not None
        assert decode_media(parts, LIMITS, with_audio=False)[0].audio is None

    def test_nothing_is_decoded_after_a_medium_that_is_not_taken(self):
        taken = []

        def take(medium, index):
            taken.append((type(medium).__name__, index))
            if index:
                raise TooLarge("no room")

        parts = [MediaPart("image", samples.image_file()), MediaPart("audio", samples.audio_file())]
        with pytest.raises(TooLarge, match="no room"):
            decode_media([*parts, MediaPart("image", b"no picture")], LIMITS, with_audio=False, take=take)
        assert taken == [("Image", 0), ("Audio", 1)]


class TestAudio:
    @pytest.mark.parametrize("kind", ["wav", "flac"])
    def test_lossless_mono_at_16_khz_is_what_was_written(self, kind):
        decoded = decode_audio(samples.audio_file(kind), LIMITS).samples
        assert decoded.dtype == np.float32
        np.testing.assert_allclose(decoded, samples.tone(), atol=1 / 32768)

    @pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "ogg"])
    @pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
    @pytest.mark.parametrize("channels", [1, 2])
    def test_any_rate_and_channels_keep_pitch_and_length(self, kind, rate, channels):
        wave = samples.tone(1.0, rate)
        wave = wave if channels == 1 else np.stack([wave, wave], axis=1)
        decoded = decode_audio(samples.audio_file(kind, samples=wave, rate=rate), LIMITS).samples
        assert len(decoded) == 16000
        spectrum = np.abs(np.fft.rfft(decoded))
        assert np.argmax(spectrum) == 440
        assert np.abs(decoded[2000:-2000]).max() == pytest.approx(0.5, abs=0.05)

    def test_channels_are_averaged(self):
        stereo = np.stack([np.full(8000, 0.5), np.full(8000, -0.25)], axis=1).astype(np.float32)
        decoded = decode_audio(samples.audio_file("wav", samples=stereo), LIMITS).samples
        np.testing.assert_allclose(decoded, 0.125, atol=1 / 32768)

    def test_resampling_is_librosas(self):
        wave = np.random.default_rng(0).uniform(-0.5, 0.5, 22051).astype(np.float32)
        decoded = decode_audio(samples.audio_file("wav", samples=wave, rate=22050, subtype="FLOAT"), LIMITS).samples
        expected = soxr.resample(wave, 22050, 16000, quality="HQ")
        assert len(decoded) == 16001  # ceil, as librosa fixes the length
        np.testing.assert_array_equal(decoded[: len(expected)], expected[:16001])

    @pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "ogg"])
    def test_too_long_is_refused(self, kind):
        with pytest.raises(TooLarge, match="longer than 2 seconds"):
            decode_audio(samples.audio_file(kind, seconds=3), LIMITS)

    def test_exactly_the_limit_is_allowed(self):
        assert len(decode_audio(samples.audio_file("wav", seconds=2.0), LIMITS).samples) == 32000

    def test_a_header_that_claims_hours_costs_nothing(self):
        data = bytearray(samples.audio_file("wav"))
        size_at = data.index(b"data") + 4
        data[size_at : size_at + 4] = struct.pack("<I", 0xFFFFFFF0)
        assert len(decode_audio(bytes(data), LIMITS).samples) == 8000

    def test_a_header_that_claims_less_does_not_get_past_the_limit(self):
        data = bytearray(samples.audio_file("flac", seconds=3))
        # STREAMINFO: 36 bits of total samples from byte 21's low nibble; 0 = unknown.
        data[21] &= 0xF0
        data[22:26] = bytes(4)
        with pytest.raises(OmniError):
            decode_audio(bytes(data), LIMITS)

    @pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
    def test_decoding_stops_at_the_limit(self, kind, monkeypatch):
        seconds = []
        mono = audio._mono

        def counting(frame):
            seconds.append(frame.samples / frame.sample_rate)
            return mono(frame)

        monkeypatch.setattr(audio, "_mono", counting)
        with pytest.raises(TooLarge):
            decode_audio(samples.audio_file(kind, seconds=30, rate=8000), LIMITS)
        assert sum(seconds) <= 2 + 2 * max(seconds)

    def test_too_short_is_refused(self):
        with pytest.raises(BadRequest, match="479 samples at 16 kHz, at least 480"):
            decode_audio(samples.audio_file("wav", samples=samples.tone()[:479]), LIMITS)
        assert len(decode_audio(samples.audio_file("wav", samples=samples.tone()[:480]), LIMITS).samples) == 480

    def test_no_samples_at_all_are_refused(self):
        with pytest.raises(BadRequest, match="0 samples"):
            decode_audio(samples.audio_file("wav", samples=samples.tone()[:0]), LIMITS)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_samples_that_are_not_finite_are_refused(self, value):
        wave = samples.tone()
        wave[7] = value
        with pytest.raises(BadRequest, match="not finite"):
            decode_audio(samples.audio_file("wav", samples=wave, subtype="FLOAT"), LIMITS)

    @pytest.mark.parametrize("value", [3e38, -3e38, 1e20, 4.4e9])
    def test_samples_whose_squares_overflow_are_refused(self, value):
        """They made hidden states infinite, and the request's error `internal`."""
        wave = samples.tone()
        wave[7] = value
        with pytest.raises(
            BadRequest, match=r"a sample is .*e\+\d\d, the limit is 4.29497e\+09: scale the sound to -1 to 1"
        ):
            decode_audio(samples.audio_file("wav", samples=wave, subtype="FLOAT"), LIMITS)

    @pytest.mark.parametrize("scale", [1, 2**15, 2**31])
    def test_integers_that_were_written_as_floats_are_heard(self, scale):
        heard = decode_audio(samples.audio_file("wav", samples=samples.tone() * scale, subtype="FLOAT"), LIMITS).samples
        np.testing.assert_allclose(heard, samples.tone() * scale, rtol=1e-6)

    def test_rates_and_channels_beyond_reason_are_refused(self):
        with pytest.raises(BadRequest, match="9 channels, allowed are 1 to 8"):
            decode_audio(samples.audio_file("wav", samples=np.zeros((2000, 9), np.float32)), LIMITS)
        with pytest.raises(BadRequest, match="sample rate 400000 Hz"):
            decode_audio(samples.audio_file("wav", samples=samples.tone(), rate=400000), LIMITS)

    @pytest.mark.parametrize("kind", ["wav", "mp3", "flac", "ogg"])
    def test_a_cut_file_is_shorter_or_refused_but_never_another_error(self, kind):
        data = samples.audio_file(kind)
        for size in (5, 20, 60, len(data) // 2, len(data) - 3):
            with suppress(BadRequest):
                assert len(decode_audio(data[:size], LIMITS).samples) <= 8000

    @settings(max_examples=60)
    @given(st.binary(max_size=200), st.sampled_from(["wav", "mp3", "flac", "ogg"]), st.integers(4, 400))
    def test_damage_is_refused_or_decoded(self, noise, kind, place):
        data = bytearray(samples.audio_file(kind, seconds=0.1))
        data[place : place + len(noise)] = noise
        with suppress(OmniError):
            assert np.isfinite(decode_audio(bytes(data), LIMITS).samples).all()


def png_header(width, height):
    """A png that claims a size and holds next to nothing."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


class TestImages:
    def test_a_size_that_the_model_takes_is_left_alone(self):
        decoded = decode_image(samples.image_file("png", 84, 56), LIMITS, SIZES).pixels
        assert decoded.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(decoded), samples.picture(84, 56))

    @pytest.mark.parametrize("kind", ["jpeg", "webp"])
    def test_lossy_formats_come_close(self, kind):
        smooth = Pillow.linear_gradient("L").resize((84, 56)).convert("RGB")
        decoded = decode_image(samples.encode_image(smooth, kind, quality=95), LIMITS, SIZES).pixels
        assert np.abs(np.asarray(decoded, int) - np.asarray(smooth, int)).mean() < 3

    def test_other_sizes_are_resized_as_the_recipe_does(self):
        data = samples.image_file("png", 100, 70)
        decoded = decode_image(data, LIMITS, SIZES).pixels
        expected = Pillow.open(io.BytesIO(data)).convert("RGB").resize((112, 56))  # nearest multiples of 28
        np.testing.assert_array_equal(np.asarray(decoded), np.asarray(expected))

    def test_alpha_lies_over_white(self):
        picture = Pillow.new("RGBA", (56, 56), (255, 0, 0, 128))
        decoded = decode_image(samples.encode_image(picture, "png"), LIMITS, SIZES).pixels
        assert decoded.getpixel((0, 0)) == (255, 127, 127)

    def test_a_transparent_palette_colour_lies_over_white(self):
        picture = Pillow.new("P", (56, 56), 0)
        picture.putpalette([10, 20, 30, 40, 50, 60])
        decoded = decode_image(samples.encode_image(picture, "png", transparency=0), LIMITS, SIZES).pixels
        assert decoded.getpixel((0, 0)) == (255, 255, 255)

    @pytest.mark.parametrize("mode", ["1", "L", "P", "LA"])
    def test_every_mode_becomes_rgb(self, mode):
        picture = Pillow.new("L", (56, 56), 255).convert(mode)
        decoded = decode_image(samples.encode_image(picture, "png"), LIMITS, SIZES).pixels
        assert decoded.mode == "RGB"
        assert decoded.getpixel((5, 5)) == (255, 255, 255)

    def test_cmyk_jpegs_become_rgb(self):
        data = samples.encode_image(Pillow.new("CMYK", (56, 56), (0, 0, 0, 0)), "jpeg")
        assert decode_image(data, LIMITS, SIZES).pixels.getpixel((5, 5)) == (255, 255, 255)

    def test_a_picture_taken_sideways_is_turned_upright(self):
        picture = Pillow.new("RGB", (112, 56))
        picture.paste((255, 255, 255), (0, 0, 56, 56))
        exif = Pillow.Exif()
        exif[0x0112] = 6  # turn clockwise to view
        decoded = decode_image(samples.encode_image(picture, "jpeg", exif=exif, quality=95), LIMITS, SIZES).pixels
        assert decoded.size == (56, 112)
        assert decoded.getpixel((28, 10))[0] > 200
        assert decoded.getpixel((28, 100))[0] < 50

    def test_of_an_animation_the_first_frame_counts(self):
        frames = [Pillow.new("RGB", (56, 56), color) for color in ("red", "blue")]
        data = samples.encode_image(frames[0], "webp", save_all=True, append_images=frames[1:], lossless=True)
        assert decode_image(data, LIMITS, SIZES).pixels.getpixel((5, 5)) == (255, 0, 0)

    @pytest.mark.parametrize(("width", "height"), [(1025, 1024), (30000, 30000), (2**31 - 1, 2**31 - 1)])
    def test_a_header_of_too_many_pixels_is_refused_before_decoding(self, width, height):
        with pytest.raises(TooLarge, match="the limit is 1048576"):
            decode_image(png_header(width, height), LIMITS, SIZES)

    def test_a_webp_canvas_of_too_many_pixels_is_refused_before_pillow_opens_it(self):
        body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3f\x00" * 2
        data = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
        with pytest.raises(TooLarge, match="16384 x 16384 pixels"):
            decode_image(data, LIMITS, SIZES)

    def test_a_decompression_bomb_is_refused(self):
        data = samples.encode_image(Pillow.new("L", (4000, 4000)), "png")
        assert len(data) < 50_000
        with pytest.raises(TooLarge, match="4000 x 4000 pixels"):
            decode_image(data, LIMITS, SIZES)

    def test_a_thread_of_a_picture_is_refused(self):
        with pytest.raises(BadRequest, match="one side may be at most 200 times the other"):
            decode_image(samples.image_file("png", 1, 201), LIMITS, SIZES)

    @pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
    def test_a_truncated_file_is_refused(self, kind):
        data = samples.image_file(kind, 200, 160)
        for size in (15, 40, len(data) // 2, len(data) * 3 // 4):
            with pytest.raises(BadRequest, match="unreadable image"):
                decode_image(data[:size], LIMITS, SIZES)

    def test_other_formats_are_not_tried(self):
        out = io.BytesIO()
        Pillow.new("RGB", (8, 8)).save(out, format="BMP")
        with pytest.raises(BadRequest, match="unreadable image"):
            decode_image(out.getvalue(), LIMITS, SIZES)

    @settings(max_examples=100)
    @given(st.binary(max_size=60), st.sampled_from(["png", "jpeg", "webp"]), st.integers(4, 300))
    def test_damage_is_refused_or_decoded(self, noise, kind, place):
        data = bytearray(samples.image_file(kind))
        data[place : place + len(noise)] = noise
        with suppress(OmniError):
            assert decode_image(bytes(data), LIMITS, SIZES).pixels.mode == "RGB"


class TestSmartResize:
    @settings(max_examples=300)
    @given(st.integers(28, 5000), st.integers(28, 5000))
    def test_sizes_are_hfs(self, height, width):
        assert smart_resize(height, width, 28, PixelRange(3136, 12845056)) == hf_smart_resize(
            height, width, factor=28, min_pixels=3136, max_pixels=12845056
        )

    @settings(max_examples=200)
    @given(st.integers(1, 5000), st.integers(1, 5000))
    def test_the_processors_own_resize_has_nothing_left_to_do(self, height, width):
        pixels = PixelRange(100352, 602112)
        if max(height, width) <= 200 * min(height, width):
            once = smart_resize(height, width, 28, pixels)
            if max(once) <= 200 * min(once):
                assert hf_smart_resize(*once, factor=28, min_pixels=100352, max_pixels=602112) == once


def all_frames(data):
    with av.open(io.BytesIO(data)) as source:
        return [frame.to_ndarray(format="rgb24") for frame in source.decode(video=0)]


class TestVideo:
    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_frames_are_sampled_evenly_from_first_to_last(self, kind):
        data = samples.video_file(kind, seconds=3, fps=8, width=84, height=56)
        decoded = video(data, kind=kind)
        assert decoded.frames.shape == (6, 56, 84, 3)
        assert decoded.frames.dtype == np.uint8
        assert decoded.fps == pytest.approx(2.0)
        indices = torch.linspace(0, 23, 6).round().long().tolist()
        np.testing.assert_array_equal(decoded.frames, np.stack([all_frames(data)[index] for index in indices]))

    def test_frames_are_resized_as_the_recipe_does(self):
        import torchvision.transforms.v2.functional as vision

        data = samples.video_file(width=64, height=48)
        decoded = video(data, sizes=SIZES)
        assert decoded.frames.shape[1:] == (*hf_smart_resize(48, 64, 28, 100352, 602112), 3)
        first = torch.from_numpy(all_frames(data)[0]).permute(2, 0, 1)
        expected = vision.resize(
            first, list(decoded.frames.shape[1:3]), vision.InterpolationMode.BICUBIC, antialias=True
        ).permute(1, 2, 0)
        np.testing.assert_array_equal(decoded.frames[0], expected)

    @pytest.mark.parametrize(
        ("total", "fps", "most", "expected"),
        [
            (24, 8.0, 8, 6),
            (8, 8.0, 8, 4),
            (2, 8.0, 8, 2),
            (3, 8.0, 8, 2),
            (5, 8.0, 8, 4),
            (300, 30.0, 8, 8),
            (300, 30.0, 7, 6),
            (300, 29.97, 768, 20),
            (10, 1.0, 768, 10),
        ],
    )
    def test_the_number_of_frames_is_the_recipes(self, total, fps, most, expected):
        assert frame_count(total, fps, most) == expected

    @pytest.mark.parametrize("total", [0, 1])
    def test_fewer_than_two_frames_are_refused(self, total):
        with pytest.raises(BadRequest, match="at least 2 are needed"):
            frame_count(total, 8.0, 8)

    def test_frames_share_the_pixels_of_a_video(self):
        data = samples.video_file(seconds=4, fps=2, width=640, height=480)
        limits = LIMITS.model_copy(update={"max_video_pixels": 8 * 100_000})
        frames = video(data, limits=limits).frames
        assert len(frames) == 8
        assert frames.shape[1] * frames.shape[2] <= 100_000
        assert video(data, limits=LIMITS).frames.shape[1:3] == (476, 644)

    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_sound_comes_along_when_asked(self, kind):
        data = samples.video_file(kind, seconds=1, audio=True)
        sound = video(data, kind=kind, with_audio=True).audio
        assert isinstance(sound, Audio)
        assert len(sound.samples) == pytest.approx(16000, abs=1100)
        spectrum = np.abs(np.fft.rfft(sound.samples, 16000))
        assert np.argmax(spectrum) == pytest.approx(440, abs=2)

    def test_a_video_of_the_longest_length_keeps_its_padded_sound(self):
        data = samples.video_file(seconds=4, fps=2, audio=True)
        assert len(video(data, with_audio=True).audio.samples) > 4 * 16000

    def test_a_silent_video_has_no_sound(self):
        assert video(samples.video_file(), with_audio=True).audio is None

    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_too_long_is_refused_without_decoding(self, kind, monkeypatch):
        data = samples.video_file(kind, seconds=5, fps=4)
        monkeypatch.setattr("triton_omni.request.media.video._VideoFile._decode", None)
        with pytest.raises(TooLarge, match=r"5\.0 seconds of video, the limit is 4"):
            video(data, kind=kind)

    def test_frames_of_too_many_pixels_are_refused(self):
        limits = LIMITS.model_copy(update={"max_image_pixels": 3000})
        with pytest.raises(TooLarge, match="frames of 64 x 48 pixels, the limit is 3000"):
            video(samples.video_file(), limits=limits)

    def test_a_file_without_pictures_is_refused(self):
        out = io.BytesIO()
        with av.open(out, mode="w", format="mp4") as container:
            stream = container.add_stream("aac", rate=48000)
            stream.layout = "mono"
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 48000
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        with pytest.raises(BadRequest, match="has no video track"):
            video(out.getvalue())

    @pytest.mark.parametrize(("codec", "track"), [(b"V_VP9", "video"), (b"A_OPUS", "audio")])
    def test_an_unknown_codec_is_refused(self, codec, track):
        data = samples.video_file("webm", audio=True).replace(codec, codec[:-1] + b"?")
        with pytest.raises(BadRequest, match=f"the codec of its {track} track is unknown"):
            video(data, kind="webm", with_audio=True)

    @pytest.mark.parametrize("kind", ["mp4", "webm"])
    def test_a_truncated_file_is_refused_or_shorter(self, kind):
        data = samples.video_file(kind, seconds=2, width=84, height=56)
        for size in (8, 40, 200, len(data) // 2, len(data) - 10):
            with suppress(BadRequest):
                assert len(video(data[:size], kind=kind).frames) <= 4

    @settings(max_examples=40)
    @given(st.binary(max_size=40), st.sampled_from(["mp4", "webm"]), st.integers(0, 2000))
    def test_damage_is_refused_or_decoded(self, noise, kind, place):
        data = bytearray(samples.video_file(kind, audio=True, seconds=0.5))
        data[place : place + len(noise)] = noise
        with suppress(OmniError):
            assert video(bytes(data), kind=kind, with_audio=True).frames.ndim == 4

    def test_a_frame_of_the_right_size_is_not_touched(self):
        frame = samples.picture(56, 28)
        assert resize_frame(frame, 28, 56) is frame

# SPDX-License-Identifier: Apache-2.0
"""A file of a video's kind that has sound alone is a sound: a voice memo, a recording of a browser's microphone."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import av
import numpy as np
import pytest
from typer.testing import CliRunner

from client_fakes import FakeTriton, inputs_of, serve_grpc
from command_line import unframed
from triton_omni_client import BadRequest, cli, load_media, media_kind
from triton_omni_client.containers import is_sound_alone
from triton_omni_client.options import read_media

CODECS = {"mp4": ("aac", "h264"), "mov": ("aac", "h264"), "webm": ("libopus", "libvpx"), "matroska": ("aac", "h264")}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov"}
INDEX_FIRST = {"movflags": "faststart"}


class Pipe(io.RawIOBase):
    """Takes bytes as a pipe does: without a way back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(self.data)


def made(
    container: str,
    *,
    sound: bool = True,
    pictures: bool = False,
    options: dict[str, str] | None = None,
    piped: bool = False,
) -> bytes:
    """Half a second of a tone, of a gray picture or of both."""
    with contextlib.ExitStack() as stack:
        pipe = Pipe()
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "file"
        file = stack.enter_context(av.open(pipe if piped else str(path), "w", format=container, options=options or {}))
        sounds, shown = CODECS[container]
        heard = file.add_stream(sounds, rate=48_000, layout="mono") if sound else None
        seen = file.add_stream(shown, rate=10, width=64, height=48, pix_fmt="yuv420p") if pictures else None
        if seen is not None:
            for _ in range(5):
                picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 128, np.uint8), format="rgb24")
                file.mux(seen.encode(picture))
            file.mux(seen.encode(None))
        if heard is not None:
            samples = (np.sin(np.arange(24_000) / 20)[None] * 9000).astype(np.int16)
            for begin in range(0, 24_000, 960):
                frame = av.AudioFrame.from_ndarray(samples[:, begin : begin + 960].copy(), format="s16", layout="mono")
                frame.sample_rate, frame.pts = 48_000, begin
                file.mux(heard.encode(frame))
            file.mux(heard.encode(None))
        file.close()
        return bytes(pipe.data) if piped else path.read_bytes()


SOUNDS = {
    "a voice memo (m4a)": made("mp4"),
    "its index first": made("mp4", options=INDEX_FIRST),
    "in fragments": made("mp4", options=FRAGMENTED),
    "QuickTime": made("mov"),
    "WebM": made("webm"),
    "WebM as a browser sends it": made("webm", piped=True),
    "Matroska": made("matroska"),
}
VIDEOS = {
    "mp4": made("mp4", pictures=True),
    "mp4, silent": made("mp4", sound=False, pictures=True),
    "mp4 in fragments": made("mp4", pictures=True, options=FRAGMENTED),
    "QuickTime": made("mov", pictures=True),
    "WebM": made("webm", pictures=True),
    "WebM, silent, as a browser sends it": made("webm", sound=False, pictures=True, piped=True),
    "Matroska": made("matroska", pictures=True),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_sound_alone_is_a_sound_whatever_its_name_says(name: str, tmp_path: Path) -> None:
    assert media_kind(SOUNDS[name], "film.mp4") == "audio"
    (tmp_path / "film.mp4").write_bytes(SOUNDS[name])
    assert load_media(tmp_path / "film.mp4").kind == "audio"


@pytest.mark.parametrize("name", VIDEOS)
def test_pictures_make_a_video_whatever_its_name_says(name: str) -> None:
    assert media_kind(VIDEOS[name], "memo.m4a") == "video"


@pytest.mark.parametrize("name", SOUNDS)
def test_what_is_cut_anywhere_or_overwritten_ends_no_reader(name: str) -> None:
    whole, random = SOUNDS[name], np.random.default_rng(1)
    for end in range(0, min(len(whole), 2000), 7):
        assert is_sound_alone(whole[:end]) in {True, False}
    for _ in range(300):
        data = bytearray(whole)
        for at in random.integers(0, len(data), 8):
            data[at] = random.integers(0, 256)
        assert is_sound_alone(bytes(data)) in {True, False}


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\0\x08ftyp", b"\0\0\0\x18ftypM4A ", b"\x1aE\xdf\xa3", b"\x1aE\xdf\xa3\x80\x18"]
)
def test_where_no_track_can_be_found_it_stays_a_video(data: bytes) -> None:
    assert not is_sound_alone(data)


def test_boxes_that_lie_about_their_size_are_read_once() -> None:
    for size in (0, 1, 7, 2**32 - 1):
        assert not is_sound_alone(b"\0\0\0\x08ftyp" + size.to_bytes(4) + b"moov" + bytes(64))
    assert not is_sound_alone(b"\0\0\0\x08ftyp" + (1).to_bytes(4) + b"moov" + (2**63).to_bytes(8) + bytes(64))


def test_ask_sends_a_memo_as_a_sound(tmp_path: Path) -> None:
    (tmp_path / "memo.m4a").write_bytes(SOUNDS["a voice memo (m4a)"])
    with serve_grpc(FakeTriton()) as server:
        result = CliRunner().invoke(cli.app, ["ask", "What is said?", str(tmp_path / "memo.m4a"), "--url", server.url])
        assert result.exit_code == 0, result.output
        assert b'"type": "audio"' in inputs_of(server.requests[0])["messages"][0]


def test_a_memo_given_as_a_video_is_wrong_usage_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "memo.m4a"
    path.write_bytes(SOUNDS["a voice memo (m4a)"])
    with pytest.raises(BadRequest, match=r"memo\.m4a: it has sound and no pictures; give it by --audio"):
        read_media(None, None, [path])
    result = CliRunner().invoke(cli.app, ["say", "hi", "--video", str(path), "--check"])
    assert result.exit_code == 2
    assert unframed("it has sound and no pictures; give it by --audio") in unframed(result.stderr)

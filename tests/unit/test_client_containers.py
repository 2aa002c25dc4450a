# SPDX-License-Identifier: Apache-2.0
"""A file of a video's kind that has sound alone is a sound: a voice memo, a recording of a browser's microphone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from client_fakes import FakeTriton, inputs_of, serve_grpc
from command_line import unframed
from container_samples import SOUNDS, VIDEOS
from triton_omni_client import BadRequest, cli, load_media, media_kind
from triton_omni_client.containers import is_sound_alone
from triton_omni_client.options import read_media


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

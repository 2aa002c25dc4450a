# SPDX-License-Identifier: Apache-2.0
"""Recordings are cut by a program that may be killed, and that kills nobody else."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from media_samples import audio_file
from triton_omni_gateway import cut_recording, recordings
from triton_omni_gateway.errors import GatewayError
from triton_omni_gateway.recordings import Cutter, plain_seconds

MP3 = audio_file("mp3", seconds=4)
PROGRAM = f"""
import runpy, sys
program = runpy.run_path({cut_recording.__file__!r})
"""
LIMITED = f'{PROGRAM}program["limit_this_process"](int(sys.argv[3]))\n'


def program(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Cut by this code."""
    (folder / "program.py").write_text(code)
    monkeypatch.setattr(recordings, "_PROGRAM", folder / "program.py")


async def settled() -> None:
    """Let asyncio close what belonged to a program that has ended: a few calls that wait for their turns."""
    for _ in range(10):
        await asyncio.sleep(0)


async def cut(data: bytes = MP3, **limits: Any) -> list[recordings.Window]:
    given = {"window_seconds": 1.5, "limit_seconds": 60, "cpu_seconds": 20, "at_once": 1, **limits}
    try:
        return [window async for window in Cutter(**given).windows(data, "file")]
    finally:
        await settled()


@pytest.mark.parametrize(
    ("code", "status", "what"),
    [
        ("while True: pass", 413, "takes over 1 CPU seconds"),
        ("bytearray(1 << 30)", 400, "its decoder ended"),
        ("import os; os.abort()", 400, "its decoder ended"),
        ("print('w', end='')", 400, "its decoder ended"),
        ("open(sys.argv[0] + '.left', 'w').write('x')", 400, "its decoder ended"),
    ],
    ids=["endless", "memory", "crash", "half a record", "disk"],
)
async def test_a_program_that_ends_early_refuses_its_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, status: int, what: str
) -> None:
    program(monkeypatch, tmp_path, LIMITED + code)
    with pytest.raises(GatewayError, match="file") as caught:
        await cut(cpu_seconds=1 if code.startswith("while") else 100)
    assert (caught.value.status, caught.value.param) == (status, "file")
    assert what in caught.value.message


async def test_a_file_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = 'program["main"].__globals__["decoded"] = lambda file: [bytes(1 << 30)]\nprogram["main"](1.5, 60, 20)'
    program(monkeypatch, tmp_path, PROGRAM + code)
    with pytest.raises(GatewayError, match="needs more memory to decode"):
        await cut()


async def test_a_recording_that_nobody_wants_ends_its_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"""
import os, struct, sys, time
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
sys.stdout.buffer.write(struct.pack("<cI", b"w", 3) + b"one")
sys.stdout.buffer.write(bytes(1 << 20))  # more than anybody reads ahead
time.sleep(3600)
"""
    program(monkeypatch, tmp_path, code)
    cutter = Cutter(1.5, 60, 20, at_once=1)
    async with aclosing(cutter.windows(MP3, "file")) as others:
        async with aclosing(cutter.windows(MP3, "file")) as windows:
            assert (await anext(windows)).data == b"one"
            waiting = asyncio.ensure_future(anext(others))  # the one place is taken
            await settled()
            assert not waiting.done()
            pid = int((tmp_path / "pid").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert (await waiting).data == b"one"  # the place is free again
    await settled()


async def test_nothing_is_open_after_a_recording() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    for data in (MP3, b"no sound"):
        try:
            await cut(data)
        except GatewayError:
            continue
    assert set(Path("/proc/self/fd").iterdir()) <= before


async def test_windows_join_to_the_recording() -> None:
    windows = await cut()
    assert [window.begin for window in windows[1:]] == [window.end for window in windows[:-1]]
    assert all(1 <= window.seconds <= 1.5 for window in windows[:-1])
    assert windows[-1].end == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize("seconds", [0.1, 1.4999, 1.5, 1.51, 1.7, 3.01])
async def test_no_window_is_too_short_or_too_long(seconds: float) -> None:
    windows = await cut(audio_file("flac", seconds=seconds))
    assert all(cut_recording.LEAST_SECONDS <= window.seconds <= 1.5 for window in windows)
    assert windows[-1].end == pytest.approx(seconds, abs=1e-3)


def test_a_window_is_cut_at_its_quietest_moment() -> None:
    samples = np.full(16_000, 1000, np.int16)
    samples[13_000:13_040] = 0  # a word's own pause
    samples[11_500:14_800] -= 900
    assert 11_500 + 1_600 <= cut_recording.quietest(samples) <= 14_800 - 1_600


@pytest.mark.parametrize(
    ("data", "seconds"), [(audio_file("wav"), 0.5), (audio_file("flac"), None), (b"", None), (b"RIFF", None)]
)
def test_plain_files_tell_their_seconds(data: bytes, seconds: float | None) -> None:
    assert plain_seconds(data) == seconds

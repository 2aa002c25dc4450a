# SPDX-License-Identifier: Apache-2.0
"""Recordings as callers send them, in windows that the model hears one by one. Nothing is decoded in this process.

A short WAV file of plain samples is a window as it came: the Triton server decodes it. Any other file is decoded by
`cut_recording.py`, a program that is killed when its work is not wanted any more.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import wave
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import cut_recording
from .errors import GatewayError

_PROGRAM: Final = Path(__file__).with_name("cut_recording.py")
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Else numpy takes memory for a thread of each core."""


@dataclass(frozen=True)
class Window:
    """A part of a recording."""

    data: bytes
    """A WAV file."""
    begin: float
    """Seconds from the recording's begin."""
    seconds: float

    @property
    def end(self) -> float:
        """Seconds from the recording's begin."""
        return self.begin + self.seconds


class Cutter:
    """Cuts recordings, a few at once; others wait.

    Args:
        window_seconds: longest window.
        limit_seconds: longest recording.
        cpu_seconds: CPU time that one may take to decode.
        at_once: programs that run at once, each with up to 256 MiB.
    """

    def __init__(self, window_seconds: float, limit_seconds: float, cpu_seconds: int, at_once: int) -> None:
        self._window_seconds = window_seconds
        self._limit_seconds = limit_seconds
        self._cpu_seconds = cpu_seconds
        self._places = asyncio.Semaphore(at_once)

    async def windows(self, data: bytes, param: str) -> AsyncGenerator[Window, None]:
        """The windows of a file, one after another; the next one is decoded while the last one is used.

        Args:
            data: the file.
            param: its name in refusals.

        Raises:
            GatewayError: 400 or 413, the file is refused.
        """
        seconds = plain_seconds(data)
        if seconds is not None and cut_recording.LEAST_SECONDS <= seconds <= self._window_seconds:
            yield Window(data, 0.0, seconds)
            return
        begin = 0.0
        async with self._places, self._program(data) as program:
            async for sound in self._records(program, param):
                length = plain_seconds(sound) or 0.0
                yield Window(sound, begin, length)
                begin += length

    @asynccontextmanager
    async def _program(self, data: bytes) -> AsyncIterator[Process]:
        """The program with this file as its input; killed at the end, if it has not ended."""
        file = await asyncio.to_thread(_in_memory, data)
        given = (self._window_seconds, self._limit_seconds, self._cpu_seconds)
        command = (sys.executable, "-I", str(_PROGRAM), *map(str, given))
        try:
            program = await asyncio.create_subprocess_exec(
                *command, stdin=file, stdout=PIPE, stderr=DEVNULL, env={**os.environ, **_ONE_THREAD}
            )
        finally:
            os.close(file)
        try:
            yield program
        finally:
            if program.returncode is None:
                program.kill()
            await program.communicate()  # asyncio sees no end before all that was written is read

    async def _records(self, program: Process, param: str) -> AsyncIterator[bytes]:
        assert program.stdout is not None
        while True:
            try:
                kind, length = cut_recording.RECORD.unpack(await program.stdout.readexactly(cut_recording.RECORD.size))
                content = await program.stdout.readexactly(length)
            except asyncio.IncompleteReadError as error:
                raise self._killed(await program.wait(), param) from error
            if kind == b"e":
                return
            if kind == b"r":
                raise _refused(param, content.decode())
            yield content

    def _killed(self, code: int, param: str) -> GatewayError:
        if code == -signal.SIGXCPU:
            said = f"takes over {self._cpu_seconds} CPU seconds to decode, the limit of this gateway"
            return _refused(param, f"{said}; encode it anew, for example as wav", status=413)
        return _refused(param, "cannot be decoded: its decoder ended; encode it anew, for example as wav")


def plain_seconds(data: bytes) -> float | None:
    """Seconds of a WAV file of plain samples by its header; None of any other file."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            seconds: float = file.getnframes() / file.getframerate()
            return seconds
    except (wave.Error, EOFError, ZeroDivisionError):
        return None


def _refused(param: str, reason: str, status: int = 400) -> GatewayError:
    return GatewayError(status, f"Invalid value for '{param}': it {reason}.", param=param, code="invalid_file")


def _in_memory(data: bytes) -> int:
    """A descriptor of a file that has no name, at its begin."""
    file = os.memfd_create("recording")
    with open(file, "wb", buffering=0, closefd=False) as out:
        out.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file

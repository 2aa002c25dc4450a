# SPDX-License-Identifier: Apache-2.0
"""A microphone and a speaker, which stand where a room would for LiveKit's agents."""

import asyncio

from livekit import rtc
from livekit.agents.voice import io

RATE = 16000
PIECE = RATE // 50


class Microphone(io.AudioInput):
    """Samples in their own time, and silence before and after."""

    def __init__(self, samples=b""):
        super().__init__(label="Microphone")
        self.samples = samples

    async def __anext__(self):
        await asyncio.sleep(PIECE / RATE)
        piece, self.samples = self.samples[: 2 * PIECE].ljust(2 * PIECE, b"\0"), self.samples[2 * PIECE :]
        return rtc.AudioFrame(piece, RATE, 1, PIECE)


class Speaker(io.AudioOutput):
    """Plays speech in its own time, unless it is told to be silent."""

    def __init__(self):
        super().__init__(label="Speaker", capabilities=io.AudioOutputCapabilities(pause=False))
        self.begun = asyncio.Event()
        self.seconds = 0.0
        """Of the speech that it got since the last reply ended."""
        self._end = None

    async def capture_frame(self, frame):
        await super().capture_frame(frame)
        self.seconds += frame.duration
        self.begun.set()

    def flush(self):
        super().flush()
        if self.begun.is_set():
            self._end = asyncio.get_running_loop().call_later(self.seconds, self._ended, False)

    def clear_buffer(self):
        if self._end:
            self._end.cancel()
        if self.begun.is_set():
            self._ended(True)

    def _ended(self, interrupted):
        self.on_playback_finished(playback_position=self.seconds, interrupted=interrupted)
        self.seconds, self._end = 0.0, None
        self.begun.clear()

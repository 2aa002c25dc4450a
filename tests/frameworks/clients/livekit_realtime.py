# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of OpenAI's RealtimeModel greets, and answers a spoken question that interrupts its story.

The server finds the turns.
"""

import asyncio
import json
import wave

from livekit import rtc
from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins import openai

MODEL = "qwen2_5_omni"
RATE = 16000
PIECE = RATE // 50


class Microphone(io.AudioInput):
    """Silence until it has something to say, each in its own time."""

    def __init__(self):
        super().__init__(label="Microphone")
        self.samples = b""

    async def __anext__(self):
        await asyncio.sleep(PIECE / RATE)
        piece, self.samples = self.samples[: 2 * PIECE].ljust(2 * PIECE, b"\0"), self.samples[2 * PIECE :]
        return rtc.AudioFrame(piece, RATE, 1, PIECE)


class Speaker(io.AudioOutput):
    """Stands where a room would: plays speech in its own time, unless it is told to be silent."""

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


async def main():
    session = AgentSession(llm=openai.realtime.RealtimeModel(model=MODEL))
    microphone = session.input.audio = Microphone()
    speaker = session.output.audio = Speaker()
    said = asyncio.Queue()

    @session.on("conversation_item_added")
    def added(event):
        if event.item.type == "message":
            said.put_nowait([event.item.role, event.item.text_content])

    await session.start(Agent(instructions="You are a helpful assistant."))
    await session.generate_reply(instructions="Say: Good morning.").wait_for_playout()
    greeting = await said.get()
    story = session.generate_reply(user_input="Tell me a story.")
    await speaker.begun.wait()
    with wave.open("question.wav") as file:
        microphone.samples = file.readframes(file.getnframes())
    await story.wait_for_playout()
    others = [await said.get() for _ in range(4)]
    await session.aclose()
    print(json.dumps({"greeting": greeting, "interrupted": story.interrupted, "others": others}))


asyncio.run(main())

# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of OpenAI's LLM and TTS greets, is interrupted in a story, and answers a question."""

import asyncio
import json

from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins import openai

MODEL = "qwen2_5_omni"


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
    session = AgentSession(llm=openai.LLM(model=MODEL), tts=openai.TTS(model=MODEL))
    speaker = session.output.audio = Speaker()
    heard, played = {}, []
    speaker.on("playback_finished", lambda event: played.append(event.playback_position))

    async def told(name, reply):
        await reply.wait_for_playout()
        text = " ".join(item.text_content for item in reply.chat_items)
        heard[name] = {"interrupted": reply.interrupted, "text": text, "seconds": sum(played)}
        played.clear()

    await session.start(Agent(instructions="You are a helpful assistant."))
    await told("greeting", session.generate_reply(instructions="Say: Good morning."))
    story = session.generate_reply(user_input="Tell me a story.")
    await speaker.begun.wait()
    await session.interrupt()
    await told("story", story)
    await told("answer", session.generate_reply(user_input="What color is the sky?"))
    await session.aclose()
    print(json.dumps(heard))


asyncio.run(main())

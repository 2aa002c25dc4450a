# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of OpenAI's STT, LLM and TTS hears a question and answers it."""

import asyncio
import json
import wave

from address import KEY, URL
from livekit.agents import Agent, AgentSession
from livekit.agents.voice import io
from livekit.plugins import openai
from livekit_room import Microphone


class Speaker(io.AudioOutput):
    """Stands where a room would: plays speech at once."""

    def __init__(self):
        super().__init__(label="Speaker", capabilities=io.AudioOutputCapabilities(pause=False))
        self.seconds = 0.0

    async def capture_frame(self, frame):
        await super().capture_frame(frame)
        self.seconds += frame.duration

    def flush(self):
        super().flush()
        self.on_playback_finished(playback_position=self.seconds, interrupted=False)

    def clear_buffer(self):
        pass


async def main():
    stt = openai.STT(base_url=URL, api_key=KEY)
    llm = openai.LLM(base_url=URL, api_key=KEY)
    tts = openai.TTS(base_url=URL, api_key=KEY)
    session = AgentSession(stt=stt, llm=llm, tts=tts)
    with wave.open("question.wav") as file:
        session.input.audio = Microphone(file.readframes(file.getnframes()))
    speaker = session.output.audio = Speaker()
    said = asyncio.Queue()

    @session.on("conversation_item_added")
    def added(event):
        if event.item.type == "message":
            said.put_nowait(event.item.text_content)

    await session.start(Agent(instructions="You are a helpful assistant."))
    told = {"question": await said.get(), "answer": await said.get(), "seconds": speaker.seconds}
    await session.aclose()
    print(json.dumps(told))


asyncio.run(main())

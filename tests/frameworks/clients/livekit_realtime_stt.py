# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent hears a question by OpenAI's STT over a realtime session, whose server finds the turns."""

import asyncio
import json
import wave

from address import KEY, URL
from livekit.agents import Agent, AgentSession
from livekit.agents.utils import http_context
from livekit.plugins import openai
from livekit_room import Microphone


async def main():
    stt = openai.STT(base_url=URL, api_key=KEY, use_realtime=True)
    session = AgentSession(stt=stt, llm=openai.LLM(base_url=URL, api_key=KEY), vad=None)
    with wave.open("question.wav") as file:
        session.input.audio = Microphone(file.readframes(file.getnframes()))
    said = asyncio.Queue()

    @session.on("conversation_item_added")
    def added(event):
        if event.item.type == "message":
            said.put_nowait(event.item.text_content)

    await session.start(Agent(instructions="You are a helpful assistant."))
    print(json.dumps([await said.get(), await said.get()]))
    await session.aclose()


async def in_a_job():
    """LiveKit's workers open this for each of their jobs."""
    async with http_context.open():
        await main()


asyncio.run(in_a_job())

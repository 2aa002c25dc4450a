# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of OpenAI's RealtimeModel greets, and answers a spoken question that interrupts its story.

The server finds the turns.
"""

import asyncio
import json
import wave

from address import KEY, URL
from livekit.agents import Agent, AgentSession
from livekit.plugins import openai
from livekit_room import Microphone, Speaker


async def main():
    llm = openai.realtime.RealtimeModel(base_url=URL, api_key=KEY)
    session = AgentSession(llm=llm)
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

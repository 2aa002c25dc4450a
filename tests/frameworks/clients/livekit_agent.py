# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of OpenAI's LLM and TTS greets, is interrupted in a story, and answers a question."""

import asyncio
import json

from livekit.agents import Agent, AgentSession
from livekit.plugins import openai
from livekit_room import Speaker


async def main():
    session = AgentSession(llm=openai.LLM(), tts=openai.TTS())
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

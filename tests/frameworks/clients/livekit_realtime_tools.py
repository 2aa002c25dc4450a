# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of a RealtimeModel calls a function, and speaks after its result."""

import asyncio
import json

from livekit.agents import AgentSession
from livekit.plugins import openai
from livekit_room import Speaker
from livekit_weather import CITIES, Assistant


async def main():
    session = AgentSession(llm=openai.realtime.RealtimeModel())
    speaker = session.output.audio = Speaker()
    played = []
    speaker.on("playback_finished", lambda event: played.append(event.playback_position))
    await session.start(Assistant())
    reply = session.generate_reply(user_input="What is the weather in Paris?", tool_choice="required")
    await reply.wait_for_playout()
    answer = [item.text_content for item in reply.chat_items if item.type == "message"]
    await session.aclose()
    print(json.dumps({"cities": CITIES, "answer": " ".join(answer), "seconds": sum(played)}))


asyncio.run(main())

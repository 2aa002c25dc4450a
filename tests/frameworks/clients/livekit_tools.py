# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent's model calls a function, and the agent answers after its result."""

import asyncio
import json

from livekit.agents import AgentSession
from livekit.plugins import openai
from livekit_weather import CITIES, Assistant


async def main():
    session = AgentSession(llm=openai.LLM())
    await session.start(Assistant())
    reply = session.generate_reply(user_input="What is the weather in Paris?", tool_choice="required")
    await reply.wait_for_playout()
    answer = [item.text_content for item in reply.chat_items if item.type == "message"]
    await session.aclose()
    print(json.dumps({"cities": CITIES, "answer": " ".join(answer)}))


asyncio.run(main())

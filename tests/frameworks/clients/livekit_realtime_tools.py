# SPDX-License-Identifier: Apache-2.0
"""LiveKit: an agent of a RealtimeModel calls a function, and answers after its result."""

import asyncio
import json
from typing import Literal

from livekit.agents import Agent, AgentSession, function_tool
from livekit.plugins import openai

MODEL = "qwen2_5_omni"
CITIES = []


class Assistant(Agent):
    """Knows the weather."""

    def __init__(self):
        super().__init__(instructions="You are a helpful assistant.")

    @function_tool
    async def get_weather(self, city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        CITIES.append(city)
        return "The sky is blue."


async def main():
    session = AgentSession(llm=openai.realtime.RealtimeModel(model=MODEL, modalities=["text"]))
    await session.start(Assistant())
    reply = session.generate_reply(user_input="What is the weather in Paris?", tool_choice="required")
    await reply.wait_for_playout()
    answer = [item.text_content for item in reply.chat_items if item.type == "message"]
    await session.aclose()
    print(json.dumps({"cities": CITIES, "answer": " ".join(answer)}))


asyncio.run(main())

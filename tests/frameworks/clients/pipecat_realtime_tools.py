# SPDX-License-Identifier: Apache-2.0
"""Pipecat: the model of an agent of OpenAI's realtime service calls a function, and answers after its result."""

import asyncio
import json

from address import KEY, WS_URL
from pipecat.frames.frames import LLMUpdateSettingsFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat_weather import ask
from weather import FUNCTION


def properties(tool_choice):
    """A session that may, or must, call the function, and writes."""
    weather = {"type": "function", **FUNCTION}
    return SessionProperties(output_modalities=["text"], tools=[weather], tool_choice=tool_choice)


async def main():
    settings = OpenAIRealtimeLLMService.Settings(session_properties=properties("required"))
    llm = OpenAIRealtimeLLMService(base_url=WS_URL, api_key=KEY, settings=settings)
    context = LLMContext([{"role": "user", "content": "What is the weather in Paris?"}])

    async def forbid_calls():
        settings = OpenAIRealtimeLLMService.Settings(session_properties=properties("none"))
        await llm.queue_frame(LLMUpdateSettingsFrame(delta=settings))

    print(json.dumps(await ask(llm, context, forbid_calls)))


asyncio.run(main())

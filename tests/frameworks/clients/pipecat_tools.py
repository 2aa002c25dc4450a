# SPDX-License-Identifier: Apache-2.0
"""Pipecat: an agent's model calls a function, and the agent answers after its result."""

import asyncio
import json

from pipecat.adapters.llm.schemas.tools_schema import AdapterType, ToolsSchema
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.openai.llm import OpenAILLMService
from pipecat_weather import ask
from weather import FUNCTION


async def main():
    llm = OpenAILLMService()
    weather = {"type": "function", "function": FUNCTION}
    tools = ToolsSchema(standard_tools=[], custom_tools={AdapterType.OPENAI: [weather]})
    context = LLMContext([{"role": "user", "content": "What is the weather in Paris?"}], tools, "required")

    async def forbid_calls():
        context.set_tool_choice("none")

    print(json.dumps(await ask(llm, context, forbid_calls)))


asyncio.run(main())

# SPDX-License-Identifier: Apache-2.0
"""Pipecat: an agent's model calls a function, and the agent answers after its result."""

import asyncio
import json

from pipecat.adapters.llm.schemas.tools_schema import AdapterType, ToolsSchema
from pipecat.frames.frames import EndFrame, LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.workers.runner import WorkerRunner

MODEL = "qwen2_5_omni"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def main():
    llm = OpenAILLMService(settings=OpenAILLMService.Settings(model=MODEL))
    tools = ToolsSchema(standard_tools=[], custom_tools={AdapterType.OPENAI: [WEATHER]})
    context = LLMContext([{"role": "user", "content": "What is the weather in Paris?"}], tools, "required")
    user, assistant = LLMContextAggregatorPair(context)
    cities, answers = [], asyncio.Queue()

    async def get_weather(call):
        cities.append(call.arguments["city"])
        context.set_tool_choice("none")
        await call.result_callback("The sky is blue.")

    llm.register_function("get_weather", get_weather)

    @assistant.event_handler("on_assistant_turn_stopped")
    async def stopped(_assistant, turn):
        if turn.content:
            answers.put_nowait(turn.content)

    worker = PipelineWorker(Pipeline([user, llm, assistant]))
    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await worker.queue_frame(LLMRunFrame())
    answer = await answers.get()
    await worker.queue_frame(EndFrame())
    await running
    print(json.dumps({"cities": cities, "answer": answer}))


asyncio.run(main())

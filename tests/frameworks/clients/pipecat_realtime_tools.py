# SPDX-License-Identifier: Apache-2.0
"""Pipecat: the model of an agent of OpenAI's realtime service calls a function, and answers after its result."""

import asyncio
import json
import os

from pipecat.frames.frames import EndFrame, LLMRunFrame, LLMUpdateSettingsFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

MODEL = "qwen2_5_omni"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def properties(tool_choice):
    """A session that may, or must, call the function, and writes."""
    return SessionProperties(output_modalities=["text"], tools=[WEATHER], tool_choice=tool_choice)


async def main():
    llm = OpenAIRealtimeLLMService(
        api_key=os.environ["OPENAI_API_KEY"],
        base_url=os.environ["OPENAI_BASE_URL"].replace("http", "ws", 1) + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model=MODEL, session_properties=properties("required")),
    )
    context = LLMContext([{"role": "user", "content": "What is the weather in Paris?"}])
    user, assistant = LLMContextAggregatorPair(context)
    cities, answers = [], asyncio.Queue()

    async def get_weather(call):
        cities.append(call.arguments["city"])
        settings = OpenAIRealtimeLLMService.Settings(session_properties=properties("none"))
        await llm.queue_frame(LLMUpdateSettingsFrame(delta=settings))
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

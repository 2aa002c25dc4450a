# SPDX-License-Identifier: Apache-2.0
"""An agent of Pipecat whose model looks up the weather, and answers."""

import asyncio

from pipecat.frames.frames import EndFrame, LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.workers.runner import WorkerRunner


async def ask(llm, context, forbid_calls):
    """What was looked up and what was answered; `forbid_calls` runs before the model gets a call's result."""
    user, assistant = LLMContextAggregatorPair(context)
    cities, answers = [], asyncio.Queue()

    async def get_weather(call):
        cities.append(call.arguments["city"])
        await forbid_calls()
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
    return {"cities": cities, "answer": answer}

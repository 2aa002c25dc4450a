# SPDX-License-Identifier: Apache-2.0
"""Pipecat: an agent of OpenAI's LLM and TTS services greets, is interrupted in a story, and answers a question."""

import asyncio
import json

from pipecat.frames.frames import EndFrame, InterruptionFrame, LLMRunFrame, TTSAudioRawFrame, TTSTextFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.workers.runner import WorkerRunner


class Listener(FrameProcessor):
    """Stands where a transport's output would, and hears what it would play."""

    def __init__(self):
        super().__init__()
        self.seconds, self.sentences = 0.0, 0
        self.second_sentence = asyncio.Event()

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.seconds += frame.num_frames / frame.sample_rate
            if self.sentences:
                self.second_sentence.set()
        elif isinstance(frame, TTSTextFrame):
            self.sentences += 1
        await self.push_frame(frame, direction)


async def main():
    llm = OpenAILLMService(settings=OpenAILLMService.Settings(system_instruction="You are a helpful assistant."))
    tts = OpenAITTSService()
    context, listener = LLMContext(), Listener()
    user, assistant = LLMContextAggregatorPair(context)
    worker = PipelineWorker(Pipeline([user, llm, tts, listener, assistant]))
    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())

    turns = asyncio.Queue()

    @assistant.event_handler("on_assistant_turn_stopped")
    async def stopped(_assistant, turn):
        turns.put_nowait({"text": turn.content, "interrupted": turn.interrupted, "seconds": listener.seconds})
        listener.seconds, listener.sentences = 0.0, 0

    async def say(role, text):
        context.add_message({"role": role, "content": text})
        await worker.queue_frame(LLMRunFrame())

    await say("developer", "Start by concisely introducing yourself.")
    greeting = await turns.get()
    await say("user", "Tell me a story.")
    await listener.second_sentence.wait()
    await worker.queue_frame(InterruptionFrame())
    story = await turns.get()
    await say("user", "What color is the sky?")
    answer = await turns.get()
    await worker.queue_frame(EndFrame())
    await running
    print(json.dumps({"greeting": greeting, "story": story, "answer": answer}))


asyncio.run(main())

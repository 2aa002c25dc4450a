# SPDX-License-Identifier: Apache-2.0
"""Pipecat: OpenAI's realtime service greets and answers a spoken question, which another time interrupts its story.

The server finds the turns.
"""

import asyncio
import json
import wave

from address import KEY, WS_URL
from pipecat.frames.frames import InputAudioRawFrame, LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner

RATE = 16000
PIECE = RATE // 50


class Player(BaseOutputTransport):
    """Plays speech in its own time."""

    def __init__(self):
        super().__init__(TransportParams(audio_out_enabled=True))
        self.seconds = 0.0
        self.begun = asyncio.Event()

    async def start(self, frame):
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame):
        seconds = frame.num_frames / frame.sample_rate
        self.seconds += seconds
        self.begun.set()
        await asyncio.sleep(seconds)
        return True


async def speak(worker, samples):
    """A microphone: the samples in their own time, and then silence."""
    while True:
        piece, samples = samples[: 2 * PIECE].ljust(2 * PIECE, b"\0"), samples[2 * PIECE :]
        await worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))
        await asyncio.sleep(PIECE / RATE)


async def converse(message, *, interrupts):
    """Both replies of a session that a message begins, and that the spoken question goes on with, at once or later."""
    llm = OpenAIRealtimeLLMService(base_url=WS_URL, api_key=KEY)
    player = Player()
    user, assistant = LLMContextAggregatorPair(LLMContext([message]))
    worker = PipelineWorker(Pipeline([user, llm, player, assistant]))
    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    turns, ended = asyncio.Queue(), asyncio.Event()

    @assistant.event_handler("on_assistant_turn_stopped")
    async def stopped(_assistant, turn):
        turns.put_nowait({"text": turn.content, "interrupted": turn.interrupted, "seconds": player.seconds})
        player.seconds = 0.0
        ended.set()

    await worker.queue_frame(LLMRunFrame())
    await (player.begun if interrupts else ended).wait()
    with wave.open("question.wav") as file:
        question = file.readframes(file.getnframes())
    microphone = asyncio.create_task(speak(worker, question))
    replies = [await turns.get(), await turns.get()]
    microphone.cancel()
    await runner.cancel()
    await running
    return replies


async def main():
    greets = {"role": "developer", "content": "Start by concisely introducing yourself."}
    greeting, answer = await converse(greets, interrupts=False)
    for _ in range(3):  # on a busy machine a story can be whole before the question was heard
        story, after = await converse({"role": "user", "content": "Tell me a story."}, interrupts=True)
        if story["interrupted"]:
            break
    print(json.dumps({"greeting": greeting, "answer": answer, "story": story, "after": after}))


asyncio.run(main())

# SPDX-License-Identifier: Apache-2.0
"""Pipecat: an agent of OpenAI's STT, LLM and TTS services hears a question and answers it, with the usual detection of
turns.
"""

import asyncio
import json
import wave

from address import KEY, URL
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import InputAudioRawFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.workers.runner import WorkerRunner

RATE = 16000
PIECE = RATE // 50


class Listener(FrameProcessor):
    """Stands where a transport's output would, and hears what it would play."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.seconds += frame.num_frames / frame.sample_rate
        await self.push_frame(frame, direction)


async def speak(worker, samples):
    """A microphone: the samples in their own time, and then silence."""
    while True:
        piece, samples = samples[: 2 * PIECE].ljust(2 * PIECE, b"\0"), samples[2 * PIECE :]
        await worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))
        await asyncio.sleep(PIECE / RATE)


async def main():
    stt = OpenAISTTService(base_url=URL, api_key=KEY)
    llm = OpenAILLMService(base_url=URL, api_key=KEY)
    tts = OpenAITTSService(base_url=URL, api_key=KEY)
    listener = Listener()
    user, assistant = LLMContextAggregatorPair(
        LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
    worker = PipelineWorker(Pipeline([stt, user, llm, tts, listener, assistant]))
    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    heard, answered = asyncio.Queue(), asyncio.Queue()

    @user.event_handler("on_user_turn_stopped")
    async def asked(_user, _strategy, turn):
        heard.put_nowait(turn.content)

    @assistant.event_handler("on_assistant_turn_stopped")
    async def stopped(_assistant, turn):
        answered.put_nowait(turn.content)

    with wave.open("question.wav") as file:
        question = file.readframes(file.getnframes())
    microphone = asyncio.create_task(speak(worker, question))
    told = {"question": await heard.get(), "answer": await answered.get(), "seconds": listener.seconds}
    microphone.cancel()
    await runner.cancel()
    await running
    print(json.dumps(told))


asyncio.run(main())

# SPDX-License-Identifier: Apache-2.0
"""Pipecat: OpenAI's realtime STT service hears a question, whose end its own detector finds, or the server's."""

import asyncio
import json
import wave

from address import KEY, WS_URL
from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import InputAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair, LLMUserAggregatorParams
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.workers.runner import WorkerRunner

RATE = 16000
PIECE = RATE // 50


async def speak(worker, samples):
    """A microphone: the samples in their own time, and then silence."""
    while True:
        piece, samples = samples[: 2 * PIECE].ljust(2 * PIECE, b"\0"), samples[2 * PIECE :]
        await worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))
        await asyncio.sleep(PIECE / RATE)


async def hear(stt, vad_analyzer):
    """The question as the service hears it."""
    user, _ = LLMContextAggregatorPair(LLMContext(), user_params=LLMUserAggregatorParams(vad_analyzer=vad_analyzer))
    worker = PipelineWorker(Pipeline([stt, user]))
    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    heard = asyncio.Queue()

    @user.event_handler("on_user_turn_stopped")
    async def asked(_user, _strategy, turn):
        heard.put_nowait(turn.content)

    with wave.open("question.wav") as file:
        question = file.readframes(file.getnframes())
    microphone = asyncio.create_task(speak(worker, question))
    text = await heard.get()
    microphone.cancel()
    await runner.cancel()
    await running
    return text


async def main():
    stt = OpenAIRealtimeSTTService(base_url=WS_URL, api_key=KEY)
    by_the_client = await hear(stt, SileroVADAnalyzer())
    stt = OpenAIRealtimeSTTService(base_url=WS_URL, api_key=KEY, turn_detection={"type": "server_vad"})
    by_the_server = await hear(stt, None)
    print(json.dumps([by_the_client, by_the_server]))


asyncio.run(main())

# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: a realtime session answers a written question, and then a spoken one, whose text it tells."""

import asyncio
import base64
import json
import wave

from openai import AsyncOpenAI

MODEL = "qwen2_5_omni"


async def reply(connection):
    """The transcript and the seconds of the response that comes next."""
    await connection.response.create()
    sound, transcript = b"", ""
    async for event in connection:
        if event.type == "response.output_audio.delta":
            sound += base64.b64decode(event.delta)
        elif event.type == "response.output_audio_transcript.done":
            transcript = event.transcript
        elif event.type == "error":
            raise RuntimeError(event.error.message)
        elif event.type == "response.done":
            break
    return {"text": transcript, "seconds": len(sound) / 48000}


async def main():
    async with AsyncOpenAI().realtime.connect(model=MODEL) as connection:
        listening = {"format": {"type": "audio/pcm", "rate": 16000}, "turn_detection": None}
        audio = {"input": listening, "output": {"voice": "marin"}}
        await connection.session.update(session={"type": "realtime", "output_modalities": ["audio"], "audio": audio})
        content = [{"type": "input_text", "text": "What color is the sky?"}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        written = await reply(connection)
        with wave.open("question.wav") as file:
            question = base64.b64encode(file.readframes(file.getnframes())).decode()
        await connection.input_audio_buffer.append(audio=question)
        await connection.input_audio_buffer.commit()
        print(json.dumps({"written": written, "spoken": await reply(connection)}))


asyncio.run(main())

# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: a realtime session's model calls a function, and answers after its result."""

import asyncio
import json

from openai import AsyncOpenAI
from weather import FUNCTION

MODEL = "qwen2_5_omni"
WEATHER = {"type": "function", **FUNCTION}


async def done(connection):
    """The output of the response that comes next."""
    async for event in connection:
        if event.type == "error":
            raise RuntimeError(event.error.message)
        if event.type == "response.done":
            break
    return event.response.output


async def main():
    async with AsyncOpenAI().realtime.connect(model=MODEL) as connection:
        session = {"type": "realtime", "output_modalities": ["text"], "tools": [WEATHER], "tool_choice": "required"}
        await connection.session.update(session=session)
        content = [{"type": "input_text", "text": "What is the weather in Paris?"}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await connection.response.create()
        (call,) = await done(connection)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "The sky is blue."}
        await connection.conversation.item.create(item=result)
        await connection.response.create(response={"tool_choice": "none"})
        (message,) = await done(connection)
        cities = [json.loads(call.arguments)["city"]]
        print(json.dumps({"cities": cities, "answer": message.content[0].text}))


asyncio.run(main())

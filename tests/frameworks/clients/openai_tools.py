# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: a reply that calls a function, whole and streamed, and the reply after the call's result."""

import json

from openai import OpenAI
from weather import FUNCTION

client = OpenAI()
weather = {"type": "function", "function": {**FUNCTION, "strict": True}}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
chat = {"model": "qwen2_5_omni", "tools": [weather]}
first = client.chat.completions.create(**chat, messages=messages, tool_choice="required").choices[0]
call = first.message.tool_calls[0]
streamed = {"name": "", "arguments": ""}
for chunk in client.chat.completions.create(**chat, messages=messages, tool_choice="required", stream=True):
    for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
        streamed["name"] += piece.function.name or ""
        streamed["arguments"] += piece.function.arguments or ""
messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "The sky is blue."}]
last = client.chat.completions.create(**chat, messages=messages, tool_choice="none").choices[0]
print(
    json.dumps(
        {
            "name": call.function.name,
            "arguments": json.loads(call.function.arguments),
            "reason": first.finish_reason,
            "streamed": streamed["name"],
            "streamed_arguments": json.loads(streamed["arguments"]),
            "answer": last.message.content,
        }
    )
)

# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: the models, a chat, the same chat streamed, and a spoken one."""

import base64
import json
from pathlib import Path

from address import KEY, URL
from openai import OpenAI

client = OpenAI(base_url=URL, api_key=KEY)
messages = [{"role": "user", "content": "What color is the sky?"}]
reply = client.chat.completions.create(model="qwen2_5_omni", messages=messages)
chunks = client.chat.completions.create(model="qwen2_5_omni", messages=messages, stream=True)
spoken = client.chat.completions.create(
    model="qwen2_5_omni", messages=messages, modalities=["text", "audio"], audio={"voice": "alloy", "format": "mp3"}
).choices[0]
Path("reply.mp3").write_bytes(base64.b64decode(spoken.message.audio.data))
print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "text": reply.choices[0].message.content,
            "tokens": reply.usage.completion_tokens,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "transcript": spoken.message.audio.transcript,
        }
    )
)

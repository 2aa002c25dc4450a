# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: the models, a chat, the same chat streamed, and a spoken one."""

import base64
import json
from pathlib import Path

from openai import OpenAI

client = OpenAI()
chat = {"model": "qwen2_5_omni", "messages": [{"role": "user", "content": "What color is the sky?"}]}
reply = client.chat.completions.create(**chat)
chunks = client.chat.completions.create(**chat, stream=True)
spoken = client.chat.completions.create(
    **chat, modalities=["text", "audio"], audio={"voice": "alloy", "format": "mp3"}
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

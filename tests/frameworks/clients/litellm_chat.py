# SPDX-License-Identifier: Apache-2.0
"""LiteLLM: a chat, whole and streamed, and a text read aloud into a file."""

import json
from pathlib import Path

import litellm

chat = {"model": "openai/qwen2_5_omni", "messages": [{"role": "user", "content": "What color is the sky?"}]}
reply = litellm.completion(**chat)
chunks = litellm.completion(**chat, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
speech = litellm.speech(model="openai/qwen2_5_omni", voice="alloy", input="The sky is blue.")
Path("speech.mp3").write_bytes(speech.content)
print(json.dumps({"text": reply.choices[0].message.content, "streamed": streamed}))

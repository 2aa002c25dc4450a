# SPDX-License-Identifier: Apache-2.0
"""LiteLLM: a chat, whole and streamed, and a text read aloud into a file."""

import json
from pathlib import Path

import litellm
from address import KEY, URL

messages = [{"role": "user", "content": "What color is the sky?"}]
reply = litellm.completion("openai/qwen2_5_omni", messages, api_base=URL, api_key=KEY)
chunks = litellm.completion("openai/qwen2_5_omni", messages, api_base=URL, api_key=KEY, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
text = "The sky is blue."
speech = litellm.speech("openai/qwen2_5_omni", text, "alloy", api_base=URL, api_key=KEY)
Path("speech.mp3").write_bytes(speech.content)
print(json.dumps({"text": reply.choices[0].message.content, "streamed": streamed}))

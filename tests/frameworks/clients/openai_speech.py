# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: a text read aloud into a file, in the format that it has where none is asked for."""

from openai import OpenAI

client = OpenAI()
speech = {"model": "qwen2_5_omni", "voice": "alloy", "input": "The sky is blue."}
with client.audio.speech.with_streaming_response.create(**speech) as answer:
    answer.stream_to_file("speech.mp3")

# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python client: a recording is written down, whole, as text, with its length and streamed; and translated."""

import json
from pathlib import Path

from openai import OpenAI

client = OpenAI()
asked = {"model": "qwen2_5_omni", "file": Path("question.wav")}
events = list(client.audio.transcriptions.create(**asked, stream=True))
verbose = client.audio.transcriptions.create(**asked, response_format="verbose_json")
print(
    json.dumps(
        {
            "json": client.audio.transcriptions.create(**asked).text,
            "text": client.audio.transcriptions.create(**asked, response_format="text"),
            "verbose": verbose.text,
            "seconds": verbose.duration,
            "pieces": "".join(event.delta for event in events if event.type == "transcript.text.delta"),
            "streamed": events[-1].text,
            "translated": client.audio.translations.create(**asked).text,
        }
    )
)

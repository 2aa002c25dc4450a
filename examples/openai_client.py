# SPDX-License-Identifier: Apache-2.0
"""Ask about a picture with OpenAI's own client, through the gateway: the text while it comes, the speech as a WAV file.

Usage: pip install openai; python examples/openai_client.py PICTURE [WAV] [http://HOST:PORT/v1]
"""

from __future__ import annotations

import base64
import mimetypes
import os
import sys
import wave
from pathlib import Path

from openai import OpenAI, OpenAIError


def main(picture: str, output: str = "answer.wav", base_url: str = "http://localhost:8080/v1") -> None:
    """Leaving the loop early, and with it the stream, would cancel the request on the server."""
    image = base64.b64encode(Path(picture).read_bytes()).decode()
    url = f"data:{mimetypes.guess_type(picture)[0]};base64,{image}"
    question = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Describe the picture."}]
    with OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "any")) as client:
        stream = client.chat.completions.create(
            model="qwen2_5_omni",
            messages=[{"role": "user", "content": question}],
            modalities=["text", "audio"],
            audio={"voice": "Chelsie", "format": "pcm16"},
            max_completion_tokens=200,
            seed=7,
            stream=True,
        )
        with stream, wave.open(output, "wb") as wav:
            wav.setparams((1, 2, 24_000, 0, "NONE", ""))  # one channel of 16 bits
            for chunk in stream:
                audio = chunk.choices[0].delta.audio if chunk.choices else None
                if audio and audio.transcript:
                    print(audio.transcript, end="", flush=True)
                if audio and audio.data:
                    wav.writeframes(base64.b64decode(audio.data))
            print(f"\n{output}: {wav.getnframes() / 24_000:.1f} s")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OpenAIError, OSError) as error:
        sys.exit(f"error: {error} {error.__cause__ or ''}".rstrip())

# SPDX-License-Identifier: Apache-2.0
"""Show a picture, ask about it twice in one chat, and save the second answer's speech.

Usage: python examples/ask_about_an_image.py PICTURE [HOST:PORT]
"""

from __future__ import annotations

import sys
from pathlib import Path

from triton_omni_client import OmniClient, Overloaded, Request


def main(picture: str, url: str = "localhost:8001") -> None:
    """The chat is sent whole each time: the server keeps nothing of it."""
    media = [Path(picture).read_bytes()]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]}]
    with OmniClient(url) as client:
        try:
            with client.stream(Request(messages=chat, media=media, modalities=["text"])) as stream:
                first = stream.collect()
        except Overloaded as error:
            raise SystemExit(f"{error.message}; try again in {error.retry_after_ms} ms") from error
        print("answer:", first.text)
        chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Say it in one word."}]
        with client.stream(Request(messages=chat, media=media, voice="Ethan")) as stream:
            second = stream.collect()
        second.save_wav("answer.wav")
        print(f"in one word: {second.text} ({second.timings.audio:.1f} s in answer.wav)")


if __name__ == "__main__":
    main(*sys.argv[1:])

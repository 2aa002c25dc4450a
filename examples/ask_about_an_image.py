# SPDX-License-Identifier: Apache-2.0
"""Describe a picture, ask about it once more in the same conversation, and save the second answer's speech.

Usage: python examples/ask_about_an_image.py PICTURE [HOST:PORT]

The model that is served by default sees shapes and colours: examples/red_circle.png is one.
"""

from __future__ import annotations

import sys

from triton_omni_client import Conversation, OmniClient, OmniClientError, load_media


def main(picture: str, url: str = "localhost:8001") -> None:
    """The server keeps nothing of a chat: `Conversation` sends all of it each time, the picture included."""
    chat = Conversation(voice="Ethan", seed=2, thinker={"max_tokens": 60})
    with OmniClient(url) as client:
        description = chat.ask(client, "Describe the picture.", [load_media(picture)], modalities=["text"])
        for text in description.texts():
            print(text, end="", flush=True)
        print()
        answer = chat.ask(client, "Say it in one word.").collect()
    answer.save_wav("answer.wav")
    print(f"in one word: {answer.text} ({answer.timings.audio:.1f} s in answer.wav)")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OmniClientError, OSError) as error:
        sys.exit(f"error: {error}")

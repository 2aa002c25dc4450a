# SPDX-License-Identifier: Apache-2.0
"""Write down what is said in a sound file, then answer it aloud.

Usage: python examples/transcribe_and_answer.py SOUND [WAV] [HOST:PORT]
"""

from __future__ import annotations

import sys

from triton_omni_client import OmniClient, OmniClientError, load_media


def main(sound: str, output: str = "answer.wav", url: str = "localhost:8001") -> None:
    """A sound alone is a question that is spoken; with a text beside it, it is what the text is about."""
    question = load_media(sound)
    limits = {"max_tokens": 100}
    with OmniClient(url) as client:
        said = client.say("Write down what is said, word by word.", [question], modalities=["text"], thinker=limits)
        print("said:", said.text)
        answer = client.say(media=[question], voice="Chelsie", seed=7, thinker=limits)
    answer.save_wav(output)
    print(f"answer: {answer.text} ({answer.timings.audio:.1f} s in {output})")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OmniClientError, OSError) as error:
        sys.exit(f"error: {error}")

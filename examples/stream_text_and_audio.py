# SPDX-License-Identifier: Apache-2.0
"""Print a reply's text while it comes and write its speech to a WAV file, chunk by chunk.

Usage: python examples/stream_text_and_audio.py [TEXT] [WAV] [HOST:PORT]
"""

from __future__ import annotations

import sys
from pathlib import Path

from triton_omni_client import AudioDelta, OmniClient, OmniClientError, Request, TextDelta
from triton_omni_client.audio import WavWriter


def main(text: str = "Tell me a story", output: str = "story.wav", url: str = "localhost:8001") -> None:
    """Ask `text`; leaving the `with` block early would cancel the request on the server."""
    request = Request.ask(text, voice="Chelsie", seed=7, thinker={"max_tokens": 200})
    with (
        OmniClient(url) as client,
        Path(output).open("wb") as file,
        WavWriter(file) as wav,
        client.stream(request) as stream,
    ):
        for delta in stream:
            if isinstance(delta, TextDelta):
                print(delta.text, end="", flush=True)
            elif isinstance(delta, AudioDelta):
                wav.write(delta.samples)  # float32 [S], mono, 24 kHz
            else:
                print(f"\n{delta.codes} codes, finish {dict(delta.finish_reason)}, seed {delta.seed}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OmniClientError, OSError) as error:
        sys.exit(f"error: {error}")

# SPDX-License-Identifier: Apache-2.0
"""Talk by voice: each sound file is one thing you say, each answer a WAV file beside it, all in one conversation.

Usage: python examples/voice_loop.py HOST:PORT SOUND...

The model that is served by default understands questions in its own voices. This speaks one into a file:
triton-omni say "Say: What color is the sky?" -o question.wav
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from triton_omni_client import AsyncOmniClient, AudioDelta, Conversation, OmniClientError, TextDelta, load_media
from triton_omni_client.audio import WavWriter


async def main(url: str, *sounds: str) -> None:
    """Where you talk over an answer, `chat.stop(heard=seconds)` keeps of it what you have heard."""
    chat = Conversation(voice="Chelsie", seed=2, thinker={"max_tokens": 60})
    async with AsyncOmniClient(url) as client:
        for sound in map(Path, sounds):
            answer = sound.with_name(f"{sound.stem}.answer.wav")
            with answer.open("wb") as file, WavWriter(file) as wav:
                async for delta in chat.ask_async(client, media=[load_media(sound)]):
                    if isinstance(delta, AudioDelta):
                        wav.write(delta.samples)  # or to the loudspeaker: `triton_omni_client.Player`
                    elif isinstance(delta, TextDelta):
                        print(delta.text, end="", flush=True)
            print(f"\n{answer.name}: {wav.num_samples / 24_000:.1f} s")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (OmniClientError, OSError) as error:
        sys.exit(f"error: {error}")

# SPDX-License-Identifier: Apache-2.0
"""Tell what happens in a video, with its sound and without.

Usage: python examples/watch_a_video.py VIDEO [HOST:PORT]
"""

from __future__ import annotations

import sys

from triton_omni_client import OmniClient, OmniClientError, Request, load_media


def main(video: str, url: str = "localhost:8001") -> None:
    """The sound is heard only where `use_audio_in_video` asks for it; it costs 25 prompt tokens a second."""
    film = load_media(video)
    with OmniClient(url) as client:
        for with_sound in (True, False):
            request = Request.ask(
                "What happens here?",
                [film],
                use_audio_in_video=with_sound,
                modalities=["text"],
                thinker={"max_tokens": 100},
            )
            reply = client.stream(request).collect()
            tokens = None if reply.info is None else reply.info.prompt_tokens
            print(f"{'with' if with_sound else 'without'} its sound ({tokens} prompt tokens): {reply.text}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (OmniClientError, OSError) as error:
        sys.exit(f"error: {error}")

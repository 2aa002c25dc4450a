# SPDX-License-Identifier: Apache-2.0
"""Requests of many kinds, one by one and at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from media_samples import audio_file, image_file
from server.probes import CRAWLING_THINKER
from server.serving import TINY, Served, wait_for
from triton_omni_client import Media, Reply, Request

BATCH_TOLERANCE = 1e-5
"""A waveform may differ by rounding when its windows are solved in another batch."""
QUESTION = "what is this?"
SAMPLED = {"temperature": 1.0, "max_tokens": 60}
DIFFERENT: dict[str, dict[str, Any]] = {
    "greedy": {"text": "hello", "voice": "Chelsie", "seed": 1, "talker": {"temperature": 0}},
    "the same in another voice": {"text": "hello", "voice": "Ethan", "seed": 1, "talker": {"temperature": 0}},
    "sampled": {"text": "hello", "seed": 2, "thinker": SAMPLED},
    "sampled with another seed": {"text": "hello", "seed": 3, "thinker": SAMPLED},
    "long prompt": {"text": "Tell me about the sea. " * 12, "seed": 4, "thinker": {"temperature": 0.7, "top_p": 0.9}},
    "image": {"media": [Media("image", image_file("png", 112, 84))], "seed": 5, "voice": "Ethan"},
    "sound": {"media": [Media("audio", audio_file("flac", seconds=1.1))], "seed": 6, "thinker": SAMPLED},
    "few steps": {"text": "x", "seed": 7, "token2wav": {"solver": "euler", "num_steps": 4}},
}


def request(request_id: str, *, text: str = QUESTION, media: Sequence[Media] = (), **options: Any) -> Request:
    """A request of one message."""
    return Request.ask(text, media, request_id=request_id, **options)


def ask(server: Served, request_id: str, **options: Any) -> Reply:
    """The whole reply to `request`."""
    return server.client.stream(request(request_id, **options)).collect()


def ask_together(server: Served, requests: Mapping[str, Request]) -> dict[str, Reply]:
    """All at once, each on a thread of its own."""
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = {name: pool.submit(server.client.stream(asked).collect) for name, asked in requests.items()}
        return {name: future.result() for name, future in futures.items()}


@contextmanager
def every_session_taken(server: Served) -> Iterator[None]:
    """Replies of half a minute, which are left at the end, have all sessions of the server."""
    count: int = TINY["thinker"]["max_sessions"]
    long = {"min_tokens": 250, "max_tokens": 250}
    with ExitStack() as crowd:
        for number in range(count):
            asked = Request(text="hello", seed=CRAWLING_THINKER, request_id=f"crowd {number}", thinker=long)
            crowd.enter_context(server.client.stream(asked))
        wait_for(lambda: server.metrics("omni_sessions")['omni_sessions{stage="thinker"}'] == count, server.held)
        yield

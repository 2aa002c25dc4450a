# SPDX-License-Identifier: Apache-2.0
"""Loads, the rules one by one, and their effect on listeners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from triton_omni.core.policy_settings import ThinkerPolicy, Token2WavPolicy
from triton_omni.core.settings import Token2WavSettings
from triton_omni_client.bench.player import play

from .costs import Costs
from .replies import Request
from .server import Policies, Server

PROMPT_TOKENS, TOKENS = 100, 150
SHIPPED: Final = Token2WavSettings()


def together(count: int, codes: int) -> list[Request]:
    """Return requests at one moment, with replies of 0.75 to 1.25 times `codes`."""
    return [Request(0.0, PROMPT_TOKENS, TOKENS, codes * (3 + index % 3) // 4) for index in range(count)]


def spread(count: int, codes: int, interval_ms: float) -> list[Request]:
    """Return requests one after another."""
    return [Request(index * interval_ms, PROMPT_TOKENS, TOKENS, codes) for index in range(count)]


@dataclass(frozen=True)
class Load:
    """Requests, and how many of them may be open at once."""

    requests: Sequence[Request]
    clients: int | None = None
    """None: all of them."""

    def prompted(self, tokens: int) -> Load:
        """Return the same load with prompts of `tokens` tokens."""
        return replace(self, requests=[replace(request, prompt_tokens=tokens) for request in self.requests])


LOADS: Final = {
    "1 stream": Load(together(1, 200)),
    "8 together": Load(together(8, 200)),
    "32 together": Load(together(32, 300)),
    "32 ask again": Load(together(96, 300), clients=32),
    "32 listen": Load(spread(64, 1000, 625.0)),
    "48 listen": Load(spread(96, 1000, 417.0)),
}
RULES_OFF: Final = {
    "all": Policies(),
    "no claim": Policies(token2wav=Token2WavPolicy(claim_ms=0)),
    "no pause": Policies(thinker=ThinkerPolicy(pause_ms=0)),
    "no urgent batch": Policies(token2wav=Token2WavPolicy(enough_sound_ms=0)),
}


@dataclass(frozen=True)
class Effect:
    """The result of a load for its listeners."""

    first_audio_p50_ms: float
    first_audio_p95_ms: float
    replies_with_gaps: int
    silence_s: float
    """Seconds of silence within all replies, each played from its first chunk on."""
    speech_per_second: float


def simulate(load: Load, costs: Costs, policies: Policies, speech: Token2WavSettings = SHIPPED) -> Effect:
    """Serve a load on a model of the GPU; return the effect on its listeners."""
    server = Server(costs, policies, speech)
    replies = server.run(load.requests, load.clients)
    first = sorted(reply.chunks[0].at_s * 1000 for reply in replies)
    played = [play(reply.chunks) for reply in replies]
    speech_s = sum(chunk.seconds for reply in replies for chunk in reply.chunks)
    return Effect(
        first_audio_p50_ms=first[len(first) // 2],
        first_audio_p95_ms=first[int(len(first) * 0.95)],
        replies_with_gaps=sum(one.underruns > 0 for one in played),
        silence_s=sum(one.silence_s for one in played),
        speech_per_second=speech_s / (server.now_ms / 1000),
    )

# SPDX-License-Identifier: Apache-2.0
"""The whole reply that is asked of all stages, with Triton and without, and its figures. It knows neither."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from triton_omni_client.bench.prompt_length import Count, fit
from triton_omni_client.bench.workload import PROMPTS

from .figures import milliseconds
from .plan import Plan

MODELS = Path(__file__).resolve().parents[2] / "model_repository"

ONE_TOKEN: Mapping[str, Any] = {"modalities": ["text"], "thinker": {"max_tokens": 1}}
"""Parameters of a request that counts its prompt."""

Times = tuple[float, float, float]
"""Seconds from the request to the first text, to the first samples, and to the end."""


def chat(text: str) -> list[dict[str, str]]:
    """A question without a system prompt, as `triton-omni bench --system ""` asks it."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": text}]


def chat_of(tokens: int, count: Count) -> list[dict[str, str]]:
    """Such a chat of so many tokens.

    Args:
        count: of the tokens of a text's `chat`.

    Raises:
        BadRequest: it cannot be so short.
    """
    text, _ = asyncio.run(fit(PROMPTS[0], tokens, count))
    return chat(text)


def parameters(plan: Plan) -> dict[str, Any]:
    """Return the parameters of a reply of exactly the plan's lengths."""
    return {
        "seed": 0,
        "thinker": {"min_tokens": plan.reply_tokens, "max_tokens": plan.reply_tokens},
        "talker": {"min_tokens": plan.codes, "max_tokens": plan.codes},
    }


def reply_figures(by: str, times: Sequence[Times], lengths: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """First text, first audio and end, of replies of these lengths."""
    for name, seconds in zip(("first_text", "first_audio", "reply"), zip(*times, strict=True), strict=True):
        yield milliseconds(f"pipeline_{name}", by, seconds, lengths)

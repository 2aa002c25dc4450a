# SPDX-License-Identifier: Apache-2.0
"""Times of single decode steps of a batch of sequences, whatever engine runs them.

It knows no engine: a `Decoder` begins sequences, steps, and drops them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .figures import milliseconds
from .plan import Plan

TOKENS_OF_A_STEP = 2048
"""`max_num_batched_tokens` of ours and of plain vLLM: how long a batch's prompts take before all of it decodes."""


class StepError(RuntimeError):
    """A step did not give one token of every sequence, so its time would be that of something else."""


@dataclass(frozen=True)
class Mode:
    """How tokens are drawn."""

    name: str
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


GREEDY = Mode("greedy")


class Decoder(Protocol):
    """An engine under test; sequences never end by themselves."""

    by: str
    """Name of the implementation in the report."""

    def begin(self, batch: int, mode: Mode, tokens: int) -> None:
        """Submit `batch` sequences that may draw `tokens` tokens each."""

    def step(self) -> int:
        """One engine step; returns the tokens it gave (0 while the pipeline fills)."""

    def clear(self) -> None:
        """Drop every sequence and finish what is in flight."""

    def facts(self) -> dict[str, Any]:
        """Facts that must be equal for two engines to be compared."""

    def close(self) -> None:
        """Release the device."""


def tokens_needed(plan: Plan, batch: int) -> int:
    """Tokens a sequence may have to draw: the first to be prefilled decodes while the others still are."""
    prefills = -(-batch * (plan.prompt_tokens + 2) // TOKENS_OF_A_STEP)
    return prefills + plan.warm_up + plan.steps + 4


def longest_sequence(plan: Plan) -> int:
    """`max_model_len` that holds prompt and tokens of the largest batch, a multiple of a KV cache block."""
    longest = plan.prompt_tokens + 2 + tokens_needed(plan, max(plan.batches))
    return -(-longest // 64) * 64


def measure(decoder: Decoder, name: str, plan: Plan, modes: tuple[Mode, ...]) -> Iterator[Mapping[str, Any]]:
    """The decoder's facts, then a figure of every batch and mode; the decoder is closed at the end."""
    try:
        yield {"ready": decoder.facts()}
        for batch in plan.batches:
            for mode in modes:
                times = step_times(decoder, plan, batch, mode)
                yield milliseconds(name, decoder.by, times, {"batch": batch, "mode": mode.name})
    finally:
        decoder.close()


def step_times(decoder: Decoder, plan: Plan, batch: int, mode: Mode) -> list[float]:
    """Seconds between the returns of consecutive decode steps, each of which gave one token of all `batch` sequences.

    The time between returns, not that of the call, is what a token costs: with asynchronous scheduling a call waits for
    a step launched by the call before. A return means that the step's tokens are on the host, so nothing of the step
    is left on the device, and no further synchronisation is needed or wanted.

    Raises:
        StepError: a sequence ended, or a timed step gave another number of tokens.
    """
    decoder.begin(batch, mode, tokens_needed(plan, batch))
    gc.collect()
    try:
        while _next_tokens(decoder) != batch:
            pass
        for _ in range(plan.warm_up):
            _decode(decoder, batch)
        return [_time_of(lambda: _decode(decoder, batch)) for _ in range(plan.steps)]
    finally:
        decoder.clear()


def _time_of(step: Callable[[], None]) -> float:
    # Consecutive calls: what passes between two of them is two clock readings.
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _decode(decoder: Decoder, batch: int) -> None:
    tokens = _next_tokens(decoder)
    if tokens != batch:
        raise StepError(f"a decode step gave {tokens} tokens of {batch} sequences")


def _next_tokens(decoder: Decoder) -> int:
    for _ in range(1000):
        tokens = decoder.step()
        if tokens:
            return tokens
    raise StepError("1000 engine steps gave no token")

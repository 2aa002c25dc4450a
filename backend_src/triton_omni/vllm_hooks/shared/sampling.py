# SPDX-License-Identifier: Apache-2.0
"""Seeded sampling for a whole batch at the price of one host-to-device copy a step.

vLLM draws seeded sequences one by one with a Python generator each. Here a draw needs a single uniform
number, a function of (seed, position), so the whole batch is one call; nothing here knows thinker or talker.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from triton_omni.session.engine import Sampling
from triton_omni.vllm_hooks.shared.compat import GPUModelRunner, SchedulerOutput, VllmConfig, apply_top_k_top_p
from triton_omni.vllm_hooks.shared.fused_decode import wanted_fused

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    _Runner = GPUModelRunner
else:
    _Runner = object

_SEED_KEY: Final = "noise_seed"
# SplitMix64 (Steele, Lea, Flood 2014): the increment and the two multipliers of its finaliser. Not the Philox of
# token2wav's noise: for 64 sequences this takes 0.06 ms of the host a step, that 2 ms.
_GOLDEN_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
# 52 bits, not 53: `uniform * total` then rounds below `total` for every total, so a draw never runs off the end.
_UNIFORM_BITS: Final = 52
_ONE_PASS: Final = 16384
"""Up to this size a vocabulary is summed cumulatively as a whole."""
_BLOCK: Final = 512
"""Ids of a block of a larger vocabulary; if its size is no multiple of this, the greatest common divisor."""


def drawing(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` for the draw; the stage adds those that end a sequence."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def seed_args(seed: int) -> dict[str, int]:
    """Return the `SamplingParams.extra_args` of a sequence with this seed.

    `SamplingParams.seed` stays unset: with it vLLM makes a generator per sequence and samples in a loop.
    """
    return {_SEED_KEY: seed % (1 << 64)}


def counter_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), a function of (seed, position) alone.

    Args:
        seeds: uint64 [B].
        positions: uint64 [B], the place of the drawn token in its sequence.

    Returns:
        float64 [B], multiples of 2**-52.
    """
    return stream_uniforms(noise_streams(seeds), positions)


def noise_streams(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the start of each seed's numbers, uint64 [B]; it is the same at all positions."""
    return _mix(seeds + _GOLDEN_GAMMA)


def stream_uniforms(streams: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return `counter_uniforms` for the seeds of these `noise_streams`."""
    bits = _mix(streams + (positions + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64, a bijection of 64-bit integers."""
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLIERS[0]
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLIERS[1]
    return z ^ (z >> np.uint64(31))


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one id a row by inverting the cumulative distribution of softmax(logits).

    In a large vocabulary the number first finds a block of ids, and its remainder the id within. Blocks are summed in
    parallel, whereas a cumulative sum walks along a row.

    Args:
        logits: float [B, V]; -inf marks ids that must not be drawn, at least one id a row is finite.
        uniforms: float64 [B] in [0, 1).

    Returns:
        int64 [B]. An id of probability 0 is never returned.
    """
    probabilities, uniforms = logits.softmax(dim=-1, dtype=torch.float32), uniforms.unsqueeze(-1)
    rows, size = logits.shape
    if size <= _ONE_PASS:
        return _invert(probabilities, uniforms)[0].squeeze(-1)
    width = math.gcd(size, _BLOCK)
    blocks = probabilities.view(rows, -1, width)
    masses = blocks.sum(dim=-1)
    block, beyond = _invert(masses, uniforms)
    left = 1 - beyond / masses.gather(-1, block)
    ids, _ = _invert(blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, width)).squeeze(1), left)
    return (block * width + ids).squeeze(-1)


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Find where each row's cumulative `weights` float32 [B, N] pass the part `uniforms` float64 [B, 1] of their total.

    Returns:
        The index int64 [B, 1], never of weight 0 where any weight is not, and float64 [B, 1], how far the cumulative
        weight at it lies beyond that part.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1:]
    # Only NaN, or a part that rounding made 1, runs off the end. A sequence with NaN fails later, but its index must be
    # valid.
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    # A GPU sums in parallel, so two sums with only excluded ids between them may differ in their last bit, and a
    # target may fall between them.
    index = torch.where(weights.gather(-1, index) > 0, index, weights.argmax(dim=-1, keepdim=True))
    return index, cumulative.gather(-1, index) - target


class CounterTopKTopPSampler(nn.Module):
    """Stands in for vLLM's `TopKTopPSampler`: its filters, then a draw with this step's uniforms.

    Args:
        uniforms: float64 [max sequences] on the device; row i belongs to row i of the logits.
        draws: `draw`, or an equivalent function.
    """

    def __init__(self, uniforms: Tensor, draws: Callable[[Tensor, Tensor], Tensor] = draw) -> None:
        super().__init__()
        self._uniforms, self._draws = uniforms, draws

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, None]:
        """Ids [B] of one step; `generators` is vLLM's own per-sequence seeding, empty here."""
        filtered = apply_top_k_top_p(logits, k, p)
        return self._draws(filtered, self._uniforms[: logits.shape[0]]), None


class CounterNoiseMixin(_Runner):
    """Gives vLLM's V1 model runner counter-based noise; greedy sequences and vLLM's processors are untouched.

    Put it before `GPUModelRunner` or `CPUModelRunner` in the bases. A sequence without `seed_args` draws with seed 0.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._uniforms = self._make_buffer(self.max_num_reqs, dtype=torch.float64)
        self._seeded: list[str] = []
        self._streams = np.zeros(0, dtype=np.uint64)
        sampler = CounterTopKTopPSampler(self._uniforms.gpu, _fused_draw() if wanted_fused(vllm_config) else draw)
        self.sampler.topk_topp_sampler = sampler  # type: ignore[assignment]

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        """Stage the uniforms together with vLLM's other host inputs, whose reuse an event guards."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        computed = self.input_batch.num_computed_tokens_cpu[: self.input_batch.num_reqs]
        self.stage_uniforms(computed + num_scheduled_tokens)
        return prepared

    def stage_uniforms(self, positions: NDArray[np.integer[Any]]) -> None:
        """Stage the uniforms of a step that draws for `positions` [B]; none if all are greedy."""
        if self.fill_uniforms(positions):
            self._uniforms.copy_to_gpu(len(positions))

    def fill_uniforms(self, positions: NDArray[np.integer[Any]]) -> bool:
        """Fill the uniforms on the host alone; return True if there are any."""
        if self.input_batch.all_greedy:
            return False
        drawn = stream_uniforms(self._batch_streams(), positions.astype(np.uint64))
        self._uniforms.np[: len(positions)] = drawn
        return True

    def _batch_streams(self) -> NDArray[np.uint64]:
        """Noise streams in the order of the batch's rows, uint64 [B]; found again only when the batch changes."""
        if self._seeded != self.input_batch.req_ids:
            self._seeded = list(self.input_batch.req_ids)
            seeds = [self._seed_of(request_id) for request_id in self._seeded]
            self._streams = noise_streams(np.asarray(seeds, dtype=np.uint64))
        return self._streams

    def _seed_of(self, request_id: str) -> int:
        parameters = self.requests[request_id].sampling_params
        arguments = parameters.extra_args if parameters is not None else None
        return int((arguments or {}).get(_SEED_KEY, 0))


def _fused_draw() -> Callable[[Tensor, Tensor], Tensor]:
    # The Triton language is imported where it is needed alone.
    from triton_omni.vllm_hooks.kernels.draw import fused_draw

    return fused_draw

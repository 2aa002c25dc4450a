# SPDX-License-Identifier: Apache-2.0
"""Sampling settings of the talker's sequences, on the device by slot, so that a recorded step can draw.

vLLM keeps such settings in the order of its batch and rebuilds them when the batch changes. A slot belongs to its
sequence for as long as that is open. It knows neither vLLM's runner nor how a step is scheduled.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.session.engine import Sampling
from triton_omni.vllm_hooks.shared.compat import apply_top_k_top_p
from triton_omni.vllm_hooks.shared.sampling import counter_uniforms, draw
from triton_omni.vllm_hooks.talker.conditioning import Indices


class Setting(IntEnum):
    """Rows of the table of settings; counts and places up to 2**24 are exact in float32."""

    TEMPERATURE = 0
    TOP_P = 1
    TOP_K = 2
    LOG_MIN_P = 3
    FIRST_STOP = 4
    REPETITION = 5
    """HF's penalty: divides a positive logit of an id that was used, multiplies a negative one. 1 = none."""
    PRESENCE = 6
    """OpenAI's penalty: subtracted from the logit of a spoken code. 0 = none."""
    FREQUENCY = 7
    """Subtracted once for each time that the code was spoken."""


class SlotDraws:
    """Draws ids for sequences named by slot; greedy, filtered and seeded ones in one batch.

    Args:
        slots: number of slots, the idle one included; each draws greedily until `choose` sets its sampling.
        stops: bool [V] on the device, ids that end a sequence.
    """

    def __init__(self, slots: int, stops: Tensor) -> None:
        self.stops, self._vocabulary = stops, stops.shape[0]
        self.settings = torch.zeros(len(Setting), slots, dtype=torch.float32, device=stops.device)
        """fp32 [settings, slots], in the order of `Setting`."""
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._write(slice(None), Sampling(), 0)

    def choose(self, slot: int, sampling: Sampling, prompt_length: int) -> None:
        """Let a slot draw by `sampling` from now on; its prompt has `prompt_length` positions."""
        self._write(slot, sampling, prompt_length)
        self._seeds[slot] = sampling.seed % (1 << 64)

    def _write(self, slots: int | slice, sampling: Sampling, prompt_length: int) -> None:
        values = {
            Setting.TEMPERATURE: sampling.temperature,
            Setting.TOP_P: sampling.top_p,
            Setting.TOP_K: min(sampling.top_k, self._vocabulary) if sampling.top_k > 0 else self._vocabulary,
            Setting.LOG_MIN_P: math.log(sampling.min_p) if sampling.min_p else float("-inf"),
            # The first code is drawn at the prompt's last position.
            Setting.FIRST_STOP: prompt_length - 1 + sampling.min_tokens,
            Setting.REPETITION: sampling.repetition_penalty,
            Setting.PRESENCE: sampling.presence_penalty,
            Setting.FREQUENCY: sampling.frequency_penalty,
        }
        for setting, value in values.items():
            # As a kernel's argument, since a copy from pageable memory would wait for all of the device's work.
            self.settings[setting, slots].fill_(value)

    def uniforms(self, slots: Indices, positions: Indices) -> NDArray[np.float64]:
        """Return uniform numbers [...] for draws at `positions` int64 [...] of the sequences of `slots` int64 [...].

        A number belongs to the position of the drawn id, which is the next one.
        """
        return counter_uniforms(self._seeds[slots], (positions + 1).astype(np.uint64))

    def __call__(self, logits: Tensor, slots: Tensor, positions: Tensor, uniforms: Tensor) -> Tensor:
        """Ids int64 [B], in the order of vLLM's and HF's steps: least length, temperature, min-p, top-k, top-p.

        Args:
            logits: float32 [B, V], overwritten; -inf marks ids that must not be drawn.
            slots, positions: int64 [B], the sequence and position of each row of logits.
            uniforms: float64 [B].
        """
        temperature, top_p, top_k, log_min_p, first_stop = self.settings[: Setting.REPETITION, slots]
        too_early = positions < first_stop
        logits.masked_fill_(too_early.unsqueeze(-1) & self.stops, float("-inf"))
        greedy, likeliest = temperature == 0, logits.argmax(dim=-1)
        logits.div_(torch.where(greedy, 1.0, temperature).unsqueeze(-1))
        # p < min_p * max(p), of logits.
        floor = logits.amax(dim=-1, keepdim=True) + log_min_p.unsqueeze(-1)
        logits.masked_fill_(logits < floor, float("-inf"))
        # Copies with the memory layout of vLLM's own settings, for which its kernels are compiled.
        filtered = apply_top_k_top_p(logits, top_k.to(torch.int32), top_p.clone())
        return torch.where(greedy, likeliest, draw(filtered, uniforms))

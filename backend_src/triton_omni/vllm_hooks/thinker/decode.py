# SPDX-License-Identifier: Apache-2.0
"""Inputs of the thinker's incremental decode step, and its draw: vLLM's sampler with this project's numbers.

It knows vLLM's buffers of a step; `hidden_rows.py` takes the hidden rows, as in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.gpu import to_device
from triton_omni.vllm_hooks.shared.fused_decode import decoder_of
from triton_omni.vllm_hooks.shared.incremental_decode import IncrementalDecodeMixin, Layout
from triton_omni.vllm_hooks.shared.sampling import CounterNoiseMixin
from triton_omni.vllm_hooks.thinker.hidden_rows import HiddenRowCollector
from triton_omni.vllm_hooks.thinker.networks import ThinkerNetwork


class ThinkerDecodeMixin(CounterNoiseMixin, IncrementalDecodeMixin):
    """Lays out a step's inputs on the device, from those of the step before."""

    if TYPE_CHECKING:
        row_collector: HiddenRowCollector

    _begin_decode: Callable[[Tensor, bool], None] | None = None
    """Kernel that lays out the step after these ids, int32 [B]; the flag is True if draws use the host's numbers.
    None = decode steps are not fused.
    """

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache. If decode steps are fused, compile the kernels around their network too."""
        super().initialize_kv_cache(*args, **kwargs)
        if not self.fuses_decode_steps:
            return
        # The Triton language is imported where it is needed alone.
        from triton_omni.vllm_hooks.kernels.thinker_step import Places, Uniforms, begin_step, finish

        inputs, cache = self.inputs_embeds.gpu, self.input_batch.block_table[0]
        moved = self.positions, self.mrope_positions.gpu, self.seq_lens, cache.slot_mapping.gpu
        places = Places(*moved, cache.block_table.gpu, cache.block_size)
        numbers, table = Uniforms(self._uniforms.cpu, self._uniforms.gpu), decoder_of(self.network)[0].embed_tokens

        def begin_decode(drawn: Tensor, draws: bool) -> None:
            begin_step(drawn, table.weight, inputs, places, numbers if draws else None)

        self._begin_decode, self.row_collector.finish = begin_decode, finish
        for draws in (False, True):
            begin_decode(torch.zeros(1, dtype=torch.int32, device=self.device), draws)
        finish(inputs[:1], inputs[:1])
        for tensor in (*moved, inputs):
            tensor.zero_()

    def _settle_prompts(self, count: int, padded: int) -> None:
        super()._settle_prompts(count, padded)
        axes = self.mrope_positions.gpu[:, :count].copy_(self.positions[:count])
        # After media, M-RoPE positions differ from places.
        states = (self.requests[request_id] for request_id in self.input_batch.req_ids)
        deltas = np.array([state.mrope_position_delta or 0 for state in states], dtype=np.int64)
        if deltas.any():
            axes.add_(to_device(torch.from_numpy(deltas), self.device))

    def _stage_decode(self, layout: Layout) -> None:
        batch, count = self.input_batch, len(layout.computed)
        batch.refresh_metadata()  # type: ignore[no-untyped-call]
        if self._begin_decode is not None:
            self._begin_decode(self._ids_before(), self.fill_uniforms(layout.computed + 1))
            return
        self.stage_uniforms(layout.computed + 1)
        places = self.positions[:count].add_(1)
        self.mrope_positions.gpu[:, :count].add_(1)
        batch.block_table.compute_slot_mapping(count, self.query_start_loc.gpu[: count + 1], places)
        self.inputs_embeds.gpu[:count].copy_(self.network.embed_input_ids(self._ids_before()))

    def _lengthen(self, layout: Layout) -> None:
        if self._begin_decode is None:
            super()._lengthen(layout)

    def _decode_inputs(self, layout: Layout) -> dict[str, Any]:
        return {"inputs_embeds": self.inputs_embeds.gpu[: len(layout.ids)]}

    def _draw_decoded(self, hidden: Tensor) -> Tensor:
        logits = self.network.compute_logits(hidden[: self.input_batch.num_reqs])
        return self._sample(logits, None).sampled_token_ids[:, 0]

    @property
    def network(self) -> ThinkerNetwork:
        """The network, once it is loaded."""
        return cast(ThinkerNetwork, self.get_model())

    def _hand_out(self, drawn: Tensor, ready: torch.cuda.Event | None) -> None:
        """Do nothing: vLLM's engine gives the ids to their sequences."""

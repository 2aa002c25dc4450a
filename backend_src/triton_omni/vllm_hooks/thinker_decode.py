# SPDX-License-Identifier: Apache-2.0
"""What the thinker reads in a decode step that goes on, and how it draws: vLLM's sampler with this project's numbers.

It knows vLLM's buffers of a step; hidden rows are taken where they always are (`hidden_rows.py`).
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from triton_omni.vllm_hooks.hidden_rows import to_device
from triton_omni.vllm_hooks.sampling import CounterNoiseMixin
from triton_omni.vllm_hooks.steady_decode import Layout, SteadyDecodeMixin
from triton_omni.vllm_hooks.thinker_networks import ThinkerNetwork


class ThinkerDecodeMixin(CounterNoiseMixin, SteadyDecodeMixin):
    """Lays a step's inputs out on the device, from those of the step before."""

    def _settle_prompts(self, count: int, padded: int) -> None:
        super()._settle_prompts(count, padded)
        axes = self.mrope_positions.gpu[:, :count].copy_(self.positions[:count])
        # Behind media, positions run ahead of places.
        states = (self.requests[request_id] for request_id in self.input_batch.req_ids)
        deltas = np.array([state.mrope_position_delta or 0 for state in states], dtype=np.int64)
        if deltas.any():
            axes.add_(to_device(deltas, self.device))

    def _stage_decode(self, layout: Layout) -> None:
        batch, count = self.input_batch, len(layout.computed)
        batch.refresh_metadata()  # type: ignore[no-untyped-call]
        self.stage_uniforms(layout.computed + 1)
        places = self.positions[:count].add_(1)
        self.mrope_positions.gpu[:, :count].add_(1)
        batch.block_table.compute_slot_mapping(count, self.query_start_loc.gpu[: count + 1], places)

    def _decode_inputs(self, layout: Layout) -> dict[str, Any]:
        drawn = self.input_batch.prev_sampled_token_ids
        if drawn is None:
            raise RuntimeError("a step goes on behind one that drew nothing")
        embeddings = self.inputs_embeds.gpu
        embeddings[: len(drawn)].copy_(self.network.embed_input_ids(drawn[:, 0]))
        return {"inputs_embeds": embeddings[: len(layout.ids)]}

    def _draw_decoded(self, hidden: Tensor) -> Tensor:
        logits = self.network.compute_logits(hidden[: self.input_batch.num_reqs])
        return self._sample(logits, None).sampled_token_ids[:, 0]

    @property
    def network(self) -> ThinkerNetwork:
        """The network; there is one once it is loaded."""
        return cast(ThinkerNetwork, self.get_model())

    def _hand_out(self, drawn: Tensor, ready: torch.cuda.Event | None) -> None:
        """vLLM's engine hands them out."""

# SPDX-License-Identifier: Apache-2.0
"""Steps with prompts: the step of one prompt of text alone, and prompts whose M-RoPE positions are known beforehand.

vLLM lays out any mix of sequences by two dozen small operations, during which an idle device waits. That delays the
first audio of a single request, so this module lays out such a step by a few copies.

The first message of a session carries its prompt's positions, so preprocessing computes them. vLLM would compute them
again in the prompt's first step, which delays all sequences. This module knows vLLM's buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.vllm_hooks.shared.compat import CachedRequestState, GPUModelRunner, SchedulerOutput

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    _Runner = GPUModelRunner
else:
    _Runner = object


class LonePromptsMixin(_Runner):
    """Lays out the step of one text prompt, for a network with M-RoPE, and leaves all others to vLLM.

    Put it before the platform's runner in the bases, after classes that add to `_prepare_inputs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = torch.arange(self.max_num_tokens, device=self.device)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        count = int(num_scheduled_tokens[0])
        if not self._is_lone_prompt(count):
            return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._lay_prompt_out(count)
        return self._places[count - 1 : count], None, 1

    def _is_lone_prompt(self, count: int) -> bool:
        """True if a step, with `count` tokens of its first sequence, is a whole prompt of text and nothing else."""
        batch = self.input_batch
        if batch.num_reqs != 1 or batch.num_computed_tokens_cpu[0]:
            return False
        state = self.requests[batch.req_ids[0]]
        # A preempted sequence begins again with its reply so far.
        return count == state.num_prompt_tokens == state.num_tokens and not state.mm_features

    def _lay_prompt_out(self, count: int) -> None:
        """Lay out the step, with the same state for later steps and the sampler as vLLM's."""
        batch, ids, starts = self.input_batch, self.input_ids, self.query_start_loc
        batch.block_table.commit_block_table(1)
        ids.np[:count] = batch.token_ids_cpu[0, :count]
        ids.copy_to_gpu(count)
        starts.np[0], starts.np[1:] = 0, count
        starts.copy_to_gpu()
        self.optimistic_seq_lens_cpu.zero_()[0] = count
        self.seq_lens.copy_(self.optimistic_seq_lens_cpu, non_blocking=True)
        positions = self.positions[:count].copy_(self._places[:count])
        self.mrope_positions.gpu[:, :count].copy_(positions)
        batch.block_table.compute_slot_mapping(1, starts.gpu[:2], positions)
        self.discard_request_mask.np[0], self.prev_positions.np[0] = False, -1


# --- placed prompts ---------------------------------------------------------------------------------------------------


class PlacedPromptsMixin(_Runner):
    """Uses the positions of placed prompts, and lets vLLM compute those of others, as on other ranks.

    Put it before the platform's runner in the bases. `place` and `forget_place` are called between steps, on the thread
    that steps the engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placed: dict[str, Tensor] = {}

    def place(self, request_id: str, positions: Tensor) -> None:
        """Give the prompt of this request its `positions`, int64 [3, P] on the CPU."""
        self._placed[request_id] = positions

    def forget_place(self, request_id: str) -> None:
        """Forget the positions of a request that is not scheduled any more; unknown ones are ignored."""
        self._placed.pop(request_id, None)

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """Set the positions of a request when it is first scheduled."""
        positions = self._placed.pop(req_state.req_id, None)
        if positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions = positions
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

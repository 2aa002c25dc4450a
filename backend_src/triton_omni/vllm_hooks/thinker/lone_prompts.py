# SPDX-License-Identifier: Apache-2.0
"""The step of one prompt of text alone, laid out by a few copies.

vLLM lays out any mix of sequences by two dozen small operations, during which an idle device waits. That delays the
first audio of a single request. It knows vLLM's buffers, neither thinker nor talker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.vllm_hooks.shared.compat import GPUModelRunner, SchedulerOutput

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    _Runner = GPUModelRunner
else:
    _Runner = object


class LonePromptsMixin(_Runner):
    """Lays such a step out itself, for a network of M-RoPE, and leaves every other to vLLM.

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
        # One that was preempted begins again with what it has said.
        return count == state.num_prompt_tokens == state.num_tokens and not state.mm_features

    def _lay_prompt_out(self, count: int) -> None:
        """Leave the state that later steps and the sampler read, as vLLM leaves it."""
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

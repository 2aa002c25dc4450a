# SPDX-License-Identifier: Apache-2.0
"""Device inputs of a decode step that goes on where the one before ended: counted up, not sent anew.

vLLM lays every step out from the host's state, some twenty copies and small kernels; while a batch only decodes, all
that changes is that each sequence is one token longer. It knows vLLM's buffers, neither thinker nor talker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.vllm_hooks.compat import GPUModelRunner, SchedulerOutput, VllmConfig

if TYPE_CHECKING:
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    _Runner = GPUModelRunner
else:
    _Runner = object


@dataclass
class _LastStep:
    """A step after which the next may be counted up."""

    ids: list[str]
    computed: NDArray[np.int32]
    """Tokens of each sequence that the step found in the cache, [B]."""
    last_tokens: Tensor
    """Places of the sequences' last tokens in the step, int [B] on the device: 0, 1, 2 .."""


class SteadyDecodeMixin(_Runner):
    """Shortens `GPUModelRunner._prepare_inputs` for a step of the same sequences, one token further each.

    Put it right before the platform's runner in the bases. The buffers then hold what vLLM's method would write to
    them; those of the host, which no step of this kind reads, are left behind until it writes them again.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._last_step: _LastStep | None = None

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        """Count the last step's inputs up where that is enough; otherwise vLLM's own way."""
        count = self.input_batch.num_reqs
        computed = self.input_batch.num_computed_tokens_cpu[:count]
        last = self._last_step
        if last is not None and self._goes_on(last, scheduler_output, computed):
            last.computed += 1
            self._count_up(scheduler_output, count, computed)
            return last.last_tokens, None, 1
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        decoded = (
            scheduler_output.total_num_scheduled_tokens == count and not self.discard_request_mask.np[:count].any()
        )
        self._last_step = _LastStep(list(self.input_batch.req_ids), computed.copy(), prepared[0]) if decoded else None
        return prepared

    def _goes_on(self, last: _LastStep, step: SchedulerOutput, computed: NDArray[np.int32]) -> bool:
        """Whether every sequence of the last step, and no other, has one more token; a draw is never thrown away."""
        return (
            step.total_num_scheduled_tokens == len(last.ids)
            and last.ids == self.input_batch.req_ids
            and bool((computed == last.computed + 1).all())
        )

    def _count_up(self, scheduler_output: SchedulerOutput, count: int, computed: NDArray[np.int32]) -> None:
        batch = self.input_batch
        batch.block_table.commit_block_table(count)
        # The host's bound of the lengths, by which attention is planned.
        self.optimistic_seq_lens_cpu[:count] += 1
        self.num_computed_tokens[:count] += 1
        self.positions[:count] += 1
        self.seq_lens[:count] += 1
        if self.uses_mrope:
            self.mrope_positions.gpu[:, :count] += 1
        starts = self.query_start_loc.gpu[: count + 1]
        batch.block_table.compute_slot_mapping(count, starts, self.positions[:count])
        # Ids that the host knows; vLLM takes the others from the draws of the step before.
        self._compute_prev_positions(count)
        self.input_ids.np[:count] = batch.token_ids_cpu[self.arange_np[:count], computed]
        self._prepare_input_ids(scheduler_output, count, count, self.query_start_loc.np[1 : count + 1])

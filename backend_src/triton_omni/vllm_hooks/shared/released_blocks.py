# SPDX-License-Identifier: Apache-2.0
"""KV cache blocks that a sequence leaves before all that it wrote there is known to be finite.

Attention multiplies values after a sequence's end by zero, and zero times NaN is NaN. So such blocks are zeroed before
another sequence gets them. It knows vLLM's records of sequences, neither thinker nor talker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from triton_omni.vllm_hooks.shared.compat import GPUModelRunner, SchedulerOutput

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object


class ReleasedBlocksMixin(_Runner):
    """Zeroes the blocks that a sequence leaves, once, and only while they are its own.

    vLLM's scheduler gives the blocks of a preempted sequence away at once, and tells the runner with the step that may
    use them. Until the sequence resumes, vLLM's runner still names its former blocks.

    Put it before the platform's runner in the bases.
    """

    def clear_cache_of(self, request_id: str, kept: int = 0) -> None:
        """Zero the blocks of a sequence that failed, or may have, and forget them; an unknown one is ignored.

        The first `kept` blocks are known to be finite and in the prefix cache, where others may share them; they stay.
        It is ordered after every step already launched. The sequence may have ended: its blocks are known here, and
        nobody else's, until the next step.
        """
        state = self.requests.get(request_id)
        if state is None:
            return
        self.clear_blocks([block for group in state.block_ids for block in group[kept:]])
        state.block_ids = tuple([] for _ in state.block_ids)

    @torch.inference_mode()
    def clear_blocks(self, blocks: list[int]) -> None:
        """Zero KV cache blocks; the first call compiles what does that on a GPU."""
        if self.device.type != "cpu" and not hasattr(self, "_kv_block_zeroer"):
            self._init_kv_zero_meta()
        self._zero_block_ids(blocks)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's, once what preempted sequences held is zeroed: from here on it may be another's."""
        # Schedulers without a prefix cache keep none.
        kept = getattr(scheduler_output, "kept_blocks", {})
        for request_id in scheduler_output.preempted_req_ids or ():
            self.clear_cache_of(request_id, kept.get(request_id, 0))
        return super()._update_states(scheduler_output)

# SPDX-License-Identifier: Apache-2.0
"""The talker's step with fused kernels for decode steps; all other steps are plain."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from triton_omni.vllm_hooks.kernels.talker_draw import Rules, draw
from triton_omni.vllm_hooks.kernels.talker_step import Layout, Memory, begin_step
from triton_omni.vllm_hooks.talker.step import TalkerStep


class FusedTalkerStep(TalkerStep):
    """Takes two launches where the plain step takes ninety; its arguments are the plain step's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory = Memory(self.rows.pool, self.rows.used, self.rows.faults, self.drawn)
        self._rules = Rules.of(self.forbidden, self.draws.stops, self.draws.settings, self.speakable)

    def begin_decode(self, ids: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Do as the plain step."""
        layout = Layout(self.index, ids, positions, self.cache_slots)
        return begin_step(layout, self._memory, table, self.mask_id)

    def finish_decode(self, logits: Tensor) -> None:
        """Do as the plain step, but keep all ids that are as likely as the last that top-k or top-p keeps."""
        draw(logits, self.index, self._memory, self._rules, self.mask_id)

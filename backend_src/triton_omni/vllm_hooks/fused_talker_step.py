# SPDX-License-Identifier: Apache-2.0
"""The talker's step with decode steps by the kernels of `talker_step_kernels.py`; all others are the plain step's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from triton_omni.vllm_hooks.talker_step import Column, TalkerStep
from triton_omni.vllm_hooks.talker_step_kernels import Columns, Layout, Memory, Rules, begin, draw

_COLUMNS = Columns(
    row=Column.ROW,
    slot=Column.SLOT,
    place=Column.PLACE,
    uniform=Column.UNIFORM,
    follows=Column.FOLLOWS,
    axis=Column.AXIS,
    cache=Column.CACHE,
)


class FusedTalkerStep(TalkerStep):
    """Takes two launches where the plain step takes ninety; its arguments are the plain step's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory = Memory(self.rows.pool, self.rows.seen, self.rows.faults, self.drawn)
        self._rules = Rules(self.forbidden, self.draws.stops, self.rows.penalties, self.draws.settings)

    def begin_decode(self, ids: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """As the plain step's."""
        layout = Layout(self.index, ids, positions, self.cache_slots)
        return begin(layout, self._memory, table, _COLUMNS, self.mask_id)

    def finish_decode(self, logits: Tensor) -> None:
        """As the plain step's, but that ids as likely as the last that top-k or top-p keeps are all kept."""
        draw(logits, self.index, self._memory, self._rules, _COLUMNS, self.mask_id)

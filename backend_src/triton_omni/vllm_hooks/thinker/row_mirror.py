# SPDX-License-Identifier: Apache-2.0
"""The hidden rows of cached tokens, for sequences that begin after a cached prefix and so compute no rows of it.

The rows lie by the slots of the key-value cache: a row is valid wherever keys and values are. There is neither a table
nor an eviction besides vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.streams import record_event, to_device, to_host
from triton_omni.vllm_hooks.thinker.hidden_rows import GatherPlan, HiddenRowsMixin, Kept, Segment, StepRows


class RowMirror:
    """Rows [slots, H], a slot for each token that the cache holds.

    Args:
        blocks, block_size: of the cache.
        like: any tensor of rows, which gives their width, dtype and device.
    """

    def __init__(self, blocks: int, block_size: int, like: Tensor) -> None:
        self.rows = like.new_zeros(blocks * block_size, like.shape[-1])
        self._block_size = block_size

    def read(self, parts: Sequence[Segment], blocks: Sequence[Sequence[int]]) -> StepRows:
        """Rows of sequences' cached tokens, as a step gives them, each flagged by itself.

        Args:
            parts: which tokens of which sequence.
            blocks: each sequence's blocks of the cache.
        """
        slots = [self._slots(part, mine) for part, mine in zip(parts, blocks, strict=True)]
        rows = self.rows.index_select(0, to_device(torch.from_numpy(np.concatenate(slots)), self.rows.device))
        finite = to_host(rows.abs().amax(dim=1) < float("inf"))
        return StepRows(tuple(parts), rows, finite, record_event(rows.device), are_cached=True)

    def _slots(self, part: Segment, blocks: Sequence[int]) -> Any:
        positions = np.arange(part.start, part.stop)
        return np.asarray(blocks)[positions // self._block_size] * self._block_size + positions % self._block_size


class RowMirrorMixin(HiddenRowsMixin):
    """Keeps the mirror where there is a prefix cache. While no request shares its tokens, steps are those without one.

    A step's rows are written outside of what is recorded, by the kernel that completes them. So a decode step of
    sequences that want their rows launches nothing more than one without a mirror.
    """

    mirror: RowMirror | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and the mirror on the rank that gives rows."""
        super().initialize_kv_cache(*args, **kwargs)
        if self.cache_config.enable_prefix_caching and not self.parallel_config.rank:
            config, inputs = self.kv_cache_config, self.inputs_embeds.gpu
            (group,) = config.kv_cache_groups
            self.mirror = RowMirror(config.num_blocks, group.kv_cache_spec.block_size, inputs)
            # Compiled here where it is a kernel; all of this is zero and stays so.
            first = Kept(self.mirror.rows, torch.zeros(1, dtype=torch.int64, device=inputs.device))
            self.row_tap.finish(torch.zeros_like(inputs[:1]), torch.zeros_like(inputs[:1]), first)

    @property
    def _used_mirror(self) -> RowMirror | None:
        return self.mirror if self.row_tap.shared else None

    def _model_forward(self, *args: Any, **named: Any) -> Any:
        batch, mirror = self.input_batch, self._used_mirror
        if mirror is not None and (parts := self.row_tap.skipped(batch.req_ids, batch.num_computed_tokens_cpu)):
            blocks = [self.requests[part.request_id].block_ids[0] for part in parts]
            self.row_tap.steps.append(mirror.read(parts, blocks))
        return super()._model_forward(*args, **named)

    def _take_embeddings(self, plan: GatherPlan, inputs_embeds: Tensor) -> Tensor | None:
        """Those of all tokens, zero at media: the mirror keeps rows that nobody wants now."""
        if self._used_mirror is None:
            return super()._take_embeddings(plan, inputs_embeds)
        batch, bounds = self.input_batch, self.query_start_loc.np
        embeddings = inputs_embeds[: int(bounds[len(batch.req_ids)])].clone()
        media = self.row_tap.media_places(batch.req_ids, batch.num_computed_tokens_cpu, bounds)
        if len(media):
            embeddings.index_fill_(0, to_device(torch.from_numpy(media), embeddings.device), 0)
        return embeddings

    def _record_rows(self, plan: GatherPlan, taken: Tensor | None, hidden: Tensor) -> None:
        if (mirror := self._used_mirror) is None or taken is None:
            super()._record_rows(plan, taken, hidden)
            return
        slots = self.input_batch.block_table[0].slot_mapping.gpu[: taken.shape[0]]
        self.row_tap.record_kept(plan, taken, hidden, Kept(mirror.rows, slots))

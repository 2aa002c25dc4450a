# SPDX-License-Identifier: Apache-2.0
"""The hidden rows of cached tokens, for sequences that begin after a cached prefix and so compute no rows of it.

The rows lie by the slots of the key-value cache: a row is valid wherever keys and values are. There is neither a table
nor an eviction besides vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.streams import record_event, to_device, to_host
from triton_omni.vllm_hooks.shared.compat import GPUModelRunner
from triton_omni.vllm_hooks.thinker.hidden_rows import RowTap, Segment, StepRows

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object


class RowMirror:
    """Rows [slots, H], a slot for each token that the cache holds.

    Args:
        blocks, block_size: of the cache.
        like: any tensor of rows, which gives their width, dtype and device.
    """

    def __init__(self, blocks: int, block_size: int, like: Tensor) -> None:
        self.rows = like.new_zeros(blocks * block_size, like.shape[-1])
        self._block_size = block_size

    def write(self, slots: Tensor, embeddings: Tensor, hidden: Tensor) -> None:
        """Keep the rows of a step's tokens.

        Args:
            slots: int64 [N], of the cache.
            embeddings: [N, H], zero at media; overwritten.
            hidden: [N, H], the last hidden states.
        """
        self.rows.index_copy_(0, slots, embeddings.add_(hidden))

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


class RowMirrorMixin(_Runner):
    """Keeps the mirror where there is a prefix cache. Put it before `HiddenRowsMixin` in the bases.

    A step's rows are written outside of what is recorded: a clone and three small kernels a step.
    """

    mirror: RowMirror | None = None

    if TYPE_CHECKING:
        row_tap: RowTap

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and the mirror on the rank that gives rows."""
        super().initialize_kv_cache(*args, **kwargs)
        if self.cache_config.enable_prefix_caching and not self.parallel_config.rank:
            config = self.kv_cache_config
            (group,) = config.kv_cache_groups
            self.mirror = RowMirror(config.num_blocks, group.kv_cache_spec.block_size, self.inputs_embeds.gpu)

    def _model_forward(self, *args: Any, **named: Any) -> Any:
        inputs_embeds: Tensor | None = named.get("inputs_embeds")
        mirror, batch, bounds = self.mirror, self.input_batch, self.query_start_loc.np
        if mirror is None or inputs_embeds is None:
            return super()._model_forward(*args, **named)
        starts, count = batch.num_computed_tokens_cpu, int(bounds[len(batch.req_ids)])
        if parts := self.row_tap.skipped(batch.req_ids, starts):
            blocks = [self.requests[part.request_id].block_ids[0] for part in parts]
            self.row_tap.steps.append(mirror.read(parts, blocks))
        # The network adds its residual stream into the very buffer that holds the embeddings.
        embeddings = inputs_embeds[:count].clone()
        if len(media := self.row_tap.media_places(batch.req_ids, starts, bounds)):
            embeddings.index_fill_(0, to_device(torch.from_numpy(media), embeddings.device), 0)
        hidden = super()._model_forward(*args, **named)
        mirror.write(batch.block_table[0].slot_mapping.gpu[:count], embeddings, hidden[:count])
        return hidden

# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 model runner for the talker: it selects the rows that a step reads, and keeps draws on the device.

One mixin for CPU and GPU. `step.py` computes a step; the scheduler (`schedulers.py`) decides when a sequence may run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.gpu import record_event
from triton_omni.vllm_hooks.shared.compat import (
    BatchDescriptor,
    CachedRequestState,
    CompilationMode,
    SamplerOutput,
    SchedulerOutput,
    VllmConfig,
)
from triton_omni.vllm_hooks.shared.fused_decode import FusedDecodeMixin
from triton_omni.vllm_hooks.shared.graphs import PrefillGraphsMixin
from triton_omni.vllm_hooks.shared.incremental_decode import IncrementalDecodeMixin, IncrementalStep, Layout
from triton_omni.vllm_hooks.shared.partition import PartitionMixin
from triton_omni.vllm_hooks.shared.platform import PlatformRunner, StageWorker
from triton_omni.vllm_hooks.shared.schedulers import ReleasedBlocksMixin
from triton_omni.vllm_hooks.talker.network import TalkerForCausalLM
from triton_omni.vllm_hooks.talker.rows import Column, SampledStep, Sequence
from triton_omni.vllm_hooks.talker.step import FusedTalkerStep, TalkerStep, make_step

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


SESSIONS: Final = "max_sessions"
"""Key of vLLM's `additional_config`: sequences open at once."""
ROWS: Final = "rows"
"""Key of vLLM's `additional_config`: hidden rows of all sequences together."""
_STEPS_AHEAD: Final = 32
"""Steps whose numbers are computed together: a small array operation costs no more than its call."""


class _Batch(NamedTuple):
    """Sequences in the order of a batch's rows."""

    ids: list[str]
    sequences: list[Sequence]
    slots: NDArray[np.int64]
    deltas: NDArray[np.int64]
    """Added to a token's place to get its M-RoPE position after the prompt."""
    begins: NDArray[np.int64]
    """The first position of each that is computed."""


class TalkerRunnerMixin(FusedDecodeMixin, IncrementalDecodeMixin):
    """Selects the rows that a step's tokens read, and gives each draw to its sequence."""

    step: TalkerStep
    """State that this runner and the network share; made with the network."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._index = self._make_buffer(self.max_num_tokens, len(Column), dtype=torch.int64)
        self._sequences: dict[str, Sequence] = {}
        self._batch = _Batch([], [], *(np.zeros(0, dtype=np.int64) for _ in range(3)))
        self._drawing: list[Sequence | None] = []
        self._fetch: Callable[[Tensor, Tensor, Tensor, int], None] | None = None
        """Kernel that copies from pinned memory; None = decode steps are not fused."""
        self._idle = np.zeros(len(Column), dtype=np.int64)
        """Step inputs of a waiting sequence that keeps its place."""
        self._ahead: list[NDArray[np.int64]] = []
        """Inputs of the next incremental steps; invalid after any other step."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the network, and allocate what it reads in every step before any step is recorded."""
        super().load_model(*args, **kwargs)
        sizes = cast(dict[str, int], self.vllm_config.additional_config)
        # The engine writes to these tensors between steps, outside inference mode.
        with torch.inference_mode(False):
            self.step = make_step(
                Path(self.model_config.model),
                self._index.gpu,
                cast(torch.dtype, self.model_config.dtype),
                max_sequences=self.max_num_reqs,
                max_positions=self.max_model_len,
                rows=sizes[ROWS],
                sessions=sizes[SESSIONS],
                kind=FusedTalkerStep if self.fuses_decode_steps else TalkerStep,
            )
        self._index.cpu.copy_(self._index.gpu)
        told = {Column.SLOT: self.step.rows.idle_slot, Column.FOLLOWS: 1, Column.CACHE: -1}
        self._idle = np.array([told.get(column, 0) for column in Column], dtype=np.int64)
        if self.compilation_config.mode != CompilationMode.NONE:
            self.step.compile()
        network = cast(TalkerForCausalLM, self.get_model())
        network.step = self.step
        if self._fused is not None:
            from triton_omni.vllm_hooks.shared.fused_layers import fuse_ends

            fuse_ends(network.thinker_to_talker_proj, network.logits_processor, network.lm_head, self._fused)

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and give the step the tensor of its slots."""
        super().initialize_kv_cache(*args, **kwargs)
        self.step.cache_slots = self.input_batch.block_table[0].slot_mapping.gpu
        if self.fuses_decode_steps:
            from triton_omni.vllm_hooks.kernels.step_copy import fetch

            self._fetch = fetch
            self._upload_index(1)

    def _warmup_and_capture(self, desc: BatchDescriptor, *args: Any, **kwargs: Any) -> None:
        """Record a step; the graph of a decode step includes its draws."""
        self.step.decoding = desc.uniform
        try:
            super()._warmup_and_capture(desc, *args, **kwargs)
        finally:
            self.step.decoding = False

    def serve(self, sequences: dict[str, Sequence]) -> None:
        """Take inputs from `sequences`, the open ones by vLLM's request id, kept up to date by the owner."""
        self._sequences = sequences

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """Take the thinker's positions; vLLM's own way would need the media's grids."""
        positions = self._sequences[req_state.req_id].prompt.positions.cpu()
        req_state.mrope_positions = positions
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _calc_mrope_positions(self, scheduler_output: SchedulerOutput) -> None:
        """Compute positions by one array operation if every sequence decodes, else by vLLM's loop over sequences."""
        batch, count = self.input_batch, self.input_batch.num_reqs
        computed = batch.num_computed_tokens_cpu[:count]
        decodes = scheduler_output.total_num_scheduled_tokens == count
        if not decodes or (computed < batch.num_prompt_tokens[:count]).any():
            super()._calc_mrope_positions(scheduler_output)
            return
        self.mrope_positions.np[:, :count] = computed + self._current_batch().deltas

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        """Stage pool rows and slots together with vLLM's other host inputs, whose reuse an event guards."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self._last_tokens = prepared[0]
        self._ahead = []
        count, batch = scheduler_output.total_num_scheduled_tokens, self._current_batch()
        self.step.decoding = count == len(batch.sequences)
        for row in np.flatnonzero(self.input_batch.num_computed_tokens_cpu[: len(batch.sequences)] == batch.begins):
            self.step.rows.reset_used(int(batch.slots[row]))
        self.step.rows.store()
        self._stage_index(count, batch.slots)
        skipped = self.discard_request_mask.np[: len(batch.sequences)]
        self._drawing = list(batch.sequences)
        for row in np.flatnonzero(skipped):
            self._drawing[row] = None
        return prepared

    def _current_batch(self) -> _Batch:
        """Return the sequences in the order of vLLM's batch; rebuilt only when that changes."""
        if self._batch.ids != self.input_batch.req_ids:
            ids = list(self.input_batch.req_ids)
            sequences = [self._sequences[request_id] for request_id in ids]
            slots = np.asarray([sequence.slot for sequence in sequences], dtype=np.int64)
            deltas = np.asarray([self.requests[found].mrope_position_delta for found in ids], dtype=np.int64)
            begins = np.asarray([sequence.begin for sequence in sequences], dtype=np.int64)
            self._batch = _Batch(ids, sequences, slots, deltas, begins)
        return self._batch

    def _stage_index(self, count: int, slots: NDArray[np.int64]) -> None:
        """Copy the step's inputs for its tokens to the device at once."""
        owners = self.req_indices.np[:count]
        positions = self.input_batch.num_computed_tokens_cpu[owners] + self.query_pos.np[:count]
        index, owned = self._index.np, slots[owners]
        index[:count, Column.ROW] = self.step.rows.pool_rows(owned, positions)
        index[:count, Column.SLOT] = owned
        index[:count, Column.PLACE] = positions
        index[:count, Column.UNIFORM] = self.step.draws.uniforms(owned, positions).view(np.int64)
        index[:count, Column.FOLLOWS] = 0
        self._index.copy_to_gpu(self._idle_behind(count))

    def _idle_behind(self, count: int) -> int:
        """Fill the padding of a recorded step after its `count` tokens with the idle slot; return the padding's end."""
        index = self._index.np
        end = min(max(count, self.max_num_reqs), len(index)) if self.step.decoding else len(index)
        index[count:end] = 0
        index[count:end, Column.SLOT] = self.step.rows.idle_slot
        return end

    def _settle_prompts(self, count: int, padded: int) -> None:
        super()._settle_prompts(count, padded)
        self.step.drawn[:count].copy_(self._ids_before())
        self.step.decoding = True
        self._index.copy_to_gpu(self._idle_behind(count))

    def _stage_decode(self, layout: Layout) -> None:
        """Stage the inputs of a step of one token a sequence, after the last step's draws."""
        self.step.rows.store()
        count = len(layout.computed)
        self._ahead = self._ahead or self._look_ahead(layout)
        told, table = self._ahead.pop(), self.input_batch.block_table[0]
        places, size = told[:, Column.PLACE], table.block_size
        told[:, Column.ROW] = self.step.rows.pool_rows(told[:, Column.SLOT], places)
        told[:, Column.CACHE] += table.get_numpy_array()[layout.active, places // size] * np.int64(size)
        index = self._index.np[:count]
        if len(told) < count:
            index[:] = self._idle
            if layout.is_planned:
                index[:, Column.LENGTH] = layout.bounds
        index[layout.part] = told
        self._upload_index(count)

    def _take_part(self, layout: Layout, step: IncrementalStep) -> None:
        """A waiting sequence draws nothing; its last draw stays where its next step looks for it."""
        super()._take_part(layout, step)
        batch, self._ahead = self._current_batch(), []
        self._drawing = [None] * len(layout.computed)
        for row in layout.active:
            self._drawing[row] = batch.sequences[row]

    def _lengthen(self, layout: Layout) -> None:
        """With fused decode steps, `_upload_index` has already updated the lengths."""
        if self._fetch is None:
            layout.lengths.copy_(self.optimistic_seq_lens_cpu[: len(layout.computed)], non_blocking=True)

    def _upload_index(self, count: int) -> None:
        """Copy the index of a step's `count` tokens to the device."""
        if self._fetch is None:
            self._index.copy_to_gpu(count)
        else:
            self._fetch(self._index.cpu[:count], self._index.gpu, self.seq_lens, Column.LENGTH.value)

    def _look_ahead(self, layout: Layout) -> list[NDArray[np.int64]]:
        """Return the inputs of the next steps for their tokens [N, len(Column)], the latest step first.

        The row is missing, since it may not have arrived, and the cache's slot lacks its block.
        """
        places = layout.computed[layout.part] + np.arange(_STEPS_AHEAD, dtype=np.int64)[::-1, np.newaxis]
        slots = np.broadcast_to(self._batch.slots[layout.part], places.shape)
        told = np.zeros((*places.shape, len(Column)), dtype=np.int64)
        told[..., Column.SLOT] = slots
        told[..., Column.PLACE] = places
        told[..., Column.UNIFORM] = self.step.draws.uniforms(slots, places).view(np.int64)
        told[..., Column.FOLLOWS] = 1
        told[..., Column.AXIS] = places + self._batch.deltas[layout.part]
        told[..., Column.LENGTH] = places + 1
        told[..., Column.CACHE] = places % self.input_batch.block_table[0].block_size
        return list(told)

    def _decode_inputs(self, layout: Layout) -> dict[str, Any]:
        return {"input_ids": layout.ids}

    def _draw_decoded(self, hidden: Tensor) -> Tensor:
        # The network has drawn already.
        del hidden
        return self._drawn()

    def _drawn(self) -> Tensor:
        """Return the ids of a decode step; the next step overwrites them."""
        return self.step.drawn[: len(self._batch.ids)]

    def _sample(self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        """Return the step's draws: a decode step has made them already, after the network."""
        if logits is None:
            raise RuntimeError("the talker runs on one rank, so every step has logits")
        drawn = self._drawn().clone() if self.step.decoding else self.step.draw(logits, self._last_tokens)
        self._hand_out(drawn, record_event(drawn.device))
        return SamplerOutput(sampled_token_ids=drawn.unsqueeze(-1), logprobs_tensors=None)

    def _hand_out(self, drawn: Tensor, ready: torch.cuda.Event | None) -> None:
        """Keep this step's ids [B] with their sequences until vLLM accepts them."""
        for sequence, code in zip(self._drawing, torch.split(drawn, 1), strict=True):
            if sequence is not None:
                sequence.sampled.append(SampledStep(code, ready))


class TalkerRunner(
    PartitionMixin, TalkerRunnerMixin, ReleasedBlocksMixin, IncrementalDecodeMixin, PrefillGraphsMixin, PlatformRunner
):
    """vLLM's runner with hidden rows, its own draws, graphs of prompts, incremental decode steps, and decode steps on a
    part of the GPU.
    """


class TalkerWorker(StageWorker):
    """Worker of the talker's engine."""

    runner_class = TalkerRunner

# SPDX-License-Identifier: Apache-2.0
"""Incremental decode steps: each reuses the layout of the step before, of which only the lengths change.

vLLM derives the layout of every step anew from its scheduler and batch, which takes longer than a small network runs.
While the same sequences decode, only their lengths change, by one. The scheduler decides when that is so
(`vllm_hooks/shared/incremental_schedule.py`). This module knows vLLM's buffers, neither thinker nor talker.

Every step of both engines launches vLLM's kernel for the tokens' slots in the key-value cache. vLLM inspects that
kernel's signature at every launch, to match the block tables' arguments; here they are matched once.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.gpu import record_event
from triton_omni.vllm_hooks.shared.compat import (
    PAD_SLOT_ID,
    SLOT_MAPPING_KERNEL,
    BlockTable,
    CachedRequestState,
    CommonAttentionMetadata,
    CUDAGraphMode,
    ForwardContext,
    GPUModelRunner,
    IntermediateTensors,
    ModelRunnerOutput,
    MultiGroupBlockTable,
    Request,
    SchedulerOutput,
    VllmConfig,
    override_forward_context,
)

if TYPE_CHECKING:
    from triton_omni.vllm_hooks.kernels.step_copy import DrawnIds

    _Runner = GPUModelRunner
else:
    _Runner = object

# --- slots of the cache -----------------------------------------------------------------------------------------------


def launch_directly(tables: MultiGroupBlockTable) -> None:
    """Make these tables, which must not be replaced, launch the kernel with arguments matched once."""
    for table in tables.block_tables:
        table.compute_slot_mapping = functools.partial(_launch, _fixed_arguments(table))  # type: ignore[method-assign]


def _fixed_arguments(table: BlockTable) -> dict[str, Any]:
    """Arguments of one table that all launches share."""
    blocks = table.block_table.gpu
    return {
        "max_num_tokens": table.max_num_batched_tokens,
        "block_table_ptr": blocks,
        "block_table_stride": blocks.stride(0),
        "slot_mapping_ptr": table.slot_mapping.gpu,
        "KV_CACHE_BLOCK_SIZE": table.block_size,
        "TOTAL_CP_WORLD_SIZE": table.dcp_world_size,
        "TOTAL_CP_RANK": table.dcp_rank,
        "CP_KV_CACHE_INTERLEAVE_SIZE": table.cp_kv_cache_interleave_size,
        "PAD_ID": PAD_SLOT_ID,
        "BLOCK_SIZE": SLOT_MAPPING_KERNEL.triton_block_size,
    }


def _launch(fixed: dict[str, Any], num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
    # One program for each sequence, and one for the padding.
    SLOT_MAPPING_KERNEL.kernel[(num_reqs + 1,)](
        num_tokens=positions.shape[0], query_start_loc_ptr=query_start_loc, positions_ptr=positions, **fixed
    )


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IncrementalStep:
    """A step that decodes one token for some sequences of the runner's batch; the others keep their places.

    It has the fields of vLLM's `SchedulerOutput` that taking a step's result needs.
    """

    num_scheduled_tokens: dict[str, int]
    """1 for every sequence, by request id; successive steps of the same sequences share it."""
    new_blocks: list[tuple[str, tuple[list[int], ...]]]
    """Cache blocks that sequences were given for this step, a list a cache group."""
    requests: list[Request]
    """The scheduler's requests of these sequences; successive steps share the list."""
    stops: frozenset[int]
    """Ids that may end one of them."""
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    num_invalid_spec_tokens: None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.num_scheduled_tokens)


class StepInFlight:
    """Takes the place of a step's future in vLLM's engine; `result` waits for the step.

    Args:
        request_ids, rows: the batch's sequences in order, and the row of each.
        drawn: int32 [B, 1] on the host, complete once `ready` is reached.
    """

    def __init__(
        self, request_ids: list[str], rows: dict[str, int], drawn: Tensor, ready: torch.cuda.Event | None
    ) -> None:
        self._request_ids, self._rows, self._drawn, self._ready = request_ids, rows, drawn, ready

    def synchronize(self) -> None:
        """Wait until the ids are on the host."""
        if self._ready is not None:
            self._ready.synchronize()

    def result(self) -> ModelRunnerOutput:
        """Return the step's ids in the form that vLLM's scheduler takes."""
        self.synchronize()
        return ModelRunnerOutput(self._request_ids, self._rows, self._drawn.tolist())


@dataclass
class Layout:
    """State that the steps of an unchanged batch share; tensors are views of the runner's own, padded as the step
    is.
    """

    shares: dict[str, int]
    """`num_scheduled_tokens` of the step that the next two fields describe."""
    states: list[CachedRequestState]
    active: NDArray[np.int64]
    """Rows of `states` in the batch."""
    computed: NDArray[np.int32]
    """Tokens of each sequence in the cache before the step, [B]."""
    ends: NDArray[np.int32]
    """Ids of each sequence that vLLM's batch holds, [B]."""
    bounds: NDArray[np.int32]
    """Tokens of each sequence with the step's, as vLLM bounds them on the host, [B]."""
    lengths: Tensor
    """The same on the device."""
    ids: Tensor
    positions: Tensor
    attention: dict[str, Any]
    """Fields of the attention's metadata, except the longest length."""
    context: ForwardContext
    is_planned: bool
    """True if attention needs a plan for each step. Recorded fused attention reads `lengths` and the block table
    alone.
    """
    request_ids: list[str]
    rows_by_request: dict[str, int]

    @property
    def part(self) -> slice | NDArray[np.int64]:
        """`active` as an index; a slice, which is faster, if it is the whole batch."""
        return slice(None) if len(self.active) == len(self.computed) else self.active


class IncrementalDecodeMixin(_Runner):
    """Adds `launch_incremental` to vLLM's runner. The stage defines the network's inputs and the draw.

    Put it right before the platform's runner in the bases, which have a `FusedDecodeMixin` too.
    """

    if TYPE_CHECKING:

        @property
        def fuses_decode_steps(self) -> bool:
            """See `FusedDecodeMixin`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._layout: Layout | None = None
        self._drawn_ids: DrawnIds | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache. If steps are fused, also compile the kernel that copies their draws."""
        super().initialize_kv_cache(*args, **kwargs)
        launch_directly(self.input_batch.block_table)
        if self.fuses_decode_steps:
            # The Triton language is imported where it is needed alone.
            from triton_omni.vllm_hooks.kernels.step_copy import DrawnIds

            self._drawn_ids = DrawnIds(self.max_num_reqs, self.device)
            self._drawn_ids.keep(torch.zeros(1, dtype=torch.int32, device=self.device))

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> Any:
        """A step in vLLM's own way."""
        self._layout = None
        return super().execute_model(scheduler_output, intermediate_tensors)

    @torch.inference_mode()
    def launch_incremental(self, step: IncrementalStep) -> StepInFlight:
        """Launch a step; the one before, of either kind, must have drawn for every sequence of the same batch.

        It keeps all of vLLM's records up to date, so that the next step may be one of vLLM's own.
        """
        with self.synchronize_input_prep():
            layout = self._layout = self._layout or self._lay_out()
            if layout.shares is not step.num_scheduled_tokens:
                self._take_part(layout, step)
            self._advance(layout, step)
            self._stage_decode(layout)
            self._lengthen(layout)
            if layout.is_planned:
                layout.context.attn_metadata = self._plan_attention(layout)
        with override_forward_context(layout.context):
            hidden = self._model_forward(positions=layout.positions, **self._decode_inputs(layout))
        drawn = self._draw_decoded(hidden)
        self._keep_book(layout)
        return self._publish_drawn(layout, drawn)

    @abstractmethod
    def _stage_decode(self, layout: Layout) -> None:
        """Stage the network's inputs for a step of one token a sequence, at the places `layout.computed`."""

    def _lengthen(self, layout: Layout) -> None:
        """Update the lengths on the device for this step."""
        layout.lengths.add_(1)

    def _take_part(self, layout: Layout, step: IncrementalStep) -> None:
        """Note the sequences of the batch that take part in the step."""
        layout.shares = step.num_scheduled_tokens
        layout.states = [self.requests[request_id] for request_id in layout.shares]
        # The scheduler may have them in another order than the batch.
        layout.active = np.sort([layout.rows_by_request[request_id] for request_id in layout.shares])

    def _ids_before(self) -> Tensor:
        """Return the ids of the previous step, int32 [B]."""
        drawn = self.input_batch.prev_sampled_token_ids
        if drawn is None:
            raise RuntimeError("a step continues after one that drew nothing")
        return drawn[:, 0]

    @abstractmethod
    def _decode_inputs(self, layout: Layout) -> dict[str, Any]:
        """Return the network's inputs besides positions, padded as the step is."""

    @abstractmethod
    def _draw_decoded(self, hidden: Tensor) -> Tensor:
        """Draw ids int32 [B] from last hidden states [B and padding, H]; the next step may overwrite them."""

    @abstractmethod
    def _hand_out(self, drawn: Tensor, ready: torch.cuda.Event | None) -> None:
        """Take the ids [B] of a step, complete once `ready` is reached."""

    def _lay_out(self) -> Layout:
        """Return the layout of the next step, taken from the step just launched."""
        batch = self.input_batch
        count = batch.num_reqs
        mode, descriptor, *_ = self._determine_batch_execution_and_padding(
            num_tokens=count,
            num_reqs=count,
            num_scheduled_tokens_np=np.ones(count, dtype=np.int32),
            max_num_scheduled_tokens=1,
        )
        is_recorded = mode == CUDAGraphMode.FULL
        padded = descriptor.num_tokens if is_recorded else count
        if self.query_start_loc.np[count] > count:
            self._settle_prompts(count, padded)
        by_group, by_layer = self._get_slot_mappings(padded, padded, count)
        if by_group is None:
            raise RuntimeError("the runner has no key-value cache yet")
        return Layout(
            shares={},
            states=[],
            active=self.arange_np[:0],
            computed=batch.num_computed_tokens_cpu[:count],
            ends=batch.num_tokens_no_spec[:count],
            bounds=self.optimistic_seq_lens_cpu.numpy()[:count],
            lengths=self.seq_lens[:count],
            ids=self.input_ids.gpu[:padded],
            positions=self.mrope_positions.gpu[:, :padded] if self.uses_mrope else self.positions[:padded],
            attention=self._common_attention(padded, by_group[0]),
            context=self._context(mode, descriptor, by_layer),
            is_planned=not (is_recorded and self.fuses_decode_steps),
            request_ids=list(batch.req_ids),
            rows_by_request=dict(batch.req_id_to_index),
        )

    def _settle_prompts(self, count: int, padded: int) -> None:
        """Turn the records of a step with prompts into those of a padded decode step of its `count` last tokens."""
        batch, starts = self.input_batch, self.query_start_loc
        further = np.diff(starts.np[: count + 1]) - 1
        batch.num_computed_tokens_cpu[:count] += further
        for request_id, tokens in zip(batch.req_ids, further.tolist(), strict=True):
            self.requests[request_id].num_computed_tokens += tokens
        starts.np[:] = np.minimum(self.arange_np[: len(starts.np)], count)
        starts.copy_to_gpu()
        self.positions[:count].copy_(self.seq_lens[:count]).sub_(1)
        # Padding gets vLLM's null block, as in any padded batch.
        batch.block_table[0].get_device_tensor(padded)[count:].zero_()

    def _common_attention(self, padded: int, slots: Tensor) -> dict[str, Any]:
        """Build the metadata that `_build_attention_metadata` makes for a decode step."""
        return {
            "query_start_loc": self.query_start_loc.gpu[: padded + 1],
            "query_start_loc_cpu": self.query_start_loc.cpu[: padded + 1],
            "seq_lens": self.seq_lens[:padded],
            "seq_lens_cpu_upper_bound": self.optimistic_seq_lens_cpu[:padded],
            "num_reqs": padded,
            "num_actual_tokens": padded,
            "max_query_len": 1,
            "block_table_tensor": self.input_batch.block_table[0].get_device_tensor(padded),
            "slot_mapping": slots,
            "causal": True,
            "is_prefilling": torch.zeros(padded, dtype=torch.bool),
            "positions": self.positions[:padded],
        }

    def _context(self, mode: CUDAGraphMode, descriptor: Any, slots: Any) -> ForwardContext:
        return ForwardContext(
            no_compile_layers=self.compilation_config.static_forward_context,
            attn_metadata={},
            slot_mapping=slots,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor,
        )

    def _advance(self, layout: Layout, step: IncrementalStep) -> None:
        """Update vLLM's records of the sequences for this step, as its `_update_states` does."""
        batch = self.input_batch
        layout.computed[layout.part] += 1
        layout.bounds[layout.part] += 1
        for state in layout.states:
            state.num_computed_tokens += 1
        for request_id, blocks in step.new_blocks:
            for known, new in zip(self.requests[request_id].block_ids, blocks, strict=True):
                known.extend(new)
            batch.block_table.append_row(blocks, batch.req_id_to_index[request_id])
        if step.new_blocks:
            batch.block_table.commit_block_table(len(layout.computed))

    def _keep_book(self, layout: Layout) -> None:
        """Note that each sequence has one more id, as vLLM's `_bookkeeping_sync` does after the draw."""
        batch, rows = self.input_batch, layout.active
        for state in layout.states:
            state.output_token_ids.append(-1)
        ends = layout.ends[layout.part]
        batch.token_ids_cpu[rows, ends] = -1
        batch.is_token_ids[rows, ends] = True
        layout.ends[layout.part] += 1

    def _plan_attention(self, layout: Layout) -> dict[str, Any]:
        """Each layer's attention metadata."""
        # A new object each step, since a backend may keep values in it that it derives from the lengths.
        common = CommonAttentionMetadata(**layout.attention, max_seq_len=int(layout.bounds.max()))
        metadata = {}
        for group in self.attn_groups[0]:
            planned = group.build_metadata(common, 0)
            metadata.update(dict.fromkeys(group.layer_names, planned))
        return metadata

    def _publish_drawn(self, layout: Layout, drawn: Tensor) -> StepInFlight:
        """Store the draws where vLLM's next step looks for them, and copy them to the host.

        The copy runs on the step's own stream: for a few bytes, another stream costs the host more than it saves.
        """
        kept, host = self._copy_drawn(drawn)
        self.input_batch.prev_sampled_token_ids, host = kept.unsqueeze(-1), host.unsqueeze(-1)
        ready = record_event(kept.device, blocking=True)
        self._hand_out(kept, ready)
        launched = StepInFlight(layout.request_ids, layout.rows_by_request, host, ready)
        # Penalties count the drawn ids.
        self.input_batch.set_async_sampled_token_ids(host, cast(torch.Event, launched))
        return launched

    def _copy_drawn(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return two copies of a step's ids [B]: on the device, and on the host once the stream has run."""
        if self._drawn_ids is not None:
            return self._drawn_ids.keep(drawn)
        kept = drawn.clone()
        return kept, kept.to("cpu", non_blocking=True)

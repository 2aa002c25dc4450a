# SPDX-License-Identifier: Apache-2.0
"""vLLM's V1 model runner for the talker: inputs are codec embeddings plus hidden rows, draws stay on the device.

One mixin for CPU and GPU. When a sequence may run is the scheduler's matter (`waiting.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from triton_omni.stage import record_event
from triton_omni.talker.conditioning import CodecIds
from triton_omni.vllm_hooks.compat import (
    CachedRequestState,
    GPUModelRunner,
    SamplerOutput,
    SchedulerOutput,
    VllmConfig,
)
from triton_omni.vllm_hooks.platform import PlatformRunner, StageWorker
from triton_omni.vllm_hooks.sampling import CounterNoiseMixin
from triton_omni.vllm_hooks.talker_rows import SampledStep, Sequence, TalkerRows

if TYPE_CHECKING:
    from vllm.sequence import IntermediateTensors
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    _Runner = GPUModelRunner
else:
    _Runner = object


class TalkerRunnerMixin(_Runner):
    """Feeds rows, masks what the codec cannot speak, and hands each draw to its sequence."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._row_index = self._make_buffer(self.max_num_tokens, dtype=torch.int64)
        self._slot_index = self._make_buffer(self.max_num_reqs, dtype=torch.int64)
        self._drawing: list[Sequence | None] = []

    def serve(self, rows: TalkerRows, sequences: dict[str, Sequence], ids: CodecIds, speakable: int) -> None:
        """Take inputs from `rows` from now on.

        Args:
            rows: the device memory of all sequences.
            sequences: open sequences by vLLM's request id, kept up to date by the owner.
            ids: special codec ids.
            speakable: number of codes the codec's table holds; other ids are never drawn, the stop ids apart.
        """
        self._rows, self._sequences, self._ids = rows, sequences, ids
        forbidden = torch.ones(self.model_config.get_vocab_size(), dtype=torch.bool)
        forbidden[:speakable] = False
        forbidden[list(ids.stops)] = False
        forbidden[[ids.bos, ids.mask]] = True
        self._forbidden = forbidden.to(self.device)
        # Its graphs are captured over embeddings by now; from here on vLLM need not upload embeddings of its own.
        self.enable_prompt_embeds = False

    @torch.inference_mode()
    def scrub(self, request_id: str) -> None:
        """Zero the cache blocks of a sequence that ends before its values are known to be finite.

        A later owner of a block reads what lies behind its last position times zero, and NaN times zero is NaN.
        Must run before the scheduler gives the blocks away, that is before its next step.
        """
        state = self.requests.get(request_id)
        if state is None:
            return
        blocks = torch.tensor([block for group in state.block_ids for block in group], dtype=torch.int64)
        if self.device.type == "cuda":
            blocks = blocks.pin_memory()
        blocks = blocks.to(self.device, non_blocking=True)
        for cache in self.kv_caches:
            # Blocks come first in every layer's view; an attention kernel may split one into several.
            torch.unflatten(cache, 0, (self.kv_cache_config.num_blocks, -1)).index_fill_(0, blocks, 0)

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """The thinker computed the positions; vLLM's own way would need the media's grids."""
        positions = self._sequences[req_state.req_id].prompt.positions.cpu()
        req_state.mrope_positions = positions
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

    def _calc_mrope_positions(self, scheduler_output: SchedulerOutput) -> None:
        """One array operation where every sequence decodes; otherwise vLLM's loop over sequences."""
        batch, count = self.input_batch, self.input_batch.num_reqs
        computed = batch.num_computed_tokens_cpu[:count]
        decodes = scheduler_output.total_num_scheduled_tokens == count
        if not decodes or (computed < batch.num_prompt_tokens[:count]).any():
            super()._calc_mrope_positions(scheduler_output)
            return
        states = (self.requests[request_id] for request_id in batch.req_ids)
        deltas = np.fromiter((state.mrope_position_delta for state in states), dtype=np.int64, count=count)
        self.mrope_positions.np[:, :count] = computed + deltas

    def _preprocess(
        self,
        scheduler_output: SchedulerOutput,
        num_input_tokens: int,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> tuple[None, Tensor, Tensor, None, dict[str, Any], None]:
        """Write row + codec embedding of every scheduled position into the buffer that CUDA graphs read.

        Replaces vLLM's method as a whole: here every input is an embedding and none comes from the host.
        """
        count = scheduler_output.total_num_scheduled_tokens
        self._stage_indices(count)
        embeds = self.inputs_embeds.gpu[:count]
        owners = self._slot_index.gpu[self.req_indices.gpu[:count]]
        self._rows.gather(self._row_index.gpu[:count], owners, embeds)
        ids = self.input_ids.gpu[:count]
        codes: Tensor = self.model.embed_input_ids(ids)  # type: ignore[operator]
        embeds += codes * (ids != self._ids.mask).unsqueeze(-1)
        inputs_embeds = self.inputs_embeds.gpu[:num_input_tokens]
        positions = self.mrope_positions.gpu[:, :num_input_tokens]
        return None, inputs_embeds, positions, None, self._init_model_kwargs(), None

    def _stage_indices(self, count: int) -> None:
        """Pool rows of the step's positions and slots of its sequences, to the device in two copies."""
        batch = self.input_batch
        sequences = [self._sequences[request_id] for request_id in batch.req_ids]
        slots = np.fromiter((sequence.slot for sequence in sequences), dtype=np.int64, count=len(sequences))
        owners = self.req_indices.np[:count]
        positions = batch.num_computed_tokens_cpu[owners] + self.query_pos.np[:count]
        self._row_index.np[:count] = self._rows.pool_rows(slots[owners], positions)
        self._row_index.copy_to_gpu(count)
        self._slot_index.np[: len(sequences)] = slots
        self._slot_index.copy_to_gpu(len(sequences))
        unfinished = self.discard_request_mask.np[: len(sequences)]
        self._drawing = [None if skip else found for skip, found in zip(unfinished, sequences, strict=True)]

    def _sample(self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        """Penalise, mask and draw; a sequence with anything non-finite draws the mask id, which ends it alone."""
        if logits is None:
            raise RuntimeError("the talker runs on one rank, so every step has logits")
        slots = self._slot_index.gpu[: logits.shape[0]]
        sound = self._rows.sound(slots, logits)
        output = super()._sample(self._adjust(logits, slots, sound), spec_decode_metadata)
        drawn = torch.where(sound, output.sampled_token_ids[:, 0], self._ids.mask)
        # A draw in the middle of a prompt is thrown away and must not count as used.
        slots = torch.where(self.discard_request_mask.gpu[: logits.shape[0]], self._rows.idle_slot, slots)
        self._rows.mark_seen(slots, drawn)
        output.sampled_token_ids = drawn.unsqueeze(-1)
        self._hand_out(drawn)
        return output

    def _adjust(self, logits: Tensor, slots: Tensor, sound: Tensor) -> Tensor:
        """Logits [B, V] after HF's repetition penalty (`RepetitionPenaltyLogitsProcessor`) and the fixed mask.

        vLLM's own penalty would need the codes on the host, so a step would wait for the one before.
        """
        logits = torch.where(sound.unsqueeze(-1), logits.float(), 0.0)
        penalty = self._rows.penalties[slots].unsqueeze(-1)
        penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
        logits = torch.where(self._rows.seen[slots], penalised, logits)
        return logits.masked_fill_(self._forbidden, float("-inf"))

    def _hand_out(self, drawn: Tensor) -> None:
        """Remember this step's ids [B] with their sequences until vLLM says which of them count."""
        ids = drawn.to(torch.int32)
        step = SampledStep(ids, record_event(ids.device))
        for row, sequence in enumerate(self._drawing):
            if sequence is not None:
                sequence.sampled.append((step, row))


class TalkerRunner(TalkerRunnerMixin, CounterNoiseMixin, PlatformRunner):
    """vLLM's runner with hidden rows added and batched seeded sampling."""


class TalkerWorker(StageWorker):
    """Worker of the talker's engine."""

    runner_class = TalkerRunner

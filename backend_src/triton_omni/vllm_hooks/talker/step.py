# SPDX-License-Identifier: Apache-2.0
"""Device part of a talker step before and after the network: conditioned inputs, drawn codes.

Every tensor it reads or writes between steps is allocated once, so a recorded step (a CUDA graph) may hold all of it.
It knows neither vLLM nor how a step is scheduled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_omni.checkpoint.config import OmniConfig, load_config
from triton_omni.vllm_hooks.talker.conditioning import CodecIds, TextRows, prompt_ids
from triton_omni.vllm_hooks.talker.draw import Setting, SlotDraws
from triton_omni.vllm_hooks.talker.rows import Column, TalkerRows


class TalkerStep:
    """Inputs and draws of a step's tokens.

    Args:
        rows: device memory of all sequences.
        index: int64 [tokens of the largest step, len(Column)] on the device, written before every step. Places after a
            step's tokens must be valid too, with `rows.idle_slot`.
        ids: special codec ids.
        speakable: number of codes the codec's table holds; other ids are never drawn, the stop ids apart.
        max_sequences: sequences of the largest decode step.
    """

    def __init__(self, rows: TalkerRows, index: Tensor, ids: CodecIds, speakable: int, max_sequences: int) -> None:
        self.rows, self.index, self.mask_id, self.speakable = rows, index, ids.mask, speakable
        self.decoding = False
        """True if the step that runs has one token a sequence; set before it."""
        vocabulary = rows.used.shape[1]
        self.forbidden = _forbidden(vocabulary, ids, speakable).to(index.device)
        """bool [V], ids that are never drawn."""
        stops = torch.zeros(vocabulary, dtype=torch.bool)
        stops[list(ids.stops)] = True
        self.draws = SlotDraws(rows.idle_slot + 1, stops.to(index.device))
        self.drawn = torch.zeros(max_sequences, dtype=torch.int32, device=index.device)
        """Ids of the last decode step, by its order of sequences."""
        self.cache_slots = torch.zeros(0, dtype=torch.int64, device=index.device)
        """The tokens' slots in the cache, which attention reads; set before the first decode step."""

    def compile(self) -> None:
        """Let torch.compile fuse the operations around the network, from its next run on."""
        self.condition = torch.compile(self.condition, fullgraph=True, dynamic=True)  # type: ignore[method-assign]
        self._adjust_decode = torch.compile(self._adjust_decode, fullgraph=True, dynamic=True)  # type: ignore[method-assign]

    def begin_decode(self, ids: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Lay out the tokens that follow the last step, and return the inputs [N, H] of a step of one token a sequence.

        Args:
            ids, positions: int32 [N] and int64 [3, N], updated in place.
            table: [V, H], the embeddings of ids.
        """
        self.lay_out_next(ids, positions)
        return self.condition(ids, table.index_select(0, ids))

    def lay_out_next(self, ids: Tensor, positions: Tensor) -> None:
        """Lay out the tokens of a decode step that follow the last one's: `ids` [N], `positions` [3, N], cache slots.

        It writes in place, as vLLM would have done. Tokens that vLLM laid out itself stay unchanged.
        """
        count = ids.shape[0]
        index, slots = self.index[:count], self.cache_slots[:count]
        follows = index[:, Column.FOLLOWS] != 0
        ids.copy_(torch.where(follows, self.drawn[:count], ids))
        positions.copy_(torch.where(follows, index[:, Column.AXIS], positions))
        slots.copy_(torch.where(follows, index[:, Column.CACHE], slots))

    def condition(self, ids: Tensor, codes: Tensor) -> Tensor:
        """Inputs [N, H] of a step's tokens: each one's hidden row plus `codes` [N, H], the embeddings of `ids` [N].

        From here on an id that was read counts as used, as for HF's repetition penalty and OpenAI's penalties.
        """
        count = ids.shape[0]
        slots = self.index[:count, Column.SLOT]
        inputs = self.rows.gather(self.index[:count, Column.ROW], slots)
        self.rows.count(slots, ids)
        return inputs.add_(codes * (ids != self.mask_id).unsqueeze(-1))

    def finish_decode(self, logits: Tensor) -> None:
        """Draw from the `logits` [N, V] of a step of one token a sequence into `drawn`, where the last draws of waiting
        sequences stay.
        """
        index, before = self.index[: logits.shape[0]], self.drawn[: logits.shape[0]]
        drawn = self._draw(*self._adjust_decode(logits), index)
        before.copy_(torch.where(index[:, Column.SLOT] == self.rows.idle_slot, before, drawn))

    def draw(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Draw ids int32 [B] after `tokens` int [B], places in a step of any kind, whose logits are [B, V]."""
        index = self.index[tokens]
        return self._draw(*self.adjust(logits, index[:, Column.SLOT]), index)

    def _adjust_decode(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.adjust(logits, self.index[: logits.shape[0], Column.SLOT])

    def _draw(self, logits: Tensor, sound: Tensor, index: Tensor) -> Tensor:
        """Draw ids; a sequence with any non-finite value draws the mask id, which ends it alone."""
        uniforms = index[:, Column.UNIFORM].view(torch.float64)
        drawn = self.draws(logits, index[:, Column.SLOT], index[:, Column.PLACE], uniforms)
        return torch.where(sound, drawn, self.mask_id).to(torch.int32)

    def adjust(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, V] after the penalties and the fixed mask.

        HF's repetition penalty (`RepetitionPenaltyLogitsProcessor`) comes first, then OpenAI's, as in vLLM. Only the
        first counts the prompt's ids, which are stops or never drawn.

        vLLM's own penalties would need the codes on the host, so a step would wait for the one before.

        Returns:
            float32 [B, V], and bool [B], True if the sequence is finite so far; otherwise its logits are 0.
        """
        sound = self.rows.sound(slots, logits)
        logits = torch.where(sound.unsqueeze(-1), logits.float(), 0.0)
        repetition, presence, frequency = self.draws.settings[Setting.REPETITION :, slots].unsqueeze(-1)
        times = self.rows.used[slots]
        penalised = torch.where(logits < 0, logits * repetition, logits / repetition)
        logits = torch.where(times > 0, penalised, logits)
        logits = logits - torch.where(self.draws.stops, 0.0, frequency * times + presence * (times > 0))
        return logits.masked_fill_(self.forbidden, float("-inf")), sound


class FusedTalkerStep(TalkerStep):
    """Decode steps by kernels of its own: two launches where the plain step takes ninety. All others are the plain's.

    It imports its kernels itself, so that an engine without fused steps loads none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from triton_omni.vllm_hooks.kernels.talker_draw import Rules
        from triton_omni.vllm_hooks.kernels.talker_step import Memory

        super().__init__(*args, **kwargs)
        self._memory = Memory(self.rows.pool, self.rows.used, self.rows.faults, self.drawn)
        self._rules = Rules.of(self.forbidden, self.draws.stops, self.draws.settings, self.speakable)

    def begin_decode(self, ids: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """Do as the plain step."""
        from triton_omni.vllm_hooks.kernels.talker_step import Layout, begin_step

        layout = Layout(self.index, ids, positions, self.cache_slots)
        return begin_step(layout, self._memory, table, self.mask_id)

    def finish_decode(self, logits: Tensor) -> None:
        """Do as the plain step, but keep all ids that are as likely as the last that top-k or top-p keeps."""
        from triton_omni.vllm_hooks.kernels.talker_draw import draw

        draw(logits, self.index, self._memory, self._rules, self.mask_id)


def codec_ids(config: OmniConfig) -> CodecIds:
    """Special codec ids of a checkpoint."""
    talker = config.talker
    return CodecIds(talker.codec_mask_id, talker.codec_pad_id, talker.codec_bos_id, talker.codec_eos_id)


def make_step(
    checkpoint: Path,
    index: Tensor,
    dtype: torch.dtype,
    *,
    max_sequences: int,
    max_positions: int,
    rows: int,
    sessions: int,
    kind: type[TalkerStep] = TalkerStep,
) -> TalkerStep:
    """The step of a checkpoint, with memory for its sessions.

    Args:
        checkpoint: folder of the whole checkpoint.
        index: as in `TalkerStep`; its rows are filled with the values for no token.
        dtype: of hidden rows.
        max_sequences: sequences of the largest decode step.
        max_positions: positions of the longest sequence.
        rows: rows that all sessions share.
        sessions: sequences open at once.
        kind: the class of the step.

    Raises:
        CheckpointError: the checkpoint lacks the text embeddings.
    """
    config = load_config(checkpoint)
    ids, talker = codec_ids(config), config.talker
    text = TextRows(checkpoint, dtype, index.device)
    used = torch.zeros(talker.decoder.vocab_size, dtype=torch.bool)
    used[prompt_ids(1, ids)] = True
    pool = TalkerRows(
        torch.stack([text[talker.text_eos_id], text[talker.text_pad_id]]),
        rows=rows,
        slots=sessions,
        prompt_ids=used.to(index.device),
        max_positions=max_positions,
    )
    index[:, Column.SLOT] = pool.idle_slot
    return kind(pool, index, ids, config.codec.largest_code + 1, max_sequences)


def _forbidden(vocabulary: int, ids: CodecIds, speakable: int) -> Tensor:
    """bool [V]: ids that are never drawn."""
    forbidden = torch.ones(vocabulary, dtype=torch.bool)
    forbidden[:speakable] = False
    forbidden[list(ids.stops)] = False
    forbidden[[ids.bos, ids.mask]] = True
    return forbidden

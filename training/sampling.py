# SPDX-License-Identifier: Apache-2.0
"""Codes of many replies at once by the talker, sampled as HF's `generate` samples them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training.exam import Task
from training.sizes import VOCAB
from training.talker import thinker_rows

_PROMPT_SEEN = (VOCAB.codec_mask, VOCAB.codec_pad, VOCAB.codec_bos)
"""Codec ids of the prompt, which the repetition penalty counts."""


@dataclass(frozen=True)
class Sampling:
    """HF's defaults for the talker."""

    temperature: float = 0.9
    top_k: int = 40
    top_p: float = 0.8
    penalty: float = 1.05

    def draw(self, logits: Tensor, seen: Tensor, generator: torch.Generator) -> Tensor:
        """Ids [B] of logits [B, V] fp32; `seen` [B, V] bool tells which ids were there before."""
        scaled = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        logits = torch.where(seen, scaled, logits).index_fill(
            1, torch.tensor(VOCAB.codec_bos, device=seen.device), -1e9
        )
        top = (logits / self.temperature).topk(self.top_k)
        parts = top.values.softmax(-1)
        parts = parts.masked_fill(parts.cumsum(-1) - parts > self.top_p, 0)
        return top.indices.gather(1, torch.multinomial(parts, 1, generator=generator)).squeeze(1)


@dataclass(frozen=True)
class _Rows:
    """Rows of a batch: what the talker begins with [B, P, hidden] and what it gets at each step [B, limit, hidden]."""

    begin: Tensor
    steps: Tensor


@torch.no_grad()
def speak(
    talker: Any, text: nn.Module, tasks: Sequence[Task], sampling: Sampling, limit: int
) -> list[list[int] | None]:
    """Codes of each task; None if it did not stop within `limit`.

    Args:
        talker: HF's talker.
        text: the thinker's text model.
        tasks: all are given the same number of their prompt's last rows, as many as the shortest has.
        sampling: how ids are drawn, from seed 0.
        limit: most codes.
    """
    rows = _rows(talker, text, tasks, limit)
    device, count = rows.begin.device, len(tasks)
    generator = torch.Generator(device).manual_seed(0)
    seen = torch.zeros(count, VOCAB.codec_size, dtype=torch.bool, device=device)
    seen[:, list(_PROMPT_SEEN)] = True
    drawn, ended = [], torch.zeros(count, dtype=torch.bool, device=device)
    steps = _Steps(talker, count, device)
    hidden = steps.run(rows.begin)
    for step in range(limit):
        ids = sampling.draw(talker.codec_head(hidden[:, -1]).float(), seen, generator)
        drawn.append(ids)
        ended |= (ids == VOCAB.codec_eos) | (ids == VOCAB.codec_pad)
        if step % 16 == 0 and bool(ended.all()):
            break
        seen[torch.arange(count, device=device), ids] = True
        hidden = steps.run((talker.model.embed_tokens(ids) + rows.steps[:, step]).unsqueeze(1))
    return [_until_end(ids) for ids in torch.stack(drawn, 1).tolist()]


class _Steps:
    """The talker's forward with a cache."""

    def __init__(self, talker: Any, count: int, device: torch.device) -> None:
        from transformers import DynamicCache

        self._talker, self._count, self._device = talker, count, device
        self._cache: Any = DynamicCache(config=talker.model.config)
        self._position = 0

    def run(self, embeds: Tensor) -> Tensor:
        """Last hidden states [B, L, width] of the next inputs [B, L, hidden]."""
        end = self._position + embeds.shape[1]
        position = torch.arange(self._position, end, device=self._device).expand(3, self._count, -1)
        self._position = end
        projected = self._talker.thinker_to_talker_proj(embeds)
        out = self._talker.model(
            inputs_embeds=projected, position_ids=position, past_key_values=self._cache, use_cache=True
        )
        hidden: Tensor = out.last_hidden_state
        return hidden


def _rows(talker: Any, text: Any, tasks: Sequence[Task], limit: int) -> _Rows:
    device = next(text.parameters()).device
    kept = min(len(task.prompt) for task in tasks)
    table, codec = text.embed_tokens, talker.model.embed_tokens
    ids = torch.tensor([VOCAB.tts_eos, VOCAB.tts_pad], device=device)
    eos, pad = table(ids).float()
    codec_pad, codec_bos = codec(torch.tensor([VOCAB.codec_pad, VOCAB.codec_bos], device=device)).float()
    begins, steps = [], []
    for task in tasks:
        prompt, reply = task.prompt, task.reply
        sequence = torch.tensor([prompt + reply], device=device)
        rows = thinker_rows(text, sequence, torch.tensor([task.voice.bos], device=device))[0]
        end = len(prompt) + len(reply)
        said = rows[len(prompt) : end]
        begins.append(torch.cat([rows[len(prompt) - kept : len(prompt)], rows[-1:] + codec_pad, said[:1] + codec_bos]))
        later = torch.cat([said[1:], eos.unsqueeze(0), pad.expand(limit, -1)])
        steps.append(later[:limit])
    return _Rows(torch.stack(begins), torch.stack(steps))


def _until_end(ids: Sequence[int]) -> list[int] | None:
    """Codes before the end; None without one. Ids that are no codes count as none (0)."""
    ends = [place for place, value in enumerate(ids) if value in {VOCAB.codec_eos, VOCAB.codec_pad}]
    return [value if value < VOCAB.codec_embeds else 0 for value in ids[: ends[0]]] if ends else None

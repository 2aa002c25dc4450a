# SPDX-License-Identifier: Apache-2.0
"""Assigns a hidden row and a codec id to each position of a talker sequence.

Integer arithmetic over positions; it knows no engine and no session. Three rows of the thinker's text embedding
(text_bos of a speaker, text_eos, text_pad) are read without loading the table.
Follows the talker part of HF's `Qwen2_5OmniForConditionalGeneration.generate`:

    position   0 .. P-1        P           P+1           P+2 ..                  M         M+1 ..
    id         codec_mask      codec_pad   codec_bos     the code before it ..
    row        prompt rows     text_bos    reply row 0   reply row 1 ..          text_eos  text_pad

M = P + 1 + number of reply rows. The input of a position is its row plus the embedding of its id, where the
embedding of codec_mask counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.weights import weight_map
from triton_omni.core.errors import InternalError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class CodecIds:
    """Special ids of the talker's vocabulary."""

    mask: int
    pad: int
    bos: int
    eos: int

    @property
    def stops(self) -> tuple[int, int]:
        """Ids that end a spoken reply and are never spoken (HF: `talker_eos_token_id`)."""
        return (self.pad, self.eos)


def prompt_ids(prompt_rows: int, ids: CodecIds) -> list[int]:
    """The P + 2 ids of a talker prompt; HF's repetition penalty counts them."""
    return [ids.mask] * prompt_rows + [ids.pad, ids.bos]


def prompt_length(prompt_rows: int) -> int:
    """Positions of a talker prompt: P prompt rows, text_bos, reply row 0."""
    return prompt_rows + 2


def stored_rows(prompt_rows: int, fed_rows: int) -> int:
    """Positions whose row is known after `fed_rows` rows came; text_bos follows the prompt rows by itself."""
    return fed_rows + (fed_rows >= prompt_rows)


def can_speak(prompt_rows: int, fed_rows: int) -> bool:
    """True if a reply row came; without one nothing is spoken."""
    return fed_rows > prompt_rows


def pool_rows(positions: Indices, bases: Indices, stored: Indices, *, text_eos: int, text_pad: int) -> Indices:
    """Return the index of each position's row in a pool where a sequence's rows are contiguous.

    Args:
        positions: int64 [N], places in their sequences.
        bases: int64 [N], pool index of position 0 of each one's sequence.
        stored: int64 [N], M of each one's sequence; a position at or past it takes the tail.
        text_eos, text_pad: pool indices of the two tail rows.

    Returns:
        int64 [N].
    """
    tail = np.where(positions == stored, text_eos, text_pad)
    return np.where(positions < stored, bases + positions, tail)


def split_at_text_bos(prompt_rows: int, fed_rows: int, count: int) -> tuple[slice, slice, int, int]:
    """Divide `count` further rows at the row of text_bos, which lies between prompt rows and reply rows.

    Returns:
        The part of the rows that are prompt rows, the part that are reply rows, and the position of each part's
        first row.
    """
    cut = min(max(prompt_rows - fed_rows, 0), count)
    return slice(0, cut), slice(cut, count), fed_rows, max(fed_rows, prompt_rows) + 1


# --- text rows --------------------------------------------------------------------------------------------------------


_TABLE = "thinker.model.embed_tokens.weight"


class TextRows:
    """Rows of the thinker's embedding table by text id, kept once read.

    Args:
        checkpoint: folder of the whole checkpoint.
        dtype, device: of the rows given.

    Raises:
        CheckpointError: the checkpoint has no such table.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> None:
        shard = weight_map(checkpoint).get(_TABLE)
        if shard is None:
            raise CheckpointError(f"{checkpoint}: {_TABLE} is missing, the talker needs its text embeddings")
        self._file = checkpoint / shard
        self._dtype, self._device = dtype, device
        self._rows: dict[int, Tensor] = {}

    def __getitem__(self, text_id: int) -> Tensor:
        """Embedding [H] of one text id.

        Raises:
            InternalError: the table has no such row.
        """
        if text_id not in self._rows:
            self._rows[text_id] = self._read(text_id).to(device=self._device, dtype=self._dtype)
        return self._rows[text_id]

    def _read(self, text_id: int) -> Tensor:
        with safe_open(self._file, framework="pt") as file:
            table = file.get_slice(_TABLE)
            size = table.get_shape()[0]
            if not 0 <= text_id < size:
                raise InternalError(f"text id {text_id} is outside the thinker's {size} embeddings", stage="talker")
            row: Tensor = table[text_id : text_id + 1]
            return row[0]

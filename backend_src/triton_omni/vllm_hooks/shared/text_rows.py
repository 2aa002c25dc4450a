# SPDX-License-Identifier: Apache-2.0
"""Single rows of the thinker's text embedding, read without loading the table.

The talker needs three of them (text_bos of a speaker, text_eos, text_pad); it knows no weights besides.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.weights import weight_map
from triton_omni.core.errors import InternalError

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

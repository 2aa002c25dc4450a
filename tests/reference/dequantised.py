# SPDX-License-Identifier: Apache-2.0
"""The plain checkpoint of a 4-bit one, by the formulas of AutoAWQ and GPTQModel: the reference of what the codes mean.

Nothing of the code that packs is used.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from triton_omni.checkpoint.weights import weight_map

AWQ_REVERSE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AutoAWQ's (`awq/utils/packing_utils.py`): where in a word the code of each of eight outputs is."""
ENDS = ("qweight", "qzeros", "scales", "g_idx")


def codes_of(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 [R, C] of words int32 [R, C / 8]."""
    columns = [(words[:, place // 8] >> (4 * order[place % 8])) & 15 for place in range(8 * words.shape[1])]
    return torch.stack(columns, dim=1)


def dequantised(parts: dict[str, Tensor], method: str) -> Tensor:
    """float32 [N, K]: (code - zero) * scale."""
    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].float()
    if method == "awq":
        codes, zero = codes_of(words, AWQ_REVERSE_ORDER), codes_of(zeros, AWQ_REVERSE_ORDER)
        group = torch.arange(len(codes)) // (len(codes) // len(scales))
    else:
        codes, zero = codes_of(words.T).T, codes_of(zeros) + 1
        group = parts["g_idx"].long()
    return ((codes - zero[group]) * scales[group]).T.contiguous()


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """All of a checkpoint."""
    files = {file: load_file(checkpoint / file) for file in set(weight_map(checkpoint).values())}
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def parts_of(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each quantised matrix by the ends of their names, by the name of its plain weight."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        if end in ENDS:
            found.setdefault(f"{stem}.weight", {})[end] = tensor
    return found


def write_dequantised(checkpoint: Path, folder: Path) -> Path:
    """Write the plain checkpoint into an empty folder."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    method = config.pop("quantization_config")["quant_method"]
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(checkpoint)
    plain = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in ENDS}
    weights = {name: dequantised(parts, method) for name, parts in parts_of(tensors).items()}
    save_file({**plain, **weights}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

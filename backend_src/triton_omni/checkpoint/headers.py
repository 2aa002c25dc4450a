# SPDX-License-Identifier: Apache-2.0
"""Checks by their headers that weight files are complete: a second for a checkpoint that loads for minutes.

Format: https://github.com/huggingface/safetensors#format. Reads no weight and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from triton_omni.checkpoint.reading import INDEX_FILE, LARGEST_JSON_BYTES, CheckpointError, parse_json

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_END = 1 << 63
"""No file is so long."""


def check_weights(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Look whether each file holds the tensors that it should, to the last byte.

    Args:
        folder: of the checkpoint.
        weight_map: of the index: the file that each tensor is in.

    Raises:
        CheckpointError: a file cannot be read, is cut off or damaged, or lacks a tensor; the message names both.
    """
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        wanted.setdefault(file, []).append(name)
    for file, names in wanted.items():
        check_file(folder / file, names)


def check_file(path: Path, names: Iterable[str] = ()) -> None:
    """One file of them; raises as `check_weights` does."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            raw = file.read(length) if length <= LARGEST_JSON_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    tensors = _tensors(path, raw, length)
    end = _LENGTH_BYTES + length + max((offsets[1] for offsets in tensors.values()), default=0)
    if size != end:
        past = [name for name, offsets in tensors.items() if _LENGTH_BYTES + length + offsets[1] > size]
        within = f", within {min(past, key=lambda name: tensors[name])}" if past else ""
        raise CheckpointError(
            f"{path}: has {size} bytes, its header says {end}: it ends too {_side(size, end)}{within}"
        )
    if missing := [name for name in names if name not in tensors]:
        raise CheckpointError(f"{path}: {missing[0]} is listed in {INDEX_FILE} but not in the file")


def _side(size: int, end: int) -> str:
    return "early" if size < end else "late"


def _range(begin: object, end: object) -> tuple[int, int]:
    if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end < _END:
        raise ValueError(f"data_offsets are {begin!r:.20}, {end!r:.20}")
    return begin, end


def _tensors(path: Path, raw: bytes, length: int) -> dict[str, tuple[int, int]]:
    """The byte range of each tensor after the header."""
    if len(raw) != length or not raw:
        raise CheckpointError(f"{path}: is no safetensors file, or is cut off within its header")
    try:
        header: dict[str, Any] = parse_json(raw)
        found = {name: tensor["data_offsets"] for name, tensor in header.items() if name != _METADATA}
        return {name: _range(begin, end) for name, (begin, end) in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: its header cannot be read: {type(error).__name__}") from error

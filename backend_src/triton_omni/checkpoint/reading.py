# SPDX-License-Identifier: Apache-2.0
"""Typed access to a checkpoint's JSON files and to the headers of its weights; every refusal names the file, the key,
the value and the limit.

Knows nothing of the model: `config.py` knows the keys and their meaning. Headers show in a second that weight files are
complete, before a load of minutes. Format: https://github.com/huggingface/safetensors#format.
It reads no weight and needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "model.safetensors.index.json"
"""Names the file of each tensor where the weights are in several files."""
SINGLE_FILE = "model.safetensors"
LARGEST_JSON_BYTES = 100_000_000
"""Maximum bytes of a JSON file, the same as for a header of safetensors."""
LARGEST_INTEGER = 2**31 - 1
MOST_ITEMS = 1024
"""Maximum items of a list of integers: one a layer."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the key or tensor."""


@dataclass(frozen=True)
class Section:
    """A JSON object and where it was found, such as `config.json: talker_config`.

    Each reader takes alternative names of a key in order of preference, since published and newer configurations
    differ. A `default` serves keys that HF's configuration classes fill in; without one a missing key is an error.
    """

    where: str
    values: Mapping[str, Any]

    def fail(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about a key of this section."""
        return CheckpointError(f"{self.where}.{key}: {problem}")

    def section(self, key: str) -> Section:
        """The JSON object under `key`."""
        found = self.values.get(key)
        if not isinstance(found, Mapping):
            raise self.fail(key, f"expected an object, found {found!r:.80}" if key in self.values else "is missing")
        return Section(f"{self.where}.{key}", found)

    def maybe(self, key: str) -> Section:
        """The JSON object under `key`, an empty one when it is missing or null."""
        return self.section(key) if self.values.get(key) is not None else Section(f"{self.where}.{key}", {})

    def has(self, *keys: str) -> bool:
        """True if one of the keys is there and not null."""
        return any(self.values.get(key) is not None for key in keys)

    def integer(self, *keys: str, default: int | None = None, low: int = 0, high: int = LARGEST_INTEGER) -> int:
        """An integer in [low, high]."""
        key, value = self._find(keys, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"expected an integer, found {value!r:.80}")
        if not low <= value <= high:
            raise self.fail(key, f"{value} is outside [{low}, {high}]")
        return value

    def number(
        self, *keys: str, default: float | None = None, low: float = 0.0, high: float = sys.float_info.max
    ) -> float:
        """A finite number in [low, high]."""
        key, value = self._find(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= sys.float_info.max:
            raise self.fail(key, f"expected a finite number of at least {low}, found {value!r:.80}")
        if value > high:
            raise self.fail(key, f"{float(value)} is above {high}")
        return float(value)

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """A boolean."""
        key, value = self._find(keys, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, found {value!r:.80}")
        return value

    def integers(self, *keys: str, default: tuple[int, ...] | None = None, low: int = 0) -> tuple[int, ...]:
        """A list of integers of at least `low`; a single integer counts as a list of one."""
        key, value = self._find(keys, default)
        items = value if isinstance(value, list | tuple) else [value]
        if len(items) > MOST_ITEMS:
            raise self.fail(key, f"has {len(items)} items, at most {MOST_ITEMS} are taken")
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items) or not all(
            low <= item <= LARGEST_INTEGER for item in items
        ):
            raise self.fail(key, f"expected integers in [{low}, {LARGEST_INTEGER}], found {value!r:.80}")
        return tuple(items)

    def integer_rows(self, key: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of positive integers."""
        _, value = self._find((key,), None)
        if not isinstance(value, list) or len(value) > MOST_ITEMS or not all(isinstance(row, list) for row in value):
            raise self.fail(key, f"expected a list of lists, found {value!r:.80}")
        return tuple(Section(self.where, {key: row}).integers(key, low=1) for row in value)

    def _find(self, keys: tuple[str, ...], default: object) -> tuple[str, Any]:
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        if default is None:
            raise self.fail(keys[0], "is missing" + (f" (as are {', '.join(keys[1:])})" if keys[1:] else ""))
        return keys[0], default


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _text(path: Path) -> str:
    if (size := path.stat().st_size) > LARGEST_JSON_BYTES:
        raise ValueError(f"{size} bytes are more than {LARGEST_JSON_BYTES}")
    return path.read_text(encoding="utf-8")


def read_json(path: Path, *, optional: bool = False) -> Section:
    """The JSON object of a file; with `optional` a missing file is an empty object."""
    if optional and not path.is_file():
        return Section(path.name, {})
    try:
        values = parse_json(_text(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return Section(path.name, values)


def read_index(folder: Path) -> dict[str, str] | None:
    """The file that each tensor is in, by the index; None = there is none.

    Raises:
        CheckpointError: it cannot be read, or names files outside the folder.
    """
    if not (folder / INDEX_FILE).is_file():
        return None
    entries = read_json(folder / INDEX_FILE).section("weight_map").values
    for name, file in entries.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".."):
            raise CheckpointError(f"{INDEX_FILE}: {name}: expected the name of a file here, found {file!r:.80}")
    return dict(entries)


# --- headers of weight files ------------------------------------------------------------------------------------------


_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_END = 1 << 63
"""Bytes beyond any file's length."""


def check_weights(folder: Path, weight_map: Mapping[str, str]) -> None:
    """Check that each file holds its tensors, to the last byte.

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
    """Check one file; raises as `check_weights`."""
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

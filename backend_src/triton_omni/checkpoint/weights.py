# SPDX-License-Identifier: Apache-2.0
"""Strict loading of torch modules from sharded safetensors: anything missing, unexpected or misshapen is an error.

Knows nothing of any network: names are the checkpoint's own below a prefix, unless the caller renames them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from triton_omni.checkpoint.reading import INDEX_FILE, SINGLE_FILE, CheckpointError, read_index

_LISTED = 5
"""Names that an error message shows of a longer list."""


def load_module(
    module: nn.Module,
    checkpoint: Path,
    prefix: str,
    *,
    rename: Callable[[str], str | None] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Fill every parameter and persistent buffer of `module` from the checkpoint.

    The module may lie on the meta device; only the shards that hold its tensors are opened, and they are read
    straight to `device`. Afterwards the module is on `device`, in evaluation mode, and needs no gradients.

    Args:
        module: its state names are the checkpoint's names without `prefix`, after `rename`.
        checkpoint: folder with `model.safetensors.index.json` or one `model.safetensors`.
        prefix: for example `token2wav.code2wav_dit_model.`.
        rename: the module's name for a checkpoint's name without prefix; None for one that is left out on purpose.
        dtype: floating point tensors are cast to it.
        device: of the loaded tensors.

    Raises:
        CheckpointError: with the names of the tensor and the file.
    """
    wanted = module.state_dict()
    sources = _sources(checkpoint, prefix, rename)
    _check_names(wanted, sources, checkpoint, prefix)
    state: dict[str, Tensor] = {}
    for file in sorted({file for file, _ in sources.values()}):
        names = {target: name for target, (shard, name) in sources.items() if shard == file}
        state.update(_read_shard(checkpoint / file, names, wanted, dtype, torch.device(device)))
    module.load_state_dict(state, strict=True, assign=True)
    # Buffers that are no part of the checkpoint.
    module.to(device)
    module.eval().requires_grad_(False)


def weight_map(checkpoint: Path) -> dict[str, str]:
    """Tensor names of the whole checkpoint and the file that holds each.

    Raises:
        CheckpointError: there is neither an index nor a single file, or the index names files outside the folder.
    """
    if (indexed := read_index(checkpoint)) is not None:
        return indexed
    with _open(checkpoint / SINGLE_FILE, torch.device("cpu")) as shard:
        return dict.fromkeys(shard.keys(), SINGLE_FILE)


def _sources(checkpoint: Path, prefix: str, rename: Callable[[str], str | None] | None) -> dict[str, tuple[str, str]]:
    """The module's name of each tensor, with its file and its name there."""
    sources: dict[str, tuple[str, str]] = {}
    for name, file in weight_map(checkpoint).items():
        if not name.startswith(prefix):
            continue
        short = name.removeprefix(prefix)
        target = rename(short) if rename else short
        if target is None:
            continue
        if target in sources:
            raise CheckpointError(f"{checkpoint}: {name} and {sources[target][1]} are both named {target}")
        sources[target] = (file, name)
    return sources


def _check_names(
    wanted: Mapping[str, Tensor], sources: Mapping[str, tuple[str, str]], checkpoint: Path, prefix: str
) -> None:
    missing = [name for name in wanted if name not in sources]
    unexpected = [name for name in sources if name not in wanted]
    if missing:
        raise CheckpointError(f"{checkpoint}: tensors missing below {prefix!r}: {_some(missing)}")
    if unexpected:
        raise CheckpointError(f"{checkpoint}: unexpected tensors below {prefix!r}: {_some(unexpected)}")


def _read_shard(
    path: Path, names: Mapping[str, str], wanted: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Tensors of one file by the module's names; `names` gives their names in the file."""
    tensors: dict[str, Tensor] = {}
    with _open(path, device) as shard:
        present = set(shard.keys())
        for target, name in names.items():
            if name not in present:
                raise CheckpointError(f"{path}: {name} is listed in {INDEX_FILE} but not in the file")
            found, expected = list(shard.get_slice(name).get_shape()), list(wanted[target].shape)
            if found != expected:
                raise CheckpointError(f"{path}: {name} has shape {found}, expected {expected}")
            tensor = shard.get_tensor(name)
            tensors[target] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def _open(path: Path, device: torch.device) -> safe_open:
    """Open a safetensors file; a missing or truncated one is an error that names it."""
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _some(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")

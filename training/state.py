# SPDX-License-Identifier: Apache-2.0
"""Weights of a stage on disk, with facts such as the number of steps. A file is there whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.settings import Settings


@dataclass(frozen=True)
class State:
    """Tensors and facts that a stage kept."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @property
    def steps(self) -> int:
        """Optimiser steps so far, over all runs."""
        return int(self.facts.get("steps", 0))


def folder(settings: Settings) -> Path:
    """Where the states of a run lie, one file `NAME.pt` each."""
    return settings.work / "state"


def save(settings: Settings, name: str, tensors: dict[str, Tensor], **facts: Any) -> None:
    """Keep tensors (floating ones in fp32) and facts (of JSON's types) under a name."""
    write(folder(settings) / f"{name}.pt", tensors, torch.float32, facts)


def write(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype, facts: dict[str, Any]) -> None:
    """Write a state's file; floating tensors get `dtype`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        key: value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        for key, value in tensors.items()
    }
    new = path.with_suffix(".new")
    torch.save({"tensors": kept, "facts": facts}, new)
    new.replace(path)


def load(settings: Settings, name: str) -> State | None:
    """Return the state kept under a name, floating tensors in fp32; None if nothing was."""
    path = folder(settings) / f"{name}.pt"
    return read(path) if path.exists() else None


def read(path: Path) -> State:
    """Read a state's file."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    tensors = {key: value.float() if value.is_floating_point() else value for key, value in found["tensors"].items()}
    return State(tensors, found["facts"])


def load_into(settings: Settings, name: str, module: nn.Module) -> State | None:
    """Give `module` the weights kept under a name.

    Returns:
        The state, or None if there is none; the module is then as it was.

    Raises:
        RuntimeError: names or shapes of the weights are not the module's: the sizes were changed since.
    """
    found = load(settings, name)
    if found is not None:
        module.load_state_dict(found.tensors)
    return found

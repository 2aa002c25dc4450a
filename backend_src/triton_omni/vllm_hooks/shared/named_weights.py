# SPDX-License-Identifier: Apache-2.0
"""Names the tensor that vLLM could not load: its own errors name shapes alone, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor

from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.weights import weight_map

Weights = Iterable[tuple[str, Tensor]]


def load_named(load: Callable[[Weights], set[str]], weights: Weights, checkpoint: Path) -> set[str]:
    """Return `load(weights)`; an error names the tensor that `load` got last.

    Args:
        load: takes tensors one by one, as vLLM's loaders do.
        weights: the checkpoint's names and tensors.
        checkpoint: its folder.

    Raises:
        CheckpointError: a tensor does not fit into the network; the message names it, its file and its shape.
    """
    last: tuple[str, list[int]] | None = None

    def noted() -> Iterator[tuple[str, Tensor]]:
        nonlocal last
        for name, tensor in weights:
            last = (name, list(tensor.shape))
            yield name, tensor

    try:
        return load(noted())
    # vLLM's many loaders raise these for an unexpected shape; `CheckpointError` is a ValueError.
    except (AssertionError, RuntimeError, IndexError) as error:
        if last is None:
            raise
        name, shape = last
        file = checkpoint / weight_map(checkpoint).get(name, "?")
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file}: {name} has shape {shape}, which does not fit the network: {reason}") from error

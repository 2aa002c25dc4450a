# SPDX-License-Identifier: Apache-2.0
"""Training steps recorded as one CUDA graph: small networks would else wait for the launches of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WARM_UP = 4


class Recorded:
    """A step without arguments that reads and writes tensors of fixed addresses and shapes, and returns one.

    It runs as it is on the CPU. On a GPU it is recorded after some real runs; it must not wait for the device, and its
    random numbers come from torch's default generator.
    """

    def __init__(
        self, step: Callable[[], Tensor], device: torch.device, pool: Any = None, *, plain: bool = False
    ) -> None:
        """`pool`, of `torch.cuda.graph_pool_handle`, is memory shared by steps that never run at the same time.

        If `plain`, nothing is recorded.
        """
        self._step, self._pool, self._runs = step, pool, 0
        self._records = device.type == "cuda" and not plain
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        """Run the step; the result is overwritten by the next call."""
        self._runs += 1
        if not self._records:
            return self._step()
        if self._runs <= _WARM_UP:
            return self._warm_up()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=self._pool):
                self._result = self._step()
        self._graph.replay()
        assert self._result is not None
        return self._result

    def _warm_up(self) -> Tensor:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self._step()
        torch.cuda.current_stream().wait_stream(side)
        return result

# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of the fused networks: one launch replays a recorded forward pass, instead of one launch a kernel.

A graph has fixed shapes and addresses. A ragged batch of the DiT runs in a graph recorded for at least as many rows
and blocks: the start of a window is data, not shape. The vocoder's shapes are those of a streaming plan. A batch that
fits no graph is launched kernel by kernel. All graphs share one memory pool, so only one may run at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.gpu import fill, to_device
from triton_omni.token2wav.attention import Rotary
from triton_omni.token2wav.batching import LAYOUTS_KEPT, BlockLayout, Blocks, block_layout
from triton_omni.token2wav.dit import DiT
from triton_omni.token2wav.fused_dit import FusedDiT
from triton_omni.token2wav.fused_vocoder import FusedVocoder
from triton_omni.token2wav.ode import EVALUATIONS_A_STEP, Solver, Steps
from triton_omni.token2wav.sampler import Flow, StepwiseSolver
from triton_omni.token2wav.solver_kernels import advance
from triton_omni.token2wav.window_cache import NONE, WindowCachePool, WindowKVCache, evaluation_numbers

WARM_UP_CALLS = 2
"""Number of calls before recording: kernels are compiled and libraries choose their algorithms at the first call."""

TRIED_ALGORITHMS = 3
"""Number of algorithms that cuDNN tries for each convolution; its own limit of ten makes a start much longer."""


@dataclass(frozen=True)
class _Recorded:
    """A graph with the tensors that it reads and the one that it writes."""

    graph: torch.cuda.CUDAGraph
    output: Tensor


def _choosing_algorithms() -> AbstractContextManager[None]:
    """Let cuDNN try its best few algorithms of each convolution, only at shapes that are recorded.

    With ordered sums it tries none: the fastest of two may be another one at the next start.
    """
    ordered = torch.backends.cudnn.deterministic
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True,
        benchmark=not ordered,
        benchmark_limit=TRIED_ALGORITHMS,
        deterministic=ordered,
        allow_tf32=False,
    )
    return flags


class GraphPool:
    """Records calls into one memory pool."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Tensor]) -> _Recorded:
        """Record `call`, which must read fixed tensors and never wait for the device."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _choosing_algorithms():
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process copy inputs meanwhile, which a global capture mode would forbid.
        with (
            torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"),
            _choosing_algorithms(),
        ):
            output = call()
        return _Recorded(graph, output)


@dataclass(frozen=True)
class _Inputs:
    """Tensors at fixed addresses that a solver step reads and writes.

    S rows and N blocks a half; one half or, under guidance, two. Blocks after a batch's end have no rows.
    """

    state: Tensor
    """[S, M]"""
    condition: Tensor
    """[halves, S, H]"""
    scale: Tensor
    """[S, 1]"""
    modulation: Tensor
    """[evaluations of a step, 6 L + 2, H]"""
    width: Tensor
    """[], the step's width."""
    rotary: Rotary
    """[halves x S, 1, head_dim / 2]"""
    pointers: Tensor
    """int32 [6, halves x N], of which the next two are views."""
    blocks: Blocks
    """Rows of halves x N blocks."""
    past: WindowKVCache
    """Window cache of the same blocks, at the evaluations of the step."""

    @classmethod
    def allocate(cls, dit: DiT, pool: WindowCachePool, halves: int, size: int, evaluations: int) -> _Inputs:
        rows, config, device = size * dit.config.block_size, dit.config, pool.pages.device
        pointers = to_device(torch.from_numpy(_pointers(None, halves, rows, most_blocks(size))), device)
        parts = dit.modulation(torch.zeros(1, device=device)).shape[1]
        numbers = torch.zeros(evaluations, dtype=torch.int32, device=device)
        return cls(
            state=torch.zeros(rows, config.mel_dim, device=device),
            condition=torch.zeros(halves, rows, config.hidden_size, device=device),
            scale=torch.zeros(rows, 1, device=device),
            modulation=torch.zeros(evaluations, parts, config.hidden_size, device=device),
            width=torch.zeros((), device=device),
            rotary=dit.rotary(torch.zeros(halves * rows, dtype=torch.int64, device=device)),
            pointers=pointers,
            blocks=Blocks(*pointers[:4]),
            past=WindowKVCache(pool, pointers[4], pointers[5], numbers),
        )

    def load(self, state: Tensor, flow: Flow) -> None:
        """Copy the inputs that the steps of a batch share, except the angles."""
        count, (halves, rows) = len(state), self.condition.shape[:2]
        self.state[:count] = state
        self.scale[:count] = flow.scale
        self.condition[:, :count] = flow.condition
        # All pointers: none after the batch's end may point into the batch or into a cache page.
        fill(self.pointers, torch.from_numpy(_pointers(flow, halves, rows, self.pointers.shape[1] // halves)))

    def copy_angles(self, rotary: Rotary) -> None:
        """Copy the angles of a batch."""
        count, shape = len(rotary.cos), (*self.condition.shape[:2], 1, -1)
        self.rotary.cos.view(shape)[:, :count] = rotary.cos
        self.rotary.sin.view(shape)[:, :count] = rotary.sin


def most_blocks(size: int) -> int:
    """Return the maximum number of blocks in the rows of `size` whole blocks.

    A window's last block may be short: eight blocks of first windows have the rows of seven whole ones.
    """
    return size + size // 4 + 1


def _fits(layout: BlockLayout, size: int) -> bool:
    return sum(layout.lengths) <= size * layout.block_size and layout.num_blocks <= most_blocks(size)


def _pointers(flow: Flow | None, halves: int, rows: int, blocks: int) -> NDArray[np.int32]:
    """Return int32 [6, halves x blocks]: the fields of `Blocks`, then first pages to read and to write; without a flow
    no rows and NONE.
    """
    table = np.zeros((6, halves, blocks), np.int32)
    table[4:] = NONE
    if flow is not None:
        ours = flow.layout.table
        count = ours.shape[1]
        table[:4, :, :count] = ours[:, None]
        table[0, :, :count] += (rows * np.arange(halves, dtype=np.int32))[:, None]
        table[4:, :, :count] = flow.past.pages.reshape(2, halves, count)
    return table.reshape(6, -1)


_Kind = tuple[int, Solver, bool]
"""Rows in whole blocks, solver, and whether there is guidance."""


@dataclass
class _LoadedFlow:
    """A flow that is being solved."""

    flow: Flow
    state: Tensor
    """[R, M] after its last step, unless a graph holds it."""


def _rotary_by_layout(dit: DiT, device: torch.device) -> Callable[[tuple[int, ...]], Rotary]:
    """Return a cached function from window lengths to the batch's angles, which must not be written to."""

    @functools.lru_cache(maxsize=LAYOUTS_KEPT)
    def rotary(lengths: tuple[int, ...]) -> Rotary:
        return dit.rotary(block_layout(lengths, dit.config.block_size, device).positions)

    return rotary


class GraphedSolver:
    """Solves flows with one recorded solver step, launched once a step (`sampler.FlowSolver`).

    Graphs of `recorded` kinds are recorded at the start, of any other kind at first use. Flows that are solved
    alternately may share a graph: each restores its state in the graph's tensors after another has used them.

    Args:
        dit: for what is computed once a batch.
        fused: what is recorded, and what solves batches larger than any size evaluation by evaluation.
        pool: where graphs have their memory.
        past: of all flows.
        sizes: rows in whole blocks, one half of guidance counted, to record graphs for; see `most_blocks`.
        recorded: (solver, guided) of the flows that come most.
    """

    def __init__(
        self,
        dit: DiT,
        fused: FusedDiT,
        pool: GraphPool,
        past: WindowCachePool,
        *,
        sizes: Iterable[int],
        recorded: Iterable[tuple[Solver, bool]],
    ) -> None:
        self._dit, self._fused, self._pool, self._past = dit, fused, pool, past
        self._stepwise = StepwiseSolver(fused)
        self._rotary = _rotary_by_layout(dit, past.pages.device)
        self._sizes = sorted(set(sizes))
        self._graphs: dict[_Kind, tuple[_Inputs, _Recorded]] = {}
        self._loaded: dict[_Kind, _LoadedFlow] = {}
        self._angles_of: dict[_Kind, tuple[int, ...]] = {}
        """Lengths of the windows whose angles a graph's tensors hold; the next batch often has the same."""
        # The largest first: the smaller ones then fit into its memory.
        for solver, guided in recorded:
            for size in reversed(self._sizes):
                self._graph(size, solver, guided)

    def steps(self, noise: Tensor, flow: Flow) -> Steps[Tensor]:
        """See `FlowSolver`."""
        size = next((size for size in self._sizes if _fits(flow.layout, size)), None)
        if size is None:
            return (yield from self._stepwise.steps(noise, flow))
        kind = size, flow.solver, flow.is_guided
        inputs, recorded = self._graph(*kind)
        evaluations = EVALUATIONS_A_STEP[flow.solver]
        numbers = evaluation_numbers(flow.past.evaluations, noise.device)
        modulations, numbers_by_step = (torch.split(table, evaluations) for table in (flow.modulation, numbers))
        mine = _LoadedFlow(flow, noise)
        try:
            for place, width in enumerate(flow.grid.diff().tolist()):
                if place:
                    yield
                self._load(mine, kind)
                inputs.modulation.copy_(modulations[place])
                inputs.past.numbers.copy_(numbers_by_step[place])
                inputs.width.fill_(width)
                recorded.graph.replay()
            return inputs.state[: len(noise)].clone()
        finally:
            if self._loaded.get(kind) is mine:
                del self._loaded[kind]

    def _load(self, mine: _LoadedFlow, kind: _Kind) -> None:
        """Load this flow into the graph's tensors."""
        (inputs, _), other = self._graphs[kind], self._loaded.get(kind)
        if other is mine:
            return
        if other is not None:
            # If memory is missing for this, the other flow stays where it is.
            other.state = inputs.state[: len(other.state)].clone()
            del self._loaded[kind]
        inputs.load(mine.state, mine.flow)
        lengths = mine.flow.layout.lengths
        if self._angles_of.get(kind) != lengths:
            inputs.copy_angles(self._rotary(lengths))
            self._angles_of[kind] = lengths
        self._loaded[kind] = mine

    def _graph(self, size: int, solver: Solver, guided: bool) -> tuple[_Inputs, _Recorded]:
        kind = size, solver, guided
        if kind not in self._graphs:
            inputs = _Inputs.allocate(self._dit, self._past, 1 + guided, size, EVALUATIONS_A_STEP[solver])
            self._graphs[kind] = inputs, self._pool.record(lambda: self._step(inputs, solver))
        return self._graphs[kind]

    def _step(self, inputs: _Inputs, solver: Solver) -> Tensor:
        condition, state = inputs.condition.flatten(0, 1), inputs.state
        scale = inputs.scale if len(inputs.condition) > 1 else None
        evaluations, place = EVALUATIONS_A_STEP[solver], state
        slopes = torch.empty(evaluations - 1, *state.shape, device=state.device)
        for number in range(evaluations):
            velocity = self._fused.evaluate(
                number,
                place,
                condition,
                inputs.modulation,
                rotary=inputs.rotary,
                blocks=inputs.blocks,
                past=inputs.past,
            )
            place = advance(velocity, scale, inputs.width, state, slopes, solver=solver, number=number)
        return place


class GraphedVocoder:
    """A fused vocoder with graphs for some shapes.

    Args:
        fused: what is recorded, and what runs for all other shapes.
        mel_dim: channels of its input.
        shapes: (batch, frames) to record graphs for. A batch runs in the smallest that holds it, a larger one in parts.
        pool: where graphs have their memory.
    """

    def __init__(
        self,
        fused: FusedVocoder,
        mel_dim: int,
        shapes: Iterable[tuple[int, int]],
        pool: GraphPool,
        device: torch.device,
    ) -> None:
        self.samples_per_frame = fused.samples_per_frame
        self._fused = fused
        self._graphs: dict[tuple[int, int], tuple[Tensor, _Recorded]] = {}
        for batch, frames in sorted(set(shapes), key=lambda shape: -shape[0] * shape[1]):
            mel = torch.zeros(batch, mel_dim, frames, device=device)
            self._graphs[batch, frames] = mel, pool.record(lambda mel=mel: fused(mel))  # type: ignore[misc]

    def __call__(self, mel: Tensor) -> Tensor:
        """See `BigVGAN.forward`."""
        sizes = sorted(size for size, length in self._graphs if length == mel.shape[2])
        if not sizes:
            return self._fused(mel)
        return torch.cat([self._replay(part, sizes) for part in torch.split(mel, sizes[-1])])

    def _replay(self, mel: Tensor, sizes: Sequence[int]) -> Tensor:
        inputs, recorded = self._graphs[next(size for size in sizes if size >= len(mel)), mel.shape[2]]
        inputs[: len(mel)] = mel
        recorded.graph.replay()
        # A copy, since the next part may use the same graph.
        return recorded.output[: len(mel)].clone()

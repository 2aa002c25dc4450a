# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for a GPU at the published sizes, on a machine that need not have one.

    compile_ahead.py all CAPABILITY          every size; 90 for a Hopper GPU
    compile_ahead.py once CAPABILITY ...     one launch of each kernel, of large sizes, for several GPUs

Runs as a program, in a process where the Triton language compiles (`TRITON_INTERPRET` unset). Prints a line a launch:
the GPU's capability, the kernel's name, bytes of shared memory a program, bytes of a thread outside registers, and the
hash of the compiled code. With `TRITON_DUMP_PTXAS_LOG=1` the output of ptxas goes before it. After the line `again`
follow launches of other sizes, as requests bring them to a warm server.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_omni.token2wav.attention import Rotary
from triton_omni.token2wav.attention_kernels import block_attention, leave_past
from triton_omni.token2wav.batching import Blocks, block_layout
from triton_omni.token2wav.kernels import (
    SnakeFilters,
    anti_aliased_snake,
    fused_standard_normal,
    mean_of_sums,
    residual_norm,
)
from triton_omni.token2wav.layer_kernels import LayerTilings, product, tilings_for
from triton_omni.token2wav.ode import EVALUATIONS_A_STEP
from triton_omni.token2wav.solver_kernels import advance, fused_condition
from triton_omni.token2wav.window_cache import LayerKVCache
from triton_omni.vllm_hooks.kernels import thinker_step
from triton_omni.vllm_hooks.kernels.decode_attention import Cache, Projected, Rotation, decode_attention
from triton_omni.vllm_hooks.kernels.decode_product import (
    add_norm,
    gated_product,
    most_rows,
    split_product,
)
from triton_omni.vllm_hooks.kernels.draw import fused_draw
from triton_omni.vllm_hooks.kernels.step_copy import DrawnIds, fetch
from triton_omni.vllm_hooks.kernels.talker_draw import Rules, draw
from triton_omni.vllm_hooks.kernels.talker_step import Layout, Memory, begin_step
from triton_omni.vllm_hooks.talker.draw import Setting
from triton_omni.vllm_hooks.talker.rows import Column

HALF, BRAIN, FLOAT, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


class Sizes(NamedTuple):
    """Sizes of a decoder layer."""

    heads: int
    key_heads: int
    width: int
    """Width of a head."""
    hidden: int
    inner: int


LAYERS = [
    Sizes(28, 4, 128, 3584, 18944),
    Sizes(16, 2, 128, 2048, 11008),
    Sizes(12, 4, 128, 896, 18944),
    Sizes(14, 2, 64, 896, 4864),
]
"""Sizes of the thinkers' and talkers' layers."""
THINKERS = LAYERS[:2]


class Ahead:
    """Stands where the driver of a GPU would, and says which GPU to compile for.

    Args:
        capability: ten times the compute capability.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """None that anything is launched on."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The GPU of this capability."""
        return GPUTarget("cuda", self.capability, 32)


_STACKS: dict[str, int] = {}
"""Stack bytes of each compiled kernel, by its hash."""


def stack_bytes(kernel: Any) -> int:
    """Bytes of a thread's stack, where lies what does not fit into its registers."""
    if kernel.hash not in _STACKS:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        _STACKS[kernel.hash] = max(int(size) for size in re.findall(r"STACK:(\d+)", told))
    return _STACKS[kernel.hash]


def compile_only(capability: int, *, once: bool) -> None:
    """Have launches compile, say so, and launch nothing; with `once` each kernel's first alone, and one of E4M3."""
    triton.runtime.driver.set_active(Ahead(capability))
    launch, compiled = JITFunction.run, set[tuple[str, bool]]()

    def run(self: Any, *args: Any, **options: Any) -> Any:
        of_e4m3 = any(isinstance(given, TensorDescriptor) and given.base.dtype == E4M3 for given in args)
        if once and (self.fn.__name__, of_e4m3) in compiled:
            return None
        compiled.add((self.fn.__name__, of_e4m3))
        # The options of the GPU that is compiled for, whatever device the tensors are on.
        early = {"EARLY": True, "launch_pdl": True} if "EARLY" in options and capability >= 90 else {}
        kernel = launch(self, *args, **{**options, **early, "warmup": True})
        print(capability, self.fn.__name__, kernel.metadata.shared, stack_bytes(kernel), kernel.hash, flush=True)
        return kernel

    JITFunction.run = run


def zeros(*sizes: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def attention(count: int, sizes: Sizes, projected: Projected) -> Tensor:
    """Compute the attention of a layer."""
    blocks, arrivals = zeros(4, sizes.key_heads, 16, 2 * sizes.width), zeros(256, dtype=torch.int32)
    cache = Cache(blocks, zeros(count, 8, dtype=torch.int32), zeros(count, dtype=torch.int32))
    sections = 16, sizes.width // 2 - 40, 24
    rotation = Rotation(zeros(3, count, dtype=torch.int64), zeros(64, sizes.width), sections)
    return decode_attention(projected, rotation, cache, arrivals, heads=sizes.heads, scale=0.1)


def layer(count: int, sizes: Sizes) -> None:
    """Compute a whole layer, then attention after a library's product."""
    hidden, columns = sizes.hidden, (sizes.heads + 2 * sizes.key_heads) * sizes.width
    attention(count, sizes, Projected(zeros(1, count, columns)))
    residual, gain, projected = (
        zeros(count, hidden),
        zeros(hidden),
        split_product(zeros(count, hidden), zeros(columns, hidden)),
    )
    seen = attention(count, sizes, Projected(projected, zeros(columns)))
    normed = add_norm(split_product(seen, zeros(hidden, seen.shape[1])), residual, gain, 1e-6)
    gated = gated_product(normed, zeros(2 * sizes.inner, hidden))
    add_norm(split_product(gated, zeros(hidden, sizes.inner)), residual, gain, 1e-6)


def quantised_products(count: int, sizes: Sizes) -> None:
    """Compute the E4M3 products of a layer."""
    inner, seen = 2 * sizes.inner, sizes.heads * sizes.width
    columns = seen + 2 * sizes.key_heads * sizes.width
    for width, depth in ((columns, sizes.hidden), (sizes.hidden, seen), (sizes.hidden, sizes.inner)):
        split_product(zeros(count, depth, dtype=BRAIN), zeros(width, depth, dtype=E4M3), zeros(width, dtype=FLOAT))
    rows, weights = zeros(count, sizes.hidden, dtype=BRAIN), zeros(inner, sizes.hidden, dtype=E4M3)
    gated_product(rows, weights, zeros(inner, dtype=FLOAT))


def talker_steps(count: int, width: int, vocabulary: int = 8448, slots: int = 65) -> None:
    """Both ends of a step, and what passes between two."""
    index = zeros(count, len(Column), dtype=torch.int64)
    drawn = zeros(count, dtype=torch.int32)
    positions, places = zeros(3, count, dtype=torch.int64), zeros(count, dtype=torch.int64)
    used, faults = zeros(slots, vocabulary, dtype=torch.int32), zeros(slots, dtype=torch.int32)
    memory = Memory(zeros(64, width), used, faults, drawn)
    begin_step(Layout(index, drawn.clone(), positions, places), memory, zeros(vocabulary, width), 8296)
    forbidden = torch.arange(vocabulary) >= 8193
    rules = Rules.of(forbidden, zeros(vocabulary, dtype=torch.bool), zeros(len(Setting), slots, dtype=FLOAT), 8192)
    for kind in (HALF, FLOAT):
        draw(zeros(count, vocabulary, dtype=kind), index, memory, rules, 8296)
    split_product(zeros(count, 896), zeros(vocabulary, 896))
    narrow, parts = zeros(896), split_product(zeros(count, width), zeros(896, width), early=False)
    add_norm(parts, zeros(count, 896), narrow, 1e-6, narrow)
    fetch(index, index.clone(), drawn, Column.LENGTH.value)
    DrawnIds(count, index.device).keep(drawn)


def thinker_steps(count: int, width: int) -> None:
    """Both ends of a step."""
    positions, axes = zeros(count, dtype=torch.int64), zeros(3, count + 1, dtype=torch.int64)
    lengths, blocks = zeros(count, dtype=torch.int32), zeros(count, 64, dtype=torch.int32)
    places = thinker_step.Places(positions, axes, lengths, positions.clone(), blocks, 16)
    numbers = thinker_step.Uniforms(zeros(count, dtype=torch.float64), zeros(count, dtype=torch.float64))
    table, inputs = zeros(152064, width, dtype=BRAIN), zeros(count, width, dtype=BRAIN)
    for uniforms in (None, numbers):
        thinker_step.begin_step(zeros(count, dtype=torch.int32), table, inputs, places, uniforms)
    for rows in (None, inputs.clone()):
        thinker_step.finish(rows, inputs)


def transformer(blocks: int, width: int = 1024, heads: int = 16) -> None:
    """A DiT's layer."""
    rows, head = blocks * 24, width // heads
    hidden, part = zeros(rows, width, dtype=FLOAT), zeros(width, dtype=FLOAT)
    for branch in (None, zeros(rows, width), zeros(2, rows, width, dtype=FLOAT)):
        residual_norm(hidden, branch, part, part, part, eps=1e-6, dtype=HALF)
    number = zeros(blocks, dtype=torch.int32)
    angles = zeros(rows, head // 2, dtype=FLOAT)
    before = Rotary(zeros(24, 1, head // 2, dtype=FLOAT), zeros(24, 1, head // 2, dtype=FLOAT))
    past = LayerKVCache(zeros(3, 24, 2 * width), zeros(1, dtype=torch.int32)[0], number, number, before)
    qkv, tables = zeros(rows, 3 * width), Blocks(number, number, number, number)
    for reach in ((0, 0), (1, 0), (0, 1)):
        found = past if reach[0] else None
        block_attention(qkv, (angles, angles), tables, reach, found, block_size=24, heads=heads, rotary_heads=1)
    leave_past(qkv, tables, past, heads=heads)


def tiled_layer(tilings: LayerTilings, rows: int, width: int = 1024, inner: int = 2048) -> None:
    """A DiT's layer of few rows."""
    few = zeros(rows, width)
    if tilings.qkv is not None:
        product(few, zeros(3 * width, width), zeros(3 * width), tilings.qkv)
    if tilings.out is not None:
        product(few, zeros(width, width), zeros(width), tilings.out)
    if tilings.enter is not None:
        product(few, zeros(inner, width), zeros(inner), tilings.enter, gelu=True)
    if tilings.leave is not None:
        product(zeros(rows, inner), zeros(width, inner), zeros(width), tilings.leave)


def solvers() -> None:
    """Compute the steps before and between evaluations."""
    layout = block_layout((96,), 24, torch.device("cpu"))
    for halves in (1, 2):
        voices = zeros(1, 2, 1024, dtype=FLOAT)[:, :halves]
        fused_condition(zeros(48, dtype=torch.int32), zeros(8, 1024, dtype=FLOAT), voices, layout)
    state, width = zeros(96, 80, dtype=FLOAT), zeros(1, dtype=FLOAT)[0]
    for guided in (True, False):
        velocity, scale = zeros(96 << guided, 80), zeros(96, 1, dtype=FLOAT) if guided else None
        for solver, evaluations in EVALUATIONS_A_STEP.items():
            slopes = zeros(evaluations - 1, *state.shape, dtype=FLOAT)
            for number in range(evaluations):
                advance(velocity, scale, width, state, slopes, solver=solver, number=number)


def waveform(frames: int, windows: int) -> None:
    """The vocoder's filter and the noise."""
    fused_standard_normal([(1, 0, frames)], 80, torch.device("cpu"))
    for channels in (1536, 768, 48, 24):
        taps = torch.ones(12) / 12
        snake = SnakeFilters.of(taps, taps, zeros(channels, dtype=FLOAT), zeros(channels, dtype=FLOAT), HALF)
        bias, hidden = zeros(channels, dtype=FLOAT), zeros(windows, frames, channels)
        anti_aliased_snake(hidden, None, bias, snake, dtype=HALF)
        anti_aliased_snake(hidden, hidden, bias, snake, dtype=HALF, total=hidden)
        mean_of_sums([(hidden, hidden, bias)] * 3, HALF)
    # The last of them are in float32.
    mean_of_sums([(hidden, hidden, bias)] * 3, FLOAT)
    whole = SnakeFilters.of(taps, taps, snake.frequency, snake.magnitude)
    anti_aliased_snake(hidden.float(), None, bias, whole, dtype=FLOAT)


DATACENTRE = (90, 100)
"""GPUs with the shared memory that the tilings of a DiT's layer need (`layer_kernels.fit`)."""
HOPPER = 90
"""From it on, products read E4M3 (`decode_product.reads_e4m3`)."""


def each_once(capability: int) -> None:
    """Compile every kernel that runs on the GPU, at large sizes."""
    layer(most_rows(LAYERS[0].hidden), LAYERS[0])
    if capability >= HOPPER:
        quantised_products(most_rows(LAYERS[0].hidden), LAYERS[0])
    fused_draw(zeros(3, 152064, dtype=FLOAT), zeros(3, dtype=torch.float64))
    talker_steps(3, 3584)
    thinker_steps(3, 3584)
    transformer(4)
    solvers()
    waveform(96, windows=1)
    if capability in DATACENTRE:
        tiled_layer(tilings_for(256), 256)


def every_size() -> None:
    """Compile every kernel at every size."""
    for sizes in LAYERS:
        layer(most_rows(sizes.hidden), sizes)
    # Kernels for one row are compiled anew, with no more memory than those for many.
    layer(1, LAYERS[0])
    for sizes in THINKERS:
        quantised_products(most_rows(sizes.hidden), sizes)
        quantised_products(1, sizes)
    # Attention of few sequences takes more keys at a time.
    for sizes in LAYERS:
        attention(2, sizes, Projected(zeros(4, 2, (sizes.heads + 2 * sizes.key_heads) * sizes.width)))
    fused_draw(zeros(3, 152064, dtype=FLOAT), zeros(3, dtype=torch.float64))
    talker_steps(3, 3584)
    talker_steps(3, 2048)
    thinker_steps(3, 3584)
    thinker_steps(3, 2048)
    transformer(4)
    for rows in (48, 96, 192, 384):
        tiled_layer(tilings_for(rows), rows)
    solvers()
    waveform(96, windows=1)
    print("again", flush=True)
    waveform(97, windows=3)


def main() -> int:
    """Compile for each GPU in a process of its own, which shares the imports; return the worst exit status."""
    what, *capabilities = sys.argv[1:]
    worst = 0
    for capability in map(int, capabilities):
        if (pid := os.fork()) == 0:
            compile_only(capability, once=what == "once")
            every_size() if what == "all" else each_once(capability)
            return 0
        worst = max(worst, abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    return worst


if __name__ == "__main__":
    sys.exit(main())

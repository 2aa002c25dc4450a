# SPDX-License-Identifier: Apache-2.0
"""Fused kernels and networks against the plain ones they stand in for.

Without a GPU the kernels run in the Triton language's interpreter, in float32 and float16, since it does not compute
bfloat16. Graphs, and speed, need a GPU.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from triton_omni.core.settings import SettingsError, StreamingPlan, Token2WavSettings
from triton_omni.session.engine import StreamOptions
from triton_omni.token2wav import fused_dit
from triton_omni.token2wav.attention import Before, Rotary, block_attention, rotate_
from triton_omni.token2wav.attention_kernels import block_attention as fused_block_attention
from triton_omni.token2wav.attention_kernels import leave_past
from triton_omni.token2wav.batching import REACHES, BlockLayout, block_layout
from triton_omni.token2wav.bigvgan import AntiAliasedSnake
from triton_omni.token2wav.dit import NORM_EPS, modulate
from triton_omni.token2wav.engine import Token2WavEngine
from triton_omni.token2wav.fused_dit import FusedDiT
from triton_omni.token2wav.fused_vocoder import FusedVocoder
from triton_omni.token2wav.graphs import GraphedSolver, GraphedVocoder, GraphPool
from triton_omni.token2wav.kernels import (
    SnakeFilters,
    anti_aliased_snake,
    fused_standard_normal,
    mean_of_sums,
    residual_norm,
)
from triton_omni.token2wav.layer_kernels import LIBRARY, LayerTilings, Tiling, product, tilings_for
from triton_omni.token2wav.networks import Networks, load_networks, resolve_dtype, vocoder_shapes
from triton_omni.token2wav.noise import MAX_SEED, standard_normal
from triton_omni.token2wav.ode import EVALUATIONS_A_STEP, STEPS, Solver, guide, run_out
from triton_omni.token2wav.sampler import FlowOptions, Sampler, StepwiseSolver, Window, condition
from triton_omni.token2wav.solver_kernels import advance, fused_condition
from triton_omni.token2wav.window_cache import WindowCacheUse, WindowKVCache

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CPU = torch.device("cpu")
LENGTHS = (30, 1, 24, 49)
VOICE = "Chelsie"
LEAST_DECIBEL = 45.0
"""Least ratio in dB of the float32 result to its difference from the float16 one; published as 35."""


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def networks(tiny_checkpoint: Path) -> Networks:
    return load_networks(tiny_checkpoint, Token2WavSettings(dtype="float32"), DEVICE)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def decibel(reference: Tensor, other: Tensor) -> float:
    """Signal to noise ratio of `other`."""
    return float(10 * torch.log10(reference.square().sum() / (reference - other).square().sum()))


@pytest.mark.parametrize("width", [64, 100])
def test_residual_norm_equals_sum_and_adaptive_norm(width: int) -> None:
    hidden, branch = random(5, width), random(5, width, seed=1)
    gate, shift, scale = random(3, width, seed=2).unbind(0)
    total = hidden + gate * branch
    updated = hidden.clone()
    normed = residual_norm(updated, branch, gate, shift, scale, eps=NORM_EPS, dtype=torch.float32)
    torch.testing.assert_close(updated, total, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(normed, modulate(total, shift, scale), atol=1e-5, rtol=1e-5)
    untouched = hidden.clone()
    normed = residual_norm(untouched, None, gate, shift, scale, eps=NORM_EPS, dtype=torch.float32)
    assert torch.equal(untouched, hidden)
    torch.testing.assert_close(normed, modulate(hidden, shift, scale), atol=1e-5, rtol=1e-5)


def some_past(networks: Networks, layout: BlockLayout, *, bad: float) -> WindowKVCache:
    """Pages with a past before the second and the fourth window; all others, of whom nobody reads, are `bad`."""
    pool = networks.dit.past_pool(7, torch.float32)
    pool.pages.fill_(bad)
    pool.pages[1:4] = random(*pool.pages[1:4].shape, seed=5)
    windows = [
        WindowCacheUse(4, is_left=False, kept_frames=24),
        WindowCacheUse(0, is_left=True, kept_frames=0),
        None,
        WindowCacheUse(2, is_left=True, kept_frames=48),
    ]
    return pool.of_batch(windows, layout, evaluations=2, halves=1).upload()


@pytest.mark.parametrize("reach", REACHES)
def test_fused_attention_equals_the_plain_one_on_ragged_windows(networks: Networks, reach: tuple[int, int]) -> None:
    block, heads, head_dim = 24, 2, 32
    layout = block_layout(LENGTHS, block, DEVICE)
    qkv = random(sum(LENGTHS), 3 * heads * head_dim)
    angles = random(sum(LENGTHS), 1, head_dim // 2, seed=1)
    rotary = Rotary(angles.cos(), angles.sin())
    query, key, value = (part.reshape(-1, heads, head_dim).clone() for part in qkv.chunk(3, dim=-1))
    rotate_(query, rotary)
    rotate_(key, rotary)
    past, before = None, None
    if reach[0]:
        past = some_past(networks, layout, bad=float("nan")).at(1, networks.dit.config.look_backward_layers[0])
        assert past is not None
        earlier_key, earlier_value, there = past.find(heads)
        assert there.tolist() == [False, False, True, False, True, False, False]
        rotate_(earlier_key, past.rotary)
        before = Before(earlier_key, earlier_value, there)
    expected = block_attention(query, key, value, layout, reach, before=before).flatten(1)
    ours = fused_block_attention(
        qkv,
        (rotary.cos[:, 0], rotary.sin[:, 0]),
        layout.blocks,
        reach,
        past,
        block_size=block,
        heads=heads,
        rotary_heads=1,
    )
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_fused_copy_leaves_the_same_rows_in_the_same_pages(networks: Networks) -> None:
    heads, head_dim = networks.dit.config.num_heads, networks.dit.config.head_dim
    layout = block_layout(LENGTHS, 24, DEVICE)
    qkv = random(sum(LENGTHS), 3 * heads * head_dim)
    _, key, value = (part.reshape(-1, heads, head_dim)[layout.by_block] for part in qkv.chunk(3, dim=-1))
    plain, fused = (some_past(networks, layout, bad=0.5) for _ in range(2))
    for evaluation in range(2):
        for past in (plain, fused):
            layer = past.at(evaluation, networks.dit.config.look_backward_layers[0])
            assert layer is not None
            layer.write(key, value) if past is plain else leave_past(qkv, layout.blocks, layer, heads=heads)
    assert torch.equal(fused.pool.pages[:-1], plain.pool.pages[:-1])
    assert (fused.pool.pages[-1] == 0.5).all()
    # The first window's first block, the fourth's second.
    for page, block in ((4, 0), (5, 0), (2, 5), (3, 5)):
        rows = torch.cat([key[block].flatten(1), value[block].flatten(1)], dim=-1)
        assert torch.equal(fused.pool.pages[page, 0], rows)


@pytest.mark.parametrize("lengths", [(96,), (24, 72), (30, 2, 48)], ids=str)
@pytest.mark.parametrize("halves", [1, 2])
def test_fused_condition_is_the_plain_one(lengths: tuple[int, ...], halves: int) -> None:
    layout, width = block_layout(lengths, 24, DEVICE), 1100
    codes = torch.randint(9, (sum(lengths) // 2,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    spoken, voices = random(9, width), random(len(lengths), 2, width, seed=2)[:, :halves]
    ours = fused_condition(codes.to(DEVICE), spoken, voices, layout)
    assert ours.shape == (halves, sum(lengths), width)
    assert torch.equal(ours, condition(codes.to(DEVICE), spoken, voices, layout))


@pytest.mark.parametrize("solver", ["rk4", "euler"])
@pytest.mark.parametrize("guided", [True, False])
def test_fused_step_of_a_solver_is_the_plain_one(solver: Solver, guided: bool) -> None:
    shape, width, scale = (72, 10), torch.tensor(0.3, device=DEVICE), random(72, 1, seed=1)
    begin, factors = random(*shape), random(2, *shape, seed=2)

    def halves(number: int, state: Tensor) -> Tensor:
        return torch.cat([factor * state.cos() + number for factor in factors[: 1 + guided]])

    def velocity(number: int, state: Tensor) -> Tensor:
        found = halves(number, state)
        return guide(*found.chunk(2), scale) if guided else found

    expected = STEPS[solver](velocity, width, begin)
    state, evaluations = begin.clone(), EVALUATIONS_A_STEP[solver]
    place, slopes = state, torch.empty(evaluations - 1, *shape, device=DEVICE)
    for number in range(evaluations):
        found = halves(number, place)
        place = advance(found, scale if guided else None, width, state, slopes, solver=solver, number=number)
    assert place is state
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tiling", [Tiling(32, 16, 2, parts=4), Tiling(64, 128, 3, parts=2)], ids=str)
def test_parts_of_a_product_of_few_rows_sum_up_to_a_linear_layer(tiling: Tiling) -> None:
    rows, weights, biases = random(50, 72), random(80, 72, seed=1) / 8, random(80, seed=2)
    ours = product(rows, weights, biases, tiling)
    assert ours.shape == (tiling.parts, 50, 80)
    torch.testing.assert_close(ours.sum(0), F.linear(rows, weights, biases), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gelu", [True, False])
def test_a_product_of_few_rows_is_a_linear_layer(gelu: bool) -> None:
    rows, weights, biases = random(70, 72), random(80, 72, seed=1) / 8, random(80, seed=2)
    expected = F.linear(rows, weights, biases)
    ours = product(rows, weights, biases, Tiling(32, 32, 3), gelu=gelu)
    torch.testing.assert_close(ours, F.gelu(expected, approximate="tanh") if gelu else expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [48, 96, 192, 384, 6144])
def test_tilings_are_chosen_by_rows(rows: int) -> None:
    tilings = tilings_for(rows)
    assert (tilings is LIBRARY) == (rows > 512)
    # Parts cannot be under one GELU.
    assert tilings.enter is None or tilings.enter.parts == 1


@pytest.mark.parametrize("rows", [48, 96, 192, 384])
def test_a_dit_of_few_rows_is_the_same_by_its_own_products_and_a_library(
    networks: Networks, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tilings, options = tilings_for(rows), FlowOptions("euler", 2, -1.0, guided=True)
    dtype = torch.float16 if ON_GPU else torch.float32

    def solve(chosen: LayerTilings) -> tuple[Tensor, ...]:
        monkeypatch.setattr(fused_dit, "tilings_for", lambda _: chosen)
        solver = StepwiseSolver(FusedDiT(networks.dit, dtype))
        sampler = Sampler(networks.dit, DEVICE, solver, past=networks.dit.past_pool(0, dtype))
        return sampler.sample(some_windows(networks), options)

    for theirs, mine in zip(solve(LIBRARY), solve(tilings), strict=True):
        assert decibel(theirs, mine) > (LEAST_DECIBEL if ON_GPU else 100.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 1e-2)])
@pytest.mark.parametrize("length", [1, 2, 5, 53, 54, 55, 120])
def test_fused_snake_equals_the_module_at_every_edge(length: int, dtype: torch.dtype, tolerance: float) -> None:
    channels = 20
    module = AntiAliasedSnake(channels).to(DEVICE)
    module.act.alpha.copy_(random(channels, seed=1))
    module.act.beta.copy_(random(channels, seed=2))
    first, second, bias = random(2, length, channels), random(2, length, channels, seed=3), random(channels, seed=4)
    total = first + second + bias
    snake = SnakeFilters.of(
        module.up_filter[0, 0],
        module.down_filter[0, 0],
        module.act.alpha.exp(),
        1 / (module.act.beta.exp() + module.act.NO_DIVISION_BY_ZERO),
        dtype,
    )
    kept = torch.empty_like(total)
    ours = anti_aliased_snake(first, second, bias, snake, dtype=dtype, total=kept)
    torch.testing.assert_close(kept, total, atol=1e-6, rtol=1e-6)
    expected = module(total.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(ours.float(), expected, atol=tolerance, rtol=tolerance / 2)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_mean_of_sums_is_one_kernel(dtype: torch.dtype, parts: int) -> None:
    sums = [
        (
            random(2, 173, 20, seed=part).to(dtype),
            random(2, 173, 20, seed=part + 9).to(dtype),
            random(20, seed=part + 20),
        )
        for part in range(parts)
    ]
    expected = torch.stack([first.float() + second.float() + bias for first, second, bias in sums]).mean(0)
    torch.testing.assert_close(mean_of_sums(sums, torch.float32), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(mean_of_sums(sums, torch.float16), mean_of_sums(sums, torch.float32).half())


def test_fused_noise_is_the_same_function_of_seed_frame_and_channel() -> None:
    spans = [(5, 3, 9), (MAX_SEED, 8100, 8107), (2**40 + 3, 0, 2)]
    for channels in (80, 7):
        ours = fused_standard_normal(spans, channels, DEVICE)
        torch.testing.assert_close(ours, standard_normal(spans, channels, DEVICE), atol=1e-6, rtol=1e-6)


def some_windows(networks: Networks, lengths: tuple[int, ...] = (7, 12)) -> list[Window]:
    generator = torch.Generator().manual_seed(3)
    voice = networks.voices[VOICE]
    codes = [torch.randint(networks.dit.config.num_embeds + 1, (n,), generator=generator).to(DEVICE) for n in lengths]
    return [Window(part, 24 * n, n, voice, 0.5) for n, part in enumerate(codes)]


@pytest.mark.parametrize("guided", [True, False])
def test_fused_dit_in_float32_equals_the_plain_one(networks: Networks, guided: bool) -> None:
    options = FlowOptions("euler", 2, -1.0, guided)
    windows = some_windows(networks)
    plain = Sampler(networks.dit, DEVICE).sample(windows, options)
    solver = StepwiseSolver(FusedDiT(networks.dit, torch.float32))
    for theirs, mine in zip(plain, Sampler(networks.dit, DEVICE, solver).sample(windows, options), strict=True):
        assert theirs.std() > 0.1
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_fused_dit_reads_no_product_of_the_plain_one(tiny_checkpoint: Path) -> None:
    options = FlowOptions("euler", 2, -1.0, guided=True)
    own = load_networks(tiny_checkpoint, Token2WavSettings(dtype="float32"), DEVICE)
    solver, windows = StepwiseSolver(FusedDiT(own.dit, torch.float32)), some_windows(own)
    before = Sampler(own.dit, DEVICE, solver).sample(windows, options)
    held = sum(weight.numel() for weight in own.dit.parameters())
    own.dit.free_products()
    config = own.dit.config
    inner = config.num_heads * config.head_dim
    layer = 4 * config.hidden_size * inner + 2 * config.ff_mult * config.hidden_size**2
    assert held - sum(weight.numel() for weight in own.dit.parameters()) > config.num_layers * layer
    for theirs, mine in zip(before, Sampler(own.dit, DEVICE, solver).sample(windows, options), strict=True):
        assert torch.equal(mine, theirs)


def test_fused_dit_in_float16_is_close(networks: Networks) -> None:
    options = FlowOptions("euler", 2, -1.0, guided=True)
    windows = some_windows(networks)
    plain = Sampler(networks.dit, DEVICE).sample(windows, options)
    solver = StepwiseSolver(FusedDiT(networks.dit, torch.float16))
    sampler = Sampler(networks.dit, DEVICE, solver, past=networks.dit.past_pool(0, torch.float16))
    for theirs, mine in zip(plain, sampler.sample(windows, options), strict=True):
        assert decibel(theirs, mine) > LEAST_DECIBEL


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 100.0), (torch.float16, LEAST_DECIBEL)])
def test_fused_vocoder_is_as_close_as_its_precision(networks: Networks, dtype: torch.dtype, least: float) -> None:
    mel = random(2, 80, 2) * 2 - 4
    plain = networks.vocoder(mel)
    assert plain.std() > 1e-2
    assert decibel(plain, FusedVocoder(networks.vocoder, dtype)(mel)) > least


def test_half_precision_without_a_gpu_is_refused_by_name() -> None:
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.float16
    assert resolve_dtype("bfloat16", torch.device("cuda")) is torch.bfloat16
    with pytest.raises(SettingsError, match="dtype: float16 needs a GPU, the device is cpu; use float32"):
        resolve_dtype("float16", CPU)


def test_vocoder_shapes_are_those_of_the_plans_regular_chunks(networks: Networks) -> None:
    plans = {"plan": StreamingPlan(chunk_blocks=(1, 3), look_ahead_codes=12, vocoder_context_frames=24)}
    settings = Token2WavSettings(plan="plan", plans=plans, max_batch=3, max_batch_frames=200)
    # Chunk 0: its block and the look-ahead, three at once; then 24 frames of context a side of 72, solved as 96, two.
    assert vocoder_shapes(settings, networks) == [(1, 48), (1, 120), (2, 48), (2, 120), (4, 48)]


def assert_recorded_steps_are_the_same(
    networks: Networks,
    graphs: GraphPool,
    options: FlowOptions,
    *,
    dtype: torch.dtype,
    batches: list[tuple[int, ...]],
    recorded: Sequence[tuple[Solver, bool]] = (),
) -> None:
    """Solve `batches` of windows (lengths in codes, the first two with pasts) by recorded steps and one by one."""
    fused = FusedDiT(networks.dit, dtype)
    pasts = [networks.dit.past_pool(2 * options.pages, dtype) for _ in range(2)]
    for past in pasts:
        past.pages.copy_(random(*past.pages.shape) / 2)
    graphed = GraphedSolver(networks.dit, fused, graphs, pasts[1], sizes=(2, 6), recorded=recorded)
    for lengths in batches:
        windows = [
            dataclasses.replace(
                window, past=WindowCacheUse(page, is_left=True, kept_frames=24 * (len(window.codes) // 12))
            )
            for window, page in zip(some_windows(networks, lengths), (0, options.pages), strict=False)
        ]
        one_by_one, by_steps = (
            Sampler(networks.dit, DEVICE, solver, past=past).sample(windows, options)
            for solver, past in zip((StepwiseSolver(fused), graphed), pasts, strict=True)
        )
        for theirs, mine in zip(one_by_one, by_steps, strict=True):
            assert decibel(theirs, mine) > 60.0
        assert decibel(*(past.pages[:-1].float() for past in pasts)) > 50.0


@pytest.fixture
def one_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are shared out in one way: a graph has more blocks than what is solved one by one."""
    chosen = tilings_for(192)
    monkeypatch.setattr(fused_dit, "tilings_for", lambda _: chosen)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs exist on a GPU only")
@pytest.mark.usefixtures("one_tiling")
@pytest.mark.parametrize("solver", ["rk4", "euler"])
@pytest.mark.parametrize("guided", [True, False])
def test_recorded_steps_equal_the_same_steps_one_by_one(networks: Networks, solver: Solver, guided: bool) -> None:
    # Larger, then smaller (leftovers of the first must not matter), then too large for any graph.
    batches = [(30, 24), (7,), (12, 12), (90,), (31, 5)]
    options = FlowOptions(solver, 4, -1.0, guided)
    assert_recorded_steps_are_the_same(
        networks, GraphPool(), options, dtype=torch.float16, batches=batches, recorded=[("rk4", True)]
    )


class CalledAgain(GraphPool):
    """Records nothing: what would be replayed is called again."""

    def __init__(self) -> None:
        pass

    def record(self, call: Callable[[], Tensor]) -> Any:
        output = call()
        return SimpleNamespace(graph=SimpleNamespace(replay=lambda: output.copy_(call())), output=output)


@pytest.mark.usefixtures("plain_norm")
def test_what_a_recorded_step_reads_is_given_to_every_step_anew(networks: Networks) -> None:
    options = FlowOptions("euler", 3, -1.0, guided=True)
    # Two blocks of two windows, then of one: their angles differ, and are the same again in the third.
    batches = [(6, 6), (13,), (13,), (4,)]
    assert_recorded_steps_are_the_same(networks, CalledAgain(), options, dtype=torch.float32, batches=batches)


class Launches(TorchDispatchMode):
    """Counts what torch is asked for but views and room, of the device or pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith("empty") and "pin" not in name:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def test_little_is_launched_before_the_first_step(networks: Networks) -> None:
    """The device has nothing to do meanwhile, and a listener waits."""
    options, past = FlowOptions("rk4", 4, -1.0, guided=True), networks.dit.past_pool(0, torch.float32)
    graphs = CalledAgain()
    graphs.record = lambda call: SimpleNamespace(graph=SimpleNamespace(replay=lambda: None))  # type: ignore[method-assign]
    solver = GraphedSolver(networks.dit, FusedDiT(networks.dit, torch.float32), graphs, past, sizes=(4,), recorded=())
    noise, laid = random(96, 80), random(2, 96, networks.dit.config.hidden_size)
    sampler = Sampler(networks.dit, DEVICE, solver, noise=lambda *_: noise, lay_condition=lambda *_: laid, past=past)
    windows = some_windows(networks, (48,))
    run_out(sampler.steps(windows, options))
    with Launches() as launches:
        next(sampler.steps(windows, options))
    # Codes and voices; state, scale, condition, pointers; modulation, numbers; width. The grid's widths are the host's.
    assert launches.names == {"cat": 1, "stack": 1, "copy_": 6, "fill_": 1, "diff": 1}


@pytest.mark.usefixtures("plain_norm")
def test_short_windows_run_in_a_graph_with_as_many_blocks(networks: Networks) -> None:
    options, dtype = FlowOptions("euler", 3, -1.0, guided=True), torch.float16 if ON_GPU else torch.float32
    fused, past = FusedDiT(networks.dit, dtype), networks.dit.past_pool(0, dtype)
    graphed = GraphedSolver(networks.dit, fused, CalledAgain(), past, sizes=(1, 4), recorded=())
    windows = some_windows(networks, (1, 2, 1, 3, 2))
    one_by_one, by_steps = (
        Sampler(networks.dit, DEVICE, solver, past=past).sample(windows, options)
        for solver in (StepwiseSolver(fused), graphed)
    )
    for theirs, mine in zip(one_by_one, by_steps, strict=True):
        assert decibel(theirs, mine) > 60.0


@pytest.mark.usefixtures("plain_norm")
@pytest.mark.parametrize("graphs", [CalledAgain, GraphPool] if ON_GPU else [CalledAgain])
def test_flows_that_take_turns_in_one_graph_are_what_they_are_alone(
    networks: Networks, graphs: type[GraphPool]
) -> None:
    options, dtype = FlowOptions("euler", 3, -1.0, guided=False), torch.float16 if ON_GPU else torch.float32
    past = networks.dit.past_pool(0, dtype)
    solver = GraphedSolver(networks.dit, FusedDiT(networks.dit, dtype), graphs(), past, sizes=(1,), recorded=())
    sampler = Sampler(networks.dit, DEVICE, solver)
    batches = [some_windows(networks, lengths) for lengths in ((12,), (7,), (5,))]
    alone = [sampler.sample(windows, options) for windows in batches]
    first, second, dropped = (sampler.steps(windows, options) for windows in batches)
    for steps in (first, dropped, second):
        next(steps)
    dropped.close()
    for steps, theirs in ((first, alone[0]), (second, alone[1])):
        (ours,) = run_out(steps)
        assert decibel(theirs[0], ours) > 100.0


class SumVocoder:
    """Two samples a frame, its sum; counts its batches."""

    samples_per_frame = 2

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, mel: Tensor) -> Tensor:
        self.batches.append(len(mel))
        return mel.sum(1).repeat_interleave(2, dim=1)


@pytest.mark.parametrize(("batch", "parts"), [(1, [1]), (2, [2]), (3, [4]), (4, [4]), (9, [4, 4, 1]), (11, [4, 4, 4])])
def test_a_batch_of_the_vocoder_runs_in_the_smallest_recorded_one_that_holds_it(batch: int, parts: list[int]) -> None:
    plain: Any = SumVocoder()
    vocoder = GraphedVocoder(plain, 80, [(1, 3), (2, 3), (4, 3)], CalledAgain(), DEVICE)
    for frames, expected in ((3, parts), (2, [batch])):
        plain.batches.clear()
        mel = random(batch, 80, frames, seed=batch)
        assert torch.equal(vocoder(mel), mel.sum(1).repeat_interleave(2, dim=1))
        assert plain.batches == expected


@pytest.mark.skipif(not ON_GPU, reason="on the CPU work is done when it returns")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {}, {"cuda_graphs": False}])
def test_no_step_waits_for_the_device(tiny_checkpoint: Path, settings: dict[str, Any]) -> None:
    engine = Token2WavEngine(tiny_checkpoint, Token2WavSettings(**settings), DEVICE)

    def speak(count: int) -> None:
        engine.open("a", VOICE, 7, StreamOptions())
        engine.feed("a", torch.zeros(count, dtype=torch.int32, device=DEVICE))
        engine.end("a")
        while engine.has_work():
            assert all(output.error is None for output in engine.step())

    # Values made once, such as the table of modulations, may wait; a window of another length may not.
    speak(70)
    torch.cuda.set_sync_debug_mode("error")
    try:
        speak(65)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not ON_GPU, reason="half precision needs a GPU")
@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("mode", ["streaming", "offline"])
def test_speech_in_half_precision_is_close_to_the_plain_paths(
    tiny_checkpoint: Path, networks: Networks, mode: str, cuda_graphs: bool
) -> None:
    codes = torch.randint(networks.dit.config.num_embeds + 1, (130,), generator=torch.Generator().manual_seed(1)).int()

    def speak(settings: Token2WavSettings) -> Tensor:
        engine = Token2WavEngine(tiny_checkpoint, settings, DEVICE)
        for key in ("first", "second"):
            engine.open(key, VOICE, 7, StreamOptions(mode=mode))
            engine.feed(key, codes)
            engine.end(key)
        chunks: dict[str, list[Tensor]] = {"first": [], "second": []}
        while engine.has_work():
            for output in engine.step():
                assert output.error is None
                chunks[output.key].append(output.samples)
        assert decibel(torch.cat(chunks["first"]), torch.cat(chunks["second"])) > 60.0
        return torch.cat(chunks["first"])

    plain = speak(Token2WavSettings(dtype="float32"))
    fast = speak(Token2WavSettings(dtype="auto", cuda_graphs=cuda_graphs))
    assert len(plain) == len(fast) == 130 * 480
    assert decibel(plain, fast) > 35.0

# SPDX-License-Identifier: Apache-2.0
"""Kernels of decode steps against plain arithmetic; without a GPU they run in the Triton language's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from triton_omni.vllm_hooks.kernels.decode_attention import (
    Cache,
    Projected,
    Rotation,
    decode_attention,
    splits,
    tile,
)
from triton_omni.vllm_hooks.kernels.decode_product import (
    add_norm,
    gated_product,
    shares,
    split_product,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
SECTIONS = {32: (4, 6, 6), 64: (16, 16, 0), 128: (16, 24, 24)}
"""By the width of a head, as the published checkpoints have them."""


@dataclass
class Step:
    """A decode step: sequences of `lengths` tokens, the last of each being new."""

    lengths: list[int]
    heads: int = 6
    key_heads: int = 2
    width: int = 32
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        count, most = len(self.lengths), -(-max(self.lengths) // BLOCK)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=random).to(DEVICE, self.dtype)

        self.projected = normal(count, (self.heads + 2 * self.key_heads) * self.width)
        # Memory after a sequence's end is another's, or unused: NaN shows that it is not read.
        self.blocks = normal(count * most + 1, self.key_heads, BLOCK, 2 * self.width)
        order = 1 + torch.randperm(count * most, generator=random)
        self.table = order.view(count, most).to(DEVICE, torch.int32)
        for row, length in enumerate(self.lengths):
            for place in range(max(length - 1, 0), most * BLOCK):
                self.blocks[self.table[row, place // BLOCK], :, place % BLOCK] = float("nan")
        self.positions = torch.randint(0, 500, (3, count), generator=random).to(DEVICE)
        angles = torch.arange(500)[:, None] / 10000 ** (torch.arange(self.width // 2) / (self.width // 2))
        self.angles = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE, self.dtype)

    def run(self, arrivals: Tensor, projected: Projected | None = None) -> tuple[Tensor, Tensor]:
        """Return the kernel's result, and the cache after it."""
        blocks = self.blocks.clone()
        cache = Cache(blocks, self.table, torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE))
        rotation = Rotation(self.positions, self.angles, SECTIONS[self.width])
        scale = 1 / math.sqrt(self.width)
        given = projected or Projected(self.projected[None])
        return decode_attention(given, rotation, cache, arrivals, heads=self.heads, scale=scale), blocks

    def rotated(self, heads: Tensor, row: int) -> Tensor:
        """Heads [H, D] of one token, as HF's `apply_multimodal_rotary_pos_emb` rotates them."""
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(SECTIONS[self.width])).to(DEVICE)
        half = self.width // 2
        pairs = torch.arange(half, device=DEVICE)
        at = self.positions[axes, row]
        cosine, sine = self.angles[at, pairs].float(), self.angles[at, half + pairs].float()
        first, second = heads.float().split(half, 1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], 1).to(self.dtype)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same by PyTorch, one sequence after another."""
        blocks, outputs = self.blocks.clone(), []
        for row, length in enumerate(self.lengths):
            if not length:
                outputs.append(torch.zeros(self.heads * self.width, device=DEVICE))
                continue
            parts = self.projected[row].view(-1, self.width).split([self.heads, self.key_heads, self.key_heads])
            query, key = self.rotated(parts[0], row), self.rotated(parts[1], row)
            place = length - 1
            blocks[self.table[row, place // BLOCK], :, place % BLOCK] = torch.cat([key, parts[2]], 1)
            used = self.table[row, : place // BLOCK + 1].long()
            known = blocks[used].transpose(0, 1).flatten(1, 2)[:, :length].float()
            keys, values = known.split(self.width, 2)
            out = F.scaled_dot_product_attention(
                query.float()[:, None], *(x.repeat_interleave(self.heads // self.key_heads, 0) for x in (keys, values))
            )
            outputs.append(out.flatten())
        return torch.stack(outputs), blocks


def arrivals() -> Tensor:
    return torch.zeros(256, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [BLOCK, BLOCK + 1],
        [128, 129, 127, 257],
        [64, 65, 63, 129, *[0, 7] * 4],
        [7, 0, 300, 0],
        [1100],
    ],
    ids=str,
)
def test_attention_of_a_step_is_the_plain_one(lengths: list[int]) -> None:
    step, counted = Step(lengths), arrivals()
    ours, cache = step.run(counted)
    expected, plain_cache = step.expected()
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(cache, plain_cache, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert not counted.any(), "the next launch would take its parts for complete too early"


@pytest.mark.parametrize(
    ("heads", "key_heads", "width"),
    [(28, 4, 128), (16, 2, 128), (12, 4, 128), (14, 2, 64), (2, 1, 32), (2, 2, 32), (40, 2, 32)],
)
def test_attention_has_the_heads_of_every_published_size(heads: int, key_heads: int, width: int) -> None:
    step = Step([70, 5], heads, key_heads, width)
    torch.testing.assert_close(step.run(arrivals())[0], step.expected()[0], atol=2e-6, rtol=1e-5)


def test_attention_in_half_precision_rounds_as_the_plain_one_does() -> None:
    step = Step([130, 33], dtype=torch.float16)
    ours, cache = step.run(arrivals())
    expected, plain_cache = step.expected()
    torch.testing.assert_close(ours.float(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(cache, plain_cache, atol=1e-3, rtol=1e-3, equal_nan=True)


def test_a_sequence_is_none_of_its_neighbours_business() -> None:
    together, alone = Step([90, 200, 17]), Step([90, 200, 17])
    ours = together.run(arrivals())[0]
    alone.lengths = [0, 200, 0]
    torch.testing.assert_close(alone.run(arrivals())[0][1], ours[1], atol=0, rtol=0)


@pytest.mark.parametrize("parts", [1, 3])
def test_attention_finishes_the_projection_that_it_reads(parts: int) -> None:
    step = Step([90, 0, 17])
    biases = normal(step.projected.shape[1])
    shared_out = normal(parts, *step.projected.shape)
    shared_out[0] += step.projected - biases - shared_out.sum(0)
    ours, cache = step.run(arrivals(), Projected(shared_out, biases))
    expected, plain_cache = step.expected()
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache, plain_cache, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_the_work_is_split_the_more_the_fewer_sequences_there_are() -> None:
    assert [splits(pairs) for pairs in (1, 4, 16, 32, 64, 128, 256, 1000)] == [16, 16, 16, 8, 4, 2, 1, 1]
    assert [tile(pairs) for pairs in (1, 8, 9, 256)] == [(128, 8), (128, 8), (64, 4), (64, 4)]


def normal(*sizes: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))) * scale).to(DEVICE)


@pytest.mark.parametrize("shape", [(1, 896, 2000), (3, 96, 128), (33, 64, 100), (64, 160, 4), (64, 40, 300)], ids=str)
def test_parts_of_a_product_sum_up_to_it(shape: tuple[int, int, int]) -> None:
    count, width, depth = shape
    rows, weights = normal(count, depth), normal(width, depth)
    parts = split_product(rows, weights)
    assert parts.shape == (shares(width, depth)[0], count, width)
    torch.testing.assert_close(parts.sum(0), rows @ weights.T, atol=1e-3, rtol=1e-4)


def test_a_small_product_is_shared_by_many_programs() -> None:
    assert shares(896, 18944) == (10, 1920)
    assert shares(10000, 256) == (1, 256)
    assert shares(32, 100) == (1, 128)


@pytest.mark.parametrize("shape", [(1, 2000, 896), (3, 128, 96), (33, 100, 64), (64, 1, 160)], ids=str)
def test_gated_product_is_silu_of_one_half_times_the_other(shape: tuple[int, int, int]) -> None:
    count, width, depth = shape
    rows, weights = normal(count, depth), normal(2 * width, depth, scale=0.1)
    gate, up = (rows @ weights.T).split(width, 1)
    torch.testing.assert_close(gated_product(rows, weights), F.silu(gate) * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("width", [96, 896, 1024])
def test_add_norm_adds_in_place_and_norms(width: int) -> None:
    parts, residual, weight = normal(5, 3, width), normal(3, width, scale=2), normal(width)
    total = residual + parts.sum(0)
    normed = add_norm(parts, residual, weight, 1e-6)
    torch.testing.assert_close(residual, total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed, F.rms_norm(total, (width,), weight, 1e-6), atol=1e-5, rtol=1e-5)


class Same:
    """A linear layer that changes nothing; its product is its matrix' own."""

    def __init__(self, width: int) -> None:
        self.weight, self.bias = torch.eye(width, device=DEVICE), torch.zeros(width, device=DEVICE)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, None]:
        return hidden, None


def test_a_layer_computes_a_recorded_step_by_the_kernel_and_others_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_omni.vllm_hooks.shared import fused_layers

    step = Step([40, 3])
    outer = torch.randn(step.heads * step.width, 8, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rotary = SimpleNamespace(mrope_section=list(SECTIONS[step.width]), _match_cos_sin_cache_dtype=lambda _: step.angles)
    layer = SimpleNamespace(
        forward=lambda positions, hidden_states: hidden_states,
        qkv_proj=Same(step.projected.shape[1]),
        o_proj=lambda seen: (seen @ outer, None),
        rotary_emb=rotary,
        attn=SimpleNamespace(layer_name="a", kv_cache=step.blocks),
        num_heads=step.heads,
        scaling=step.width**-0.5,
    )
    lengths = torch.tensor(step.lengths, dtype=torch.int32, device=DEVICE)
    known = SimpleNamespace(attn_metadata={"a": SimpleNamespace(block_table=step.table, seq_lens=lengths)})
    monkeypatch.setattr(fused_layers, "get_forward_context", lambda: known)
    switch = fused_layers.Switch(arrivals())
    attention = fused_layers.FusedAttention(layer, switch)
    assert attention(positions=step.positions, hidden_states=step.projected) is step.projected
    expected = step.expected()[0] @ outer
    switch.on = True
    ours = attention(positions=step.positions, hidden_states=step.projected)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    ours = attention.heads(step.positions, step.projected) @ outer
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@dataclass
class Norm:
    """vLLM's `RMSNorm` in plain PyTorch."""

    weight: Tensor
    variance_epsilon: float = 1e-6

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (len(self.weight),), self.weight, self.variance_epsilon)

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self(hidden + residual), hidden + residual


def plain_layer(seed: int, hidden: int = 96, inner: int = 160) -> Any:
    """A layer as the fused one sees it, whose heads see sines."""
    random = torch.Generator().manual_seed(seed)
    a, b, c = (
        torch.randn(size, generator=random).to(DEVICE) * 0.1
        for size in ((hidden, hidden), (2 * inner, hidden), (hidden, inner))
    )
    norms = [Norm(torch.rand(hidden, generator=random).to(DEVICE) + 0.5) for _ in range(2)]
    attend = SimpleNamespace(heads=lambda positions, states: states.sin(), o_proj=SimpleNamespace(weight=a))
    mlp = SimpleNamespace(gate_up_proj=SimpleNamespace(weight=b), down_proj=SimpleNamespace(weight=c))

    def forward(positions: Tensor, states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = states if residual is None else states + residual
        total = total + norms[0](total).sin() @ a.T
        gate, up = (norms[1](total) @ b.T).split(inner, 1)
        return (F.silu(gate) * up) @ c.T, total

    return SimpleNamespace(
        input_layernorm=norms[0],
        post_attention_layernorm=norms[1],
        self_attn=attend,
        mlp=mlp,
        forward=forward,
    )


def test_what_a_projection_in_front_leaves_to_the_first_norm_is_what_the_plain_one_gives() -> None:
    from triton_omni.vllm_hooks.shared.fused_layers import FusedLayer, FusedProjection, Switch

    weight, bias, inputs = normal(96, 160) * 0.1, normal(96), normal(5, 160)
    linear = SimpleNamespace(weight=weight, bias=bias, forward=lambda inputs: F.linear(inputs, weight, bias))
    switch, layer = Switch(arrivals()), plain_layer(0)
    projection, fused = FusedProjection(linear, switch), FusedLayer(layer, layer.self_attn, switch)
    positions = torch.zeros(3, len(inputs), dtype=torch.int64)
    states, residual = layer.forward(positions, projection(inputs), None)
    switch.on = True
    parts, ours = fused(positions, projection(inputs), None)
    torch.testing.assert_close(ours, residual, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts.sum(0), states, atol=1e-4, rtol=1e-4)
    assert projection(normal(65, 160)).shape == (65, 96), "a large step is a library's"


def test_what_a_step_lays_out_is_there_when_its_layers_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read it early, so the projection before them is launched when all before it is through."""
    from triton_omni.vllm_hooks.shared import fused_layers

    launched = []

    def split(*given: Tensor | None, early: bool = True) -> Tensor:
        launched.append(early)
        return split_product(*given, early=early)

    monkeypatch.setattr(fused_layers, "split_product", split)
    switch, layer = fused_layers.Switch(arrivals()), plain_layer(0)
    switch.on = True
    linear = SimpleNamespace(weight=normal(96, 160), bias=normal(96), forward=None)
    projected = fused_layers.FusedProjection(linear, switch)(normal(5, 160))
    fused_layers.FusedLayer(layer, layer.self_attn, switch)(torch.zeros(3, 5, dtype=torch.int64), projected, None)
    assert launched == [False, True, True]


@pytest.mark.parametrize(
    ("changed", "projection_is_fused", "head_is_fused"),
    [
        pytest.param({}, True, True, id="plain"),
        pytest.param({"layers": False}, False, True, id="quantised layers"),
        pytest.param({"projection_method": None}, False, True, id="quantised projection"),
        pytest.param({"projection_bias": None}, False, True, id="projection without a bias"),
        pytest.param({"head_method": None}, True, False, id="quantised head"),
        pytest.param({"head_bias": torch.zeros(1)}, True, False, id="head with a bias"),
    ],
)
def test_the_ends_are_fused_where_their_matrices_are_plain(
    changed: dict[str, Any], projection_is_fused: bool, head_is_fused: bool
) -> None:
    from triton_omni.vllm_hooks.shared.compat import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
    from triton_omni.vllm_hooks.shared.fused_layers import FusedHead, FusedProjection, Switch, fuse_ends

    given = {"layers": True, "projection_bias": normal(96), "head_bias": None}
    given |= {"projection_method": UnquantizedLinearMethod(), "head_method": UnquantizedEmbeddingMethod()} | changed
    projection = SimpleNamespace(
        weight=normal(96, 160), bias=given["projection_bias"], quant_method=given["projection_method"], forward=None
    )
    head = SimpleNamespace(weight=normal(192, 96), bias=given["head_bias"], quant_method=given["head_method"])
    processor = SimpleNamespace(forward=None, org_vocab_size=192)
    fuse_ends(projection, processor, head, Switch(arrivals(), layers=given["layers"]))
    assert isinstance(projection.forward, FusedProjection) == projection_is_fused
    assert isinstance(processor.forward, FusedHead) == head_is_fused


@pytest.mark.parametrize(("vocabulary", "fused"), [(64 * 132, True), (64 * 3, False)])
def test_a_head_that_fills_a_gpu_gives_the_logits_of_the_plain_one(vocabulary: int, fused: bool) -> None:
    """One that does not, or of a large step, is a library's."""
    from triton_omni.vllm_hooks.shared.fused_layers import FusedHead, Switch

    head, hidden, asked = SimpleNamespace(weight=normal(vocabulary, 256) * 0.1), normal(2, 256), []

    def forward(head: Any, hidden: Tensor) -> Tensor:
        asked.append(len(hidden))
        return (hidden @ head.weight.T)[:, : vocabulary - 4]

    processor = SimpleNamespace(forward=forward, org_vocab_size=vocabulary - 4)
    switch = Switch(arrivals())
    logits = FusedHead(processor, head, switch)
    expected = logits(head, hidden)
    switch.on = True
    torch.testing.assert_close(logits(head, hidden), expected, atol=1e-4, rtol=1e-4)
    assert logits(head, normal(65, 256)).shape == (65, vocabulary - 4)
    assert asked == ([2, 65] if fused else [2, 2, 65])


def test_layers_and_the_norm_behind_them_give_what_plain_ones_give() -> None:
    from triton_omni.vllm_hooks.shared.fused_layers import FusedLayer, FusedNorm, Switch

    hidden, count = 96, 3

    def through(layers: list[Any], norm: Any) -> Tensor:
        states, residual = normal(count, hidden), None
        for layer in layers:
            states, residual = layer(positions, states, residual)
        return norm(states, residual)[0]

    positions, plain = torch.zeros(3, count, dtype=torch.int64), [plain_layer(0), plain_layer(1)]
    switch, last = Switch(arrivals()), Norm(normal(hidden))
    layers, norm = [FusedLayer(layer, layer.self_attn, switch) for layer in plain], FusedNorm(last)
    expected = through([layer.forward for layer in plain], last.forward)
    torch.testing.assert_close(through(layers, norm), expected, atol=0, rtol=0)
    switch.on = True
    torch.testing.assert_close(through(layers, norm), expected, atol=1e-4, rtol=1e-4)
    many = SimpleNamespace(shape=(3, 1000))
    assert layers[0](many, normal(count, hidden), None)[0].shape == (count, hidden), "a large step is a library's"

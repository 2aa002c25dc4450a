# SPDX-License-Identifier: Apache-2.0
"""Products of decode steps with E4M3 weights, and the layers of vLLM that have them, against plain arithmetic.

Without a GPU they run in the Triton language's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reference.teacher_forcing import relative_error, thinker
from triton_omni.vllm_hooks.kernels.decode_product import gated_product, reads_e4m3, shares, split_product
from triton_omni.vllm_hooks.shared import fused_layers
from triton_omni.vllm_hooks.shared.compat import Fp8PtpcOnlineLinearMethod, UnquantizedLinearMethod
from triton_omni.vllm_hooks.shared.fused_decode import decoder_of
from triton_omni.vllm_hooks.shared.fused_layers import Matrix

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
from_hopper_on = pytest.mark.skipif(not reads_e4m3(DEVICE), reason="on a GPU the products read E4M3 from Hopper on")
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
KIND = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
"""Dtype of rows. A GPU multiplies no float32 by so large tiles of E4M3, and the interpreter no bfloat16."""
KINDS = [torch.float16, KIND]
SHAPES = [(1, 896, 2000), (3, 96, 128), (17, 64, 272), (33, 100, 512), (64, 4, 160), (5, 1, 16)]
"""Rows, width and depth: fewer and more than tiles of each."""


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(DEVICE)


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [N, K] and scales [N] of weights, so that the largest of each row is E4M3's."""
    scales = weights.abs().amax(1) / LARGEST
    return (weights / scales[:, None]).to(E4M3), scales


def exact(weights: Tensor, scales: Tensor) -> Tensor:
    """The matrix in float64."""
    return weights.double() * scales.double()[:, None]


@from_hopper_on
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_of_a_product_round_neither_rows_nor_weights(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """They are as near to the exact product as the order of sums in float32 allows, whatever the rows' scales."""
    count, width, depth = shape
    rows, spread = normal(count, depth).to(dtype), 2.0 ** torch.linspace(-40, 40, width, device=DEVICE)
    weights, scales = quantised(normal(width, depth) * spread[:, None])
    parts = split_product(rows, weights, scales)
    assert parts.shape == (shares(width, depth, 256)[0], count, width)
    matrix, taken = exact(weights, scales), rows.double()
    apart = (parts.double().sum(0) - taken @ matrix.T).abs() / (taken.abs() @ matrix.abs().T)
    assert apart.max() < 1e-5


@from_hopper_on
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_product_rounds_where_the_plain_one_does(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, width, depth = shape
    rows = normal(count, depth).to(dtype)
    weights, scales = quantised(normal(2 * width, depth) / depth**0.5)
    gate, up = (rows.double() @ exact(weights, scales).T).to(dtype).float().split(width, 1)
    ours = gated_product(rows, weights, scales)
    assert ours.dtype == dtype
    # A sum in float32 may fall on the other side of half a step of `dtype`: a step of the gate, one of the rest, and
    # one of their product.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.float(), F.silu(gate) * up, atol=max(2 * step, 1e-5), rtol=max(4 * step, 1e-5))


@from_hopper_on
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_number_of_e4m3_is_taken_as_it_is(dtype: torch.dtype) -> None:
    """Subnormal ones, too."""
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).to(DEVICE)
    numbers = numbers[numbers.float().isfinite()]
    # Two of them are zero.
    assert numbers.float().unique().numel() == 253
    weights, rows = numbers[:, None].repeat(1, 16).contiguous(), torch.zeros(1, 16, dtype=dtype, device=DEVICE)
    rows[0, 5] = 1
    for scale in (2.0**-100, 1.0, 2.0**100):
        ours = split_product(rows, weights, torch.full((len(numbers),), scale, device=DEVICE))[:, 0].sum(0)
        torch.testing.assert_close(ours, numbers.float() * scale, atol=0, rtol=0)


def test_e4m3_is_read_where_there_is_a_copy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_e4m3(torch.device("cpu"))
    for capability, read in (((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
        assert reads_e4m3(torch.device("cuda", 0)) == read


WIDTH, INNER, HEADS, ROWS = 96, 160, 3, 5


class Linear(nn.Module):
    """A linear layer, which vLLM's own method quantises; it multiplies in float64.

    Args:
        weights: [N, K].
        bias: [N].
        e4m3: whether it is quantised.
    """

    def __init__(self, weights: Tensor, bias: Tensor | None = None, *, e4m3: bool = True) -> None:
        super().__init__()
        self.weight, self.bias, self.tp_size = nn.Parameter(weights.to(KIND), requires_grad=False), bias, 1
        self.output_size_per_partition, self.input_size_per_partition = weights.shape
        self.output_size, self.input_size = weights.shape
        self.quant_method: Any = UnquantizedLinearMethod()
        if e4m3:
            self.quant_method = method = object.__new__(Fp8PtpcOnlineLinearMethod)
            method.requantization_source, method.requantization_source_parameters = None, {}
            kernel = {"process_weights_after_loading": lambda _: None, "input_quant_key": lambda: None}
            method.fp8_linear = SimpleNamespace(**kernel)
            method.process_weights_after_loading(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """By the numbers that are stored."""
        weights, scales = Matrix.of(self)
        total = hidden.double() @ (weights.double() if scales is None else exact(weights, scales)).T
        return (total if self.bias is None else total + self.bias).to(hidden.dtype)


@dataclass
class Norm:
    """vLLM's `RMSNorm` in plain PyTorch."""

    weight: Tensor
    variance_epsilon: float = 1e-6

    def __call__(self, rows: Tensor) -> Tensor:
        return F.rms_norm(rows, (len(self.weight),), self.weight.to(rows.dtype), self.variance_epsilon)


def decoder_layer(*, e4m3: bool = True) -> Any:
    """Return a layer as vLLM has it. Its heads give sines of their queries, since another test covers attention."""

    def linear(width: int, depth: int, bias: Tensor | None = None) -> Linear:
        return Linear(normal(width, depth) * 0.1, bias, e4m3=e4m3)

    norms = [Norm((normal(WIDTH + at)[at:].abs() + 0.5).to(KIND)) for at in range(2)]
    rotary = SimpleNamespace(mrope_section=[4, 6, 6], _match_cos_sin_cache_dtype=lambda cache: cache)
    attention = SimpleNamespace(
        qkv_proj=linear(3 * WIDTH, WIDTH, normal(3 * WIDTH).to(KIND)),
        o_proj=linear(WIDTH, WIDTH),
        attn=SimpleNamespace(layer_name="a", kv_cache=normal(1)),
        rotary_emb=rotary,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        scaling=1.0,
        forward=None,
    )
    mlp = SimpleNamespace(gate_up_proj=linear(2 * INNER, WIDTH), down_proj=linear(WIDTH, INNER))

    def forward(positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = hidden if residual is None else hidden + residual
        total = total + attention.o_proj(attention.qkv_proj(norms[0](total))[:, :WIDTH].sin())
        gate, up = mlp.gate_up_proj(norms[1](total)).split(INNER, 1)
        return mlp.down_proj(F.silu(gate) * up), total

    return SimpleNamespace(
        input_layernorm=norms[0], post_attention_layernorm=norms[1], self_attn=attention, mlp=mlp, forward=forward
    )


def fused(layers: list[Any]) -> fused_layers.Switch:
    norm = SimpleNamespace(forward=None)
    return fused_layers.fuse(nn.Linear(1, 1, device=DEVICE), SimpleNamespace(norm=norm), layers, ROWS)


def test_the_matrix_of_a_layer_is_what_vllm_has_quantised() -> None:
    weights = normal(WIDTH, INNER).to(KIND)
    layer = Linear(weights)
    matrix = Matrix.of(layer)
    assert matrix.weights.is_contiguous()
    assert matrix.weights.data_ptr() == layer.weight.data_ptr(), "it was copied"
    assert (matrix.weights.shape, matrix.scales.shape) == ((WIDTH, INNER), (WIDTH,))
    # Three bits of mantissa round by half of an eighth, near zero by half of the smallest number.
    most = weights.abs() / 16 + matrix.scales[:, None] * 2.0**-10
    assert ((exact(*matrix) - weights).abs() <= most * 1.001).all()


@from_hopper_on
@pytest.mark.parametrize("e4m3", [True, False])
def test_layers_are_as_near_to_the_exact_ones_as_plain_ones(monkeypatch: pytest.MonkeyPatch, e4m3: bool) -> None:
    def seen(projected: Any, *_: Any, **__: Any) -> Tensor:
        return (projected.parts.sum(0) + projected.biases)[:, :WIDTH].to(KIND).sin()

    known = SimpleNamespace(attn_metadata={"a": SimpleNamespace(block_table=None, seq_lens=None)})
    monkeypatch.setattr(fused_layers, "get_forward_context", lambda: known)
    monkeypatch.setattr(fused_layers, "decode_attention", seen)
    layers = [decoder_layer(e4m3=e4m3) for _ in range(2)]
    plain = [layer.forward for layer in layers]
    switch = fused(layers)

    def through(forwards: list[Any], dtype: torch.dtype = KIND) -> Tensor:
        states, residual = normal(ROWS, WIDTH).to(KIND).to(dtype), None
        for forward in forwards:
            states, residual = forward(torch.zeros(3, ROWS, dtype=torch.int64, device=DEVICE), states, residual)
        return residual + (states.sum(0) if states.ndim > 2 else states)

    exact, expected = through(plain, torch.float64), through(plain)
    torch.testing.assert_close(through([layer.forward for layer in layers]), expected, atol=0, rtol=0)
    switch.on = True
    ours, theirs = (
        relative_error({"": exact}, {"": rows.double()})
        for rows in (through([layer.forward for layer in layers]), expected)
    )
    # The plain products sum in float64: in float32 alone their rounding is no measure.
    assert ours.typical < max(1.25 * theirs.typical, 1e-6)
    assert ours.worst < max(1.5 * theirs.worst, 1e-6)


def other_method(layer: Any) -> None:
    layer.mlp.down_proj.quant_method = object()


def padded(layer: Any) -> None:
    layer.self_attn.qkv_proj.input_size_per_partition -= 3


def of_another_order(layer: Any) -> None:
    layer.self_attn.o_proj.weight = nn.Parameter(layer.self_attn.o_proj.weight.contiguous(), requires_grad=False)


def with_a_bias(layer: Any) -> None:
    layer.mlp.gate_up_proj.bias = normal(2 * INNER)


@pytest.mark.parametrize(
    ("change", "reads", "whole"),
    [
        pytest.param(None, True, True, id="as vLLM has it"),
        pytest.param(None, False, False, id="a GPU before Hopper"),
        *(pytest.param(change, True, False, id=change.__name__) for change in (other_method, padded, of_another_order)),
        pytest.param(with_a_bias, True, False, id="with_a_bias"),
    ],
)
def test_layers_are_fused_whole_where_the_products_read_every_matrix(
    monkeypatch: pytest.MonkeyPatch, change: Any, reads: bool, whole: bool
) -> None:
    monkeypatch.setattr(fused_layers, "reads_e4m3", lambda device: reads)
    layers = [decoder_layer(), decoder_layer()]
    if change is not None:
        change(layers[1])
    switch = fused(layers)
    assert switch.layers == whole
    for layer in layers:
        assert isinstance(layer.forward, fused_layers.FusedLayer) == whole
        assert isinstance(layer.self_attn.forward, fused_layers.FusedAttention)


@pytest.fixture(scope="module")
def vllm_layers(tiny_checkpoint: Path) -> Iterator[list[Any]]:
    """A thinker's decoder layers, loaded by vLLM in FP8: on a CPU, too, where no stage is let."""
    from triton_omni.vllm_hooks.thinker import engine

    plain = engine.quantization_arguments

    def as_on_a_gpu(*given: Any) -> Any:
        return plain(*(torch.device("cuda") if isinstance(one, torch.device) else one for one in given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "quantization_arguments", as_on_a_gpu)
        with thinker(tiny_checkpoint, dtype="bfloat16", sequences=4, quantization="fp8", fused_decode=False) as made:
            yield decoder_of(made._model)[1]


def linears(layer: Any) -> list[Any]:
    return [layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]


@from_hopper_on
def test_products_are_near_to_those_of_vllm_s_layers(vllm_layers: list[Any]) -> None:
    """vLLM rounds the rows to E4M3 as well: 3 % apart."""
    for layer in vllm_layers:
        for linear in linears(layer):
            matrix = Matrix.of(linear)
            rows = normal(4, matrix.weights.shape[1]).to(torch.bfloat16)
            ours = split_product(rows.to(KIND), *matrix).sum(0)
            theirs = linear(rows)[0].float()
            if linear.bias is not None:
                theirs -= linear.bias.float()
            assert 0 < (ours - theirs).norm() / theirs.norm() < 0.04


@from_hopper_on
def test_layers_of_vllm_are_fused_whole(vllm_layers: list[Any]) -> None:
    plain = [(layer.forward, layer.self_attn.forward) for layer in vllm_layers]
    try:
        assert fused(vllm_layers).layers
    finally:
        for layer, (whole, attention) in zip(vllm_layers, plain, strict=True):
            layer.forward, layer.self_attn.forward = whole, attention

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with the thinker's decoder in 4 bits (AWQ, GPTQ) against plain ones with the dequantised weights.

These weights are exact in bfloat16 (`synthetic_weights.pack`), so both checkpoints have the same network. The engines
run on a GPU, by Marlin's kernels, where there is one, else by vLLM's `cpu_gemm_wna16`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reference.dequantised import codes_of, dequantised, parts_of, tensors_of, write_dequantised
from reference.hf import HfReference
from reference.talker.rig import DEVICE
from reference.teacher_forcing import (
    BFLOAT16,
    Error,
    Trace,
    relative_error,
    run_talker,
    run_thinker,
    talker,
    talker_prompts,
    thinker,
    thinker_prompts,
)
from triton_omni.checkpoint.facts import FourBit
from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.synthetic import ensure_checkpoint
from triton_omni.checkpoint.synthetic_config import FOUR_BIT_METHODS, omni_config, vocabulary
from triton_omni.checkpoint.synthetic_weights import WeightRules, pack
from triton_omni.core.settings import EngineSettings, SettingsError, ThinkerSettings
from triton_omni.session.engine import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

TOKENS = 24
SAME_WEIGHTS = Error(typical=1e-3, worst=1e-2) if DEVICE.type == "cpu" else BFLOAT16
"""Between two engines in bfloat16. A CPU's kernels round alike; Marlin sums in another order than cuBLAS."""
TINY = FourBit("awq", 32)
with_kernel = pytest.mark.usefixtures("kernel")


@dataclass(frozen=True)
class Pair:
    """A 4-bit checkpoint and the plain one of the same weights."""

    method: str
    packed: Path
    plain: Path


@pytest.fixture(scope="module", params=FOUR_BIT_METHODS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    packed = ensure_checkpoint(f"tiny-{request.param}")
    return Pair(request.param, packed, write_dequantised(packed, tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def kernel() -> None:
    from triton_omni.vllm_hooks.shared import compat  # noqa: F401 - vLLM's operations are there after it

    if DEVICE.type == "cpu" and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM has a kernel of 4-bit weights only for a CPU with AVX-512")


def test_the_words_are_those_of_vllm(pair: Pair) -> None:
    """Its own packers, from which its kernels' tests begin, make the file's words of the file's codes."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack, pack_cols

    found = parts_of(tensors_of(pair.packed))
    assert len(found) == 2 * 7
    for parts in found.values():
        outputs = parts["scales"].shape[1]
        if pair.method == "awq":
            codes = codes_of(parts["qweight"], (0, 4, 1, 5, 2, 6, 3, 7))
            words = awq_pack(codes, 4, *codes.shape)
        else:
            codes = codes_of(parts["qweight"].T).T
            words = gptq_pack(codes, 4, *codes.shape)
            # Zero point 8, written less one.
            zeros = torch.full_like(parts["scales"], 7, dtype=torch.int32)
            assert torch.equal(parts["qzeros"], pack_cols(zeros, 4, len(zeros), outputs))
            assert torch.equal(parts["g_idx"], torch.arange(len(codes), dtype=torch.int32) // 32)
        assert torch.equal(parts["qweight"], words)
        assert codes.unique().numel() > 10


def test_weights_are_the_drawn_ones_within_a_step(pair: Pair) -> None:
    """In a group's own grid. Zeros stay zeros, by which the synthetic weights' replies end."""
    rules = WeightRules(omni_config("tiny"), vocabulary("tiny"), seed=0, replies=(24, 120))
    for name, parts in parts_of(tensors_of(pair.packed)).items():
        weight = dequantised(parts, pair.method)
        assert torch.equal(weight.bfloat16().float(), weight)
        drawn = rules.draw(name, tuple(weight.shape), torch.device("cpu"))
        step = parts["scales"].float().repeat_interleave(32, dim=0).T
        errors = (weight - drawn).abs() / step
        assert (errors.max() <= 1, (errors <= 0.5).float().mean() > 0.99) == (True, True)
        assert not weight[drawn == 0].any()


def test_a_matrix_without_whole_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="a matrix of 8 x 48 has no groups of 32"):
        pack(torch.zeros(8, 48), TINY)


@with_kernel
def test_rows_are_those_of_the_dequantised_weights(pair: Pair) -> None:
    hf, prompts = HfReference(pair.plain), thinker_prompts(3, 250)
    ids = tuple(hf.processor.tokenizer(hf.render([{"role": "user", "content": "Tell me about the sea."}]))["input_ids"])
    expected = hf.thinker(
        hf.ask("Tell me about the sea."), Sampling(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    )
    with thinker(pair.plain, dtype="bfloat16", sequences=4) as engine:
        plain = run_thinker(engine, prompts, TOKENS)
    with thinker(pair.packed, dtype="bfloat16", sequences=4) as engine:
        assert_the_decoder_alone_is_quantised(engine._runner.get_model())
        ours = run_thinker(engine, {"a": ids}, TOKENS, Trace({"a": list(expected.token_ids)}))
        packed = run_thinker(engine, prompts, TOKENS, plain)
        free = run_thinker(engine, prompts, TOKENS)
    rows = torch.cat([ours.prompt_rows["a"], ours.rows["a"]])
    assert_within(relative_error({"a": expected.rows}, {"a": rows}), BFLOAT16)
    for tensors in ("prompt_rows", "rows", "logits"):
        assert_within(relative_error(getattr(plain, tensors), getattr(packed, tensors)), SAME_WEIGHTS)
    if DEVICE.type == "cpu":
        assert free.ids == plain.ids


def assert_the_decoder_alone_is_quantised(network: Any) -> None:
    from triton_omni.vllm_hooks.shared.compat import UnquantizedLinearMethod

    quantised = {
        name for name, part in network.named_modules() if hasattr(part, "quant_method") and hasattr(part, "qweight")
    }
    ends = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert quantised == {f"language_model.model.layers.{layer}.{end}" for layer in (0, 1) for end in ends}
    assert isinstance(network.visual.merger.mlp[0].quant_method, UnquantizedLinearMethod)


def assert_within(error: Error, bounds: Error) -> None:
    assert (error.typical <= bounds.typical, error.worst <= bounds.worst) == (True, True), error


@with_kernel
def test_the_attention_of_quantised_layers_is_fused_alone(pair: Pair) -> None:
    """Fuse it as the runner does on a GPU."""
    from triton_omni.vllm_hooks.shared.fused_decode import decoder_of
    from triton_omni.vllm_hooks.shared.fused_layers import FusedAttention, fuse

    with thinker(pair.packed, dtype="bfloat16", sequences=4) as engine:
        assert engine._runner.fuses_decode_steps == (DEVICE.type == "cuda")
        network = engine._runner.get_model()
        decoder, layers = decoder_of(network)
        switch = fuse(network, decoder, layers, 4)
    assert switch.layers is False
    assert all(isinstance(layer.self_attn.forward, FusedAttention) for layer in layers)
    assert not any("forward" in vars(layer) for layer in layers)


def test_the_talker_is_that_of_the_plain_checkpoint(pair: Pair) -> None:
    prompts = talker_prompts(pair.plain, 3, 8)
    with talker(pair.plain, dtype="float32", sequences=4) as engine:
        plain = run_talker(engine, prompts, 8)
    with talker(pair.packed, dtype="float32", sequences=4) as engine:
        packed = run_talker(engine, prompts, 8)
    assert packed.ids == plain.ids
    assert all(torch.equal(packed.logits[key], logits) for key, logits in plain.logits.items())


@pytest.mark.parametrize(
    ("settings", "dtype", "message"),
    [
        ({"quantization": "fp8"}, torch.bfloat16, r"quantization: fp8 does not take .*4-bit weights \(awq\); use none"),
        ({}, torch.float32, r"dtype: auto means float32 here, .* set bfloat16 for thinker and talker"),
        ({"engine": EngineSettings(deterministic=True)}, torch.bfloat16, r"engine.deterministic: true .* use false"),
    ],
)
def test_what_four_bits_exclude_is_refused(settings: dict[str, Any], dtype: torch.dtype, message: str) -> None:
    from triton_omni.vllm_hooks.thinker.quantization import quantization_arguments

    given = ThinkerSettings(prefix_caching=False, **settings)
    with pytest.raises(SettingsError, match=message):
        quantization_arguments(given, TINY, DEVICE, dtype)


@pytest.mark.parametrize(("capability", "is_served"), [((7, 0), False), ((7, 5), True), ((9, 0), True)])
def test_a_gpu_that_is_too_old_is_refused(
    capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms.interface import DeviceCapability

    from triton_omni.vllm_hooks.thinker import quantization

    found = DeviceCapability(*capability)
    monkeypatch.setattr(quantization.current_platform, "get_device_capability", lambda _index: found, raising=False)
    arguments = (ThinkerSettings(), TINY, torch.device("cuda", 1), torch.float16)
    if is_served:
        assert quantization.quantization_arguments(*arguments) == {}
        return
    with pytest.raises(SettingsError, match=r"device: cuda:1 has compute capability 7\.0, .* need 7\.5 or more; serve"):
        quantization.quantization_arguments(*arguments)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="of the CPU's kernel")
def test_a_cpu_without_the_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_omni.vllm_hooks.thinker import quantization

    monkeypatch.setattr(torch.ops, "_C", object())
    with pytest.raises(SettingsError, match="device: this CPU has no AVX-512, the checkpoint's 4-bit weights"):
        quantization.quantization_arguments(ThinkerSettings(), TINY, DEVICE, torch.bfloat16)


def test_a_device_that_is_not_vllm_s_is_not_told_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's arguments refuse it, by what it is."""
    from triton_omni.vllm_hooks.thinker import quantization

    monkeypatch.setattr(torch.ops, "_C", object())
    monkeypatch.setattr(quantization.current_platform, "device_type", "cuda")
    monkeypatch.setattr(quantization.current_platform, "get_device_capability", lambda _: pytest.fail("it was asked"))
    assert quantization.quantization_arguments(ThinkerSettings(), TINY, torch.device("cpu"), torch.bfloat16) == {}


@with_kernel
def test_a_misshapen_part_is_named(tmp_path: Path) -> None:
    packed = ensure_checkpoint("tiny-awq")
    for file in packed.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "thinker.model.layers.1.mlp.down_proj.scales"
    tensors = tensors_of(packed)
    save_file(tensors | {name: tensors[name][:2].contiguous()}, tmp_path / "model.safetensors")
    message = rf"{name} has shape \[2, 64\], which does not fit the network"
    with pytest.raises(CheckpointError, match=message), thinker(tmp_path, dtype="bfloat16", sequences=4):
        pass

# SPDX-License-Identifier: Apache-2.0
"""Both engines' demands on vLLM: memory sized in advance, no prefix cache, the supported version."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triton_omni.core.cache_folder import cache_folder
from triton_omni.core.settings import EngineSettings, SettingsError, ThinkerSettings
from triton_omni.stub.launch import INVARIANCE_VARIABLE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(scope="module")
def engine_args() -> Any:
    from triton_omni.vllm_hooks.shared import engine_args

    return engine_args


@pytest.fixture(scope="module")
def quantization() -> Any:
    from triton_omni.vllm_hooks.thinker import quantization

    return quantization


@pytest.fixture
def any_device(engine_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both platforms' arguments on either: only starting an engine needs the platform itself."""
    monkeypatch.setattr(engine_args, "_check_device", lambda _device: None)


@pytest.fixture(scope="module")
def own_device(engine_args: Any) -> torch.device:
    """Device of the installed vLLM."""
    return torch.device(engine_args.current_platform.device_type)


def build(engine_args: Any, folder: Path, settings: EngineSettings, device: torch.device, **names: Any) -> Any:
    worker = {"worker_cls": "triton_omni.vllm_hooks.thinker.worker.ThinkerWorker"} | names
    return engine_args.build_engine_args(
        folder, settings, device, torch.float32, hf_overrides={"architectures": ["X"]}, **worker
    )


@pytest.mark.parametrize(("device", "sizes"), [(CPU, (32, 4)), (GPU, (16, 7))])
def test_the_cache_holds_every_sequence_at_its_longest(
    engine_args: Any, any_device: None, tmp_path: Path, device: torch.device, sizes: tuple[int, int]
) -> None:
    block_size, blocks_a_sequence = sizes
    settings = EngineSettings(max_num_seqs=3, max_model_len=100)
    built = build(engine_args, tmp_path, settings, device)
    assert built.block_size == block_size
    assert built.num_gpu_blocks_override == 3 * blocks_a_sequence + 1
    assert built.kv_cache_memory_bytes is not None
    assert built.enable_prefix_caching is False


def test_the_cache_holds_as_many_tokens_as_are_asked_for(engine_args: Any, any_device: None, tmp_path: Path) -> None:
    built = build(engine_args, tmp_path, EngineSettings(max_num_seqs=3, max_model_len=100, kv_cache_tokens=130), GPU)
    assert built.num_gpu_blocks_override == 9 + 1


def test_a_small_engine_s_cache_holds_one_sequence_of_the_longest(
    engine_args: Any, any_device: None, tmp_path: Path
) -> None:
    built = build(engine_args, tmp_path, EngineSettings(max_num_seqs=2, max_model_len=9000), GPU)
    assert built.num_gpu_blocks_override == -(-9000 // 16) + 1


def test_the_cpu_engine_is_eager_and_synchronous(engine_args: Any, any_device: None, tmp_path: Path) -> None:
    built = build(engine_args, tmp_path, EngineSettings(), CPU)
    assert built.enforce_eager
    assert not built.async_scheduling


@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_engine_captures_decode_steps_unless_it_is_eager(
    engine_args: Any, any_device: None, tmp_path: Path, eager: bool
) -> None:
    built = build(engine_args, tmp_path, EngineSettings(max_num_seqs=20, enforce_eager=eager), GPU)
    assert built.enforce_eager is eager
    assert built.async_scheduling
    assert built.block_size == 16
    assert built.device_ids == [1]
    if not eager:
        # EngineArgs turns the mapping into vLLM's own configuration.
        assert built.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
        assert int(built.compilation_config.mode) == 0
        assert built.compilation_config.cudagraph_capture_sizes[:7] == [1, 2, 4, 8, 16, 20, 32]
        assert built.compilation_config.cudagraph_capture_sizes[-1] == 2048


def test_decode_steps_of_a_whole_network_on_a_gpu_are_fused(engine_args: Any, any_device: None, tmp_path: Path) -> None:
    for asked, device, ranks, told in [
        ("auto", GPU, 1, "auto"),
        (True, GPU, 1, True),
        (False, GPU, 1, False),
        ("auto", CPU, 1, False),
        ("auto", CPU, 2, False),
    ]:
        built = build(engine_args, tmp_path, EngineSettings(fused_decode=asked), device, tensor_parallel_size=ranks)
        assert built.additional_config["fused_decode"] == told


def test_fused_decode_steps_are_confined_under_mps(
    engine_args: Any, any_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, device, mps, percent in [
        ({}, GPU, True, 50),
        ({"partition_percent": 25}, GPU, True, 25),
        ({"partition_percent": 0}, GPU, True, 0),
        ({"fused_decode": False}, GPU, True, 0),
        ({}, GPU, False, 0),
        ({}, CPU, True, 0),
    ]:
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        if mps:
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
        built = build(engine_args, tmp_path, EngineSettings(**asked), device)  # type: ignore[arg-type]
        assert built.additional_config["partition_percent"] == percent


def test_networks_are_compiled_when_asked(engine_args: Any, any_device: None, tmp_path: Path) -> None:
    built = build(engine_args, tmp_path, EngineSettings(torch_compile=True), GPU)
    assert built.compilation_config.mode.name == "VLLM_COMPILE"
    assert built.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert not built.enforce_eager


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 24, 32])]
)
def test_graphs_of_decode_steps_go_up_to_the_largest_batch(engine_args: Any, most: int, sizes: list[int]) -> None:
    assert engine_args.graph_sizes(EngineSettings(max_num_seqs=most, max_graph_tokens=0)) == sizes


@pytest.mark.parametrize(("tokens", "last"), [(100, [32, 64, 96]), (700, [448, 512, 640]), (2048, [224, 256])])
def test_graphs_of_prompts_go_up_to_their_limit_and_no_step(engine_args: Any, tokens: int, last: list[int]) -> None:
    room = 300 if tokens == 2048 else 2048
    settings = EngineSettings(max_num_seqs=4, max_graph_tokens=tokens, max_num_batched_tokens=room)
    assert engine_args.graph_sizes(settings)[-len(last) :] == last


def test_graphs_are_of_no_more_tokens_than_a_sequence_may_have(engine_args: Any) -> None:
    """vLLM would read past its block tables while it records them: an illegal access, or worse, none."""
    settings = EngineSettings(max_num_seqs=64, max_model_len=192, max_graph_tokens=512)
    assert engine_args.graph_sizes(settings)[-1] == 192


@pytest.mark.parametrize("name", ["worker_cls", "scheduler_cls"])
def test_class_names_outside_the_allowed_packages_are_refused(
    engine_args: Any, own_device: torch.device, tmp_path: Path, name: str
) -> None:
    with pytest.raises(SettingsError, match=r"'os\.system' is outside"):
        build(engine_args, tmp_path, EngineSettings(), own_device, **{name: "os.system"})


def test_the_device_that_this_vllm_runs_on_is_taken(engine_args: Any, own_device: torch.device, tmp_path: Path) -> None:
    assert own_device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert build(engine_args, tmp_path, EngineSettings(), own_device).model == str(tmp_path)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "meta"])
def test_a_device_that_this_vllm_does_not_run_on_is_refused(
    engine_args: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    other = {"cpu": "cuda", "cuda": "cpu", "meta": "cuda"}[kind]
    monkeypatch.setattr(engine_args, "current_platform", SimpleNamespace(device_type=other))
    with pytest.raises(SettingsError, match=f"device: {kind} was asked for, but .* runs on '{other}'"):
        build(engine_args, tmp_path, EngineSettings(), torch.device(kind))


@pytest.mark.parametrize(
    ("dtype", "device", "resolved"),
    [("auto", "cpu", torch.float32), ("auto", "cuda", torch.bfloat16), ("float16", "cpu", torch.float16)],
)
def test_auto_is_exact_on_the_cpu_and_fast_on_a_gpu(
    engine_args: Any, dtype: Any, device: str, resolved: torch.dtype
) -> None:
    assert engine_args.resolve_dtype(dtype, torch.device(device)) is resolved


def test_another_vllm_is_refused_by_its_version(engine_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_omni.vllm_hooks.shared import compat

    monkeypatch.setattr(importlib.metadata, "version", lambda _package: "0.31.9")
    with pytest.raises(compat.UnsupportedVllmError, match=r"vllm 0\.31\.9 is installed.*install vllm==0\.32\.0"):
        compat._check_version()


def test_a_missing_vllm_is_named(engine_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_omni.vllm_hooks.shared import compat

    def absent(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(compat.UnsupportedVllmError, match="vLLM is not installed"):
        compat._check_version()


def test_a_runner_without_an_extended_method_is_refused(engine_args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_omni.vllm_hooks.shared import compat

    monkeypatch.delattr(compat.GPUModelRunner, "_model_forward")
    with pytest.raises(compat.UnsupportedVllmError, match="_model_forward"):
        compat._check_methods()


def test_fp8_is_refused_where_it_cannot_run(quantization: Any) -> None:
    plain, fp8 = ThinkerSettings(), ThinkerSettings(quantization="fp8")
    assert quantization.quantization_arguments(plain, None, CPU, torch.float32) == {}
    with pytest.raises(SettingsError, match="quantization: fp8 needs a GPU, the device is cpu"):
        quantization.quantization_arguments(fp8, None, CPU, torch.bfloat16)
    with pytest.raises(SettingsError, match="quantization: fp8 needs a half-precision dtype, it is float32"):
        quantization.quantization_arguments(fp8, None, GPU, torch.float32)


@pytest.mark.parametrize(
    ("layer", "quantised"),
    [
        ("language_model.model.layers.0.mlp.gate_up_proj", True),
        ("language_model.model.layers.0.self_attn.qkv_proj", True),
        # 3420 wide in the published checkpoints, no multiple of what FP8's kernels take.
        ("visual.blocks.0.mlp.gate_up_proj", False),
        ("visual.merger.mlp.0", False),
        ("audio_tower.layers.0.fc1", False),
    ],
)
def test_fp8_is_of_the_decoder_s_layers_alone(quantization: Any, layer: str, quantised: bool) -> None:
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    config: Any = OnlineQuantizationConfig(
        resolve_quantization_config(
            **quantization.quantization_arguments(ThinkerSettings(quantization="fp8"), None, GPU, torch.bfloat16)
        )
    )
    projections = ["q_proj", "k_proj", "v_proj"]
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": projections}
    chosen = config.resolve_quant_method_cls(LinearBase, layer)
    assert (chosen is not None) == quantised


def test_vllm_knows_the_variable_of_its_batch_invariant_kernels() -> None:
    from vllm import envs

    assert INVARIANCE_VARIABLE in envs.environment_variables


@pytest.mark.usefixtures("engine_args")
def test_inputs_of_4_bit_weights_keep_their_precision_on_every_cpu() -> None:
    from vllm import envs

    assert envs.VLLM_CPU_INT4_W4A8 is False


INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.mark.usefixtures("engine_args")
@pytest.mark.parametrize("given", [{}, {"USER": "other"}, {INDUCTOR_CACHE: "own"}])
def test_compiled_code_is_read_from_no_folder_that_another_user_could_make_first(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By default torch runs what it finds in /tmp/torchinductor_USER, whoever made that folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    from triton_omni.vllm_hooks.shared import compat

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(INDUCTOR_CACHE, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    compat._prepare_environment()
    assert Path(cache_dir()).absolute() == (
        tmp_path / "own" if INDUCTOR_CACHE in given else cache_folder() / "inductor"
    )

# SPDX-License-Identifier: Apache-2.0
"""Arguments of an in-process vLLM engine from a stage's settings, the same for thinker and talker.

It decides what serving needs of vLLM (memory sized in advance, graphs of decode steps);
what a model needs comes from the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from triton_omni.checkpoint.facts import DecoderConfig
from triton_omni.core.settings import Dtype, EngineSettings, SettingsError
from triton_omni.vllm_hooks.shared.compat import CompilationMode, EngineArgs, VllmConfig, current_platform
from triton_omni.vllm_hooks.shared.fused_decode import FUSED_DECODE
from triton_omni.vllm_hooks.shared.graphs import vision_graphs
from triton_omni.vllm_hooks.shared.partition import PARTITION
from triton_omni.vllm_hooks.shared.tensor_parallel import TensorParallelExecutor

GPU_BLOCK_SIZE = 16
CPU_BLOCK_SIZE = 32
"""Tokens of one KV cache block; the CPU attention kernel wants a multiple of 32."""

_CLASS_PREFIXES = ("triton_omni.", "vllm.")
_STAGES = 3


class _StageArgs(EngineArgs):
    """vLLM's arguments, with room for media as long as a whole prompt.

    By its own rule vLLM would have room for one longest medium. It would refuse a longer one, and a video with sound
    would wait for ever.
    """

    def create_engine_config(self, *args: Any, **kwargs: Any) -> VllmConfig:
        config = super().create_engine_config(*args, **kwargs)
        scheduler, longest = config.scheduler_config, config.model_config.max_model_len
        # Both in tokens: media that a step encodes, and media kept until they were read.
        scheduler.max_num_encoder_input_tokens = max(scheduler.max_num_encoder_input_tokens, longest)
        scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, longest)
        return config


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on the CPU, where it equals the reference exactly."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


def check_length(settings: EngineSettings, decoder: DecoderConfig) -> None:
    """Refuse sequences longer than the network's own.

    Raises:
        SettingsError: naming both lengths.
    """
    if settings.max_model_len > decoder.max_positions:
        raise SettingsError(
            f"engine.max_model_len: {settings.max_model_len} is over the checkpoint's max_position_embeddings, "
            f"{decoder.max_positions}"
        )


def kv_cache_blocks(settings: EngineSettings, block_size: int) -> int:
    """Return the blocks for `kv_cache_tokens`, or else for `max_num_seqs` usual sequences, each in whole blocks.

    One more block is vLLM's null block, which no sequence gets.
    """
    blocks = -(-settings.cached_tokens // block_size)
    if not settings.kv_cache_tokens:
        blocks = max(blocks, settings.max_num_seqs * -(-settings.usual_tokens // block_size))
    return blocks + 1


def graph_sizes(settings: EngineSettings) -> list[int]:
    """Return the tokens of the steps that get a CUDA graph.

    Decode steps have 1, 2, 4, then every 8 sequences and the maximum; steps with prompts go on in growing strides up to
    `max_graph_tokens`.

    No graph has more tokens than one sequence may have. vLLM records a step with prompts as if each sequence had all
    tokens, and would read past the end of its block tables.
    """
    most = settings.max_num_seqs
    decode = {1, 2, 4, *range(8, most + 1, 8), most}
    prefill = {16, 32, *range(64, 256, 32), *range(256, 512, 64), *range(512, settings.max_graph_tokens + 1, 128)}
    largest = min(settings.max_graph_tokens, settings.max_num_batched_tokens, settings.max_model_len)
    return sorted({size for size in decode if size <= most} | {size for size in prefill if size <= largest})


def schedules_ahead(settings: EngineSettings, device: torch.device) -> bool:
    """True if a step is scheduled while the device still runs the previous one."""
    return device.type == "cuda" and settings.async_scheduling


def apply_thread_share(settings: EngineSettings) -> None:
    """Give the engine its share of the cores; must run before the worker starts, which pins the count.

    `OMP_NUM_THREADS` takes precedence over the fair share.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // _STAGES))


def build_engine_args(
    checkpoint: Path,
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    worker_cls: str,
    scheduler_cls: str | None = None,
    hf_overrides: dict[str, Any] | Callable[[Any], Any],
    for_runner: Mapping[str, Any] = MappingProxyType({}),
    tensor_parallel_size: int = 1,
    prefix_caching: bool = False,
    **model_arguments: Any,
) -> EngineArgs:
    """Arguments of one engine.

    Args:
        checkpoint: folder of the whole checkpoint (config.json, safetensors, tokenizer).
        settings: limits and switches of `stage.yaml`.
        device: of the engine; this vLLM must be built for its platform.
        dtype: of weights and activations.
        worker_cls, scheduler_cls: dotted names within `triton_omni.` or `vllm.`.
        hf_overrides: changes to the checkpoint's config, at least `architectures`.
        for_runner: `additional_config` for the stage's own model runner.
        tensor_parallel_size: GPUs that share each layer: `device`, and those after it.
        prefix_caching: whether prompts may reuse cached blocks of earlier ones.
        model_arguments: further `EngineArgs` that only one of the models needs.

    Raises:
        SettingsError: this vLLM does not support the device, there are too few of it, or a class name is outside
            the allowed packages.
    """
    _check_device(device)
    for name in (worker_cls, scheduler_cls):
        _check_class_name(name)
    on_gpu = device.type == "cuda"
    fuses = settings.fuses_decode and on_gpu and tensor_parallel_size == 1
    block_size = GPU_BLOCK_SIZE if on_gpu else CPU_BLOCK_SIZE
    return _StageArgs(
        model=str(checkpoint),
        dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
        seed=0,
        hf_overrides=hf_overrides,
        generation_config="vllm",
        use_tqdm_on_load=False,
        disable_log_stats=True,
        worker_cls=worker_cls,
        scheduler_cls=scheduler_cls,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        scheduling_policy="priority",
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_chunked_prefill=True,
        enable_prefix_caching=prefix_caching,
        async_scheduling=schedules_ahead(settings, device),
        **_ranks(tensor_parallel_size, device),
        additional_config={
            FUSED_DECODE: fuses and settings.fused_decode,
            PARTITION: settings.partition_percent if fuses and _is_under_mps() else 0,
            **for_runner,
        },
        **_memory(settings, block_size),
        **_execution(settings, on_gpu, tensor_parallel_size),
        **model_arguments,
    )


def _ranks(size: int, device: torch.device) -> dict[str, Any]:
    """Return the GPUs of the engine: `device`, and as many after it as share its layers.

    Raises:
        SettingsError: there are too few.
    """
    first = device.index or 0
    if size == 1:
        return {"device_ids": [first] if first else None}
    split = {"tensor_parallel_size": size, "distributed_executor_backend": TensorParallelExecutor}
    if device.type == "cpu":
        return split
    seen = torch.cuda.device_count()
    if first + size > seen:
        raise SettingsError(
            f"tensor_parallel_size: {size} GPUs from number {first} on, but this process sees {seen} (0 to {seen - 1})"
        )
    return split | {"device_ids": list(range(first, first + size))}


def _memory(settings: EngineSettings, block_size: int) -> dict[str, Any]:
    """Size the KV cache by blocks, not by free memory: three processes start together on one device.

    Any explicit `kv_cache_memory_bytes` keeps vLLM from measuring free memory; the number of blocks then
    replaces it. `gpu_memory_utilization` is only compared with what is free at start, so it is kept small.
    """
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": kv_cache_blocks(settings, block_size),
        "kv_cache_memory_bytes": 1,
        "gpu_memory_utilization": 0.01,
    }


def _execution(settings: EngineSettings, on_gpu: bool, tensor_parallel_size: int) -> dict[str, Any]:
    """Graphs of whole steps, with plain kernels or with those of torch.compile.

    `graphs.py` adds graphs of steps with prompts; vLLM itself ignores the sizes above `max_num_seqs`.
    """
    if not on_gpu or settings.enforce_eager:
        return {"enforce_eager": True}
    return {
        "enforce_eager": False,
        "compilation_config": {
            "mode": CompilationMode.VLLM_COMPILE if settings.torch_compile else CompilationMode.NONE,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_sizes(settings),
            **(vision_graphs(settings) if tensor_parallel_size == 1 else {}),
        },
    }


def _is_under_mps() -> bool:
    """True if processes share the GPU under MPS. Without it they take turns, and no step leaves room to another."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ


def _check_device(device: torch.device) -> None:
    if device.type != current_platform.device_type:
        raise SettingsError(
            f"device: {device} was asked for, but the installed vLLM runs on {current_platform.device_type!r}"
        )


def _check_class_name(name: str | None) -> None:
    if name is not None and not name.startswith(_CLASS_PREFIXES):
        raise SettingsError(f"class name {name!r} is outside the allowed packages {_CLASS_PREFIXES}")

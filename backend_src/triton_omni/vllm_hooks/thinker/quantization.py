# SPDX-License-Identifier: Apache-2.0
"""Quantisation of the thinker's decoder, to 8 bits by a setting or to 4 by the checkpoint, and its requirements.

A checkpoint's own 4 bits need no argument: vLLM reads `quantization_config`, takes the kernels of Machete or Marlin on
a GPU and its `cpu_gemm_wna16` on a CPU, and leaves towers, embedding and head as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_omni.checkpoint.facts import FourBit
from triton_omni.core.settings import SettingsError, ThinkerSettings
from triton_omni.vllm_hooks.shared.compat import current_platform

_TOWERS = ("visual.*", "audio_tower.*")
"""vLLM's names of the thinker's layers that are not its decoder's."""
_OLDEST_GPU = 75
"""Ten times the compute capability that Marlin's kernels need."""


def quantization_arguments(
    settings: ThinkerSettings, four_bit: FourBit | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the engine arguments that quantise the decoder's weights at load; empty = weights stay as they are stored.

    `fp8` has one scale for each row of the weights and one for each token (E4M3 on both sides); fused decode steps do
    not quantise the tokens. The towers stay as they are: decode steps do not run them, and FP8's kernels do not take
    every width of a vision tower.

    Args:
        settings: of the stage.
        four_bit: the checkpoint's own quantisation; None = none.
        device: of the engine.
        dtype: of its activations.

    Raises:
        SettingsError: setting, checkpoint, device and dtype do not go together.
    """
    if four_bit is not None:
        _check_four_bit(settings, four_bit, device, dtype)
        return {}
    if settings.quantization == "none":
        return {}
    wanted = f"quantization: {settings.quantization}"
    if device.type != "cuda":
        raise SettingsError(f"{wanted} needs a GPU, the device is {device.type}; use none")
    if dtype == torch.float32:
        raise SettingsError(f"{wanted} needs a half-precision dtype, it is float32; use none")
    return {"quantization": "fp8_per_channel", "quantization_config": {"ignore": list(_TOWERS)}}


def _check_four_bit(settings: ThinkerSettings, four_bit: FourBit, device: torch.device, dtype: torch.dtype) -> None:
    weights = f"the checkpoint's 4-bit weights ({four_bit.method})"
    if settings.quantization != "none":
        raise SettingsError(f"quantization: {settings.quantization} does not take {weights}; use none")
    if dtype == torch.float32:
        raise SettingsError(
            f"dtype: {settings.dtype} means float32 here, {weights} need half precision; set bfloat16 for thinker and "
            "talker"
        )
    if settings.engine.deterministic:
        raise SettingsError(f"engine.deterministic: true has no kernel for {weights}; use false")
    on_gpu = device.type == "cuda"
    capability = current_platform.get_device_capability(device.index or 0) if on_gpu else None
    if capability is not None and capability.to_int() < _OLDEST_GPU:
        raise SettingsError(
            f"device: {device} has compute capability {capability.as_version_str()}, {weights} need "
            f"{_OLDEST_GPU / 10} or more; serve a checkpoint that is not quantised"
        )
    # vLLM compiles it for AVX-512 alone. `engine_args` refuses a vLLM of another platform.
    if device.type == current_platform.device_type == "cpu" and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        raise SettingsError(
            f"device: this CPU has no AVX-512, {weights} need it; serve a checkpoint that is not quantised, or on a GPU"
        )

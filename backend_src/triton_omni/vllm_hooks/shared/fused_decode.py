# SPDX-License-Identifier: Apache-2.0
"""Recorded decode steps by kernels of this project's own; all other steps stay vLLM's.

Chooses the networks and steps whose layers are fused; `fused_layers.py` computes them. It knows vLLM's layers, neither
thinker nor talker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from triton_omni.vllm_hooks.shared.compat import (
    BatchDescriptor,
    GPUModelRunner,
    LlamaDecoderLayer,
    MRotaryEmbedding,
    Qwen2DecoderLayer,
    VllmConfig,
)

if TYPE_CHECKING:
    from triton_omni.vllm_hooks.shared.fused_layers import Switch

    _Runner = GPUModelRunner
else:
    _Runner = object

FUSED_DECODE: Final = "fused_decode"
"""Key of vLLM's `additional_config`: whether decode steps are recorded with fused kernels, or "auto"."""
_ATTENTION: Final = "FLASH_ATTN"
"""The backend whose cache and lengths the kernel reads."""
_HALF_PRECISION: Final = (torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)


def wanted_fused(config: VllmConfig) -> bool | str:
    """Return the value of `FUSED_DECODE` in `additional_config`; False by default."""
    wanted: bool | str = cast(dict[str, Any], config.additional_config).get(FUSED_DECODE, False)
    return wanted


class FusedDecodeMixin(_Runner):
    """Records decode steps with fused kernels where `additional_config` asks for it and the network allows it.

    Put it before the platform's runner in the bases.
    """

    _fused: Switch | None = None

    @property
    def fuses_decode_steps(self) -> bool:
        """True if decode steps are fused; known once the network is loaded."""
        return self._fused is not None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the network, and let its layers switch between plain and fused steps."""
        super().load_model(*args, **kwargs)
        wanted = wanted_fused(self.vllm_config)
        if not wanted:
            return
        network = self.get_model()
        hindrance = why_not_fused(network, cast(torch.dtype, self.model_config.dtype))
        if hindrance is not None:
            level = logging.WARNING if wanted is True else logging.INFO
            logger.log(level, "decode steps are not fused: %s", hindrance)
            return
        # The Triton language is imported where it is needed alone.
        from triton_omni.vllm_hooks.shared.fused_layers import fuse

        self._fused = fuse(network, *decoder_of(network), self.max_num_reqs)

    def _warmup_and_capture(self, desc: BatchDescriptor, *args: Any, **kwargs: Any) -> None:
        """Record a step; a step of one token a sequence with the fused kernels, run once before to compile them."""
        if self._fused is None or not desc.uniform:
            super()._warmup_and_capture(desc, *args, **kwargs)
            return
        self._fused.on = True
        try:
            super()._warmup_and_capture(desc, *args, **{"num_warmups": 1, **kwargs})
        finally:
            self._fused.on = False


def why_not_fused(network: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the feature of a network that the kernels do not compute; None = they compute it."""
    _, layers = decoder_of(network)
    if dtype not in _HALF_PRECISION:
        return f"they are of half precision, the network is {dtype}"
    if not layers:
        return "the network has no decoder layers of a known kind"
    return next((reason for reason in map(_why_not, layers) if reason is not None), None)


def _why_not(layer: Any) -> str | None:
    attention, rotary = layer.self_attn.attn, layer.self_attn.rotary_emb
    backend, window = attention.attn_backend.get_name(), getattr(attention.impl, "sliding_window", None)
    if backend != _ATTENTION:
        return f"attention is {backend}, not {_ATTENTION}"
    if attention.kv_cache_dtype != "auto":
        return f"the cache is {attention.kv_cache_dtype}"
    if window not in (None, (-1, -1)):
        return f"attention sees a window of {window}"
    if not isinstance(rotary, MRotaryEmbedding) or not rotary.mrope_section or rotary.mrope_interleaved:
        return "positions are not of three axes, one after another"
    if not rotary.is_neox_style or rotary.rotary_dim != rotary.head_size:
        return "the rotation is not of two halves of a head"
    return None


def decoder_of(network: nn.Module) -> tuple[Any, list[Any]]:
    """Return the module that holds the decoder layers and the final norm, and the layers."""
    for part in network.modules():
        layers = getattr(part, "layers", None)
        if isinstance(layers, nn.ModuleList) and isinstance(layers[0], LlamaDecoderLayer | Qwen2DecoderLayer):
            return part, list(layers)
    return None, []

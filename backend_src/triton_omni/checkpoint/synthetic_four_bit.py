# SPDX-License-Identifier: Apache-2.0
"""Rounds weights to 4 bits and packs them as `Qwen/Qwen2.5-Omni-7B-AWQ` and `-GPTQ-Int4` are published.

Sources of the format, none of them the published files themselves:

- Qwen2.5-Omni's README ("GPTQ-Int4 and AWQ Usage", of 7B alone) and its `low_VRAM_demo_awq.py` and `_gptq.py`: only the
  thinker's weights are quantised, and there only `thinker.model.layers`. Embedding, head, towers, talker and token2wav
  are saved as they are, in one index with the rest. autoawq 0.2.9 and gptqmodel 2.0.0 load all as float16.
- AutoAWQ's pull request 759, by the authors of these: zero points, groups of 128, version GEMM. The two files of a 3B
  that it lists have 7.3 to 7.5 GiB together: with token2wav in float32 they are 7.3, in float16 6.5. AutoAWQ's class
  of the model leaves out `visual` and writes that into `quantization_config`, at the top level of `config.json`.
- AutoAWQ's `WQLinear_GEMM.from_linear` and vLLM's `auto_awq.py` have AWQ's packing, GPTQModel's `pack` and vLLM's
  `auto_gptq.py` have GPTQ's. GPTQModel, too, writes `quantization_config` at the top level.

No source tells if the published GPTQ file has `desc_act`. By default gptqmodel 2.0.0 switches it on. Qwen's GPTQ-Int4
checkpoints of Qwen2 have it off.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from triton_omni.checkpoint.facts import FourBit

_DECODER = re.compile(r"thinker\.model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight")
_LARGEST = 15
_MIDDLE = 8
"""GPTQ's only zero point, as its codes are symmetric."""
_BITS, _A_WORD = 4, 8
"""Bits of a code, and codes of an int32."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of eight neighbouring outputs in a word, from the lowest bits up."""
_SCALE_BITS = 4
_SMALLEST_SCALE = 2.0**-14
"""Float16's smallest normal number, for groups of zeros."""


def is_four_bit(name: str) -> bool:
    """Return True if the published checkpoints have quantised the matrix of this name."""
    return _DECODER.fullmatch(name) is not None


def quantization_config(four_bit: FourBit) -> dict[str, Any]:
    """`quantization_config` of `config.json`."""
    common = {"quant_method": four_bit.method, "bits": 4, "group_size": four_bit.group_size}
    if four_bit.method == "awq":
        return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["visual"]}
    return common | {
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.0.0"], "static_groups": False, "true_sequential": True},
    }


def pack(weight: Tensor, four_bit: FourBit) -> dict[str, Tensor]:
    """Round a matrix [N, K] to the nearest codes and pack them; on the meta device it tells shapes alone.

    A weight is `(code - zero) * scale`. Scales have four significant bits, so that every weight is exact in float16 and
    in bfloat16 alike, whichever an engine computes in.

    Returns:
        By the end of its name, for groups of G inputs: `scales` float16 [K / G, N]; `qzeros` int32 [K / G, N / 8];
        `qweight` int32, for AWQ [K, N / 8], for GPTQ [K / 8, N]; for GPTQ also `g_idx` int32 [K].

    Raises:
        ValueError: G does not divide K, or 8 not N.
    """
    outputs, inputs = weight.shape
    if inputs % four_bit.group_size or outputs % _A_WORD:
        raise ValueError(f"a matrix of {outputs} x {inputs} has no groups of {four_bit.group_size} in words of 8 codes")
    groups = weight.float().T.contiguous().view(-1, four_bit.group_size, outputs)
    scale, zero = (_awq_grid if four_bit.method == "awq" else _gptq_grid)(groups)
    codes = (groups / scale[:, None]).round().add(zero[:, None]).clamp(0, _LARGEST).reshape(inputs, outputs)
    scales = scale.to(torch.float16)
    if four_bit.method == "awq":
        order = _AWQ_ORDER
        return {"qweight": _words(codes, order), "qzeros": _words(zero, order), "scales": scales}
    numbers = torch.arange(inputs, dtype=torch.int32, device=weight.device) // four_bit.group_size
    # GPTQ writes each zero point less one.
    packed = {"qweight": _words(codes.T).T.contiguous(), "qzeros": _words(zero - 1), "scales": scales}
    return {**packed, "g_idx": numbers}


def _awq_grid(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point [K / G, N] of weights [K / G, G, N], from the smallest to the largest; 0 has a code."""
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = _rounded_up((high - low) / _LARGEST)
    return scale, (-low / scale).round().clamp(0, _LARGEST)


def _gptq_grid(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The same for codes on both sides of zero alike."""
    scale = _rounded_up(groups.abs().amax(1) / (_LARGEST - _MIDDLE))
    return scale, torch.full_like(scale, _MIDDLE)


def _rounded_up(scale: Tensor) -> Tensor:
    """To four significant bits."""
    mantissa, exponent = torch.frexp(scale.clamp(min=_SMALLEST_SCALE))
    return torch.ldexp((mantissa * 2**_SCALE_BITS).ceil(), exponent - _SCALE_BITS)


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(_A_WORD))) -> Tensor:
    """int32 [R, C / 8] of codes [R, C]: the code of place `order[i]` has the bits from 4 i on."""
    parts = codes.to(torch.int32).reshape(len(codes), -1, _A_WORD)
    word = torch.zeros_like(parts[..., 0])
    for number, place in enumerate(order):
        word |= parts[..., place] << (_BITS * number)
    return word

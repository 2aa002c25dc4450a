# SPDX-License-Identifier: Apache-2.0
"""Reads `quantization_config`: the thinker's decoder in 4-bit codes, as Qwen publishes Qwen2.5-Omni-7B by AWQ and GPTQ.

What vLLM has no kernel for is refused here, before any weight is read. `synthetic_four_bit.py` has the format.
"""

from __future__ import annotations

from typing import Any

from triton_omni.checkpoint.facts import FourBit
from triton_omni.checkpoint.reading import CheckpointError, Section

_GROUP_SIZES = (32, 64, 128)
"""Those of vLLM's Marlin kernels. The published checkpoints have 128."""


def read_four_bit(root: Section) -> FourBit | None:
    """How the decoder's matrices are quantised; None = `config.json` states nothing of it.

    Raises:
        CheckpointError: naming the key, its value and what is served.
    """
    section = root.maybe("quantization_config")
    if not section.values:
        return None
    method = section.values.get("quant_method")
    if method not in ("awq", "gptq"):
        raise _refused(section, "quant_method", method, "awq and gptq are served, and weights that are not quantised")
    _expect(section, "bits", 4)
    _expect(section, "lm_head", False, default=False)
    (_expect_awq if method == "awq" else _expect_gptq)(section)
    if (group := section.integer("group_size")) not in _GROUP_SIZES:
        raise _refused(section, "group_size", group, f"{', '.join(map(str, _GROUP_SIZES))} are served")
    return FourBit(method, group)


def _expect_awq(section: Section) -> None:
    _expect(section, "zero_point", True)
    version = section.values.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise _refused(section, "version", version, "gemm is served, other versions are packed otherwise")


def _expect_gptq(section: Section) -> None:
    _expect(section, "sym", True)
    _expect(section, "desc_act", False, cure="vLLM has no kernel for it; take an AWQ checkpoint")
    if section.values.get("dynamic"):
        raise _refused(section, "dynamic", section.values["dynamic"], "all decoder layers must be quantised alike")


def _expect(section: Section, key: str, wanted: object, *, default: Any = None, cure: str = "") -> None:
    found = section.values.get(key, default)
    if type(found) is not type(wanted) or found != wanted:
        raise _refused(section, key, found, cure or f"{str(wanted).lower()} is served")


def _refused(section: Section, key: str, found: object, served: str) -> CheckpointError:
    return section.fail(key, f"{found!r:.80} is not served: {served}")

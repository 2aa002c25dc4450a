# SPDX-License-Identifier: Apache-2.0
"""Prepares `transformers` for the import of its models. This module knows nothing of models or checkpoints."""

from __future__ import annotations

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_registered: list[torch.library.Library] = []


def prepare_transformers() -> None:
    """Let `transformers` import its vision code, and read configurations quickly; call it before that import."""
    _define_torchvision_operators()
    from transformers.configuration_utils import PreTrainedConfig

    # It renders each configuration that it reads for a log line that is off: 0.3 to 0.6 s of CPU time a file.
    PreTrainedConfig.__repr__ = _class_name  # type: ignore[method-assign]


def _define_torchvision_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms` where torch has no CUDA and nobody declared them.

    A torchvision wheel built for CUDA cannot load its operators next to a CPU build of torch, and then the import of
    torchvision fails on the missing names. The operators get no kernel: nothing here detects objects.
    """
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _NMS)  # type: ignore[no-untyped-call]
    # A library's definitions vanish with the object.
    _registered.append(library)


def _class_name(config: object) -> str:
    return type(config).__name__

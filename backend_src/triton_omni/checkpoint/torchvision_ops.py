# SPDX-License-Identifier: Apache-2.0
"""Lets `transformers` import its vision code where torchvision's compiled operators are missing.

A torchvision wheel built for CUDA cannot load its operators next to a CPU build of torch, and then the import of
torchvision fails on the missing names. This module knows nothing of models or checkpoints.
"""

from __future__ import annotations

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_registered: list[torch.library.Library] = []


def define_torchvision_operators() -> bool:
    """Declare `torchvision::nms` and `torchvision::qnms` where torch has no CUDA and nobody declared them.

    The operators get no kernel: nothing here detects objects, only the names must exist for torchvision's import.

    Returns:
        Whether the operators were declared by this call.
    """
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _NMS)  # type: ignore[no-untyped-call]
    # A library's definitions vanish with the object.
    _registered.append(library)
    return True

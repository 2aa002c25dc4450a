# SPDX-License-Identifier: Apache-2.0
"""How a GPU's libraries round here: what float32 means, and which algorithms they may take."""

from __future__ import annotations

import os

import torch


def use_full_float32(device: torch.device) -> None:
    """Keep cuDNN's convolutions and cuBLAS' products of float32 from rounding their inputs to TF32's 10 bits: that mode
    is there to be compared with the reference.

    For the whole process, which serves one stage. Nothing to do on the CPU.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


def use_ordered_sums(device: torch.device) -> None:
    """Keep cuDNN and cuBLAS from algorithms that give other bits when they run again, such as sums by atomic additions.

    For the whole process, before its first product on the GPU. Nothing to do on the CPU, whose libraries have none for
    one shape and number of threads.
    """
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True
        # Without it cuBLAS may take another algorithm while several streams share its workspace.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

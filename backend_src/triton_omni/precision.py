# SPDX-License-Identifier: Apache-2.0
"""What float32 means on a GPU here: all 23 bits, since that mode is there to be compared with the reference."""

from __future__ import annotations

import torch


def use_full_float32(device: torch.device) -> None:
    """Keep cuDNN's convolutions and cuBLAS' products of float32 from rounding their inputs to TF32's 10 bits.

    For the whole process, which serves one stage. Nothing to do on the CPU.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False

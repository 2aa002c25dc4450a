# SPDX-License-Identifier: Apache-2.0
"""Kernels that copy a step's inputs from the host and its results back; without a GPU Triton interprets them."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [1, 7, 90])
def test_what_the_host_tells_is_on_the_device_and_nothing_behind_it(count: int) -> None:
    from triton_omni.vllm_hooks.kernels.step_copy import fetch

    told = torch.arange(100 * 7, dtype=torch.int64).view(100, 7) - (1 << 40)
    told[:, 5] = torch.arange(100) * 3 + 1
    told = told.pin_memory() if DEVICE.type == "cuda" else told
    target = torch.zeros(100, 7, dtype=torch.int64, device=DEVICE)
    lengths = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    fetch(told[:count], target, lengths, 5)
    assert torch.equal(target[:count].cpu(), told[:count])
    assert lengths[:count].tolist() == told[:count, 5].tolist()
    assert not target[count:].any()
    assert not lengths[count:].any()


@pytest.mark.parametrize("count", [1, 33, 600])
def test_what_steps_draw_stays_on_the_device_and_for_some_steps_on_the_host(count: int) -> None:
    from triton_omni.vllm_hooks.kernels.step_copy import DrawnIds

    ids, memory = DrawnIds(600, DEVICE), torch.zeros(count, dtype=torch.int32, device=DEVICE)
    left = []
    for step in range(6):
        # Each step draws into the same memory.
        memory.copy_(torch.arange(count) * 10 + step)
        left.append(ids.keep(memory))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    expected = [(torch.arange(count) * 10 + step).to(torch.int32) for step in range(6)]
    assert all(torch.equal(kept.cpu(), wanted) for (kept, _), wanted in zip(left, expected, strict=True))
    assert all(torch.equal(host, wanted) for (_, host), wanted in zip(left[-4:], expected[-4:], strict=True))

# SPDX-License-Identifier: Apache-2.0
"""Both ends of a thinker's decode step by kernels against plain operations; without a GPU they run in Triton's
interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from triton_omni.vllm_hooks.thinker.hidden_rows import Kept
from triton_omni.vllm_hooks.thinker.hidden_rows import finish as finish_plainly

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
MOST = 8


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(*shape: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(("count", "width"), [(1, 64), (5, 1100)])
def test_a_step_begins_where_the_one_before_ended(count: int, width: int, draws: bool) -> None:
    from triton_omni.vllm_hooks.kernels.thinker_step import Places, Uniforms, begin_step

    # The first of the last block, among others.
    positions = integers(MOST, seed=1)
    positions[count - 1] = 2 * BLOCK - 1
    before = Places(
        positions,
        integers(3, MOST + 1, seed=2),
        integers(MOST, dtype=torch.int32, seed=3),
        integers(MOST, seed=4),
        integers(MOST, 8, dtype=torch.int32, seed=5),
        BLOCK,
    )
    after = Places(*(tensor.clone() for tensor in before[:5]), BLOCK)
    table, inputs = random(100, width), random(MOST, width, seed=1)
    drawn, unread = integers(count, dtype=torch.int32, seed=6), inputs.clone()
    told = torch.rand(MOST, dtype=torch.float64)
    told = told.pin_memory() if DEVICE.type == "cuda" else told
    numbers = Uniforms(told, torch.full((MOST,), 7.0, dtype=torch.float64, device=DEVICE))
    begin_step(drawn, table, inputs, after, numbers if draws else None)

    assert torch.equal(inputs, torch.cat([table[drawn.long()], unread[count:]]))
    within = torch.arange(MOST, device=DEVICE) < count
    assert torch.equal(after.positions, before.positions + within)
    assert torch.equal(after.axes[:, :MOST], before.axes[:, :MOST] + within)
    assert torch.equal(after.axes[:, MOST], before.axes[:, MOST])
    assert torch.equal(after.lengths, before.lengths + within)
    places = after.positions[:count]
    blocks = before.blocks[:count].long().gather(1, (places // BLOCK).unsqueeze(1)).squeeze(1)
    assert torch.equal(after.slots, torch.cat([blocks * BLOCK + places % BLOCK, before.slots[count:]]))
    assert torch.equal(after.blocks, before.blocks)
    assert numbers.target.tolist() == [*(told[:count].tolist() if draws else [7.0] * count), *[7.0] * (MOST - count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (9, 6), (9, 0)])
def test_rows_and_flags_of_a_step_are_those_of_plain_operations(tokens: int, rows: int, dtype: torch.dtype) -> None:
    from triton_omni.vllm_hooks.kernels.thinker_step import finish

    hidden = random(tokens, 100, dtype=dtype)
    taken = random(rows, 100, dtype=dtype, seed=1) if rows else None
    expected = None if taken is None else taken.clone()
    flags, plain = finish(taken, hidden), finish_plainly(expected, hidden)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert flags.tolist() == plain.tolist() == [True] * tokens
    # Triton's interpreter cuts bfloat16 off where a GPU rounds.
    is_cut = DEVICE.type == "cpu" and dtype == torch.bfloat16
    torch.testing.assert_close(taken, expected, rtol=2**-7 if is_cut else 0, atol=0)


@pytest.mark.parametrize(("tokens", "rows", "width"), [(1, 1, 100), (9, 6, 100), (3, 3, 128)])
def test_rows_are_kept_at_their_slots(tokens: int, rows: int, width: int) -> None:
    from triton_omni.vllm_hooks.kernels.thinker_step import finish

    hidden, taken = random(tokens, width), random(rows, width, seed=1)
    table, slots = random(4 * MOST, width, seed=2), torch.randperm(4 * MOST)[:rows].to(DEVICE)
    expected = table.clone()
    finish(taken, hidden, Kept(table, slots))
    assert torch.equal(table, expected.index_copy_(0, slots, taken))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_flagged_alone(bad: float) -> None:
    from triton_omni.vllm_hooks.kernels.thinker_step import finish

    hidden = random(4, 100)
    hidden[2, 99] = bad
    flags, plain = finish(None, hidden), finish_plainly(None, hidden)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert flags.tolist() == plain.tolist() == [True, True, False, True]

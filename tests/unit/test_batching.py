# SPDX-License-Identifier: Apache-2.0
"""Ragged batches of rows and their blocks: no window sees another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from triton_omni.token2wav.attention import Attention, Before, block_attention, plain_attention
from triton_omni.token2wav.batching import REACHES, block_layout

CPU = torch.device("cpu")
LENGTHS = (30, 1, 24, 71, 8, 48)
BLOCK, HEADS, DIM = 8, 2, 4


def some_windows(features: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, features, generator=generator) for length in LENGTHS]


def attend(attention: Attention, windows: list[list[Tensor]], reach: tuple[int, int]) -> tuple[Tensor, ...]:
    """Attention over [query, key, value] lists of windows [T, heads x dim]."""
    layout = block_layout(tuple(len(window) for window in windows[0]), BLOCK, CPU)
    query, key, value = (torch.cat(part).view(-1, HEADS, DIM) for part in windows)
    return layout.split(attention(query, key, value, layout, reach).flatten(1))


def by_definition(query: Tensor, key: Tensor, value: Tensor, reach: tuple[int, int]) -> Tensor:
    """One window, written as a softmax over the frames whose block is within reach."""
    block = torch.arange(len(query)) // BLOCK
    distance = block[None] - block[:, None]
    outputs = []
    for part in torch.stack([query, key, value]).view(3, -1, HEADS, DIM).unbind(2):
        scores = part[0] @ part[1].T / DIM**0.5
        scores = scores.masked_fill((distance < -reach[0]) | (distance > reach[1]), float("-inf"))
        outputs.append(F.softmax(scores, dim=-1) @ part[2])
    return torch.cat(outputs, dim=1)


def test_positions_begin_anew_in_every_window() -> None:
    layout = block_layout(LENGTHS, BLOCK, CPU)
    for length, positions in zip(LENGTHS, layout.split(layout.positions), strict=True):
        assert torch.equal(positions, torch.arange(length))


def test_each_block_knows_its_rows_and_those_beside_it_in_its_window() -> None:
    layout = block_layout((20, 1, 16), BLOCK, CPU)
    assert layout.starts == (0, 3, 4)
    assert layout.blocks.first.tolist() == [0, 8, 16, 20, 21, 29]
    assert layout.blocks.before.tolist() == [0, 8, 8, 0, 0, 8]
    assert layout.blocks.own.tolist() == [8, 8, 4, 1, 8, 8]
    assert layout.blocks.after.tolist() == [8, 4, 0, 0, 8, 0]


def test_each_row_knows_its_window() -> None:
    assert block_layout((3, 1, 9), BLOCK, CPU).windows.tolist() == [0, 0, 0, 1, *[2] * 9]


@pytest.mark.parametrize("attention", [block_attention, plain_attention])
@pytest.mark.parametrize("reach", REACHES)
def test_attention_over_a_ragged_batch_equals_its_definition_on_each_window(
    attention: Attention, reach: tuple[int, int]
) -> None:
    windows = [some_windows(HEADS * DIM, seed) for seed in range(3)]
    for number, mixed in enumerate(attend(attention, windows, reach)):
        query, key, value = (part[number] for part in windows)
        expected = by_definition(query, key, value, reach)
        torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", [block_attention, plain_attention])
@pytest.mark.parametrize("reach", [reach for reach in REACHES if reach[0]])
def test_attention_sees_the_block_that_an_earlier_window_left(attention: Attention, reach: tuple[int, int]) -> None:
    """The window gets the same result as if the block were its own first one, without queries."""
    windows = [some_windows(HEADS * DIM, seed) for seed in range(3)]
    layout = block_layout(LENGTHS, BLOCK, CPU)
    key, value = torch.randn(2, layout.num_blocks, BLOCK, HEADS, DIM, generator=torch.Generator().manual_seed(9))
    there = torch.zeros(layout.num_blocks, dtype=torch.bool)
    there[[layout.starts[number] for number in (0, 3, 4)]] = True
    query, own_key, own_value = (torch.cat(part).view(-1, HEADS, DIM) for part in windows)
    mixed = attention(query, own_key, own_value, layout, reach, before=Before(key, value, there))
    for number, ours in enumerate(layout.split(mixed.flatten(1))):
        first = layout.starts[number]
        earlier = [torch.zeros(BLOCK, HEADS * DIM), key[first].flatten(1), value[first].flatten(1)]
        seen = BLOCK if there[first] else 0
        whole = [torch.cat([left[:seen], part[number]]) for left, part in zip(earlier, windows, strict=True)]
        expected = by_definition(whole[0], whole[1], whole[2], reach)[seen:]
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", [block_attention, plain_attention])
@pytest.mark.parametrize("reach", REACHES)
def test_values_that_are_not_finite_stay_in_their_window(attention: Attention, reach: tuple[int, int]) -> None:
    windows = [some_windows(HEADS * DIM, seed) for seed in range(3)]
    for part in windows:
        part[2].fill_(float("nan"))
    finite = [bool(torch.isfinite(mixed).all()) for mixed in attend(attention, windows, reach)]
    assert finite == [True, True, False, True, True, True]


def test_whole_blocks_need_no_mask_within_a_block() -> None:
    assert block_layout((16, 8), BLOCK, CPU).reaches[0, 0].mask is None
    assert block_layout((16, 9), BLOCK, CPU).reaches[0, 0].mask is not None

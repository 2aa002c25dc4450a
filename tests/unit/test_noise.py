# SPDX-License-Identifier: Apache-2.0
"""Noise by (seed, frame, channel): the generator's published vectors, invariance and statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_omni.token2wav.noise import MAX_SEED, philox, standard_normal

CPU = torch.device("cpu")


def noise(seed: int, first: int, last: int, channels: int = 80) -> Tensor:
    return standard_normal([(seed, first, last)], channels, CPU)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor(int(word, 16)) for word in counter.split())
    k0, k1 = (torch.tensor(int(word, 16)) for word in key.split())
    assert " ".join(f"{int(word):08x}" for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


@pytest.mark.parametrize(("first", "last"), [(0, 1), (5, 30), (8190, 8192), (7, 7)])
def test_a_frame_has_the_same_noise_in_any_window(first: int, last: int) -> None:
    assert torch.equal(noise(3, 0, 8192)[first:last], noise(3, first, last))


def test_a_channel_has_the_same_noise_for_any_number_of_channels() -> None:
    assert torch.equal(noise(3, 0, 9)[:, :6], noise(3, 0, 9, channels=6))


@pytest.mark.parametrize("other", [1, 2**32, 2**63, MAX_SEED])
def test_both_halves_of_the_seed_count(other: int) -> None:
    assert (noise(0, 0, 4) != noise(other, 0, 4)).float().mean() > 0.99


def test_noise_is_standard_normal_and_without_correlation() -> None:
    values = noise(11, 0, 5000)
    assert values.dtype == torch.float32
    flat = values.flatten().double()
    tolerance = 5 / flat.numel() ** 0.5
    moments = [float((flat**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=tolerance * 10)
    assert float((flat.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=tolerance)
    correlation = torch.corrcoef(torch.cat([values[:-1], values[1:]], dim=1).T) - torch.eye(160)
    assert correlation.abs().max() < 6 / 5000**0.5


def test_frames_and_channels_never_repeat_each_other() -> None:
    values = noise(1, 0, 2000).flatten()
    # Some hundreds of chance meetings are due: fp32 has only so many values in the bell's middle.
    assert len(torch.unique(values)) > 0.995 * len(values)

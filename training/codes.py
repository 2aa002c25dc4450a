# SPDX-License-Identifier: Apache-2.0
"""Codes of speech: each names one of some hundred spectra of two mel frames, found by k-means."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.sizes import MELS, VOCAB

_QUIET, _FLOOR, _QUIET_PART = -5.0, -8.0, 0.5
"""Log magnitudes below `_QUIET` count by `_QUIET_PART` only, down to `_FLOOR`."""
_NEIGHBOUR_PART = 0.35
"""How much the frame before and the frame after count."""
_POINTS_A_PIECE = 65536
_RARE = 0.02
"""A centre with less than this part of its share of the points is moved."""
FEATURES = 4 * MELS


def features(mel: Tensor) -> Tensor:
    """Return the vectors to cluster: [frames, 80] to [frames / 2, 320].

    Each holds a code's two frames and a little of those around them.
    """
    loud = mel.float().clamp(min=_FLOOR)
    loud = torch.where(loud < _QUIET, _QUIET + (loud - _QUIET) * _QUIET_PART, loud)
    count = len(loud) // 2
    padded = F.pad(loud[: count * 2].T.unsqueeze(0), (1, 1), mode="replicate")[0].T
    before, first, second, after = (padded[place : place + 2 * count : 2] for place in range(4))
    return torch.cat([before * _NEIGHBOUR_PART, first, second, after * _NEIGHBOUR_PART], dim=1)


def nearest(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each point's nearest centre [N] and the squared distance [N]; points are [N, 320]."""
    squares, numbers, distances = centers.square().sum(1), [], []
    for piece in torch.split(points, _POINTS_A_PIECE):
        found = torch.addmm(squares, piece, centers.T, alpha=-2).min(1)
        numbers.append(found.indices)
        distances.append((found.values + piece.square().sum(1)).clamp(min=0))
    return torch.cat(numbers), torch.cat(distances)


def cluster(points: Tensor, count: int, rounds: int, generator: torch.Generator) -> Tensor:
    """k-means.

    Args:
        points: [N, 320].
        count: number of centres.
        rounds: of assignment and averaging.
        generator: on the CPU.

    Returns:
        [count, 320] fp32 on the points' device.
    """
    centers = _first_centers(points, count, generator)
    for number in range(rounds):
        which, distances = nearest(points, centers)
        sums = torch.zeros_like(centers).index_add_(0, which, points)
        sizes = torch.bincount(which, minlength=count)
        centers = torch.where((sizes > 0).unsqueeze(1), sums / sizes.clamp(min=1).unsqueeze(1), centers)
        rare = (sizes < len(points) / count * _RARE).nonzero().flatten()
        # The last rounds settle.
        if len(rare) and number < rounds * 3 // 4:
            centers[rare] = _draw_far(points, distances, len(rare), generator)
    return centers


def _first_centers(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Much of the speech is silence, so points are drawn by their distance to those drawn before, in rounds."""
    first = torch.randperm(len(points), generator=generator)[: max(1, count // 16)]
    centers = points[first.to(points.device)]
    while len(centers) < count:
        more = min(max(1, len(centers) // 4), count - len(centers))
        centers = torch.cat([centers, _draw_far(points, nearest(points, centers)[1], more, generator)])
    return centers


def _draw_far(points: Tensor, distances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    every = max(1, len(points) // 2**20)  # multinomial takes at most 2^24 categories
    drawn = torch.multinomial(distances[::every].cpu() + 1e-6, count, generator=generator)
    return points[::every][drawn.to(points.device)]


def quantise(mel: Tensor, centers: Tensor, piece: int = 400_000) -> tuple[Tensor, float]:
    """Codes of mel frames.

    Args:
        mel: [frames, 80] on any device.
        centers: [codes, 320]; computed where it lies.
        piece: frames at once.

    Returns:
        Codes [frames / 2] int16 on the CPU, from 1 on, and the mean squared distance of their features.
    """
    found = [nearest(features(part.to(centers.device)), centers) for part in torch.split(mel, piece)]
    numbers = torch.cat([which for which, _distance in found])
    return (numbers + 1).short().cpu(), float(torch.cat([distance for _which, distance in found]).mean())


def neighbours(centers: Tensor, count: int = 6) -> Tensor:
    """Codes that sound alike, for noise in training: [codec vocabulary, count]; other ids have themselves."""
    near = torch.cdist(centers, centers).topk(min(count + 1, len(centers)), largest=False).indices[:, 1:] + 1
    table = torch.arange(VOCAB.codec_size, device=centers.device).unsqueeze(1).repeat(1, near.shape[1])
    table[1 : len(centers) + 1] = near
    return table

# SPDX-License-Identifier: Apache-2.0
"""Scenes as pixels and patches, drawn in batches on the device, and what each patch group of them shows.

Normalisation and the order of patches are those of HF's Qwen2-VL processors; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from training.world.scenes import MAX_THINGS, MOVES, Scene
from training.world.words import PAINTS, SHAPES

PATCH = 14
MERGE = 2
CELL = PATCH * MERGE
"""Pixels of the side of what becomes one token."""
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
THING_FIELDS = 14
"""shape, colour, r, g, b, x, y, radius, angle, to_x, to_y, present, stretch, detail."""
_COVERED, _FREE = 0.15, 0.03
"""Part of a cell that a thing covers: from the first on the cell shows it, up to the second it does not."""


@dataclass(frozen=True)
class SceneTable:
    """Scenes as numbers, on any device."""

    things: Tensor
    """[N, K, THING_FIELDS] float32."""
    grounds: Tensor
    """[N, 5] float32: r, g, b, noise, number of the move."""


def scene_numbers(scene: Scene) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A row of a `SceneTable`: [MAX_THINGS, THING_FIELDS] and [5]."""
    things = np.zeros((MAX_THINGS, THING_FIELDS), np.float32)
    for row, thing in zip(things, scene.things, strict=False):
        kind = SHAPES.index(thing.shape), PAINTS.index(thing.color)
        places = thing.x, thing.y, thing.radius, thing.angle, thing.to_x, thing.to_y
        row[:] = (*kind, *thing.rgb, *places, 1, thing.stretch, thing.detail)
    return things, np.array((*scene.ground_rgb, scene.noise, MOVES.index(scene.move)), np.float32)


def scene_table(scenes: Sequence[Scene]) -> SceneTable:
    """The table of some scenes, on the CPU."""
    things, grounds = zip(*(scene_numbers(scene) for scene in scenes), strict=True)
    return SceneTable(torch.from_numpy(np.stack(things)), torch.from_numpy(np.stack(grounds)))


@dataclass(frozen=True)
class Labels:
    """Labels of each token of a scene; -100 where it is not clear. Shapes [B, T / 2, cells] unless said otherwise."""

    shape: Tensor
    """Number of the shape; known where a thing is."""
    color: Tensor
    """0: nothing; then the number of the colour + 1."""
    count: Tensor
    """Number of things in the picture less one; known where a thing is."""
    core: Tensor
    """1 where a thing's centre is: as many tokens as there are things."""
    move: Tensor
    center: Tensor
    """[B, T / 2, cells, 2]: x and y of the thing's centre, -1 where there is none."""


def draw(table: SceneTable, frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw scenes.

    Args:
        table: B scenes of K things.
        frames: equal to each other in a picture.
        height: in pixels.
        width: in pixels.

    Returns:
        Pixels [B, frames, 3, H, W], whole numbers from 0 to 255, and how much of each pixel a thing covers
        [B, K, frames, H, W].
    """
    ground = table.grounds[:, :3].view(-1, 1, 3, 1, 1)
    pixels = ground.expand(-1, frames, -1, height, width)
    covers = _covers(table.things, frames, height, width)
    for thing, cover in zip(table.things.unbind(1), covers.unbind(1), strict=True):
        pixels = torch.lerp(pixels, thing[:, 2:5].view(-1, 1, 3, 1, 1), cover.unsqueeze(2))
    noise = torch.randn_like(pixels) * table.grounds[:, 3].view(-1, 1, 1, 1, 1)
    return (pixels + noise).round().clamp(0, 255), covers


def _covers(things: Tensor, frames: int, height: int, width: int) -> Tensor:
    """How much of each pixel each thing covers: [B, K, frames, H, W] of things [B, K, THING_FIELDS].

    Distances come from a table of the shapes, so that a thing costs few operations.
    """
    flat, device = things.flatten(0, 1), things.device
    shape, detail = flat[:, 0].long(), (flat[:, 13] * _DETAILS).long().clamp(0, _DETAILS - 1)
    x, y, radius, angle, to_x, to_y, present, stretch = (flat[:, i].view(-1, 1, 1, 1) for i in range(5, 13))
    size = (radius * min(height, width)).clamp(min=1e-3)
    time = torch.linspace(0, 1, frames, device=device).view(1, -1, 1, 1)
    column = torch.arange(width, device=device).view(1, 1, 1, -1) + 0.5
    row = torch.arange(height, device=device).view(1, 1, -1, 1) + 0.5
    across = (column - (x + (to_x - x) * time) * width) / size
    down = (row - (y + (to_y - y) * time) * height) / size
    wide = stretch.clamp(min=0.1)
    u = (across * angle.cos() + down * angle.sin()) / wide
    v = (down * angle.cos() - across * angle.sin()) * wide
    grid = torch.stack([u, v], -1).flatten(0, 1) / _REACH
    templates = _templates(device)[shape * _DETAILS + detail].repeat_interleave(frames, 0)
    distance = F.grid_sample(templates, grid, padding_mode="border", align_corners=True).view(u.shape)
    # A picture that was enlarged has soft edges.
    soft = 1 + 2 * (torch.rand(len(things), 1, device=device) - 0.5).clamp(min=0)
    soft = soft.expand(-1, things.shape[1]).reshape(-1, 1, 1, 1)
    cover = (0.5 - distance * (size / soft)).clamp(0, 1) * present
    return cover.view(*things.shape[:2], frames, height, width)


_REACH, _TEMPLATE, _DETAILS = 1.6, 128, 4
"""A template shows a shape of radius 1 from -1.6 to 1.6 in so many points, at so many details."""


@cache
def _templates(device: torch.device) -> Tensor:
    """Distances of all shapes [shapes x details, 1, points, points]."""
    line = torch.linspace(-_REACH, _REACH, _TEMPLATE, device=device)
    v, u = torch.meshgrid(line, line, indexing="ij")
    levels = [torch.tensor((level + 0.5) / _DETAILS, device=device) for level in range(_DETAILS)]
    return torch.stack([DISTANCES[name](u, v, level) for name in SHAPES for level in levels]).unsqueeze(1)


def _square(u: Tensor, v: Tensor, _detail: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 0.85


def _triangle(u: Tensor, v: Tensor, _detail: Tensor) -> Tensor:
    return torch.maximum(v - 0.8, (u.abs() - (v + 1) / 1.8) * 0.87)


def _cross(u: Tensor, v: Tensor, detail: Tensor) -> Tensor:
    small, large = torch.minimum(u.abs(), v.abs()), torch.maximum(u.abs(), v.abs())
    return torch.maximum(small - 0.2 - 0.2 * detail, large - 1)


def _star(u: Tensor, v: Tensor, detail: Tensor) -> Tensor:
    """Five tips on the unit circle, five notches at 0.36 to 0.52."""
    fifth = 2 * math.pi / 5
    turned = (torch.remainder(torch.atan2(u, -v) + fifth / 2, fifth) - fifth / 2).abs()
    far = torch.hypot(u, v)
    p, q = far * turned.cos(), far * turned.sin()
    notch = 0.36 + 0.16 * detail
    notch_p, notch_q = notch * math.cos(fifth / 2), notch * math.sin(fifth / 2)
    length = torch.hypot(notch_q, 1 - notch_p)
    return ((p - 1) * notch_q + q * (1 - notch_p)) / length


DISTANCES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "circle": lambda u, v, _detail: torch.hypot(u, v) - 1,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "diamond": lambda u, v, _detail: (u.abs() + v.abs() - 1) * 0.71,
    "star": _star,
}
"""Distance of a point (u right, v down) from the edge of a shape of radius 1 and some detail; negative inside."""


def patches(pixels: Tensor) -> Tensor:
    """Patches as HF's processors lay them out: those of one token side by side.

    Args:
        pixels: [B, T, 3, H, W] of 0 to 255; T even, sides multiples of 28.

    Returns:
        [B, T / 2, patches, 1176].
    """
    batch, frames, _, height, width = pixels.shape
    mean, std = _normaliser(pixels.device)
    split = ((pixels - mean) / std).view(
        batch, frames // 2, 2, 3, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH
    )
    ordered = split.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9)
    return ordered.reshape(batch, frames // 2, -1, 3 * 2 * PATCH * PATCH)


@cache
def _normaliser(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation [3, 1, 1]. They are made once, since a recorded step may take nothing from the host."""
    mean, std = (torch.tensor(value, device=device).view(3, 1, 1) * 255 for value in (MEAN, STD))
    return mean, std


def labels(table: SceneTable, covers: Tensor) -> Labels:
    """Return the labels of the tokens.

    Args:
        table: B scenes.
        covers: [B, K, T, H, W] of `draw`.
    """
    batch, kinds, frames, height, width = covers.shape
    paired = covers.view(batch * kinds, frames // 2, 2, height, width).mean(2)
    cells = F.avg_pool2d(paired, CELL).view(batch, kinds, frames // 2, -1)
    most, which = cells.max(1)
    shown = most > _COVERED
    unclear = (most > _FREE) & ~shown

    def of_thing(column: int) -> Tensor:
        return table.things[:, :, column].gather(1, which.view(batch, -1)).view(which.shape)

    color = torch.where(unclear, -100, torch.where(shown, of_thing(1).long() + 1, 0))
    time = (torch.arange(frames // 2, device=covers.device) * 2 + 0.5) / max(frames - 1, 1)
    center = torch.stack([torch.lerp(of_thing(a), of_thing(b), time.view(1, -1, 1)) for a, b in ((5, 9), (6, 10))], -1)
    count = (table.things[:, :, 11].sum(1).long() - 1).clamp(min=0).view(-1, 1, 1)
    move = table.grounds[:, 4].long().view(-1, 1, 1)
    return Labels(
        torch.where(shown, of_thing(0).long(), -100),
        color,
        torch.where(shown, count, -100),
        _cores(table, time, height // CELL, width // CELL),
        torch.where(shown, move, -100),
        torch.where(shown.unsqueeze(-1), center, -1.0),
    )


def _cores(table: SceneTable, time: Tensor, height: int, width: int) -> Tensor:
    """Return True where a thing's centre is in a cell, at each of the times [T / 2]: [B, T / 2, height * width]."""
    places = []
    for begin, end, cells in ((5, 9, width), (6, 10, height)):
        place = torch.lerp(table.things[:, :, begin, None], table.things[:, :, end, None], time)
        places.append((place * cells).long().clamp(0, cells - 1))
    cell = (places[1] * width + places[0]).transpose(1, 2)
    present = table.things[:, None, :, 11].expand(cell.shape)
    counts = torch.zeros(*cell.shape[:2], height * width, device=cell.device).scatter_add(2, cell, present)
    return (counts > 0).long()

# SPDX-License-Identifier: Apache-2.0
"""Scenes as pixels and patches: what HF's processors make of the same pixels, and labels of what is shown."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from training import render
from training.sizes import PICTURE_PIXELS
from training.world import scenes
from training.world.scenes import Scene, Thing
from training.world.words import PAINTS, SHAPES


def thing(shape: str, color: str, x: float, y: float, to_x: float | None = None) -> Thing:
    return Thing(shape, color, (250.0, 0.0, 0.0), x, y, 0.15, 0.0, x if to_x is None else to_x, y)


def scene(*things: Thing, layout: str = "one", move: str = "still") -> Scene:
    return Scene(layout, things, "white", (255.0, 255.0, 255.0), 0.0, move)


@pytest.mark.parametrize(("height", "width"), [(168, 168), (140, 168), (196, 112)])
def test_picture_patches_are_those_of_the_processor(height: int, width: int) -> None:
    from transformers import Qwen2VLImageProcessor

    table = render.scene_table([scenes.picture(random.Random(seed)) for seed in range(3)])
    pixels, _ = render.draw(table, 1, height, width)
    pictures = [Image.fromarray(part[0].permute(1, 2, 0).byte().numpy()) for part in pixels]
    low, high = PICTURE_PIXELS
    processor = Qwen2VLImageProcessor(size={"shortest_edge": low, "longest_edge": high})
    wanted = processor(images=pictures, return_tensors="pt")
    got = render.patches(pixels.repeat_interleave(2, 1))
    assert wanted["image_grid_thw"].tolist() == [[1, height // 14, width // 14]] * 3
    torch.testing.assert_close(got.reshape(-1, 1176), wanted["pixel_values"], atol=1e-4, rtol=1e-4)


def test_video_patches_are_those_of_the_processor() -> None:
    from transformers import Qwen2VLVideoProcessor

    table = render.scene_table([scenes.video(random.Random(1))])
    pixels, _ = render.draw(table, 4, 280, 392)
    size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
    frames = pixels[0].permute(0, 2, 3, 1).byte().numpy()
    wanted = Qwen2VLVideoProcessor(size=size, do_sample_frames=False)(videos=[frames], return_tensors="pt")
    assert wanted["video_grid_thw"].tolist() == [[2, 20, 28]]
    got = render.patches(pixels).reshape(-1, 1176)
    torch.testing.assert_close(got, wanted["pixel_values_videos"], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_drawn_and_labelled_where_it_is(shape: str) -> None:
    table = render.scene_table([scene(thing(shape, "red", 0.75, 0.25))])
    pixels, covers = render.draw(table, 2, 168, 168)
    red = pixels[0, 0, 1] < 100
    rows, columns = np.nonzero(red.numpy())
    assert abs(columns.mean() / 168 - 0.75) < 0.03
    assert abs(rows.mean() / 168 - 0.25) < 0.05
    found = render.labels(table, covers)
    shown = found.shape[0, 0].view(6, 6)
    assert shown[1, 4] == SHAPES.index(shape)
    assert shown[5, 0] == -100
    assert found.color[0, 0].view(6, 6)[5, 0] == 0
    assert found.color[0, 0].view(6, 6)[1, 4] == PAINTS.index("red") + 1
    torch.testing.assert_close(found.center[0, 0].view(6, 6, 2)[1, 4], torch.tensor([0.75, 0.25]))


def test_a_moving_thing_is_elsewhere_in_later_frames() -> None:
    moving = scene(thing("circle", "red", 0.2, 0.5, to_x=0.8), layout="video", move="right")
    table = render.scene_table([moving])
    pixels, covers = render.draw(table, 4, 280, 392)
    centers = [np.nonzero((frame[1] < 100).numpy())[1].mean() / 392 for frame in pixels[0]]
    assert np.allclose(centers, [0.2, 0.4, 0.6, 0.8], atol=0.01)
    found = render.labels(table, covers)
    assert set(found.move[0].unique().tolist()) == {-100, scenes.MOVES.index("right")}
    assert set(found.count.unique().tolist()) == {-100, 0}
    assert found.core.nonzero().tolist() == [[0, 0, 5 * 14 + 4], [0, 1, 5 * 14 + 9]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_thing_has_one_core(count: int) -> None:
    spots = [(0.2, 0.2), (0.8, 0.3), (0.5, 0.8)][:count]
    table = render.scene_table([scene(*(thing("square", "red", *spot) for spot in spots), layout="many")])
    _, covers = render.draw(table, 2, 168, 168)
    core = render.labels(table, covers).core[0, 0].view(6, 6)
    assert core.sum() == count
    assert all(core[int(y * 6), int(x * 6)] for x, y in spots)

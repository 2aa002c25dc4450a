# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of a task file with Pillow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from .tasks import COLORS, PictureTask, Thing

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SIDE = 224
"""Width and height of a drawn picture in pixels."""
_ARM = 0.3
"""Half the width of the arms of a cross, as a fraction of half its height."""


def draw(task: PictureTask) -> bytes:
    """Return a PNG of the things of a task, drawn in their order."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIDE, SIDE), COLORS[task.ground])
    canvas = ImageDraw.Draw(picture)
    for thing in task.things:
        _draw(canvas, thing)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _draw(canvas: ImageDraw, thing: Thing) -> None:
    x, y, r = thing.at[0] * SIDE, thing.at[1] * SIDE, thing.size * SIDE / 2
    fill = COLORS[thing.color]
    match thing.shape:
        case "circle":
            canvas.ellipse((x - r, y - r, x + r, y + r), fill)
        case "square":
            canvas.rectangle((x - r, y - r, x + r, y + r), fill)
        case "triangle":
            canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill)
        case "diamond":
            canvas.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill)
        case "cross":
            canvas.rectangle((x - r, y - _ARM * r, x + r, y + _ARM * r), fill)
            canvas.rectangle((x - _ARM * r, y - r, x + _ARM * r, y + r), fill)

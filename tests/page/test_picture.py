# SPDX-License-Identifier: Apache-2.0
"""The picture of the page in the README: what it shows is looked for, and `PAGE_PICTURE=FILE` keeps it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from browser import visit
from client_fakes import INFO, FakeTriton, chunk, final, serve_grpc
from gateway_fakes import run_gateway
from media_samples import tone

VARIABLE = "PAGE_PICTURE"
WIDTH, HEIGHT = 900, 640
TEXT = (
    "A small harbour at dusk: two fishing boats lie at a stone pier, and behind them the sun goes down over calm "
    "water. The lights of the village are already lit. It looks like the end of a warm day."
)
SPEECH = tone(10.0, 24000, hertz=220)


def harbour() -> bytes:
    """A sunset over water with two boats, drawn: a PNG of 600 x 400."""
    rows = np.linspace(0, 1, 220)[:, None, None]
    sky = (1 - rows) * np.array([255, 170, 120]) + rows * np.array([200, 130, 160])
    pixels = np.empty((400, 600, 3), np.uint8)
    pixels[:220], pixels[220:350], pixels[350:] = sky, (38, 66, 96), (60, 56, 54)
    image = Image.fromarray(pixels)
    draw = ImageDraw.Draw(image)
    draw.ellipse((255, 140, 345, 230), fill=(255, 222, 150))
    draw.rectangle((0, 220, 600, 240), fill=(38, 66, 96))
    for line in range(7):
        draw.line((200 - 9 * (line % 3), 245 + 15 * line, 400 + 7 * (line % 4), 245 + 15 * line), (235, 180, 140), 3)
    for left, deck in ((110, 310), (410, 325)):
        draw.polygon(
            ((left, deck), (left + 110, deck), (left + 90, deck + 32), (left + 18, deck + 32)), fill=(20, 26, 32)
        )
        draw.line((left + 50, deck, left + 50, deck - 120), (20, 26, 32), 5)
        draw.polygon(((left + 56, deck - 112), (left + 56, deck - 30), (left + 100, deck - 30)), fill=(240, 230, 215))
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def spoken(_request: Any, _context: Any) -> Iterator[Any]:
    for word in TEXT.split(" "):
        yield chunk(text=f"{word} ")
    for part in np.array_split(SPEECH, 13):
        yield chunk(audio=part)
    yield chunk(info=INFO)
    yield final()


def test_the_page_while_a_reply_is_spoken(browser: Any) -> None:
    size = {"width": WIDTH, "height": HEIGHT}
    with (
        serve_grpc(FakeTriton(script=spoken)) as triton,
        run_gateway(triton.url) as gateway,
        visit(browser, gateway.base, viewport=size) as at,
    ):
        at.state("ready")
        at.page.set_input_files("#files", [{"name": "a.png", "mimeType": "image/png", "buffer": harbour()}])
        at.write("What do you see here?")
        at.state("speaking")
        at.page.wait_for_selector(".reply .heard:text('the sun')")
        picture = at.page.screenshot()
        assert at.text(".reply .said") == f"{TEXT} "
        assert list(at.times()) == ["First text", "First audio", "Speech"]
    assert Image.open(io.BytesIO(picture)).size == (WIDTH, HEIGHT)
    if path := os.environ.get(VARIABLE):
        Path(path).write_bytes(picture)

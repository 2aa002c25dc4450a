# SPDX-License-Identifier: Apache-2.0
"""The picture of the page in docs/using.md: what it shows is looked for, and `PAGE_PICTURE=FILE` keeps it.

`PAGE_SERVER` is the gRPC address of a server of the default checkpoint; without it, words and sound are scripted.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from browser import visit
from client_fakes import INFO, FakeTriton, chunk, final, serve_grpc
from gateway_fakes import run_gateway
from media_samples import tone

VARIABLE, SERVER = "PAGE_PICTURE", "PAGE_SERVER"
WIDTH, HEIGHT = 900, 770
PICTURE = Path(__file__).parents[2] / "examples" / "red_circle.png"
SAID = {
    "What do you see?": "I see a red circle on the left.",
    "How do you make tea?": "First, cook some water. Then put the tea into a cup. Pour the water over it and wait four "
    "minutes.",
}
"""What the checkpoint answers."""
SECONDS_A_WORD = 0.3


@contextmanager
def server() -> Iterator[str]:
    """The address of the server that `SERVER` names, or of one that says the same."""
    if url := os.environ.get(SERVER):
        yield url
        return
    replies = iter(SAID.values())
    with serve_grpc(FakeTriton(script=lambda *_: spoken(next(replies)))) as triton:
        yield triton.url


def spoken(text: str) -> Iterator[Any]:
    words = text.split(" ")
    for word in words:
        yield chunk(text=word if word is words[-1] else f"{word} ")
    for part in np.array_split(tone(SECONDS_A_WORD * len(words), 24000, hertz=220), 13):
        yield chunk(audio=part)
    yield chunk(info=INFO)
    yield final()


def test_the_page_while_a_reply_is_spoken(browser: Any) -> None:
    size = {"width": WIDTH, "height": HEIGHT}
    with (
        server() as url,
        run_gateway(url) as gateway,
        visit(browser, gateway.base, viewport=size, color_scheme="light") as at,
    ):
        seen, asked = SAID
        at.state("ready")
        at.page.set_input_files("#files", str(PICTURE))
        at.write(seen)
        at.state("speaking")
        at.state("ready")
        at.write(asked)
        at.state("speaking")
        at.page.wait_for_selector(".reply .said :text('four minutes')")
        picture = at.page.screenshot()
        assert at.page.locator(".reply .said p").all_text_contents() == list(SAID.values())
    assert Image.open(io.BytesIO(picture)).size == (WIDTH, HEIGHT)
    if path := os.environ.get(VARIABLE):
        Path(path).write_bytes(picture)

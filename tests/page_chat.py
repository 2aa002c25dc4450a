# SPDX-License-Identifier: Apache-2.0
"""What a scripted Triton server answers the gateway's page, and what the page asked it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from browser import Visit
from client_fakes import INFO, FakeTriton, Samples, chunk, failure, final, inputs_of, parameters_of
from media_samples import tone

TEXT = "The sea is deep and wide. It has been sailed, feared and loved as long as there are stories."
RATE = 24000
SPEECH = tone(4.0, RATE, hertz=220)


def story(speech: Samples = SPEECH, text: str = TEXT) -> Any:
    """A reply: all text first, then its speech in chunks of uneven length."""

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        for word in text.split(" "):
            yield chunk(text=f"{word} ")
        for part in np.array_split(speech, 13):
            yield chunk(audio=part)
        yield chunk(info=INFO)
        yield final()

    return script


def refusal(_request: Any, _context: Any) -> Iterator[Any]:
    place = "messages[0].content[0].image_url.url"
    yield failure(f"{place}: 2000000 characters of base64, the limit is 1048576 bytes [omni:too_large;stage=thinker]")


def asked(triton: FakeTriton) -> list[Any]:
    """Requests that reached the Triton server, but for those that are computed ahead or ask for transcripts."""
    return [request for request in triton.requests if "priority" not in parameters_of(request)]


def messages(triton: FakeTriton) -> list[dict[str, Any]]:
    """The chat of the last one, without the placeholders of media."""
    found: list[dict[str, Any]] = json.loads(inputs_of(asked(triton)[-1])["messages"][0])
    return found


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def choose(at: Visit, **settings: Any) -> None:
    """Change settings, by the ids of their controls."""
    at.page.click("#options")
    for name, value in settings.items():
        if isinstance(value, bool):
            at.page.set_checked(f"#{name}", value)
        elif name == "voice":
            at.page.select_option("#voice", value)
        else:
            at.page.fill(f"#{name}", value)
    at.page.click("#done")


def held(at: Visit, address: str) -> list[Any]:
    """The page's requests of this address from now on, each of which waits until the test continues it."""
    routes: list[Any] = []

    def hold(route: Any) -> None:
        routes.append(route)

    at.page.route(address, hold)
    return routes


def file(name: str, kind: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}

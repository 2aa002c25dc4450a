# SPDX-License-Identifier: Apache-2.0
"""The page in each of its states, on a desktop and on a phone held both ways, light and dark.

`PAGE_PICTURES=FOLDER` keeps a picture of each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from browser import PHONE, ROOT, Visit, launch, visit
from client_fakes import INFO, FakeTriton, chunk, tell
from gateway_fakes import MODEL, TIMEOUT_S, RunningGateway
from media_samples import audio_file
from page_chat import SPEECH, TEXT, file, held, refusal
from triton_omni_gateway.realtime import detection

FOLDER = "PAGE_PICTURES"
PICTURE = ROOT / "examples" / "red_circle.png"
DEVICES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "desktop": ({}, [(1280, 800)]),
    "phone": ({**PHONE, "device_scale_factor": 2}, [(390, 844), (844, 390)]),
}
"""Options of the browser session, and sizes in pixels."""
ALWAYS = ["#talk", "#state", "#text", "#send"]
CONTROLS = {
    "settings": ["#instructions", "#done"],
    "attached": [*ALWAYS, "#attachments button"],
    "writing": [*ALWAYS, "#stop"],
    "speaking": [*ALWAYS, "#stop"],
    "error": [*ALWAYS, "#retry", "#dismiss"],
    "locked": [*ALWAYS, "#key", "#key-form button"],
}
"""By state, what must be within reach where it is more than `ALWAYS`."""
OUT_OF_REACH = """([selectors, width, height]) => selectors.filter((selector) => {
  const { left, top, right, bottom } = document.querySelector(selector).getBoundingClientRect();
  const found = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  return left < 0 || top < 0 || right > width || bottom > height || !found?.closest(selector);
})"""
"""The selectors of elements that leave the window or lie under others."""
WIDEST = "Math.max(...[document.documentElement, document.querySelector('#log')].map((found) => found.scrollWidth))"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def at(browser: Any, gateway: RunningGateway, device: str, tmp_path: Path) -> Iterator[Visit]:
    """The page on this device, whose microphone hears nothing."""
    silence = tmp_path / "silence.wav"
    soundfile.write(silence, np.zeros(16000, np.float32), 16000)
    with (
        launch(browser.browser_type, tmp_path, silence) as quiet,
        visit(quiet, gateway.base, **DEVICES[device][0]) as found,
    ):
        yield found


class Reply:
    """A reply whose text and whose speech come when the test says so, and which never ends."""

    def __init__(self, triton: FakeTriton) -> None:
        self.writes, self.speaks = threading.Event(), threading.Event()
        self._triton = triton

    def __call__(self, _request: Any, _context: Any) -> Iterator[Any]:
        assert self.writes.wait(TIMEOUT_S)
        yield chunk(text=TEXT)
        assert self.speaks.wait(TIMEOUT_S)
        yield chunk(audio=SPEECH)
        self._triton.cancelled.wait(TIMEOUT_S)
        yield chunk(info=INFO)


def opened(at: Visit) -> Iterator[str]:
    offers = held(at, "**/v1/models")
    at.page.reload()
    at.state("connecting")
    yield "connecting"
    for route in offers:
        route.continue_()
    at.page.unroute("**/v1/models")
    at.state("ready")
    yield "ready"
    at.page.click("#options")
    yield "settings"
    at.page.click("#done")


def asked(at: Visit, triton: FakeTriton) -> Iterator[str]:
    triton.script = reply = Reply(triton)
    sound = file(f"{'long ' * 8}.wav", "audio/wav", audio_file("wav"))
    at.page.set_input_files("#files", [file(PICTURE.name, "image/png", PICTURE.read_bytes()), sound])
    at.page.locator("#attachments li").nth(1).wait_for()
    at.page.fill("#text", "What do you see?")
    yield "attached"
    at.page.keyboard.press("Enter")
    at.state("thinking")
    yield "thinking"
    reply.writes.set()
    at.state("writing")
    at.page.wait_for_selector(".reply .said :text('stories')")
    yield "writing"
    reply.speaks.set()
    at.state("speaking")
    at.wait_until("window.heard() > 1")
    yield "speaking"
    at.page.click("#stop")
    at.page.wait_for_selector(".reply .unheard")
    yield "stopped"
    triton.script = refusal
    at.write("And this?")
    at.page.wait_for_selector("#error:not([hidden])")
    yield "error"


def heard(at: Visit, patch: pytest.MonkeyPatch) -> Iterator[str]:
    talk = at.page.get_by_role("button", name="Talk")
    talk.click()
    at.state("listening")
    yield "listening"
    talk.click()
    patch.setattr(detection, "is_installed", lambda: False)
    at.page.click("#fresh")
    talk.click()
    at.state("hearing")
    yield "hearing"
    talk.click()


def refused(at: Visit, triton: FakeTriton) -> Iterator[str]:
    triton.is_ready = False
    at.page.reload()
    at.state("away")
    yield "away"
    told = {"error": {"message": "Incorrect API key provided."}}
    at.page.route("**/v1/models", lambda route: route.fulfill(status=401, json=told))
    triton.is_ready = True
    at.state("locked")
    yield "locked"


def look(at: Visit, name: str, sizes: list[tuple[int, int]]) -> None:
    """What is true of every state; a picture of it."""
    for width, height in sizes:
        at.page.set_viewport_size({"width": width, "height": height})
        for colours in ("light", "dark"):
            at.page.emulate_media(color_scheme=colours, reduced_motion="reduce")
            where = f"{name}-{width}x{height}-{colours}"
            assert at.page.evaluate(WIDEST) <= width, where
            controls = CONTROLS.get(name, ALWAYS)
            assert (where, at.page.evaluate(OUT_OF_REACH, [controls, width, height])) == (where, [])
            if folder := os.environ.get(FOLDER):
                at.page.screenshot(path=Path(folder) / f"{where}.png")


def test_every_state_has_its_controls_within_reach(
    at: Visit, triton: FakeTriton, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(triton.configs[MODEL], voices=["Chelsie", "Ethan"])
    for states in (opened(at), asked(at, triton), heard(at, monkeypatch), refused(at, triton)):
        for name in states:
            look(at, name, DEVICES[device][1])

# SPDX-License-Identifier: Apache-2.0
"""The page for people who read, see or reach it otherwise: axe finds nothing, and the keyboard reaches all."""

from __future__ import annotations

from typing import Any

import pytest

from browser import PHONE, Visit, audit, visit
from client_fakes import FakeTriton
from gateway_fakes import RunningGateway
from media_samples import audio_file, image_file, video_file
from page_chat import file, refusal

UPRIGHT = {**PHONE, "viewport": {"width": 360, "height": 640}}
ON_ITS_SIDE = {**PHONE, "viewport": {"width": 844, "height": 390}}
TABLET = {**PHONE, "viewport": {"width": 1024, "height": 768}}
DARK = {"color_scheme": "dark"}
ROOM_AROUND_THE_RING = """() => {
  const [talk, camera, state] = ["#talk", "#camera", "#state"].map((name) => document.querySelector(name));
  state.dataset.state = "hearing";
  camera.ariaPressed = "true";
  talk.style.transition = "none";
  talk.style.setProperty("--level", "1");
  const ring = Math.max(...getComputedStyle(talk).boxShadow.match(/[0-9.]+px/g).map(parseFloat));
  const [orb, seen, told] = [talk, camera, state].map((found) => found.getBoundingClientRect());
  return [orb.left - ring - seen.right, told.top - ring - orb.bottom];
}"""
"""Pixels from the ring of the loudest voice to the camera's picture and to the line of the state."""


@pytest.mark.parametrize(
    "options",
    [{}, DARK, UPRIGHT, {**UPRIGHT, **DARK}, ON_ITS_SIDE, {**ON_ITS_SIDE, **DARK}],
    ids=["light", "dark", "phone", "phone-dark", "landscape", "landscape-dark"],
)
def test_the_page_is_accessible(
    browser: Any, triton: FakeTriton, gateway: RunningGateway, options: dict[str, Any]
) -> None:
    with visit(browser, gateway.base, reduced_motion="reduce", **options) as at:
        at.state("ready")
        empty = audit(at)
        at.page.set_input_files("#files", [file("a.png", "image/png", image_file("png")),
                                           file("c.webm", "video/webm", video_file("webm", seconds=0.5))])  # fmt: skip
        at.write("What is the sea?")
        at.state("speaking")
        speaking = audit(at)
        triton.script = refusal
        at.page.set_input_files("#files", [file(f"{'long' * 20}.wav", "audio/wav", audio_file("wav"))])
        at.page.wait_for_selector("#attachments li")
        at.write("And this?")
        at.page.wait_for_selector("#error:not([hidden])")
        at.page.click("#options")
        assert audit(at) == []
        at.page.click("#done")
        assert [empty, speaking, audit(at)] == [[], [], []]
        width = at.page.viewport_size["width"]
        assert at.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("options", [UPRIGHT, ON_ITS_SIDE, TABLET], ids=["upright", "on its side", "tablet"])
def test_fingers_are_told_of_no_keys_and_their_keyboard_stays_away(
    browser: Any, triton: FakeTriton, gateway: RunningGateway, options: dict[str, Any]
) -> None:
    triton.script = triton.endless
    with visit(browser, gateway.base, **options) as at:
        at.state("ready")
        assert not at.page.is_visible("#keys")
        tapped = "getComputedStyle(document.querySelector('#talk')).webkitTapHighlightColor"
        assert at.page.evaluate(tapped) == "rgba(0, 0, 0, 0)"  # else a square around what is round
        at.write("What is the sea?")
        at.state("speaking")
        at.page.tap("#stop")
        at.state("ready")
        assert at.page.evaluate("document.activeElement.id") == "attach"


def test_a_notch_hides_nothing(browser: Any, gateway: RunningGateway) -> None:
    with visit(browser, gateway.base, **ON_ITS_SIDE) as at:
        at.state("ready")
        insets = {"left": 47, "leftMax": 47, "right": 47, "rightMax": 47}
        at.page.context.new_cdp_session(at.page).send("Emulation.setSafeAreaInsetsOverride", {"insets": insets})
        at.wait_until("document.querySelector('.mark').getBoundingClientRect().left >= 47")
        for shown in ("header", "#log", "#composer", "#stage"):
            box = at.page.locator(shown).bounding_box()
            assert box["x"] >= 47, shown
            assert box["x"] + box["width"] <= 844 - 47, shown


@pytest.mark.parametrize("options", [{}, UPRIGHT, ON_ITS_SIDE], ids=["desktop", "phone", "landscape"])
def test_the_ring_of_a_loud_voice_covers_nothing(
    browser: Any, gateway: RunningGateway, options: dict[str, Any]
) -> None:
    with visit(browser, gateway.base, **options) as at:
        at.state("ready")
        beside, below = at.page.evaluate(ROOM_AROUND_THE_RING)
        assert (beside > 0, below > 0) == (True, True), (beside, below)


def test_everything_is_reached_by_the_keyboard_in_order_and_its_focus_seen(at: Visit) -> None:
    assert at.page.is_visible("#keys")
    at.page.fill("#text", "x")
    at.page.focus("#log")
    reached = []
    for _ in range(8):
        at.page.keyboard.press("Tab")
        reached.append(at.page.evaluate("document.activeElement.id"))
        ringed = "#composer" if reached[-1] == "text" else ":focus"
        assert at.page.evaluate(f"getComputedStyle(document.querySelector('{ringed}')).outlineStyle") == "solid"
    assert reached == ["", "", "", "camera", "talk", "attach", "text", "send"]

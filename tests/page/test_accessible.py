# SPDX-License-Identifier: Apache-2.0
"""The page for people who read, see or reach it otherwise: axe finds nothing, and the keyboard reaches all."""

from __future__ import annotations

from typing import Any

import pytest

from browser import Visit, audit, visit
from client_fakes import FakeTriton
from gateway_fakes import RunningGateway
from media_samples import audio_file, image_file, video_file
from page_chat import file, refusal

PHONE = {"width": 360, "height": 640}


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, {"viewport": PHONE}], ids=["light", "dark", "phone"])
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
        width, inner = at.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= inner


def test_everything_is_reached_by_the_keyboard_in_order_and_its_focus_seen(at: Visit) -> None:
    at.page.fill("#text", "x")
    at.page.focus("#log")
    reached = []
    for _ in range(8):
        at.page.keyboard.press("Tab")
        reached.append(at.page.evaluate("document.activeElement.id"))
        ringed = "#composer" if reached[-1] == "text" else ":focus"
        assert at.page.evaluate(f"getComputedStyle(document.querySelector('{ringed}')).outlineStyle") == "solid"
    assert reached == ["", "", "", "camera", "talk", "attach", "text", "send"]

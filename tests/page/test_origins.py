# SPDX-License-Identifier: Apache-2.0
"""The page at an address that is no secure origin, where browsers give it neither microphone nor camera."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browser import Visit, launch, visit
from client_fakes import FakeTriton
from gateway_fakes import RunningGateway
from page_chat import messages, said

HEADER = "The Cross-Origin-Opener-Policy header has been ignored"
"""Chromium's remark on a page over HTTP."""


@contextmanager
def visit_at(host: str, browser: Any, gateway: RunningGateway, folder: Path, **options: Any) -> Iterator[Visit]:
    """The page as another machine has it, which knows the gateway by this host."""
    port = gateway.base.rpartition(":")[2]
    with (
        launch(browser.browser_type, folder, host=host) as away,
        visit(away, f"http://{host}:{port}", **options) as found,
    ):
        yield found
        found.problems = [problem for problem in found.problems if not problem.startswith(HEADER)]


@pytest.mark.parametrize("size", [(1280, 800), (390, 844), (844, 390)], ids=["desktop", "upright", "on its side"])
def test_a_page_over_http_tells_why_it_has_no_microphone_and_can_be_written_to(
    browser: Any, triton: FakeTriton, gateway: RunningGateway, tmp_path: Path, size: tuple[int, int]
) -> None:
    width, height = size
    with visit_at("10.1.2.3", browser, gateway, tmp_path, viewport={"width": width, "height": height}) as at:
        at.state("ready")
        assert at.page.evaluate("[isSecureContext, typeof navigator.mediaDevices]") == [False, "undefined"]
        assert at.page.get_by_text("pages over HTTPS and to localhost. Open this page there").is_visible()
        assert (at.text("#state"), at.page.is_enabled("#talk"), at.page.is_visible("#camera")) == (
            "Ready",
            False,
            False,
        )
        log, note, composer = [at.page.locator(f"#{found}").bounding_box()["width"]
                               for found in ("log", "no-microphone", "composer")]  # fmt: skip
        assert (log > width / 2, note <= composer) == (True, True)
        at.write("What is the sea?")
        at.state("speaking")
        assert messages(triton) == [said("What is the sea?")]
        at.page.click("#stop")
        at.state("ready")


def test_a_name_that_the_gateway_does_not_answer_to_is_told_with_the_cure(
    browser: Any, gateway: RunningGateway, tmp_path: Path
) -> None:
    with visit_at("page.example", browser, gateway, tmp_path) as at:
        alert = at.page.get_by_role("alert")
        alert.get_by_text("answers to an IP address, localhost and the names given by --allow-host.").wait_for()
        at.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "qwen2_5_omni"}]}))
        alert.get_by_role("button", name="Try again").click()
        at.state("ready")
        assert not alert.is_visible()

# SPDX-License-Identifier: Apache-2.0
"""The page in a browser while the server behind its gateway is away: it says so, and recovers by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import Visit, audit, visit
from client_fakes import FakeTriton, failure, serve_grpc, tell
from gateway_fakes import MODEL, RunningGateway

UNLOADED = "Request for unknown model: 'qwen2_5_omni' is not found"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        tell(fake.configs[MODEL], voices=["Ethan", "Chelsie"])
        yield fake


def can_send(at: Visit) -> bool:
    return bool(at.page.is_enabled("#send"))


def test_a_server_that_leaves_and_comes_back_is_told_and_keeps_the_draft(
    browser: Any, triton: FakeTriton, gateway: RunningGateway
) -> None:
    with visit(browser, gateway.base) as at:
        at.state("ready")
        at.page.fill("#text", "What is the sea?")
        at.page.click("#options")
        at.page.select_option("#voice", "Ethan")
        at.page.click("#done")
        assert can_send(at)
        triton.is_ready = False
        at.state("away")
        assert at.text("#state") == "Server away"
        at.page.focus("#text")
        at.page.keyboard.press("Enter")
        assert (can_send(at), at.page.input_value("#text"), triton.requests) == (False, "What is the sea?", [])
        at.page.focus("#options")
        triton.is_ready = True
        at.state("ready")
        assert (can_send(at), at.page.input_value("#voice")) == (True, "Ethan")
        assert at.page.evaluate("document.activeElement.id") == "options"


def test_a_page_opened_while_the_server_is_away_becomes_ready(
    browser: Any, triton: FakeTriton, gateway: RunningGateway
) -> None:
    triton.is_ready = False
    with visit(browser, gateway.base) as at:
        at.state("away")
        at.page.click("#fresh", force=True)
        at.page.fill("#text", "hello")
        assert not can_send(at)
        triton.is_ready = True
        at.state("ready")
        assert can_send(at)


def test_a_question_that_finds_the_server_away_is_given_back(
    browser: Any, triton: FakeTriton, gateway: RunningGateway
) -> None:
    with visit(browser, gateway.base) as at:
        at.state("ready")
        triton.script = lambda *_: iter([failure(UNLOADED)])
        triton.is_ready = False
        at.write("What is the sea?")
        at.page.get_by_role("alert").get_by_text("No triton-omni server takes requests now").wait_for()
        at.state("away")
        assert (can_send(at), at.page.input_value("#text")) == (False, "What is the sea?")
        triton.is_ready = True
        at.state("ready")
        assert can_send(at)
        assert not at.page.is_visible("#error")


def test_a_gateway_that_cannot_be_reached_is_away_too(browser: Any, gateway: RunningGateway) -> None:
    with visit(browser, gateway.base) as at:
        at.state("ready")
        at.page.route("**/health/ready", lambda route: route.abort("connectionrefused"))
        at.state("away")
        at.page.unroute("**/health/ready")
        at.state("ready")
        at.problems = [found for found in at.problems if "ERR_CONNECTION_REFUSED" not in found]


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_all_can_read_that_the_server_is_away(
    browser: Any, triton: FakeTriton, gateway: RunningGateway, colours: str
) -> None:
    triton.is_ready = False
    triton.script = lambda *_: iter([failure(UNLOADED)])
    with visit(browser, gateway.base, color_scheme=colours) as at:
        at.state("away")
        assert audit(at) == []

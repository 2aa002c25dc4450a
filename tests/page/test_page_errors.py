# SPDX-License-Identifier: Apache-2.0
"""What the page tells of a reply that fails, a session that ends and a key that is missing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from browser import Visit, visit
from client_fakes import FakeTriton, chunk, failure
from gateway_fakes import TIMEOUT_S, run_gateway
from page_chat import RATE, SPEECH, messages, refusal, said, story
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.realtime import endpoint
from triton_omni_gateway.realtime.limits import RealtimeLimits


def test_a_refused_question_is_given_back_and_leaves_nothing(triton: FakeTriton, at: Visit) -> None:
    triton.script = refusal
    at.write("And this?")
    alert = at.page.get_by_role("alert")
    alert.get_by_text("2000000 characters of base64, the limit is 1048576 bytes").wait_for()
    at.state("ready")
    assert at.page.locator(".question, .reply").count() == 0
    assert at.page.input_value("#text") == "And this?"
    triton.script = story()
    alert.get_by_role("button", name="Try again").click()
    at.state("speaking")
    assert messages(triton) == [said("And this?")]
    assert not alert.is_visible()


def test_an_error_in_the_middle_takes_the_turn_back(triton: FakeTriton, at: Visit) -> None:
    shown = threading.Event()

    def breaks(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="The sea", audio=SPEECH)
        assert shown.wait(TIMEOUT_S)
        yield failure("in ensemble 'qwen2_5_omni', the talker's engine has failed [omni:internal;stage=talker]")

    triton.script = breaks
    at.write("hello")
    at.page.wait_for_selector(".reply .said :text('The sea')")
    shown.set()
    at.page.get_by_role("alert").get_by_text("the talker's engine has failed").wait_for()
    assert at.page.locator(".reply").count() == 0
    triton.script = story()
    at.page.get_by_role("alert").get_by_role("button", name="Dismiss").click()
    at.state("ready")
    at.page.keyboard.press("Enter")
    at.state("speaking")
    assert messages(triton) == [said("hello")]


def test_a_gateway_that_is_gone_is_told(at: Visit) -> None:
    at.page.route("**/v1/realtime/client_secrets", lambda route: route.abort("connectionrefused"))
    at.write("hello")
    at.page.get_by_role("alert").get_by_text("The gateway cannot be reached.").wait_for()
    assert at.page.input_value("#text") == "hello"
    at.problems = [found for found in at.problems if "ERR_CONNECTION_REFUSED" not in found]


class Sessions:
    """In the place of `asyncio`, for the gateway's sessions: the first is over when the test says so, others never."""

    def __init__(self) -> None:
        self.first_is_over = threading.Event()
        self._ends = iter([self.first_is_over])

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def wait(self, tasks: Any, *, timeout: float, return_when: str) -> None:
        end, done = next(self._ends, threading.Event()), set[Any]()
        while not (done or end.is_set()):
            done, _ = await asyncio.wait(tasks, timeout=min(timeout, 0.05), return_when=return_when)


def test_a_session_that_broke_is_followed_by_one_that_knows_what_was_said(
    triton: FakeTriton, at: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions()
    monkeypatch.setattr(endpoint, "asyncio", sessions)
    triton.script = story(SPEECH[:RATE], text="The sea.")
    at.write("one")
    at.ended(1)
    sessions.first_is_over.set()
    at.page.get_by_role("alert").get_by_text("The session has lasted").wait_for()
    at.state("ready")
    at.write("two")
    at.ended(2)
    assert messages(triton) == [said("one"), {"role": "assistant", "content": "The sea. "}, said("two")]


def test_no_more_sessions_than_there_are_is_told(browser: Any, triton: FakeTriton) -> None:
    limits = RealtimeLimits(max_sessions=0)
    with run_gateway(triton.url, realtime=limits) as gateway, visit(browser, gateway.base) as at:
        at.state("ready")
        at.write("hello")
        at.page.get_by_role("alert").get_by_text("The gateway takes no further conversation now.").wait_for()
        at.problems = [found for found in at.problems if "WebSocket connection" not in found]


def test_a_key_is_asked_for_only_where_it_is_needed(browser: Any, triton: FakeTriton) -> None:
    with run_gateway(triton.url, keys=ApiKeys(["ключ-schlüssel"])) as gateway, visit(browser, gateway.base) as at:
        at.state("locked")
        assert not at.page.is_visible("#error")
        at.page.get_by_label("This gateway asks for an API key").fill("wrong")
        at.page.get_by_role("button", name="Use key").click()
        at.page.get_by_role("alert").get_by_text("Incorrect API key provided").wait_for()
        assert not at.page.is_visible("#retry")
        at.page.get_by_label("This gateway asks for an API key").fill("ключ-schlüssel")
        at.page.keyboard.press("Enter")
        at.state("ready")
        assert not at.page.is_visible("#key-form")
        at.write("hello")
        at.state("speaking")
        assert at.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert at.page.input_value("#key") == ""
        at.page.reload()
        at.state("ready")

# SPDX-License-Identifier: Apache-2.0
"""The control to talk: presses while a session or the microphone opens, and a microphone that leaves."""

from __future__ import annotations

import time

import pytest

from browser import Visit
from client_fakes import FakeTriton
from gateway_fakes import TIMEOUT_S
from media_samples import image_file
from page_chat import asked, held, messages
from triton_omni_gateway.realtime import detection

PERMISSION = """() => {
  window.asked = 0;
  window.streams = [];
  const permission = new Promise((resolve) => (window.permit = resolve));
  const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
  navigator.mediaDevices.getUserMedia = async (wanted) => {
    window.asked += 1;
    await permission;
    const stream = await open(wanted);
    window.streams.push(stream);
    return stream;
  };
}"""
"""Notes the microphones that the page asks for; it has none of them before the test calls `permit`."""
ALL_CAME = "window.streams.length === window.asked"
LIVE = "window.streams.flatMap((stream) => stream.getTracks()).filter(({ readyState }) => readyState === 'live').length"


@pytest.fixture(autouse=True)
def no_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions do not find turns: a press begins, and a press ends."""
    monkeypatch.setattr(detection, "is_installed", lambda: False)


def press(at: Visit, times: int = 1) -> None:
    for _ in range(times):
        at.page.get_by_role("button", name="Talk").click()


def sessions(at: Visit) -> int:
    """Wait until a session was told its settings; return the number of sessions."""
    deadline = time.monotonic() + TIMEOUT_S
    while not at.told("session.updated"):
        assert time.monotonic() < deadline, at.events
        at.page.wait_for_timeout(20)
    return len(at.told("session.created"))


@pytest.mark.parametrize("presses", [2, 3])
def test_presses_while_a_session_opens_leave_one_microphone_or_none(at: Visit, presses: int) -> None:
    at.page.evaluate(PERMISSION)
    at.page.evaluate("window.permit()")
    secrets = held(at, "**/v1/realtime/client_secrets")
    press(at, presses)
    at.wait_until("document.querySelector('#talk').ariaPressed === " + ("'false'" if presses == 2 else "'true'"))
    (secret,) = secrets
    secret.continue_()
    assert sessions(at) == 1
    at.state("ready" if presses == 2 else "hearing")
    at.wait_until(ALL_CAME)
    assert at.page.evaluate(LIVE) == presses - 2
    assert not at.page.is_visible("#error")


@pytest.mark.parametrize("presses", [2, 3])
def test_presses_while_the_microphone_opens_leave_one_or_none(triton: FakeTriton, at: Visit, presses: int) -> None:
    at.page.evaluate(PERMISSION)
    press(at)
    at.wait_until("window.asked === 1")
    press(at, presses - 1)
    at.wait_until(f"window.asked === {presses - 1}")
    at.page.evaluate("window.permit()")
    at.wait_until(ALL_CAME)
    at.state("ready" if presses == 2 else "hearing")
    at.wait_until(f"{LIVE} === {presses - 2}")
    assert sessions(at) == 1
    assert (at.told("input_audio_buffer.commit"), asked(triton)) == ([], [])
    assert not at.page.is_visible("#error")


def test_a_microphone_that_is_not_allowed_is_told_and_leaves_the_attachments(at: Visit) -> None:
    denied = "async () => { throw new DOMException('Permission denied'); }"
    at.page.evaluate(f"() => {{ navigator.mediaDevices.getUserMedia = {denied}; }}")
    at.hand_over("drop", "x.png", "image/png", image_file("png"))
    press(at)
    at.page.get_by_role("alert").get_by_text("The microphone cannot be used (Permission denied): allow it").wait_for()
    at.state("ready")
    assert at.page.locator("#attachments li").count() == 1
    assert at.told("conversation.item.create") == []


def test_a_microphone_that_is_unplugged_ends_the_turn_and_is_told(triton: FakeTriton, at: Visit) -> None:
    at.page.evaluate(PERMISSION)
    at.page.evaluate("window.permit()")
    press(at)
    at.state("hearing")
    at.wait_until("window.recorded > 1")
    at.page.evaluate("window.streams[0].getTracks()[0].dispatchEvent(new Event('ended'))")
    at.page.get_by_role("alert").get_by_text("The microphone has stopped: ").wait_for()
    at.state("speaking")
    assert at.page.get_by_role("button", name="Talk").get_attribute("aria-pressed") == "false"
    assert [part["type"] for part in messages(triton)[-1]["content"]] == ["audio"]

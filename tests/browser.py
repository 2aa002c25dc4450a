# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for the tests of the gateway's page, and a page in it that is watched.

`./build.sh test` fetches the browser; `CHROMIUM` names another one, or `none`.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway_fakes import TIMEOUT_S

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".cache" / "page-tools"
AXE = TOOLS / "node_modules" / "axe-core" / "axe.min.js"
VARIABLE = "CHROMIUM"
PHONE: dict[str, Any] = {"is_mobile": True, "has_touch": True}
"""Options of a browser session that fingers touch, besides its size."""
_REFUSED = "Failed to load resource: the server responded with a status of"
"""The browser's own remark on every answer of 4xx or 5xx."""
_DEVICES = """
window.played = [];
window.heard = () => 0;
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (when, ...rest) {
  const { context } = this;
  if (context instanceof AudioContext) {
    const first = Math.round(when * context.sampleRate);
    window.played.push({ first, samples: [...this.buffer.getChannelData(0)] });
    window.heard = () => context.currentTime - window.played[0].first / context.sampleRate;
  }
  return start.call(this, when, ...rest);
};
window.recorded = 0;
window.AudioWorkletNode = class extends AudioWorkletNode {
  constructor(context, ...rest) {
    super(context, ...rest);
    this.port.addEventListener("message", ({ data }) => (window.recorded += data.length / 16000));
  }
};
"""
"""Notes what is scheduled to play and when, in samples; seconds since the first of it, and of the microphone's sound.

They are the browser's own clocks: on a machine that stands still now and then, they stand too.
"""
_HAND_OVER = """([event, name, type, data]) => {
  const files = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  files.items.add(new File([bytes], name, { type }));
  const init = { bubbles: true, cancelable: true };
  document.body.dispatchEvent(event === "drop"
    ? new DragEvent("drop", { ...init, dataTransfer: files })
    : new ClipboardEvent("paste", { ...init, clipboardData: files }));
}"""
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{tools}/fonts</dir><cachedir>{tools}/fonts-cache</cachedir></fontconfig>"""


def _chromium(folder: Path) -> tuple[str, dict[str, str]]:
    """The browser's program and its environment; skips the test where there is none."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen and chosen != "none":
        return chosen, {}
    program = TOOLS / "chromium"
    if chosen == "none" or not program.exists():
        pytest.skip(f"no browser: ./build.sh test fetches one, {VARIABLE}=PROGRAM names one (now {chosen!r})")
    fonts = folder / "fonts.conf"
    fonts.write_text(_FONTS.format(tools=TOOLS))
    # The same letters wherever the tests run, and the libraries that a machine without a desktop lacks.
    return str(program), {"FONTCONFIG_FILE": str(fonts), "LD_LIBRARY_PATH": str(TOOLS / "al2023" / "lib")}


@contextmanager
def run_browser(folder: Path) -> Iterator[Any]:
    """A browser whose microphone plays beeps; what it writes is in `folder`. One at a time in this process."""
    _chromium(folder)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, launch(playwright.chromium, folder) as launched:
        yield launched


@contextmanager
def launch(kind: Any, folder: Path, microphone: Path | None = None, host: str | None = None) -> Iterator[Any]:
    """Another browser of this `browser_type`.

    Args:
        kind: of the browser.
        folder: where it writes.
        microphone: a WAV file, which its microphone plays once.
        host: a name or an IP address that means this machine to it, and is no secure origin as `127.0.0.1` is.
    """
    program, environment = _chromium(folder)
    options = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    if microphone is not None:
        options.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    if host is not None:
        options += [f"--host-resolver-rules=MAP {host} 127.0.0.1", "--no-proxy-server"]
    launched = kind.launch(executable_path=program, args=options, env={**os.environ, **environment})
    try:
        yield launched
    finally:
        launched.close()


@dataclass
class Visit:
    """The gateway's page as a person has it open; every problem that the browser tells is noted."""

    page: Any
    base: str
    problems: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Events between the page and its sessions, in order, without sounds."""

    def state(self, name: str, seconds: float = TIMEOUT_S) -> None:
        """Wait until the page is in this state."""
        self.page.wait_for_selector(f'#state[data-state="{name}"]', timeout=seconds * 1000)

    def wait_until(self, condition: str, seconds: float = TIMEOUT_S) -> None:
        """Wait until an expression of JavaScript is true in the page, whose policy lets no page function be made."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"still not so after {seconds:g} s: {condition}"
            self.page.wait_for_timeout(20)

    def write(self, text: str) -> None:
        """Write a message and send it."""
        self.page.fill("#text", text)
        self.page.keyboard.press("Enter")

    def hand_over(self, event: str, name: str, kind: str, data: bytes) -> None:
        """Drop or paste a file of this media type; returns once it is attached."""
        attached = self.page.locator("#attachments li").count()
        self.page.evaluate(_HAND_OVER, [event, name, kind, base64.b64encode(data).decode()])
        self.page.locator("#attachments li").nth(attached).wait_for()

    def text(self, selector: str) -> str:
        """The text of the last element of this selector."""
        return str(self.page.locator(selector).last.text_content())

    def times(self) -> dict[str, str]:
        """Names and values under the last reply."""
        last = self.page.locator(".reply").last
        return dict(zip(last.locator("dt").all_text_contents(), last.locator("dd").all_text_contents(), strict=True))

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The events of this type."""
        return [event for event in self.events if event["type"] == kind]

    def ended(self, replies: int) -> None:
        """Wait until so many replies are over."""
        self.wait_until(f"document.querySelectorAll('.reply[aria-busy=false]').length >= {replies}")

    def played(self, chunks: int = 0) -> list[tuple[int, list[float]]]:
        """Wait until so many chunks were scheduled to play; return the first sample's place and the samples of each."""
        self.wait_until(f"window.played.length >= {chunks}")
        return [(found["first"], found["samples"]) for found in self.page.evaluate("window.played")]


def audit(at: Visit) -> list[str]:
    """Return the faults of the page that axe finds."""
    at.page.evaluate(AXE.read_text(encoding="utf-8"))
    found = at.page.evaluate("axe.run()")["violations"]
    return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


@contextmanager
def visit(browser: Any, base: str, **options: Any) -> Iterator[Visit]:
    """The page of the gateway at `base`, in a browser session of its own.

    Fails at the end where the page logged an error or asked any other host for something.

    Args:
        browser: from `run_browser`.
        base: the gateway's address.
        options: of the browser session, as its width or its colours.
    """
    with browser.new_context(**{"viewport": {"width": 1000, "height": 720}, **options}) as context:
        context.set_default_timeout(TIMEOUT_S * 1000)
        found = Visit(context.new_page(), base)
        _watch(found)
        found.page.goto(f"{base}/")
        yield found
        assert found.problems == []


def _watch(found: Visit) -> None:
    def console(message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(_REFUSED):
            found.problems.append(message.text)

    def request(sent: Any) -> None:
        if not sent.url.startswith((f"{found.base}/", f"blob:{found.base}/")):
            found.problems.append(f"asked for {sent.url:.80}")

    def session(socket: Any) -> None:
        socket.on("framesent", note)
        socket.on("framereceived", note)

    def note(frame: str) -> None:
        event = json.loads(frame)
        sound = "delta" if event["type"] == "response.output_audio.delta" else "audio"
        found.events.append({key: value for key, value in event.items() if key != sound})

    found.page.on("console", console)
    found.page.on("pageerror", lambda error: found.problems.append(str(error)))
    found.page.on("request", request)
    found.page.on("websocket", session)
    found.page.add_init_script(_DEVICES)

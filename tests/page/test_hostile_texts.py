# SPDX-License-Identifier: Apache-2.0
"""Replies, file names and errors that would be more than text: each is shown as it is, and changes nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from browser import Visit, visit
from client_fakes import INFO, FakeTriton, chunk, failure, final, serve_grpc
from gateway_fakes import RunningGateway
from media_samples import image_file

REPLACED = "\ufffd"
TEXTS = {
    "script": "<script>document.title = 'taken'</script>",
    "image": "<img src=x onerror=\"document.title = 'taken'\">",
    "closing tags": "</span></p></article><style>* { display: none }</style><h1 id=send>Ready</h1>",
    "link": "[ok](javascript:document.title='taken') <a href=//evil.example ping=//evil.example>x</a>",
    "entity": "&lt;b&gt; &#x202e; %3Cscript%3E ${document.title} {{7*7}}",
    "frame": "<iframe srcdoc='<script>parent.document.title=1</script>'></iframe><base href=//evil.example>",
    "end of stream": 'data: [DONE]\n\ndata: {"error":{}}\n\nevent: x\r\n\r\n',
    "directions": "\u202egpj.exe \u2066\u2067\u200f right to left",
    "marks": "Z" + "\u0301\u0489" * 500,
    "a long word": "a" * 100_000,
    "many lines": "line\n" * 20_000,
    "unseen": "\u200b\u2060\ufeff\x01\x1b[31mred\x7f",
}


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def at(browser: Any, gateway: RunningGateway) -> Iterator[Visit]:
    """The page, ready; at the end it has asked no other host, and its policy has refused nothing."""
    with visit(browser, gateway.base) as found:
        found.state("ready")
        found.page.on("dialog", lambda dialog: found.problems.append(dialog.message))
        yield found


def check_untouched(at: Visit) -> None:
    """The page is as it was: its title, its address, its width and what the user writes with."""
    assert at.page.title() == "triton-omni"
    assert at.page.url == f"{at.base}/"
    assert at.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert at.page.locator("main :is(script, style, a:not([download]), iframe, h1, base)").count() == 0
    assert at.page.locator("#send").count() == 1
    assert at.page.locator("#text").is_visible()


def said(text: str) -> Any:
    def script(_request: Any, _context: Any) -> Iterator[Any]:
        for part in np.array_split(np.array(list(text)), 50):
            yield chunk(text="".join(part))
        yield chunk(audio=np.zeros(2400, np.float32))
        yield chunk(info=INFO)
        yield final()

    return script


def test_a_reply_is_text_alone(triton: FakeTriton, at: Visit) -> None:
    for number, text in enumerate(TEXTS.values()):
        triton.script = said(text)
        at.write(text[:1000])
        at.wait_until(f"document.querySelectorAll('.reply[aria-busy=false]').length > {number}")
        at.state("ready")
        # Markdown joins lines and reads entities; all else is shown as it is.
        assert at.text(".reply .said").split() == html.unescape(text).split()
        assert at.text(".question .said") == text[:1000].strip().replace("\r\n", "\n")
        check_untouched(at)


def test_an_error_is_text_alone(triton: FakeTriton, at: Visit) -> None:
    for text in TEXTS.values():
        error = text[:2000].strip()
        triton.script = lambda *_, error=error: iter([failure(f"{error} [omni:bad_request;stage=thinker]")])
        at.write("hello")
        at.page.wait_for_selector("#error:not([hidden])")
        assert at.text("#error-text").strip() == error
        check_untouched(at)
        at.page.click("#dismiss")
        at.state("ready")
        at.page.fill("#text", "")


@pytest.mark.parametrize("kind", ["image/png", "image/svg+xml", "text/html"])
def test_a_file_s_name_is_text_alone(at: Visit, kind: str) -> None:
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='parent.document.title=1'/>"
    for number, text in enumerate(TEXTS.values()):
        name = text[:200].replace("/", "-").replace("\r", "")
        data = image_file("png", 8, 8) if kind == "image/png" else svg
        at.page.set_input_files("#files", {"name": name, "mimeType": kind, "buffer": data})
        if kind == "text/html":
            at.page.wait_for_selector("#error:not([hidden])")
            shown = at.text("#error-text").removesuffix(" is neither an image nor a sound nor a video.")
            at.page.click("#dismiss")
        else:
            at.page.locator("#attachments li").nth(number).wait_for()
            shown = at.text("#attachments li span")
            assert at.page.locator("#attachments img").nth(number).get_attribute("alt") == shown
        assert shown == name.translate(dict.fromkeys(map(ord, "\u202e\u2066\u2067"), REPLACED))
        check_untouched(at)


def test_the_key_is_kept_in_the_tab_alone(at: Visit) -> None:
    at.page.evaluate("sessionStorage.setItem('omni-api-key', 'secret')")
    at.write("hello")
    at.state("ready")
    stored = at.page.evaluate("[document.cookie, localStorage.length, location.href, history.state, window.name]")
    assert stored == ["", 0, f"{at.base}/", None, ""]
    assert at.page.evaluate("indexedDB.databases()") == []
    assert at.page.evaluate("caches.keys()") == []

# SPDX-License-Identifier: Apache-2.0
"""Replies as the page shows and plays them, whole and cut off; `tests/server` has a real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import soundfile

from browser import Visit
from client_fakes import FakeTriton, chunk, final, parameters_of
from gateway_fakes import TIMEOUT_S
from page_chat import RATE, SPEECH, TEXT, asked, choose, messages, said, story
from triton_omni_client.heard import heard_text

OFFLINE = """async ([base, chunks]) => {
  const { Playback } = await import(`${base}/page/player.js`);
  const total = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
  const context = new OfflineAudioContext(1, total + 4800, 24000);
  const playback = new Playback(context);
  for (const chunk of chunks) playback.push(new Float32Array(chunk));
  return [...(await context.startRendering()).getChannelData(0)];
}"""


def test_a_reply_is_read_and_heard_with_its_times(triton: FakeTriton, at: Visit) -> None:
    at.write("What is the sea?")
    at.state("speaking")
    at.state("ready")
    assert at.text(".reply .said").strip() == TEXT
    # A machine that is busy may be late with a chunk, and the page then tells of gaps.
    assert [name for name in at.times() if name != "Gaps"] == ["First text", "First audio", "Speech"]
    assert at.times()["Speech"] == "4.00 s"
    assert float(at.times()["First audio"].split()[0]) >= float(at.times()["First text"].split()[0]) > 0
    assert messages(triton) == [said("What is the sea?")]
    assert at.page.locator(".reply").get_attribute("aria-busy") == "false"
    assert not at.page.is_visible(".times")
    choose(at, figures=True)
    assert at.page.is_visible(".times")


def test_speech_is_scheduled_without_a_gap_between_samples(at: Visit) -> None:
    at.write("hello")
    played = at.played(13)
    for (first, samples), (following, _) in pairwise(played):
        assert following == first + len(samples)
    sound = np.concatenate([samples for _, samples in played])
    np.testing.assert_allclose(sound, SPEECH, rtol=0, atol=1 / 32767)


def test_what_is_rendered_is_what_was_sent(at: Visit) -> None:
    chunks = [part.tolist() for part in np.array_split(SPEECH, 37)]
    rendered = at.page.evaluate(OFFLINE, [at.base, chunks])
    begin = round(0.03 * RATE)
    assert not any(rendered[:begin])
    np.testing.assert_allclose(rendered[begin : begin + len(SPEECH)], SPEECH, rtol=0, atol=1e-6)


def test_speech_that_runs_dry_goes_on_and_the_gap_is_told(triton: FakeTriton, at: Visit) -> None:
    silent = threading.Event()

    def dry(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="Hello", audio=SPEECH[:4800])
        silent.wait(TIMEOUT_S)
        yield chunk(audio=SPEECH[4800:9600])
        yield final()

    triton.script = dry
    at.write("hello")
    at.wait_until("window.heard() > 0.3")
    silent.set()
    at.state("ready")
    assert (at.times()["Gaps"], at.times()["Speech"]) == ("1", "0.40 s")
    (first, _), (second, _) = at.played()
    assert second > first + 4800


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_a_stopped_reply_is_kept_as_far_as_it_was_heard(triton: FakeTriton, at: Visit, how: str) -> None:
    text = " ".join([TEXT] * 20)  # a minute and a half: it is stopped in the middle, however late
    triton.script = story(np.tile(SPEECH, 25), text)
    at.write("What is the sea?")
    at.wait_until("window.heard() > 1")
    if how == "button":
        at.page.click("#stop")
    else:
        at.page.keyboard.press(how)
    at.page.wait_for_selector(".reply .unheard")
    (cut,) = at.told("conversation.item.truncate")
    heard = cut["audio_end_ms"] / 1000
    assert 0.5 < heard < 100
    assert at.text(".reply .note") == f"Stopped after {heard:.2f} s of speech."
    at.wait_until(f"document.querySelector('.reply .unheard').textContent.length < {len(text) - 2}")
    # All text stays to be read, and what was not heard stands back.
    assert at.text(".reply .said").strip() == text
    kept = text.removesuffix(at.text(".reply .unheard").strip()).strip()
    # A limit ended the speech, as INFO tells, so its length is not that of the text.
    assert kept == heard_text(f"{text} ", heard) != ""
    at.write("Go on")
    at.state("speaking")
    assert messages(triton) == [said("What is the sea?"), {"role": "assistant", "content": kept}, said("Go on")]


def test_stopping_in_the_middle_cancels_on_the_server(triton: FakeTriton, at: Visit) -> None:
    triton.script = triton.endless
    at.write("hello")
    at.state("speaking")
    at.page.click("#stop")
    at.state("ready")
    assert triton.cancelled.wait(TIMEOUT_S)
    at.ended(1)
    assert not at.page.is_visible("#error")


def test_a_question_cuts_the_reply_off_and_nothing_is_kept_of_what_was_not_heard(triton: FakeTriton, at: Visit) -> None:
    def silent(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text=TEXT)
        triton.cancelled.wait(TIMEOUT_S)

    triton.script = silent
    at.write("one")
    at.state("writing")
    triton.script = story()
    at.write("two")
    at.page.locator(".reply").nth(1).wait_for()
    at.state("speaking")
    assert messages(triton) == [said("one"), said("two")]


def test_a_written_reply_is_kept_as_far_as_it_came(triton: FakeTriton, at: Visit) -> None:
    def half(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="The sea")
        triton.cancelled.wait(TIMEOUT_S)

    triton.script = half
    choose(at, speak=False)
    at.write("one")
    at.page.wait_for_selector(".reply .said :text('The sea')")
    at.page.click("#stop")
    at.state("ready")
    assert parameters_of(asked(triton)[-1])["modalities"] == ["text"]
    triton.script = story()
    at.write("two")
    at.ended(2)
    assert messages(triton)[1] == {"role": "assistant", "content": "The sea"}
    assert at.played() == []


def test_the_text_of_a_reply_is_never_html(triton: FakeTriton, at: Visit) -> None:
    evil = '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script> ![x](https://evil.example/x.png)'
    triton.script = story(SPEECH[:RATE], text=evil)
    at.write(evil)
    at.ended(1)
    assert at.text(".reply .said").strip() == evil.replace("![x](https://evil.example/x.png)", "!x")
    assert at.text(".question .said") == evil
    assert at.page.locator("#log :is(img, script)").count() == 0
    assert at.page.evaluate("window.broken") is None


def test_of_two_replies_one_is_replayed_at_a_time(triton: FakeTriton, at: Visit) -> None:
    triton.script = story(np.tile(SPEECH, 25))
    for number in (1, 2):
        at.write("hello")
        at.wait_until("window.played.length")
        at.wait_until(f"document.querySelectorAll('.reply').length === {number}")
        at.state("speaking")
        at.page.click("#stop")
        at.ended(number)
    for playing in (0, 1):
        at.page.get_by_role("button", name="Replay").nth(playing).click()
        expected = json.dumps([playing != 0, playing != 1])
        at.wait_until(f"'{expected}' === JSON.stringify([...document.querySelectorAll('.reply audio')]"
                      ".map((sound) => sound.paused)).replace(',', ', ')")  # fmt: skip


def test_a_reply_is_markdown_that_one_may_copy_replay_and_keep(triton: FakeTriton, at: Visit) -> None:
    text = "# Tea\n\n- **hot** water\n- [leaves](https://tea.example/)"
    triton.script = story(SPEECH[:RATE], text=text)
    at.write("How?")
    at.ended(1)
    at.state("ready")
    reply = at.page.locator(".reply .said")
    assert reply.locator("h3").all_text_contents() == ["Tea"]
    assert [reply.locator(kind).count() for kind in ("h1", "li", "strong")] == [0, 2, 1]
    assert reply.locator("a").get_attribute("rel") == "noopener noreferrer"
    at.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    at.page.get_by_role("button", name="Copy").click()
    at.page.wait_for_selector(".actions :text('Copied')")
    at.wait_until(f"navigator.clipboard.readText().then((text) => text.trim() === {json.dumps(text)})")
    at.page.get_by_role("button", name="Replay").click()
    at.wait_until("document.querySelector('.reply audio').ended")
    with at.page.expect_download() as download:
        at.page.get_by_role("link", name="Download").click()
    kept, rate = soundfile.read(download.value.path(), dtype="float32")
    assert (download.value.suggested_filename, rate) == ("reply.wav", RATE)
    np.testing.assert_allclose(kept, SPEECH[:RATE], rtol=0, atol=2 / 32767)

# SPDX-License-Identifier: Apache-2.0
"""The page in a browser, before a gateway whose Triton server says what a test wants; `tests/server` has a real one."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from browser import Visit, audit, launch, visit
from client_fakes import INFO, FakeTriton, Samples, chunk, failure, final, inputs_of, parameters_of, serve_grpc, tell
from gateway_fakes import RunningGateway, run_gateway
from media_samples import audio_file, image_file, tone, video_file
from triton_omni_client.heard import heard_text
from triton_omni_gateway.keys import ApiKeys

TEXT = "The sea is deep and wide. It has been sailed, feared and loved as long as there are stories."
RATE = 24000
SPEECH = tone(4.0, RATE, hertz=220)
PHONE = {"width": 360, "height": 640}
OFFLINE = """async ([base, chunks]) => {
  const { Playback } = await import(`${base}/page/player.js`);
  const total = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
  const context = new OfflineAudioContext(1, total + 4800, 24000);
  const playback = new Playback(context);
  for (const chunk of chunks) playback.push(new Float32Array(chunk));
  return [...(await context.startRendering()).getChannelData(0)];
}"""


def story(speech: Samples = SPEECH, pause_s: float = 0.0, text: str = TEXT) -> Any:
    """A reply: all text first, then its speech in chunks of uneven length, with a pause before each."""

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        for word in text.split(" "):
            yield chunk(text=f"{word} ")
        for part in np.array_split(speech, 13):
            time.sleep(pause_s)
            yield chunk(audio=part)
        yield chunk(info=INFO)
        yield final()

    return script


def refusal(_request: Any, _context: Any) -> Iterator[Any]:
    place = "messages[0].content[0].image_url.url"
    yield failure(f"{place}: 2000000 characters of base64, the limit is 1048576 bytes [omni:too_large;stage=thinker]")


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(script=story())) as fake:
        yield fake


@pytest.fixture
def at(browser: Any, gateway: RunningGateway) -> Iterator[Visit]:
    """The page, ready."""
    with visit(browser, gateway.base) as found:
        found.state("ready")
        yield found


def messages(triton: FakeTriton) -> list[dict[str, Any]]:
    """The chat of the last request that reached the Triton server."""
    found: list[dict[str, Any]] = json.loads(inputs_of(triton.requests[-1])["messages"][0])
    return found


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def file(name: str, kind: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}


def test_a_reply_is_read_and_heard_with_its_times(triton: FakeTriton, at: Visit) -> None:
    at.write("What is the sea?")
    at.state("speaking")
    at.state("ready")
    assert at.text(".reply .said") == f"{TEXT} "
    # A machine that is busy may be late with a chunk, and the page then tells of gaps.
    assert [name for name in at.times() if name != "Gaps"] == ["First text", "First audio", "Speech"]
    assert at.times()["Speech"] == "4.00 s"
    assert float(at.times()["First audio"].split()[0]) >= float(at.times()["First text"].split()[0]) > 0
    assert messages(triton) == [said("What is the sea?")]
    assert at.page.locator(".reply").get_attribute("aria-busy") == "false"


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
        silent.wait(20)
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
    at.write("What is the sea?")
    at.wait_until("window.heard() > 1")
    if how == "button":
        at.page.click("#stop")
    else:
        at.page.keyboard.press(how)
    at.state("stopped")
    kept, heard = at.text(".reply .said"), float(at.text(".reply .note").split()[2])
    assert 0.5 < heard < 3.5
    # The whole speech had come; the page tells its time rounded.
    assert kept in {heard_text(f"{TEXT} ", seconds, 4.0) for seconds in (heard - 0.005, heard, heard + 0.005)}
    at.write("Go on")
    at.state("speaking")
    assert messages(triton) == [said("What is the sea?"), {"role": "assistant", "content": kept}, said("Go on")]


def test_stopping_in_the_middle_cancels_on_the_server(triton: FakeTriton, gateway: RunningGateway, at: Visit) -> None:
    triton.script = triton.endless
    at.write("hello")
    at.state("speaking")
    at.page.click("#stop")
    at.state("stopped")
    assert triton.cancelled.wait(5)
    gateway.wait_for_metric('omni_gateway_requests_total{endpoint="/v1/chat/completions",status="499"}', 1.0)


def test_a_question_cuts_the_reply_off_and_nothing_is_kept_of_what_was_not_heard(triton: FakeTriton, at: Visit) -> None:
    triton.script = story(SPEECH, pause_s=0.5)
    at.write("one")
    at.state("writing")
    at.write("two")
    at.page.locator(".reply").nth(1).wait_for()
    assert at.page.locator(".reply .note").first.text_content() == "Stopped before a word was heard."
    at.state("speaking")
    assert messages(triton) == [said("one"), said("two")]


def test_a_written_reply_is_kept_as_far_as_it_came(triton: FakeTriton, at: Visit) -> None:
    def half(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="The sea")
        triton.cancelled.wait(10)

    triton.script = half
    at.page.uncheck("#speak")
    at.write("one")
    at.page.wait_for_selector(".reply .heard:text('The sea')")
    at.page.click("#stop")
    at.state("stopped")
    assert parameters_of(triton.requests[-1])["modalities"] == ["text"]
    triton.script = story()
    at.write("two")
    at.state("ready")
    assert messages(triton)[1] == {"role": "assistant", "content": "The sea"}
    assert at.played() == []


def test_the_voice_is_what_the_gateway_offers(browser: Any, triton: FakeTriton) -> None:
    tell(triton.configs["qwen2_5_omni"], voices=["Ada", "Bo"])
    with run_gateway(triton.url) as gateway, visit(browser, gateway.base) as at:
        at.state("ready")
        assert at.page.locator("#voice option").all_text_contents() == ["Default", "Ada", "Bo"]
        at.write("one")
        at.state("speaking")
        assert "voice" not in parameters_of(triton.requests[-1])
        at.page.select_option("#voice", "Bo")
        at.write("two")
        at.page.locator(".reply").nth(1).wait_for()
        at.state("speaking")
        assert parameters_of(triton.requests[-1])["voice"] == "Bo"


def test_files_are_sent_as_the_parts_they_are(triton: FakeTriton, at: Visit) -> None:
    image, sound, video = image_file("png"), audio_file("wav"), video_file("webm", seconds=0.5)
    chosen = [file("a.png", "image/png", image), file("b.wav", "audio/wav", sound), file("c.webm", "video/webm", video)]
    at.page.set_input_files("#files", chosen)
    at.page.locator("#attachments li").nth(2).wait_for()
    at.page.check("#sounding")
    at.write("What is this?")
    at.state("speaking")
    (message,) = messages(triton)
    encoded = [base64.b64encode(data).decode() for data in (image, sound, video)]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded[0]}"}},
        {"type": "input_audio", "input_audio": {"data": encoded[1], "format": "wav"}},
        {"type": "video_url", "video_url": {"url": f"data:video/webm;base64,{encoded[2]}"}},
        {"type": "text", "text": "What is this?"},
    ]
    assert parameters_of(triton.requests[-1])["use_audio_in_video"] is True
    assert at.page.locator(".question :is(img, audio, video)").count() == 3


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_an_image_is_dropped_or_pasted_and_taken_away_again(at: Visit, event: str) -> None:
    at.hand_over(event, "x.png", "image/png", image_file("png"))
    at.page.wait_for_selector("#attachments img")
    assert at.page.is_enabled("#send")
    at.page.get_by_role("button", name="Remove x.png").click()
    assert at.page.locator("#attachments li").count() == 0
    assert not at.page.is_enabled("#send")


def test_a_file_of_another_kind_is_refused(at: Visit) -> None:
    at.page.set_input_files("#files", [file("notes.txt", "text/plain", b"hello")])
    at.page.get_by_role("alert").get_by_text("notes.txt is neither an image nor a sound nor a video.").wait_for()
    assert not at.page.is_visible("#retry")


def test_a_refusal_names_the_file_and_the_question_is_given_back(triton: FakeTriton, at: Visit) -> None:
    triton.script = refusal
    at.page.set_input_files("#files", [file("a.png", "image/png", image_file("png"))])
    at.page.wait_for_selector("#attachments li")
    at.write("And this?")
    alert = at.page.get_by_role("alert")
    alert.get_by_text("a.png: 2000000 characters of base64, the limit is 1048576 bytes", exact=True).wait_for()
    at.state("error")
    assert at.page.locator(".question, .reply").count() == 0
    assert at.page.input_value("#text") == "And this?"
    at.page.get_by_role("button", name="Remove a.png").click()
    triton.script = story()
    alert.get_by_role("button", name="Try again").click()
    at.state("speaking")
    assert messages(triton) == [said("And this?")]
    assert not alert.is_visible()


def test_an_error_in_the_middle_takes_the_turn_back(triton: FakeTriton, at: Visit) -> None:
    def breaks(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="The sea", audio=SPEECH)
        time.sleep(0.3)
        yield failure("in ensemble 'qwen2_5_omni', the talker's engine has failed [omni:internal;stage=talker]")

    triton.script = breaks
    at.write("hello")
    at.page.get_by_role("alert").get_by_text("the talker's engine has failed").wait_for()
    assert at.page.locator(".reply").count() == 0
    triton.script = story()
    at.page.get_by_role("alert").get_by_role("button", name="Dismiss").click()
    at.state("ready")
    at.page.keyboard.press("Enter")
    at.state("speaking")
    assert messages(triton) == [said("hello")]


def test_a_gateway_that_is_gone_is_told(browser: Any, triton: FakeTriton) -> None:
    with run_gateway(triton.url) as gateway, visit(browser, gateway.base) as at:
        at.state("ready")
        at.page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
        at.write("hello")
        at.page.get_by_role("alert").get_by_text("The gateway cannot be reached.").wait_for()
        at.problems = [found for found in at.problems if "ERR_CONNECTION_REFUSED" not in found]


def test_the_text_of_a_reply_is_never_html(triton: FakeTriton, at: Visit) -> None:
    evil = '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>'
    triton.script = story(SPEECH[:RATE], text=evil)
    at.write(evil)
    at.state("speaking")
    at.state("ready")
    assert at.text(".reply .said") == f"{evil} "
    assert at.text(".question .said") == evil
    assert at.page.locator("#log :is(img, script)").count() == 0
    assert at.page.evaluate("window.broken") is None


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


def test_a_new_conversation_forgets_the_old_one(triton: FakeTriton, at: Visit) -> None:
    at.write("one")
    at.state("speaking")
    at.page.get_by_role("button", name="New conversation").click()
    at.page.wait_for_selector("#welcome")
    at.state("ready")
    assert at.page.locator(".question, .reply").count() == 0
    at.write("two")
    at.state("speaking")
    assert messages(triton) == [said("two")]


@pytest.mark.parametrize("how", ["tap", "hold", "keyboard"])
def test_speech_is_recorded_and_sent(triton: FakeTriton, at: Visit, how: str) -> None:
    button = at.page.get_by_role("button", name="Talk")
    button.focus()
    button.hover()
    press, release = (at.page.mouse.down, at.page.mouse.up) if how == "hold" else (button.click, button.click)
    if how == "keyboard":
        press = release = lambda: at.page.keyboard.press("Space")
    press()
    at.state("listening")
    assert button.get_attribute("aria-pressed") == "true"
    at.wait_until("window.recorded > 1")
    release()
    at.state("speaking")
    (part,) = messages(triton)[0]["content"]
    file_bytes = base64.b64decode(part["input_audio"]["data"])
    samples, rate = soundfile.read(io.BytesIO(file_bytes))
    assert (part["input_audio"]["format"], rate) == ("wav", 16000)
    assert 0.9 < len(samples) / rate < 3
    assert np.abs(samples).max() > 0.1


def heard_part(request: Any) -> bytes:
    """The samples of the last message's sound."""
    (part,) = json.loads(inputs_of(request)["messages"][0])[-1]["content"]
    return base64.b64decode(part["input_audio"]["data"])[44:]


def prefilling(answer: Any) -> Any:
    """A script that answers requests that only prefill so, and tells a story to the others."""

    def script(request: Any, context: Any) -> Iterator[Any]:
        is_hint = parameters_of(request).get("prefill_only")
        yield from iter([answer, final()]) if is_hint else story()(request, context)

    return script


def test_speech_is_sent_while_it_is_spoken(triton: FakeTriton, at: Visit) -> None:
    triton.script = prefilling(chunk(info=INFO))
    at.write("one")
    at.state("speaking")
    button = at.page.get_by_role("button", name="Talk")
    button.click()
    at.wait_until("window.recorded > 2.2")
    while len(triton.requests) < 2:
        at.page.wait_for_timeout(20)
    button.click()
    at.page.locator(".reply").nth(1).wait_for()
    at.state("speaking")
    plain, *hints, whole = triton.requests
    assert "audio_in_pieces" not in parameters_of(plain)
    lengths = [divmod(len(heard_part(hint)) // 2, 32_000) for hint in hints]
    assert [rest for _, rest in lengths] == len(hints) * [320]
    assert sorted(set(lengths)) == lengths
    for hint in hints:
        assert parameters_of(hint) == {**parameters_of(whole), "prefill_only": True, "priority": 1}
        assert heard_part(whole).startswith(heard_part(hint))
        assert json.loads(inputs_of(hint)["messages"][0])[:-1] == messages(triton)[:-1]
    assert parameters_of(whole)["audio_in_pieces"] is True
    at.write("two")
    at.page.locator(".reply").nth(2).wait_for()
    at.state("speaking")
    assert parameters_of(triton.requests[-1])["audio_in_pieces"] is True


def test_a_server_that_keeps_no_prompts_is_asked_once(triton: FakeTriton, at: Visit) -> None:
    said_no = "sampling_parameters.prefill_only: this deployment keeps no prompts [omni:bad_request;stage=thinker]"
    triton.script = prefilling(failure(said_no))
    at.page.get_by_role("button", name="Talk").click()
    at.wait_until("window.recorded > 4.4")
    at.page.get_by_role("button", name="Talk").click()
    at.state("speaking")
    assert [parameters_of(request).get("prefill_only") for request in triton.requests] == [True, None]
    assert not at.page.is_visible("#error")


def test_pressing_the_microphone_cuts_the_reply_off_and_escape_drops_the_recording(
    triton: FakeTriton, at: Visit
) -> None:
    at.write("hello")
    at.state("speaking")
    at.page.get_by_role("button", name="Talk").click()
    at.state("listening")
    assert at.text(".reply .note").startswith("Stopped ")
    at.wait_until("window.recorded > 0.3")
    at.page.keyboard.press("Escape")
    at.state("ready")
    assert len(triton.requests) == 1


def test_hands_free_speech_cuts_in_and_is_sent_when_it_ends(
    browser: Any, triton: FakeTriton, gateway: RunningGateway, tmp_path: Path
) -> None:
    # On a machine with other work the page is late to speak, and the microphone does not wait.
    quiet, loud = np.zeros(10 * 16000, np.float32), tone(1.5, 16000)
    spoken = tmp_path / "spoken.wav"
    soundfile.write(spoken, np.concatenate([quiet, loud, quiet]), 16000, subtype="PCM_16")
    triton.script = story(np.tile(SPEECH, 7))
    with launch(browser.browser_type, tmp_path, spoken) as listening, visit(listening, gateway.base) as at:
        at.state("ready")
        at.page.check("#hands-free")
        at.write("hello")
        at.state("speaking")
        at.state("listening")
        at.page.locator(".reply").nth(1).wait_for()
        at.page.uncheck("#hands-free")
        question = messages(triton)
    assert [message["role"] for message in question] == ["user", "assistant", "user"]
    (part,) = question[-1]["content"]
    recorded, _ = soundfile.read(io.BytesIO(base64.b64decode(part["input_audio"]["data"])))
    assert 1.5 < len(recorded) / 16000 < 3.5


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
        at.state("error")
        assert [empty, speaking, audit(at)] == [[], [], []]
        width, inner = at.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= inner


def test_everything_is_reached_by_the_keyboard_in_order_and_its_focus_seen(at: Visit) -> None:
    at.page.fill("#text", "x")
    at.page.focus("#log")
    reached = []
    for _ in range(7):
        at.page.keyboard.press("Tab")
        reached.append(at.page.evaluate("document.activeElement.id"))
        ringed = "#composer" if reached[-1] == "text" else f"#{reached[-1]}"
        assert at.page.evaluate(f"getComputedStyle(document.querySelector('{ringed}')).outlineStyle") == "solid"
    assert reached == ["text", "attach", "talk", "hands-free", "send", "speak", "voice"]

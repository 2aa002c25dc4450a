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
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from browser import Visit, audit, visit
from client_fakes import INFO, FakeTriton, Samples, chunk, failure, final, inputs_of, parameters_of, serve_grpc, tell
from gateway_fakes import RunningGateway, run_gateway
from media_samples import audio_file, image_file, tone, video_file
from triton_omni_client.heard import heard_text
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.realtime import detection
from triton_omni_gateway.realtime.limits import RealtimeLimits

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


def asked(triton: FakeTriton) -> list[Any]:
    """Requests that reached the Triton server, but for those that are computed ahead or ask for transcripts."""
    return [request for request in triton.requests if "priority" not in parameters_of(request)]


def messages(triton: FakeTriton) -> list[dict[str, Any]]:
    """The chat of the last one, without the placeholders of media."""
    return chat_of(asked(triton)[-1])


def chat_of(request: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(inputs_of(request)["messages"][0])
    return found


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def choose(at: Visit, **settings: Any) -> None:
    """Change settings, by the ids of their controls."""
    at.page.click("#options")
    for name, value in settings.items():
        if isinstance(value, bool):
            at.page.set_checked(f"#{name}", value)
        elif name == "voice":
            at.page.select_option("#voice", value)
        else:
            at.page.fill(f"#{name}", value)
    at.page.click("#done")


def file(name: str, kind: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}


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
    at.page.wait_for_selector(".reply .unheard")
    (cut,) = at.told("conversation.item.truncate")
    heard = cut["audio_end_ms"] / 1000
    assert 0.5 < heard < 3.5
    assert at.text(".reply .note") == f"Stopped after {heard:.2f} s of speech."
    at.wait_until("document.querySelector('.reply .unheard').textContent.length < 90")
    # All text stays to be read, and what was not heard stands back.
    assert at.text(".reply .said").strip() == TEXT
    kept = TEXT.removesuffix(at.text(".reply .unheard").strip()).strip()
    # A limit ended the speech, as INFO tells, so its length is not that of the text.
    assert kept == heard_text(f"{TEXT} ", heard) != ""
    at.write("Go on")
    at.state("speaking")
    assert messages(triton) == [said("What is the sea?"), {"role": "assistant", "content": kept}, said("Go on")]


def test_stopping_in_the_middle_cancels_on_the_server(triton: FakeTriton, at: Visit) -> None:
    triton.script = triton.endless
    at.write("hello")
    at.state("speaking")
    at.page.click("#stop")
    at.state("ready")
    assert triton.cancelled.wait(5)
    at.ended(1)
    assert not at.page.is_visible("#error")


def test_a_question_cuts_the_reply_off_and_nothing_is_kept_of_what_was_not_heard(triton: FakeTriton, at: Visit) -> None:
    triton.script = story(SPEECH, pause_s=0.5)
    at.write("one")
    at.state("writing")
    at.write("two")
    at.page.locator(".reply").nth(1).wait_for()
    at.state("speaking")
    assert messages(triton) == [said("one"), said("two")]


def test_a_written_reply_is_kept_as_far_as_it_came(triton: FakeTriton, at: Visit) -> None:
    def half(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="The sea")
        triton.cancelled.wait(10)

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


def test_the_voice_and_the_system_prompt_are_the_user_s(browser: Any, triton: FakeTriton) -> None:
    tell(triton.configs["qwen2_5_omni"], voices=["Ada", "Bo"])
    with run_gateway(triton.url) as gateway, visit(browser, gateway.base) as at:
        at.state("ready")
        assert at.page.locator("#voice option").all_text_contents() == ["Ada", "Bo"]
        at.write("one")
        at.state("speaking")
        assert parameters_of(asked(triton)[-1])["voice"] == "Ada"
        assert messages(triton)[0] == said("one")
        choose(at, voice="Bo", instructions="Answer in rhymes.")
        at.write("two")
        at.page.locator(".reply").nth(1).wait_for()
        at.state("speaking")
        assert parameters_of(asked(triton)[-1])["voice"] == "Bo"
        assert messages(triton)[0] == {"role": "system", "content": "Answer in rhymes."}
        choose(at, instructions="")
        at.write("three")
        at.page.locator(".reply").nth(2).wait_for()
        at.state("speaking")
        assert messages(triton)[0] == said("one")


def test_files_are_sent_as_pictures_and_sound(triton: FakeTriton, at: Visit) -> None:
    image, sound = image_file("png"), audio_file("wav", seconds=0.5)
    video = video_file("webm", seconds=2.0)
    chosen = [file("a.png", "image/png", image), file("b.wav", "audio/wav", sound), file("c.webm", "video/webm", video)]
    at.page.set_input_files("#files", chosen)
    at.page.locator("#attachments li").nth(2).wait_for()
    at.write("What is this?")
    at.state("speaking")
    (message,) = messages(triton)
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image", "audio", "image", "image", "text"]
    assert at.page.locator(".question :is(img, audio, video)").count() == 3
    (created,) = at.told("conversation.item.create")
    pictures = [part["image_url"] for part in created["item"]["content"] if part["type"] == "input_image"]
    assert [opened(picture).size for picture in pictures] == [opened(image).size, (64, 48), (64, 48)]


def opened(picture: str | bytes) -> Any:
    data = base64.b64decode(picture.partition(",")[2]) if isinstance(picture, str) else picture
    return Image.open(io.BytesIO(data))


def test_a_large_picture_is_sent_as_small_as_the_model_sees_it(at: Visit) -> None:
    at.page.set_input_files("#files", [file("a.png", "image/png", image_file("png", 2400, 1200))])
    at.page.wait_for_selector("#attachments li")
    at.write("What is this?")
    at.state("speaking")
    (created,) = at.told("conversation.item.create")
    width, height = opened(created["item"]["content"][0]["image_url"]).size
    assert (width, height) == (1448, 724)


def test_each_question_has_a_picture_of_what_the_camera_sees(triton: FakeTriton, at: Visit) -> None:
    at.page.get_by_role("button", name="Camera").click()
    at.wait_until("document.querySelector('#mirror').videoWidth > 0")
    at.write("What is this?")
    at.wait_until("window.heard() > 1")
    at.page.get_by_role("button", name="Camera").click()
    assert not at.page.is_visible("#mirror")
    at.write("And this?")
    at.page.locator(".reply").nth(1).wait_for()
    at.state("speaking")
    first, _, second = messages(triton)
    assert [part["type"] for part in first["content"]] == ["image", "text"]
    assert second == said("And this?")


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


def test_a_broken_picture_is_refused_by_its_name(at: Visit) -> None:
    at.page.set_input_files("#files", [file("a.png", "image/png", b"\x89PNG" + bytes(100))])
    at.page.get_by_role("alert").get_by_text("This browser cannot read a.png.").wait_for()
    assert at.page.locator("#attachments li").count() == 0


def test_a_message_over_the_gateway_s_limit_is_refused_and_given_back(at: Visit) -> None:
    at.write("x" * (16 << 20))
    at.page.get_by_role("alert").get_by_text("The message has 16.0 MiB, and the gateway takes 16.0").wait_for()
    assert at.page.evaluate("document.querySelector('#text').value.length") == 16 << 20
    assert at.page.locator(".question").count() == 0


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


def test_a_gateway_that_is_gone_is_told(at: Visit) -> None:
    at.page.route("**/v1/realtime/client_secrets", lambda route: route.abort("connectionrefused"))
    at.write("hello")
    at.page.get_by_role("alert").get_by_text("The gateway cannot be reached.").wait_for()
    assert at.page.input_value("#text") == "hello"
    at.problems = [found for found in at.problems if "ERR_CONNECTION_REFUSED" not in found]


def test_a_session_that_broke_is_followed_by_one_that_knows_what_was_said(browser: Any, triton: FakeTriton) -> None:
    triton.script = story(SPEECH[:RATE], text="The sea.")
    limits = RealtimeLimits(session_seconds=4)
    with run_gateway(triton.url, realtime=limits) as gateway, visit(browser, gateway.base) as at:
        at.state("ready")
        at.write("one")
        at.ended(1)
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


def test_the_text_of_a_reply_is_never_html(triton: FakeTriton, at: Visit) -> None:
    evil = '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script> ![x](https://evil.example/x.png)'
    triton.script = story(SPEECH[:RATE], text=evil)
    at.write(evil)
    at.ended(1)
    assert at.text(".reply .said").strip() == evil.replace("![x](https://evil.example/x.png)", "!x")
    assert at.text(".question .said") == evil
    assert at.page.locator("#log :is(img, script)").count() == 0
    assert at.page.evaluate("window.broken") is None


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
    at.wait_until(f"navigator.clipboard.readText().then((text) => text.trim() === {json.dumps(text)})")
    at.page.get_by_role("button", name="Replay").click()
    at.wait_until("document.querySelector('.reply audio').ended")
    with at.page.expect_download() as download:
        at.page.get_by_role("link", name="Download").click()
    kept, rate = soundfile.read(download.value.path(), dtype="float32")
    assert (download.value.suggested_filename, rate) == ("reply.wav", RATE)
    np.testing.assert_allclose(kept, SPEECH[:RATE], rtol=0, atol=2 / 32767)


def test_a_starter_is_asked(triton: FakeTriton, at: Visit) -> None:
    at.page.get_by_role("button", name="What is the sea?").click()
    at.state("speaking")
    assert messages(triton) == [said("What is the sea?")]


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


def test_without_detection_of_turns_a_press_begins_and_a_press_ends(
    triton: FakeTriton, at: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "is_installed", lambda: False)
    button = at.page.get_by_role("button", name="Talk")
    button.click()
    at.state("hearing")
    at.wait_until("document.querySelector('#talk').style.getPropertyValue('--level') > 0.1")
    at.wait_until("window.recorded > 1")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    at.state("speaking")
    assert button.get_attribute("aria-pressed") == "false"
    assert [part["type"] for part in messages(triton)[-1]["content"]] == ["audio"]
    recorded, rate = soundfile.read(io.BytesIO(inputs_of(asked(triton)[-1])["media"][0]))
    assert (len(recorded) / rate > 0.9, rate) == (True, 16000)
    assert np.sqrt(np.mean(recorded**2)) > 0.01  # the beeps of the browser's own microphone


def test_opening_the_microphone_cuts_the_reply_off(
    triton: FakeTriton, at: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "is_installed", lambda: False)
    at.write("hello")
    at.state("speaking")
    at.page.get_by_role("button", name="Talk").click()
    at.state("hearing")
    assert at.text(".reply .note").startswith("Stopped ")
    assert len(asked(triton)) == 1


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

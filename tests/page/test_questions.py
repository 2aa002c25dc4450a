# SPDX-License-Identifier: Apache-2.0
"""What a person may ask by the page: in words, by voice, with files and the camera, and in a new conversation."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from browser import Visit, visit
from client_fakes import FakeTriton, inputs_of, parameters_of, tell
from gateway_fakes import run_gateway
from media_samples import audio_file, image_file, video_file
from page_chat import asked, choose, file, held, messages, said
from triton_omni_gateway.realtime import detection


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


def test_a_starter_is_asked(triton: FakeTriton, at: Visit) -> None:
    at.page.get_by_role("button", name="What is the sea?").click()
    at.state("speaking")
    assert messages(triton) == [said("What is the sea?")]


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


def test_the_page_connects_until_the_microphone_is_heard(at: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "is_installed", lambda: False)
    secrets = held(at, "**/v1/realtime/client_secrets")
    at.page.get_by_role("button", name="Talk").click()
    at.state("connecting")
    secrets.pop().continue_()
    at.state("hearing")


def test_a_question_is_shown_while_its_session_opens(at: Visit) -> None:
    secrets = held(at, "**/v1/realtime/client_secrets")
    at.write("What is the sea?")
    at.page.wait_for_selector(".question :text('What is the sea?')")
    assert not at.page.is_enabled("#fresh")
    secrets.pop().continue_()
    at.state("speaking")
    assert at.page.locator(".question").count() == 1


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

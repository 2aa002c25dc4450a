# SPDX-License-Identifier: Apache-2.0
"""The gateway's page in a browser, with a real server behind it."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Visit, launch, run_browser, visit
from gateway_fakes import RunningGateway
from media_samples import audio_file, image_file, tone, video_file
from server.probes import SLOW_TALKER
from server.serving import STAGES, Served, wait_for
from triton_omni_client import Media, Reply, Request
from triton_omni_client.heard import heard_text

TALKER = {"temperature": 0, "min_tokens": 150}
GREEDY = {"seed": 71, "talker": TALKER}
PCM16_STEP = 1 / 32767
QUESTION = "What is this?"
SOUND = Media("audio", audio_file("ogg", seconds=1.0))
FILM = Media("video", video_file("mp4", seconds=1.0, audio=True))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with run_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def direct(shared_server: Served) -> Reply:
    """What the project's own client gets."""
    return shared_server.ask("page", "hello", seed=71, voice="Ethan", talker=TALKER)


def test_what_is_read_and_heard_is_the_server_s(browser: Any, gateway: RunningGateway, direct: Reply) -> None:
    with visit(browser, gateway.base, GREEDY) as at:
        at.state("ready")
        at.page.select_option("#voice", "Ethan")
        at.write("hello")
        at.state("speaking")
        at.state("ready", seconds=60)
        assert at.asked[0]["audio"] == {"format": "pcm16", "voice": "Ethan"}
        assert at.text(".reply .said") == direct.text
        assert 0 < float(at.times()["First text"].split()[0]) < 30
        assert 0 < float(at.times()["First audio"].split()[0]) < 30
        played = at.played()
        gaps = [following - first - len(samples) for (first, samples), (following, _) in pairwise(played)]
        # A slow machine may run dry; what the page tells of it is so, and nothing ever overlaps.
        assert gaps
        assert min(gaps) >= 0
        assert sum(gap > 0 for gap in gaps) == int(at.times().get("Gaps", 0))
        np.testing.assert_allclose(_sound(at), direct.audio, rtol=0, atol=2 * PCM16_STEP)


def test_a_stop_reaches_every_stage_and_what_was_heard_is_kept(
    browser: Any, server: Served, gateway: RunningGateway
) -> None:
    whole = server.ask("whole", "hello", seed=SLOW_TALKER, modalities=["text"])
    with visit(browser, gateway.base, {"seed": SLOW_TALKER, "talker": TALKER}) as at:
        at.state("ready")
        with at.page.expect_response("**/v1/chat/completions") as answered:
            at.write("hello")
        request_id = answered.value.headers["x-request-id"]
        at.state("speaking")
        time.sleep(0.5)
        at.page.click("#stop")
        at.state("stopped")
        wait_for(lambda: any(server.records.of(request_id, stage, "noticed") for stage in STAGES), server.held)
        for stage in STAGES:
            wait_for(lambda stage=stage: server.records.of(request_id, stage, "aborted"), server.held)
        server.wait_until_idle()
        kept = at.text(".reply .said")
        assert len(kept) < len(whole.text)
        if kept:
            heard = float(at.text(".reply .note").split()[2])
            assert kept in {heard_text(whole.text, seconds) for seconds in (heard - 0.005, heard, heard + 0.005)}
        at.write("Go on")
        at.page.locator(".reply").nth(1).wait_for()
        said = [message["content"] for message in at.asked[1]["messages"] if message["role"] == "assistant"]
        assert said == ([kept] if kept else [])
        at.page.keyboard.press("Escape")
        at.state("stopped")


def test_speaking_cuts_in_on_the_server_and_is_answered(browser: Any, server: Served, gateway: RunningGateway) -> None:
    # What is recorded differs from run to run, and with it the reply: one that says something for sure.
    with visit(browser, gateway.base, {"seed": SLOW_TALKER, "talker": TALKER}) as at:
        at.state("ready")
        at.write("hello")
        at.state("speaking")
        talk = at.page.get_by_role("button", name="Talk")
        talk.click()
        at.state("listening")
        server.wait_until_idle()
        time.sleep(0.5)
        talk.click()
        at.state("speaking")
        (spoken,) = at.asked[-1]["messages"][-1]["content"]
        assert base64.b64decode(spoken["input_audio"]["data"])[:4] == b"RIFF"
        at.page.keyboard.press("Escape")
        at.state("stopped")


def test_an_image_is_understood_and_one_over_the_limit_refused(
    browser: Any, server: Served, gateway: RunningGateway
) -> None:
    small, large = image_file("png"), b"\x89PNG" + bytes(1 << 20)
    with visit(browser, gateway.base, GREEDY) as at:
        at.state("ready")
        at.page.uncheck("#speak")
        _attach(at, "large.png", large)
        at.write("What is this?")
        at.page.get_by_role("alert").get_by_text(
            re.compile(rf"^large\.png: .* the limit is {1 << 20} bytes")
        ).wait_for()
        at.page.get_by_role("button", name="Remove large.png").click()
        _attach(at, "small.png", small)
        at.page.get_by_role("button", name="Try again").click()
        at.state("ready")
        (asked,) = at.asked[-1]["messages"]
        shown = at.text(".reply .said")
    url = f"data:image/png;base64,{base64.b64encode(small).decode()}"
    assert asked["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    assert shown == gateway.chat(messages=[asked], seed=71).choices[0].message.content


def test_what_is_dropped_is_understood_and_of_a_video_the_sound_if_wanted(
    browser: Any, server: Served, gateway: RunningGateway
) -> None:
    dropped = [(SOUND, "audio/ogg", False), (FILM, "video/mp4", False), (FILM, "video/mp4", True)]
    shown = []
    with visit(browser, gateway.base, {"seed": 71}) as at:
        at.state("ready")
        at.page.uncheck("#speak")
        for medium, kind, with_sound in dropped:
            at.hand_over("drop", "dropped", kind, medium.data)
            if with_sound:
                at.page.check("#sounding")
            at.write(QUESTION)
            at.page.wait_for_selector('.reply[aria-busy="false"]')
            shown.append(at.text(".reply .said"))
            at.page.get_by_role("button", name="New conversation").click()
    assert shown == [_direct(server, medium, with_sound) for medium, _, with_sound in dropped]
    assert len(set(shown)) == len(dropped)


def _direct(server: Served, medium: Media, with_sound: bool) -> str:
    """What the project's own client gets."""
    request = Request.ask(QUESTION, [medium], seed=71, modalities=["text"], use_audio_in_video=with_sound)
    return server.client.stream(request).collect().text


def test_hands_free_speech_is_understood_and_answered(
    browser: Any, server: Served, gateway: RunningGateway, tmp_path: Path
) -> None:
    quiet, spoken = np.zeros(2 * 16000, np.float32), tmp_path / "spoken.wav"
    spoken.write_bytes(audio_file("wav", samples=np.concatenate([quiet, tone(1.5), quiet])))
    talker, short = {"temperature": 0, "min_tokens": 40, "max_tokens": 40}, {"min_tokens": 12, "max_tokens": 12}
    with (
        launch(browser.browser_type, tmp_path, spoken) as listening,
        visit(listening, gateway.base, {"seed": 71, "talker": talker, **short}) as at,
    ):
        at.state("ready")
        at.page.check("#hands-free")
        at.state("listening")
        at.page.wait_for_selector('.reply[aria-busy="false"]', timeout=60_000)
        shown, heard = at.text(".reply .said"), _sound(at)
        (question,) = at.asked[-1]["messages"]
    (part,) = question["content"]
    said = Media("audio", base64.b64decode(part["input_audio"]["data"]))
    asked = Request.ask(media=[said], seed=71, talker=talker, thinker=short, audio_in_pieces=True)
    direct = server.client.stream(asked).collect()
    assert shown == direct.text != ""
    np.testing.assert_allclose(heard, direct.audio, rtol=0, atol=2 * PCM16_STEP)


def _sound(at: Visit) -> Any:
    """All that was scheduled to play, without its gaps."""
    return np.concatenate([samples for _, samples in at.played()])


def _attach(at: Visit, name: str, data: bytes) -> None:
    at.page.set_input_files("#files", [{"name": name, "mimeType": "image/png", "buffer": data}])
    at.page.locator("#attachments li").wait_for()

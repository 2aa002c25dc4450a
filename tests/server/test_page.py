# SPDX-License-Identifier: Apache-2.0
"""The gateway's page in a browser, with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from browser import launch, run_browser, visit
from gateway_fakes import RunningGateway, run_gateway
from media_samples import image_file
from server.serving import REPLY_S, Served
from triton_omni_client import OmniClient


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with run_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_what_is_read_and_heard_is_the_server_s(browser: Any, gateway: RunningGateway) -> None:
    with visit(browser, gateway.base) as at:
        at.state("ready")
        at.write("hello")
        at.ended(1)
        at.state("ready", seconds=REPLY_S)
        (done,) = at.told("response.done")
        (part,) = done["response"]["output"][0]["content"]
        assert at.page.evaluate("document.querySelector('.reply .said').textContent") != ""
        assert part["transcript"] != ""
        assert 0 < float(at.times()["First text"].split()[0]) < 600
        assert 0 < float(at.times()["First audio"].split()[0]) < 600
        played = at.played()
        gaps = [following - first - len(samples) for (first, samples), (following, _) in pairwise(played)]
        # A slow machine may run dry; what the page tells of it is so, and nothing ever overlaps.
        assert min(gaps, default=0) >= 0
        assert sum(gap > 0 for gap in gaps) == int(at.times().get("Gaps", 0))
        assert at.times()["Speech"] == f"{sum(len(samples) for _, samples in played) / 24000:.2f} s"


def test_a_picture_is_taken(browser: Any, gateway: RunningGateway) -> None:
    with visit(browser, gateway.base) as at:
        at.state("ready")
        at.page.click("#options")
        at.page.uncheck("#speak")
        at.page.click("#done")
        at.page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": image_file("png")})
        at.page.locator("#attachments li").wait_for()
        at.write("What is this?")
        at.ended(1)
        (done,) = at.told("response.done")
        assert done["response"]["usage"]["input_token_details"]["image_tokens"] > 0
        assert at.played() == []


def test_a_spoken_question_is_answered_aloud(browser: Any, mini: Served, tmp_path: Path) -> None:
    """By the checkpoint that is served by default, whose own voice is the microphone."""
    recording = tmp_path / "question.wav"
    with OmniClient(mini.supervisor.grpc_url) as client:
        question = client.say("Say: What color is the sky?", voice="Chelsie", seed=0).audio
    quiet = np.zeros(3 * 24_000, np.float32)
    soundfile.write(recording, np.concatenate([quiet, question, quiet]), 24_000, subtype="PCM_16")
    with (
        run_gateway(mini.supervisor.grpc_url) as gateway,
        launch(browser.browser_type, tmp_path, recording) as listening,
        visit(listening, gateway.base) as at,
    ):
        at.state("ready")
        at.page.get_by_role("button", name="Talk").click()
        at.state("hearing")
        at.state("speaking", seconds=REPLY_S)
        at.state("listening", seconds=REPLY_S)
        (done,) = at.told("response.done")
        (part,) = done["response"]["output"][0]["content"]
        assert (done["response"]["status"], at.text(".reply .said").strip()) == ("completed", part["transcript"])
        assert part["transcript"] != ""
        assert sum(len(samples) for _, samples in at.played(1)) > 12_000
        at.wait_until("document.querySelector('.question').textContent !== ''")
        at.page.get_by_role("button", name="Talk").click()
        at.state("ready")
    mini.wait_until_idle()

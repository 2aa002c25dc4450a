# SPDX-License-Identifier: Apache-2.0
"""Three spoken turns, the second of which interrupts: recorded speech is the microphone of a browser.

Its camera shows a picture, so each turn begins with one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from browser import ROOT, launch, visit
from client_fakes import INFO, FakeTriton, chunk, final, inputs_of, parameters_of, serve_grpc
from gateway_fakes import run_gateway
from media_samples import tone
from triton_omni_client.heard import heard_text

SPEECH = ROOT / "docs" / "images" / "reply.wav"
RATE = 24000
QUIET_S, SPOKEN_S = 6.0, 1.5
REPLIES = [("word " * 400, 40.0), ("Second.", 0.5), ("Third.", 0.5)]
HEARD = "What is the sea?"
NOTE_STATES = """() => {
  const { dataset } = document.querySelector("#state");
  window.states = [dataset.state];
  new MutationObserver(() => window.states.push(dataset.state)).observe(document.querySelector("#state"), {
    attributeFilter: ["data-state"],
  });
}"""


class Scripted:
    """A server that writes down speech and has a reply for each turn."""

    def __init__(self) -> None:
        self._replies = iter(REPLIES)
        self.chats: list[list[dict[str, Any]]] = []

    def __call__(self, request: Any, _context: Any) -> Iterator[Any]:
        asked = parameters_of(request)
        if asked.get("prefill_only"):
            pass
        elif "priority" in asked:
            yield chunk(text=HEARD)
        else:
            self.chats.append(json.loads(inputs_of(request)["messages"][0]))
            text, seconds = next(self._replies)
            yield chunk(text=text)
            yield chunk(audio=tone(seconds, RATE, hertz=220))
        yield chunk(info=INFO)
        yield final()


def spoken(path: Path) -> None:
    """Write the recording: three times speech, and quiet before and after."""
    speech, rate = soundfile.read(SPEECH, dtype="float32")
    quiet = np.zeros(round(QUIET_S * rate), np.float32)
    turn = speech[: round(SPOKEN_S * rate)]
    soundfile.write(path, np.concatenate([quiet, turn, quiet, turn, quiet, turn, quiet]), rate, subtype="PCM_16")


def parts(chat: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Who says what: a text, or the kinds of its parts."""
    contents = [(message["role"], message["content"]) for message in chat]
    return [(role, said if isinstance(said, str) else [part["type"] for part in said]) for role, said in contents]


def test_three_spoken_turns_one_of_which_interrupts(browser: Any, tmp_path: Path) -> None:
    spoken(tmp_path / "spoken.wav")
    script = Scripted()
    with (
        serve_grpc(FakeTriton(script=script)) as triton,
        run_gateway(triton.url) as gateway,
        launch(browser.browser_type, tmp_path, tmp_path / "spoken.wav") as listening,
        visit(listening, gateway.base) as at,
    ):
        at.state("ready")
        at.page.get_by_role("button", name="Camera").click()
        at.wait_until("document.querySelector('#mirror').videoWidth > 0")
        at.page.evaluate(NOTE_STATES)
        at.page.get_by_role("button", name="Talk").click()
        at.state("hearing")
        at.state("speaking")
        at.state("hearing")
        at.wait_until("document.querySelectorAll('.reply[aria-busy=false]').length === 3")
        at.wait_until(f"[...document.querySelectorAll('.question')].every((each) => each.textContent === '{HEARD}')")
        at.page.get_by_role("button", name="Talk").click()
        at.state("ready")
        (cut,) = at.told("conversation.item.truncate")
        assert at.page.locator(".reply .unheard").count() == 1
        kinds = [event["type"] for event in at.events]
        states = at.page.evaluate("window.states")
    assert [after for before, after in pairwise(states) if before == "hearing"] == ["thinking"] * 3
    first, second, third = script.chats
    heard = heard_text(REPLIES[0][0], cut["audio_end_ms"] / 1000)
    turn = [("user", ["image"]), ("user", ["audio"])]
    assert parts(first) == turn
    assert parts(second) == [*turn, ("assistant", heard), *turn]
    assert parts(third) == [*parts(second), ("assistant", REPLIES[1][0]), *turn]
    begins = [place for place, kind in enumerate(kinds) if kind == "input_audio_buffer.speech_started"]
    ends = [place for place, kind in enumerate(kinds) if kind == "input_audio_buffer.speech_stopped"]
    assert begins[1] < kinds.index("conversation.item.truncate") < ends[1]

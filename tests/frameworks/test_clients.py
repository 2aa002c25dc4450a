# SPDX-License-Identifier: Apache-2.0
"""Unmodified clients of OpenAI's API, told nothing but the gateway's address and a key, and some the model's name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frameworks.running import PROGRAMS, ROOT, sound_of
from gateway_fakes import MODEL, RunningGateway

Run = Callable[[str], Any]
SKY, GRASS = "The sky is blue.", "Grass is green."
SHORTEST, LONGEST = 0.6, 3.0
"""Seconds in which the sentence about the sky is said."""
WHOLE_STORY = 12.0
"""Seconds that a story takes, and more."""
README = ROOT / "gateway" / "README.md"
NAMED = re.compile(r"tests/frameworks/clients/(\w+\.\w+)")
"""A program that it names."""
LEFT_SPEECH = 'omni_gateway_requests_total{endpoint="/v1/audio/speech",status="499"}'
"""Speech that was cut off by its caller."""


def is_the_sky(sound: tuple[str, float]) -> bool:
    """Whether it is an mp3 as long as the sentence about the sky."""
    codec, seconds = sound
    return codec.startswith("mp3") and SHORTEST < seconds < LONGEST


def test_openai_for_python_chats(run: Run, tmp_path: Path) -> None:
    told = run("openai_chat.py")
    assert told["models"] == [MODEL]
    assert told["text"] == told["streamed"] == told["transcript"] == SKY
    assert told["tokens"] > 0
    assert is_the_sky(sound_of(tmp_path / "reply.mp3"))


def test_openai_for_python_speaks(run: Run, tmp_path: Path) -> None:
    run("openai_speech.py")
    assert is_the_sky(sound_of(tmp_path / "speech.mp3"))


def test_openai_for_node(run: Run, tmp_path: Path) -> None:
    assert run("openai_node.mjs") == {"text": SKY, "streamed": SKY}
    assert is_the_sky(sound_of(tmp_path / "speech.mp3"))


def test_langchain(run: Run) -> None:
    told = run("langchain_chat.py")
    assert told["text"] == told["streamed"] == SKY
    assert told["pieces"] > 1


def test_litellm(run: Run, tmp_path: Path) -> None:
    assert run("litellm_chat.py") == {"text": SKY, "streamed": SKY}
    assert is_the_sky(sound_of(tmp_path / "speech.mp3"))


def test_openai_agents(run: Run) -> None:
    assert run("openai_agents.py") == {"first": SKY, "later": GRASS}


def test_pipecat(run: Run, gateway: RunningGateway) -> None:
    greeting = is_interrupted(lambda: run("pipecat_agent.py"), gateway)
    assert greeting["text"].endswith(".")


def test_livekit(run: Run, gateway: RunningGateway) -> None:
    greeting = is_interrupted(lambda: run("livekit_agent.py"), gateway)
    assert greeting["text"] == "Good morning."


def is_interrupted(agent: Callable[[], Any], gateway: RunningGateway) -> Any:
    """An agent's greeting; then it is interrupted in a story, which the gateway notices, and answers."""
    left = gateway.metric(LEFT_SPEECH)
    told = agent()
    greeting, story, answer = told["greeting"], told["story"], told["answer"]
    assert (greeting["interrupted"], story["interrupted"], answer["interrupted"]) == (False, True, False)
    assert SHORTEST < greeting["seconds"] < LONGEST
    assert story["text"]
    assert 0 < story["seconds"] < WHOLE_STORY / 2
    gateway.wait_for_metric(LEFT_SPEECH, left + 1)
    assert answer["text"] == SKY
    assert SHORTEST < answer["seconds"] < LONGEST
    return greeting


def test_the_readme_names_every_program() -> None:
    programs = {path.name for path in PROGRAMS.iterdir()}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert set(NAMED.findall(README.read_text())) == programs
    assert set(re.findall(r'"(\w+\.(?:py|mjs))"', tests)) == programs


def test_the_readme_shows_lines_that_its_programs_have() -> None:
    rows = [line.split("|") for line in README.read_text().splitlines() if line.startswith("|") and NAMED.search(line)]
    assert len(rows) > 1
    for _, client, shown, tried, _ in rows:
        programs = [(PROGRAMS / name).read_text() for name in NAMED.findall(tried)]
        had = {line.strip() for program in programs for line in program.splitlines()}
        assert re.fullmatch(r" `[^`]+`(<br>`[^`]+`)* ", shown), client
        assert set(re.findall(r"`([^`]+)`", shown)) <= had, client

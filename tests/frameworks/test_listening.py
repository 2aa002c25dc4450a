# SPDX-License-Identifier: Apache-2.0
"""Unmodified clients that have speech written down, and voice agents of both frameworks that hear by it."""

from __future__ import annotations

import pytest

from frameworks.test_clients import LONGEST, SHORTEST, SKY, Run


@pytest.mark.parametrize("program", ["openai_transcriptions.py", "openai_transcriptions.mjs"])
def test_openai_transcribes(run: Run, question: str, program: str) -> None:
    told = run(program)
    assert told["json"] == told["text"].strip() == told["verbose"] == told["pieces"] == told["streamed"] == question
    assert SHORTEST < told["seconds"] < LONGEST
    assert told["translated"]


@pytest.mark.parametrize("program", ["pipecat_voice_agent.py", "livekit_voice_agent.py"])
def test_agents_hear_a_question_and_answer(run: Run, question: str, program: str) -> None:
    told = run(program)
    assert (told["question"], told["answer"]) == (question, SKY)
    assert SHORTEST < told["seconds"] < LONGEST

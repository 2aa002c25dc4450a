# SPDX-License-Identifier: Apache-2.0
"""Unmodified clients whose model calls a function.

The default checkpoint does not know when to call one, so the programs ask for a call, and the function's schema says
what its argument may be.
"""

from __future__ import annotations

import pytest

from frameworks.test_clients import Run

CITIES = ("Paris", "Rome")


@pytest.mark.parametrize("program", ["openai_tools.py", "openai_tools.mjs"])
def test_openai(run: Run, program: str) -> None:
    told = run(program)
    assert told["name"] == told["streamed"] == "get_weather"
    assert told["arguments"] == told["streamed_arguments"]
    assert told["arguments"]["city"] in CITIES
    assert told["reason"] == "tool_calls"
    assert told["answer"]


def test_langchain(run: Run) -> None:
    told = run("langchain_tools.py")
    (call,) = told["calls"]
    assert call["name"] == "get_weather"
    assert told["results"] == [f"The sky of {call['args']['city']} is blue."]
    assert told["answer"]


@pytest.mark.parametrize("program", ["openai_agents_tools.py", "pipecat_tools.py", "livekit_tools.py"])
def test_agents(run: Run, program: str) -> None:
    told = run(program)
    assert len(told["cities"]) == 1
    assert told["cities"][0] in CITIES
    assert told["answer"]

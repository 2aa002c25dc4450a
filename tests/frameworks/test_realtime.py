# SPDX-License-Identifier: Apache-2.0
"""Unmodified clients of OpenAI's Realtime API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import trustme

from frameworks.running import run_program
from frameworks.test_clients import LONGEST, SHORTEST, SKY, WHOLE_STORY, Run
from frameworks.test_tools import CITIES
from frameworks.tls import run_tls_proxy
from gateway_fakes import RunningGateway


def is_the_sky(told: dict[str, Any]) -> bool:
    """Whether it is the answer, spoken whole."""
    return told["text"] == SKY and SHORTEST < told["seconds"] < LONGEST


def test_openai_for_python(run: Run, question: str) -> None:
    told = run("openai_realtime.py")
    assert is_the_sky(told["written"])
    assert is_the_sky(told["spoken"])


async def test_openai_for_node(gateway: RunningGateway, question: str, tmp_path: Path) -> None:
    """It knows no address without TLS."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    trust = {"NODE_EXTRA_CA_CERTS": str(tmp_path / "authority.pem")}
    async with run_tls_proxy(gateway.base, authority) as address:
        told = await asyncio.to_thread(run_program, "openai_realtime.mjs", address, tmp_path, **trust)
    for socket in ("native", "ws"):
        assert is_the_sky(told[socket]["written"])
        assert is_the_sky(told[socket]["spoken"])


def test_pipecat(run: Run, question: str) -> None:
    """What the default checkpoint answers after such a greeting is its own affair.

    On a busy machine Pipecat puts words of the interrupted story, which it has already, before those of the answer.
    """
    told = run("pipecat_realtime.py")
    for reply in (told["greeting"], told["answer"]):
        assert reply["text"]
        assert SHORTEST < reply["seconds"] < LONGEST
        assert not reply["interrupted"]
    assert told["story"]["interrupted"]
    assert 0 < told["story"]["seconds"] < WHOLE_STORY / 2
    assert is_the_sky({**told["after"], "text": told["after"]["text"][-len(SKY) :]})
    assert not told["after"]["interrupted"]


def test_livekit(run: Run, question: str) -> None:
    """Its agent, interrupted in a story by the spoken question, answers that."""
    told = run("livekit_realtime.py")
    assert told["greeting"] == ["assistant", "Good morning."]
    assert told["interrupted"]
    assert ["user", question] in told["others"]
    assert told["others"][-1] == ["assistant", SKY]


def test_pipecat_transcribes(run: Run, question: str) -> None:
    assert run("pipecat_realtime_stt.py") == [question, question]


def test_livekit_transcribes(run: Run, question: str) -> None:
    assert run("livekit_realtime_stt.py") == [question, SKY]


@pytest.mark.parametrize("program", ["openai_realtime_tools.py", "pipecat_realtime_tools.py"])
def test_tools(run: Run, program: str) -> None:
    assert_called(run(program))


def test_livekit_speaks_after_a_call(run: Run) -> None:
    told = run("livekit_realtime_tools.py")
    assert_called(told)
    assert told["seconds"] > SHORTEST


def assert_called(told: dict[str, Any]) -> None:
    """The model called the function once, and answered."""
    assert len(told["cities"]) == 1
    assert told["cities"][0] in CITIES
    assert told["answer"]

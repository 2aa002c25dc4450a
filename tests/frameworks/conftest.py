# SPDX-License-Identifier: Apache-2.0
"""A gateway with API keys before a server of the default checkpoint, and programs that ask it."""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soxr

from frameworks.running import KEY, run_program
from gateway_fakes import RunningGateway, run_gateway
from server.serving import Served
from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_gateway.keys import ApiKeys

Run = Callable[[str], Any]


@pytest.fixture(scope="session")
def shared_gateway(mini: Served) -> Iterator[RunningGateway]:
    """As `./build.sh gateway` starts it, with a key besides."""
    with run_gateway(mini.supervisor.grpc_url, keys=ApiKeys([KEY]), speech_prompt="Say: {input}") as running:
        yield running


@pytest.fixture
def gateway(mini: Served, shared_gateway: RunningGateway) -> Iterator[RunningGateway]:
    """The gateway before a server that is idle again after the test."""
    yield shared_gateway
    mini.wait_until_idle()


@pytest.fixture
def run(gateway: RunningGateway, tmp_path: Path) -> Run:
    """Runs a program by its name, in the test's folder."""
    return lambda name: run_program(name, gateway.base, tmp_path)


@pytest.fixture
def question(mini: Served, tmp_path: Path) -> str:
    """What `question.wav` in the test's folder asks, as 16 kHz."""
    text = "What color is the sky?"
    spoken = mini.client.say(f"Say: {text}", voice="Chelsie", seed=0).audio
    samples = soxr.resample(spoken, SAMPLE_RATE, 16000)
    with wave.open(str(tmp_path / "question.wav"), "w") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return text

# SPDX-License-Identifier: Apache-2.0
"""A gateway with API keys before a server of the default checkpoint, and programs that ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frameworks.running import KEY, run_program
from gateway_fakes import RunningGateway, run_gateway
from server.serving import Served
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

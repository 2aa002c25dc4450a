# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against a real tritonserver: one server for most of them, and HF's model as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_fakes import RunningGateway, run_gateway
from reference.hf import HfReference
from server.serving import Served, serve


@pytest.fixture(scope="session")
def shared_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of most tests; its stop shows that none of them left a request behind."""
    with serve(tmp_path_factory.mktemp("server"), tiny_checkpoint) as served:
        # Kernels are compiled when they first run, which takes a GPU longer than some tests wait.
        served.ask("warm-up", "hello " * 40, seed=1)
        yield served
        served.stop()


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server, idle again after the test."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture(scope="session")
def shared_gateway(shared_server: Served) -> Iterator[RunningGateway]:
    """An OpenAI gateway before the shared server."""
    with run_gateway(shared_server.supervisor.grpc_url) as running:
        yield running


@pytest.fixture
def gateway(server: Served, shared_gateway: RunningGateway) -> RunningGateway:
    """The gateway before a server that is idle again after the test."""
    return shared_gateway


@pytest.fixture(scope="session")
def hf(tiny_checkpoint: Path) -> HfReference:
    """HF's model of the tiny checkpoint, in float32 on the CPU."""
    return HfReference(tiny_checkpoint)

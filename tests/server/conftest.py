# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against a real tritonserver: one server for most of them, and HF's model as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from reference.hf import HfReference

from server.serving import Served, serve

STOP_S = 10.0
"""A server whose requests have all ended stops in a few seconds; one that leaked a request waits 30 s for it."""


@pytest.fixture(scope="session")
def shared_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of most tests; that it stops in time after all of them shows that none left a request behind."""
    with serve(tmp_path_factory.mktemp("server"), tiny_checkpoint) as served:
        yield served
        served.wait_until_idle()
        seconds = served.supervisor.stop()
        assert seconds < STOP_S, f"the server took {seconds:.1f} s to stop: a request was left behind"


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server, idle before and after the test."""
    shared_server.wait_until_idle()
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture(scope="session")
def hf(tiny_checkpoint: Path) -> HfReference:
    """HF's model of the tiny checkpoint, in float32 on the CPU."""
    return HfReference(tiny_checkpoint)

# SPDX-License-Identifier: Apache-2.0
"""A gateway before a fake Triton server, for whichever test asks for one.

It also keeps the ledgers of unit tests out of /dev/shm, so that a killed run leaves nothing on the machine. Settings
that a stage makes for its process last for its own test alone.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_fakes import FakeTriton, serve_grpc
from gateway_fakes import Lines, RunningGateway, run_gateway
from realtime_client import greeting
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.decoders import Decoders
from triton_omni.session import server_folder
from triton_omni_gateway.request_log import REQUESTS


@pytest.fixture(scope="module", autouse=True)
def tables_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that takes the place of /dev/shm."""
    folder = tmp_path_factory.mktemp("shm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_folder, "_SHARED_MEMORY", folder)
        yield folder


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    """Processes that decode within the limits as shipped; their start takes longer than most tests."""
    made = Decoders(RequestLimits())
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    """A stage sets its process a shorter one: what runs after its test keeps Python's own."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def hang_up_ends() -> Iterator[None]:
    """A hang-up ends whoever is started, also where the tests run under nohup, which the supervisor keeps to."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, earlier)


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    """A server whose replies greet; modules with another script have their own."""
    with serve_grpc(FakeTriton(greeting)) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    """The gateway as it is by default, before that server."""
    with run_gateway(triton.url) as running:
        yield running


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The log's lines of requests, once a gateway has set its log up and a test adds this to it."""
    kept = Lines()
    yield kept
    logging.getLogger(REQUESTS).removeHandler(kept)

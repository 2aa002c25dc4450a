# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against a real tritonserver: one server for most of them, and HF's model as the oracle."""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from gateway_fakes import RunningGateway, run_gateway
from processes import family, is_running
from reference.hf import HfReference
from server.serving import REPLY_S, Served, serve, wait_for
from server.stacks import doings
from triton_omni_client.messages import MODEL


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed tells what the stages of its servers do: a reply that does not come has its cause there."""
    report = yield
    if report.when == "call" and report.failed:
        fixtures = getattr(item, "funcargs", {}).values()
        for server in {server for value in fixtures if isinstance(server := getattr(value, "server", value), Served)}:
            report.sections.append((f"server {server.supervisor.pid}", _told(server)))
    return report


def _told(server: Served) -> str:
    try:
        return doings(server)
    except Exception as error:  # noqa: BLE001 - a server that has ended must not hide why the test failed
        return f"it tells nothing: {error!r}"


@pytest.fixture(scope="session")
def shared_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server of most tests; its stop shows that no test left a request or a process."""
    with serve(tmp_path_factory.mktemp("server"), tiny_checkpoint, client_shared_memory=True) as served:
        # Kernels are compiled when they first run, which takes a GPU longer than some tests wait.
        served.ask("warm-up", "hello " * 40, seed=1)
        pids = family(served.supervisor.pid)
        yield served
        with finished_stream(served):
            served.stop()
        wait_for(lambda: not any(map(is_running, pids)), lambda: pids)


@contextmanager
def finished_stream(served: Served) -> Iterator[None]:
    """A client that has its whole reply and holds its stream open; Triton waits for such a one when it is to stop."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))
    with grpcclient.InferenceServerClient(served.supervisor.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, [text], enable_empty_final_response=True)
        final = False
        while not final:
            result, error = answers.get(timeout=REPLY_S)
            assert error is None
            final = result.get_response().parameters["triton_final_response"].bool_param
        yield


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server, idle again after the test."""
    yield shared_server
    shared_server.wait_until_idle()


@pytest.fixture
def key(server: Served) -> str:
    """The key of this server, as its operator could have set it."""
    return server.supervisor._running().launch.control._key


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

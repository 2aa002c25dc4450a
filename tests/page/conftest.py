# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the page: a browser, and a gateway before a fake Triton server, which a module may replace by its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import Visit, run_browser, visit
from client_fakes import FakeTriton, serve_grpc
from gateway_fakes import RunningGateway, run_gateway
from page_chat import story


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with run_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(script=story())) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url) as running:
        yield running


@pytest.fixture
def at(browser: Any, gateway: RunningGateway) -> Iterator[Visit]:
    """The page, ready."""
    with visit(browser, gateway.base) as found:
        found.state("ready")
        yield found

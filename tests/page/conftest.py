# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the page: a browser, and a gateway before the fake Triton server of the test's own module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser import run_browser
from client_fakes import FakeTriton
from gateway_fakes import RunningGateway, run_gateway


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with run_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url) as running:
        yield running

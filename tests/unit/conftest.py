# SPDX-License-Identifier: Apache-2.0
"""Keeps the ledgers of unit tests out of /dev/shm, since a run that is killed leaves nothing on the machine, and what a
stage sets for its process to its own test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.decoders import Decoders
from triton_omni.session import server_folder


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

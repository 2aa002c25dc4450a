# SPDX-License-Identifier: Apache-2.0
"""tritonserver's heap after the last request: the memory that it still uses."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.serving import Served, serve, wait_for
from triton_omni.supervisor.native import compiler
from triton_omni_client import Request, TooLarge

TEXT_BYTES = 2 << 20
"""Bytes of a request that is refused once Triton has all of it."""
AT_ONCE, REQUESTS = 8, 32
FRESH_S = 1.0
"""Seconds in which, on an idle machine, the watch looks again and Triton's threads release their memory."""


@pytest.fixture(scope="module")
def heap(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """An environment in which tritonserver tells its heap's bytes, and the file where it does."""
    folder = tmp_path_factory.mktemp("heap")
    library, told = folder / "heap_watch.so", folder / "in-use"
    source = Path(__file__).parents[1] / "heap_watch.c"
    subprocess.run([*compiler(), "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-lpthread"], check=True)
    return {"LD_PRELOAD": str(library), "HEAP_WATCH": str(told)}, told


@pytest.fixture(scope="module")
def watched(
    heap: tuple[dict[str, str], Path], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server with such a heap."""
    with serve(tmp_path_factory.mktemp("server"), tiny_checkpoint, environment=heap[0]) as served:
        yield served


def test_streams_that_have_ended_leave_nothing_of_what_they_held(
    watched: Served, heap: tuple[dict[str, str], Path]
) -> None:
    """Triton keeps some for the next ones by default, each with all the bytes that it ever had."""

    def in_use() -> int:
        watched.wait_until_idle()
        time.sleep(FRESH_S)
        return int(heap[1].read_text())

    def ask(number: int) -> None:
        with pytest.raises(TooLarge, match="text_input"):
            watched.client.stream(Request(text="x " * (TEXT_BYTES // 2), seed=number)).collect()

    def kept() -> int:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(ask, range(REQUESTS)))
        return in_use() - before

    watched.ask("first", "hello", seed=1)
    before = in_use()
    # A connection, which lasts, has buffers for some messages, how many is chance; streams would keep eight each time.
    wait_for(lambda: kept() < AT_ONCE * TEXT_BYTES * 3 // 4, watched.log)

# SPDX-License-Identifier: Apache-2.0
"""A thinker whose layers are split over two processes: HF's replies, one stage to whoever looks at it from outside."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from processes import is_running
from reference.hf import HfReference
from server.asking import ask_together
from server.parity import GREEDY, check_reply, hf_reply
from server.probes import SLOW_THINKER
from server.serving import NEVER_S, TINY, Served, serve, wait_for
from server.test_mixed_media import CHATS
from triton_omni.core.device import gpu_count
from triton_omni_client import Internal

AT_ONCE = ("all kinds between words", "a film that is heard")
pytestmark = pytest.mark.skipif(gpu_count() == 1, reason="two processes share out a thinker on two GPUs, or on none")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which torch keeps compiled code, empty at the start."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def split(tiny_checkpoint: Path, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of its own: at its end nothing may be left of the processes that Triton does not know."""
    settings = {**TINY, "thinker": {**TINY["thinker"], "tensor_parallel_size": 2}}
    folder = tmp_path_factory.mktemp("split")
    before, named_before = set(Path(tempfile.gettempdir()).iterdir()), named_memory()
    with serve(folder, tiny_checkpoint, settings, {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}) as server:
        ranks = other_ranks(server)
        assert named_memory() <= named_before
        yield server
        wait_for(lambda: not any(map(is_running, ranks)), lambda: ranks)
        assert not [path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket() and path not in before]


def named_memory() -> set[Path]:
    """Memory by which ranks communicate and that would stay after processes that are killed."""
    return set(Path("/dev/shm").glob("vllm_dist_*"))


def other_ranks(server: Served) -> list[int]:
    """Processes that the thinker's started to hold the other parts of its layers."""
    started = psutil.Process(server.pid("thinker")).children()
    return [process.pid for process in started if "Worker_TP" in " ".join(process.cmdline())]


def test_replies_are_hf_s(split: Served, hf: HfReference) -> None:
    assert len(other_ranks(split)) == 1
    expected = {name: hf_reply(hf, CHATS[name].hf_inputs(hf), "Ethan") for name in AT_ONCE}
    requests = {
        name: CHATS[name].request(voice="Ethan", seed=seed, request_id=f"split: {name}", **GREEDY)
        for seed, name in enumerate(AT_ONCE)
    }
    replies = ask_together(split, requests)
    for name in AT_ONCE:
        check_reply(split, hf, requests[name], replies[name], expected[name])


def test_no_request_waits_for_a_compiler(split: Served, compiled: Path) -> None:
    """Without compiled code, as on a fresh machine, compiling takes a busy machine longer than a reply may take."""
    split.ask("split: compiles nothing", "hello", seed=3)
    assert not list(compiled.iterdir())


def test_a_seed_draws_what_it_draws_in_one_process(split: Served, server: Served) -> None:
    drawn = {"seed": 11, "modalities": ["text"], "thinker": {"temperature": 1.0, "min_tokens": 20, "max_tokens": 20}}
    split.ask("split: drawn", "hello", **drawn)
    server.ask("whole: drawn", "hello", **drawn)
    assert split.records.tokens("split: drawn") == server.records.tokens("whole: drawn")


def test_a_stage_dies_with_a_rank(split: Served) -> None:
    """The last test of this module: that a stage which died is started again is in `test_crashes.py`."""
    stage, ranks = split.pid("thinker"), other_ranks(split)
    with ThreadPoolExecutor(1) as pool:
        long = {"min_tokens": 250, "max_tokens": 250}
        stream = pool.submit(split.ask, "cut off", "hello", seed=SLOW_THINKER, thinker=long)
        wait_for(lambda: split.metrics('omni_sessions{stage="token2wav"}').popitem()[1] == 1, split.held)
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(Internal, match="the process of thinker ended unexpectedly"):
            stream.result(timeout=NEVER_S)
    assert not is_running(stage)
    split.stop_whatever_is_left()

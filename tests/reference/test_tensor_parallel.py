# SPDX-License-Identifier: Apache-2.0
"""Ranks of a split engine end together; what they compute is held to HF in `tests/server/test_tensor_parallel.py`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from processes import is_running
from waiting import FOREVER_S, IN_TIME_S, wait_for

FORK = multiprocessing.get_context("fork")


def sleeping_follower(pids: Any, **_: Any) -> None:
    """Stands in for vLLM's worker, which may hang inside a collective."""
    pids.put(os.getpid())
    time.sleep(FOREVER_S)


def leading(pids: Any) -> None:
    """An engine's process with one follower, which it watches."""
    from triton_omni.vllm_hooks.shared import tensor_parallel

    tensor_parallel.WorkerProc = SimpleNamespace(worker_main=sleeping_follower)  # type: ignore[assignment,misc]
    FORK.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    follower = FORK.Process(target=tensor_parallel._follow, kwargs={"pids": pids}, daemon=True)
    follower.start()
    engine: Any = SimpleNamespace(_closing=threading.Event(), _grace_s=0.0)
    tensor_parallel.TensorParallelExecutor._end_with_a_follower(engine, [follower])


@pytest.mark.parametrize("first", ["engine", "follower"])
def test_each_ends_with_the_other(first: str, capfd: pytest.CaptureFixture[str]) -> None:
    import triton_omni.vllm_hooks.shared.tensor_parallel  # noqa: F401, the processes below share it

    pids = FORK.Queue()
    engine = FORK.Process(target=leading, args=(pids,))
    engine.start()
    follower = pids.get(timeout=IN_TIME_S)
    assert engine.pid is not None
    os.kill(engine.pid if first == "engine" else follower, signal.SIGKILL)
    engine.join(IN_TIME_S)
    assert engine.exitcode == -signal.SIGKILL
    wait_for(lambda: not is_running(follower))
    # The follower of an engine that hung and was killed tells where it stood.
    assert ("in sleeping_follower" in capfd.readouterr().err) == (first == "engine")


def test_a_follower_that_fails_in_a_step_ends() -> None:
    from triton_omni.vllm_hooks.shared.tensor_parallel import failing_together

    def fail() -> None:
        with failing_together(rank=1):
            raise ValueError("out of memory")

    process = FORK.Process(target=fail)
    process.start()
    process.join(IN_TIME_S)
    assert process.exitcode == 1
    with pytest.raises(ValueError, match="out of memory"), failing_together(rank=0):
        raise ValueError("out of memory")


def test_a_call_goes_by_its_name_so_that_every_rank_can_make_it() -> None:
    from triton_omni.vllm_hooks.shared.tensor_parallel import TensorParallelExecutor

    executor = object.__new__(TensorParallelExecutor)
    with pytest.raises(TypeError, match="a call goes by its name"):
        executor.collective_rpc(print)


def test_there_must_be_as_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from triton_omni.core.settings import SettingsError
    from triton_omni.vllm_hooks.shared.engine_args import _ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert _ranks(2, torch.device("cuda", 1))["device_ids"] == [1, 2]
    with pytest.raises(SettingsError, match=r"2 GPUs from number 2 on, but this process sees 3 \(0 to 2\)"):
        _ranks(2, torch.device("cuda", 2))


def test_who_cannot_load_says_why_before_its_followers_end_it() -> None:
    from triton_omni.vllm_hooks.shared.tensor_parallel import TensorParallelExecutor

    follower = FORK.Process(target=time.sleep, args=(0,))
    follower.start()
    engine: Any = SimpleNamespace(_closing=threading.Event(), _grace_s=FOREVER_S)
    threading.Timer(0.2, engine._closing.set).start()
    TensorParallelExecutor._end_with_a_follower(engine, [follower])
    follower.join()

# SPDX-License-Identifier: Apache-2.0
"""Who brings a request waits while a step is being launched, and no longer than a launch takes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from triton_omni.launching import LONGEST_WAIT_S, Launching
from triton_omni.vllm_hooks.thinker_worker import ThinkerWorker


def test_nobody_waits_while_nothing_is_launched() -> None:
    begun = time.monotonic()
    Launching().wait()
    assert time.monotonic() - begun < LONGEST_WAIT_S / 2


def test_who_comes_during_a_launch_waits_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton_omni.launching.LONGEST_WAIT_S", 60.0)
    launching, passed = Launching(), threading.Event()

    def bring() -> None:
        launching.wait()
        passed.set()

    with launching:
        thread = threading.Thread(target=bring)
        thread.start()
        assert not passed.wait(0.05)
    assert passed.wait(5)
    thread.join()


def test_a_launch_that_fails_is_over() -> None:
    launching = Launching()
    with pytest.raises(RuntimeError), launching:
        raise RuntimeError
    begun = time.monotonic()
    launching.wait()
    assert time.monotonic() - begun < LONGEST_WAIT_S / 2


def test_nobody_waits_for_long() -> None:
    launching = Launching()
    begun = time.monotonic()
    with launching:
        launching.wait()
    assert time.monotonic() - begun >= LONGEST_WAIT_S


@pytest.mark.parametrize("call", ["execute_model", "sample_tokens"])
def test_a_worker_tells_of_its_launches(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launching, seen = Launching(), []

    def launch(self: Any, told: Any) -> str:
        del self
        seen.append((told, launching._over.is_set()))
        return "result"

    # The class that a `ThinkerWorker` adds to, whatever the platform.
    monkeypatch.setattr(ThinkerWorker.__mro__[2], call, launch)
    worker: Any = ThinkerWorker.__new__(ThinkerWorker)
    worker.rank = 0
    assert getattr(worker, call)("step") == "result"
    worker.launching = launching
    assert getattr(worker, call)("step") == "result"
    assert seen == [("step", True), ("step", False)]
    assert launching._over.is_set()

# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests against HF: one oracle a session."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from importing import more_is_imported
from processes import UNMEASURED
from reference.hf import HfReference
from triton_omni.core import metrics
from triton_omni.core.metrics import LoopClock


@pytest.fixture(autouse=True)
def _reference_in_full_float32() -> None:
    """On the CPU no product rounds its inputs, whatever an engine in this process has asked for."""
    for kind in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn):
        kind.fp32_precision = "ieee"


@pytest.fixture
def clock() -> Iterator[LoopClock]:
    """Clock of the thread that steps an engine, as a stage's loop has one."""
    clock = LoopClock()
    clock.attach()
    yield clock
    del metrics._of_thread.clock


@pytest.fixture(scope="module", autouse=True)
def _threads_left_alone() -> Iterator[None]:
    """The number is the process's. An engine that sets two threads makes the threads of all later modules wait for each
    other at every operation, which takes five times as long.
    """
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module", autouse=True)
def _modules_left_alone() -> Iterator[None]:
    """vLLM collects the whole heap eight times an engine, half a second each: not what is there before a test module.

    It freezes what it has made and gives that back when the engine is shut down, with all that was frozen before. Here
    it does neither: an engine that was shut down is collected with the little that is younger than its module.
    """
    more_is_imported()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("freeze", "unfreeze"):
            patch.setattr(gc, name, lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _functions_of_kernels_patched_once() -> Iterator[None]:
    """The Triton language's interpreter patches its whole module again whenever a kernel calls a function, such as
    `tl.sum`. That takes a third of the kernel tests' time.
    """
    from triton.runtime import interpreter

    patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch_lang(function)

    def run_grid_anew(*args: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return run_grid(*args, **options)
        finally:
            patched.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_grid_anew)
        yield


@pytest.fixture(scope="session", autouse=True)
def _types_of_kernels_made_once() -> Iterator[None]:
    """The same interpreter makes a type anew for every value, and a shape for every tensor, hundreds a program:
    a third of what it does.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make, find = core.block_type.__init__, interpreter._get_np_dtype
    made: dict[Any, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    shapes: dict[int, tuple[Any, core.constexpr, core.tuple]] = {}

    def make_once(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *shape
        if key not in made:
            make(self, element, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    def find_once(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    def hold(self: Any, handle: Any, kind: Any) -> None:
        shape: Any = kind.shape if kind.is_block() else ()
        if id(shape) not in shapes:
            shapes[id(shape)] = shape, core.constexpr(math.prod(shape)), core.tuple(map(core.constexpr, shape))
        _, self.numel, self.shape = shapes[id(shape)]
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.block_type, "__init__", make_once)
        patch.setattr(core.tensor, "__init__", hold)
        patch.setattr(interpreter, "_get_np_dtype", find_once)
        yield


@pytest.fixture
def plain_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DiT of kernels has the plain norm, for tests of something else.

    The kernel has a program a row, four fifths of what is interpreted. It is tested by itself, and within the DiT.
    """
    from triton_omni.token2wav import fused_dit
    from triton_omni.token2wav.dit import modulate

    def norm(
        hidden: Tensor,
        branch: Tensor | None,
        gate: Tensor,
        shift: Tensor,
        scale: Tensor,
        *,
        eps: float,
        dtype: torch.dtype,
        early: bool,
    ) -> Tensor:
        del eps, early
        if branch is not None:
            hidden += gate * (branch.sum(0) if branch.ndim > hidden.ndim else branch)
        return modulate(hidden, shift, scale).to(dtype)

    if not torch.cuda.is_available():
        monkeypatch.setattr(fused_dit, "residual_norm", norm)


@pytest.fixture
def token2wav_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock of token2wav's engine in nanoseconds, standing still."""
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    return now


@pytest.fixture(scope="session")
def hf(tiny_checkpoint: Path) -> HfReference:
    """HF's model of the tiny checkpoint, in float32 on the CPU."""
    return HfReference(tiny_checkpoint)


@pytest.fixture(autouse=True)
def _untraced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps coverage out of networks and of the Triton language's interpreter, which take up to twice as long under it,
    here and in processes that a test starts. Coverage is measured in the processes of a server.
    """
    for name, value in UNMEASURED.items():
        monkeypatch.setenv(name, value)
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)

# SPDX-License-Identifier: Apache-2.0
"""One worker for CPU and GPU that builds the model runner of its stage instead of vLLM's; and its process groups.

It knows the workers and runners of vLLM on this platform; it does not know what the runners add.

vLLM makes a dozen process groups for any number of processes. gloo gives each a thread that wakes up a hundred times a
second: a twentieth of a core for two idle stages. gloo also gives each a port, which any local user may connect to. It
ends the process once so many are connected that no file can be opened. So an engine of one process gets groups that do
not communicate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from triton_omni.vllm_hooks.shared.compat import GPUModelRunner, VllmConfig, Worker, current_platform

if TYPE_CHECKING:
    PlatformRunner = GPUModelRunner
    _PlatformWorker = Worker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as PlatformRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as _PlatformWorker
else:
    PlatformRunner = GPUModelRunner
    _PlatformWorker = Worker


class UnsupportedEngineError(ValueError):
    """The engine's configuration asks for a feature that the custom runners lack."""


def refuse_unsupported(config: VllmConfig, *, tensor_parallel: bool) -> None:
    """Refuse a configuration with which rows or codes would silently be wrong.

    Args:
        config: the engine's.
        tensor_parallel: whether the runner can be one of several ranks.

    Raises:
        UnsupportedEngineError: speculative decoding, or a split that the runner does not support, is configured.
    """
    if config.speculative_config is not None:
        raise UnsupportedEngineError("speculative_config: speculative decoding is not supported by the custom runners")
    whole = ["pipeline_parallel_size", "data_parallel_size", *([] if tensor_parallel else ["tensor_parallel_size"])]
    for name in whole:
        size = getattr(config.parallel_config, name)
        if size != 1:
            raise UnsupportedEngineError(f"{name} is {size}: rows are handed over inside one process, use 1")


class StageWorker(_PlatformWorker):
    """vLLM's worker with `runner_class` as its model runner."""

    runner_class: type[GPUModelRunner]
    tensor_parallel = False
    """True if the runner can be one of several ranks."""

    def _make_model_runner(self) -> GPUModelRunner:
        refuse_unsupported(self.vllm_config, tensor_parallel=self.tensor_parallel)
        return self.runner_class(self.vllm_config, self.device)

    def init_device(self) -> None:
        """Start the device and build the runner; vLLM's CPU worker names its runner class, so it is replaced."""
        if current_platform.is_cpu() and self.parallel_config.world_size > 1:
            # vLLM compiles the embedding of several ranks when it is first used: a request would wait for a compiler.
            torch.compiler.set_stance("force_eager")
        super().init_device()
        if not isinstance(self.model_runner, self.runner_class):
            self.model_runner = self._make_model_runner()


# --- process groups ---------------------------------------------------------------------------------------------------


_GLOO, _SILENT = "gloo", "fake"
"""torch's names of backends. The second returns its input, which is right in a group of one."""


@contextmanager
def lone_groups(processes: int) -> Iterator[None]:
    """If there is only one process, groups created within do not communicate."""
    if processes > 1:
        yield
        return
    # The import registers the backend.
    import torch.testing._internal.distributed.fake_pg

    new_group, begin = torch.distributed.new_group, torch.distributed.init_process_group

    def new_lone_group(ranks: Any = None, *, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend=_silent(backend), **options)

    def begin_alone(backend: Any = None, *arguments: Any, **options: Any) -> None:
        begin(_silent(backend), *arguments, **options)

    torch.distributed.new_group = new_lone_group  # type: ignore[assignment]
    torch.distributed.init_process_group = begin_alone
    try:
        yield
    finally:
        torch.distributed.new_group = new_group
        torch.distributed.init_process_group = begin


def _silent(backend: Any) -> Any:
    return _SILENT if backend == _GLOO else backend

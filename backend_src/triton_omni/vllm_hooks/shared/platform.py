# SPDX-License-Identifier: Apache-2.0
"""One worker for CPU and GPU that builds the model runner of its stage instead of vLLM's.

It knows which of vLLM's workers and runners this platform has, and nothing of what the runners add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    """The engine's configuration asks for what the custom runners do not do."""


def refuse_unsupported(config: VllmConfig, *, tensor_parallel: bool) -> None:
    """Stop the start where rows or codes would silently be wrong.

    Args:
        config: the engine's.
        tensor_parallel: whether the runner can be one of several ranks.

    Raises:
        UnsupportedEngineError: speculative decoding, or a model split as the runner cannot be, is configured.
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

# SPDX-License-Identifier: Apache-2.0
"""The thinker's model runner and the worker that vLLM loads by name.

It combines the mixins; their modules describe them.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from triton_omni.core.gpu import use_full_float32
from triton_omni.vllm_hooks.shared.compat import SchedulerOutput
from triton_omni.vllm_hooks.shared.fused_decode import FusedDecodeMixin
from triton_omni.vllm_hooks.shared.graphs import PrefillGraphsMixin
from triton_omni.vllm_hooks.shared.partition import PartitionMixin
from triton_omni.vllm_hooks.shared.platform import PlatformRunner, StageWorker
from triton_omni.vllm_hooks.shared.schedulers import ReleasedBlocksMixin
from triton_omni.vllm_hooks.shared.tensor_parallel import failing_together
from triton_omni.vllm_hooks.thinker import networks
from triton_omni.vllm_hooks.thinker.decode import ThinkerDecodeMixin
from triton_omni.vllm_hooks.thinker.media_memory import MediaMemoryMixin
from triton_omni.vllm_hooks.thinker.prompt_steps import LonePromptsMixin, PlacedPromptsMixin
from triton_omni.vllm_hooks.thinker.rows import RowMirrorMixin


class ThinkerRunner(
    PartitionMixin,
    RowMirrorMixin,
    ReleasedBlocksMixin,
    MediaMemoryMixin,
    PlacedPromptsMixin,
    ThinkerDecodeMixin,
    LonePromptsMixin,
    FusedDecodeMixin,
    PrefillGraphsMixin,
    PlatformRunner,
):
    """vLLM's runner with hidden rows, their mirror, media that may find no memory, batched seeded sampling, graphs of
    prompts, incremental decode steps, fast steps of one prompt, and decode steps on a part of the GPU.
    """


class ThinkerWorker(StageWorker):
    """Worker of the thinker's engine: the only one, or one rank of several."""

    runner_class = ThinkerRunner
    tensor_parallel = True

    def init_device(self) -> None:
        """Start the device; ranks after the first prepare their process before that."""
        networks.register()
        super().init_device()
        if self.model_config.dtype == torch.float32:
            use_full_float32(self.runner.device)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up vLLM and the vision tower, which vLLM would compile in the first image's step, shared with others."""
        times = super().compile_or_warm_up_model()
        self.runner.network.warm_vision_up()
        return times

    @property
    def runner(self) -> ThinkerRunner:
        """The model runner, once the device is started."""
        return cast(ThinkerRunner, self.model_runner)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's step."""
        with failing_together(self.rank):
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's draws of the step."""
        with failing_together(self.rank):
            return super().sample_tokens(grammar_output)

    def clear_cache_of(self, request_id: str, kept: int) -> None:
        """See `ReleasedBlocksMixin.clear_cache_of`."""
        self.runner.clear_cache_of(request_id, kept)

    def clear_blocks(self, blocks: list[int]) -> None:
        """See `ReleasedBlocksMixin.clear_blocks`."""
        self.runner.clear_blocks(blocks)

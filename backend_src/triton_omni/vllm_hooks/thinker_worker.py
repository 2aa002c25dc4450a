# SPDX-License-Identifier: Apache-2.0
"""The thinker's model runner and the worker that vLLM loads by name.

It puts the mixins together; what they do is in the modules that they are imported from.
"""

from __future__ import annotations

from triton_omni.vllm_hooks.fused_decode import FusedDecodeMixin
from triton_omni.vllm_hooks.hidden_rows import HiddenRowsMixin
from triton_omni.vllm_hooks.platform import PlatformRunner, StageWorker
from triton_omni.vllm_hooks.prefill_graphs import PrefillGraphsMixin
from triton_omni.vllm_hooks.sampling import CounterNoiseMixin


class ThinkerRunner(HiddenRowsMixin, CounterNoiseMixin, FusedDecodeMixin, PrefillGraphsMixin, PlatformRunner):
    """vLLM's runner with hidden rows, batched seeded sampling, and graphs of prompts."""


class ThinkerWorker(StageWorker):
    """Worker of the thinker's engine."""

    runner_class = ThinkerRunner

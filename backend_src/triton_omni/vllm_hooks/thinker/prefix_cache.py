# SPDX-License-Identifier: Apache-2.0
"""The thinker's schedulers, with a prefix cache or without.

The engine enters blocks once their rows have arrived, and only those of prompts with a salt.
"""

from __future__ import annotations

from triton_omni.vllm_hooks.shared.incremental_schedule import IncrementalAsyncScheduler
from triton_omni.vllm_hooks.shared.pausing import PausableAsyncScheduler, PausableScheduler
from triton_omni.vllm_hooks.shared.prefix_cache import PrefixCacheMixin


class PrefixScheduler(PrefixCacheMixin, PausableScheduler):
    """For synchronous steps."""


class PrefixAsyncScheduler(PrefixCacheMixin, PausableAsyncScheduler):
    """For steps scheduled while the device still runs the one before."""


class PrefixIncrementalScheduler(PrefixCacheMixin, IncrementalAsyncScheduler):
    """For such steps, and incremental ones."""


def scheduler_name(*, ahead: bool, steady: bool, prefix_caching: bool) -> str:
    """Name of the class; `ahead`: a step is launched while the device runs the one before, `steady`: steps go on."""
    if prefix_caching:
        kind = ("PrefixIncrementalScheduler" if steady else "PrefixAsyncScheduler") if ahead else "PrefixScheduler"
        return f"triton_omni.vllm_hooks.thinker.prefix_cache.{kind}"
    if ahead and steady:
        return "triton_omni.vllm_hooks.shared.incremental_schedule.IncrementalAsyncScheduler"
    return f"triton_omni.vllm_hooks.shared.pausing.{'PausableAsyncScheduler' if ahead else 'PausableScheduler'}"

# SPDX-License-Identifier: Apache-2.0
"""Schedulers that can be told to schedule nothing for a while, in which the steps under way are still taken, and that
tell when they found nothing to schedule.

One mixin over vLLM's schedulers. vLLM's own pause is for rare changes of an engine's state, and is logged each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_omni.vllm_hooks.shared.compat import AsyncScheduler, Scheduler, SchedulerOutput
from triton_omni.vllm_hooks.shared.media_schedule import MediaScheduleMixin

if TYPE_CHECKING:
    _Scheduler = Scheduler
else:
    _Scheduler = object


class PausableMixin(_Scheduler):
    """While `held`, there is nothing to schedule."""

    held = False
    idle = False
    """True if vLLM's last step was empty."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step in vLLM's own way."""
        output = super().schedule(throttle_prefills)
        self.idle = not output.total_num_scheduled_tokens
        return output

    def has_requests(self) -> bool:
        """True if vLLM should schedule a step now."""
        return not self.held and bool(super().has_requests())


class PausableScheduler(PausableMixin, MediaScheduleMixin, Scheduler):
    """For synchronous steps (the CPU, or asynchronous scheduling switched off)."""


class PausableAsyncScheduler(PausableMixin, MediaScheduleMixin, AsyncScheduler):
    """For steps scheduled while the device still runs the one before."""

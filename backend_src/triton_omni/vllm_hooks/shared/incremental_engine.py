# SPDX-License-Identifier: Apache-2.0
"""One step of vLLM's engine: its own, or one that goes on where the last ended, where its scheduler and runner can."""

from __future__ import annotations

import time
from typing import Any, Final

from triton_omni.core.loop_clock import SpentOn
from triton_omni.vllm_hooks.shared.compat import EngineCoreOutput
from triton_omni.vllm_hooks.shared.incremental_decode import IncrementalStep
from triton_omni.vllm_hooks.shared.incremental_schedule import IncrementalScheduleMixin

NAP_S: Final = 0.001
"""How long a step rests that found nothing to do, as those of vLLM's own processes do."""


def core_step(client: Any, runner: Any) -> list[EngineCoreOutput]:
    """Return the result of one step; with asynchronous scheduling that of the previous one.

    Where nobody can go on now, such as a sequence whose grammar is being compiled, it rests for a moment.

    Args:
        client: vLLM's in-process client of its engine's core.
        runner: the model runner of this process, the only one where the scheduler is a `IncrementalScheduleMixin`.
    """
    core = client.engine_core
    # Others' steps, synchronous ones among them, are all vLLM's own.
    step = core.scheduler.schedule_further() if isinstance(core.scheduler, IncrementalScheduleMixin) else None
    given = _whole_step(client) if step is None else _go_on(core, runner, step)
    if not given and core.scheduler.idle and _nobody_goes_on(core):
        with SpentOn("input"):
            time.sleep(NAP_S)
    return given


def _whole_step(client: Any) -> list[EngineCoreOutput]:
    with SpentOn("vllm_step"):
        given: list[EngineCoreOutput] = client.get_output().outputs
        return given


def _nobody_goes_on(core: Any) -> bool:
    """True if no step computes anything although a request waits for service."""
    under_way = core.batch_queue or ()
    if any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in under_way):
        return False
    return bool(core.scheduler.has_unfinished_requests())


def _go_on(core: Any, runner: Any, step: IncrementalStep) -> list[EngineCoreOutput]:
    """vLLM's `EngineCore.step_with_batch_queue` of a steady step: launch it, then take the one before."""
    launched = runner.go_on(step)
    core.batch_queue.appendleft((launched, step, launched))
    if len(core.batch_queue) < core.batch_queue_size:
        return []
    oldest, scheduled, _ = core.batch_queue.pop()
    with SpentOn("device"):
        result = oldest.result()
    outputs = core.scheduler.update_from_output(scheduled, result).get(0)
    return [] if outputs is None else outputs.outputs

# SPDX-License-Identifier: Apache-2.0
"""A scheduler for incremental decode steps: it schedules them, and takes their results, in a few operations.

vLLM decides about every sequence anew at every step. While the same sequences decode or wait, the only question left is
which of them need a cache block, and the number of such steps is known in advance. A waiting sequence keeps its place
in the runner's batch, so the others' steps stay incremental, and so do its own after the wait. vLLM schedules all other
steps. This module does not know why a sequence waits. `core_step` runs either kind of step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from triton_omni.core.metrics import LoopActivity
from triton_omni.vllm_hooks.shared.compat import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
)
from triton_omni.vllm_hooks.shared.incremental_decode import IncrementalStep
from triton_omni.vllm_hooks.shared.schedulers import MediaScheduleMixin, PausableMixin

if TYPE_CHECKING:
    _Scheduler = AsyncScheduler
else:
    _Scheduler = object


class IncrementalScheduleMixin(PausableMixin, _Scheduler):
    """Adds `schedule_further` to vLLM's asynchronous scheduler.

    Every step is vLLM's if the next ids depend on the last ones (a grammar), and while a prompt's media are kept.

    Put it before `AsyncScheduler` in the bases.
    """

    _decoding: list[Request] | None = None
    """The requests of vLLM's last own step, if that drew a token for each; else None."""
    _left_out: list[Request]
    """Running requests that waited during that step."""
    _active: list[Request]
    """Requests of `_decoding` that decode now."""
    _idle: list[Request]
    """Requests of `_decoding` that wait now."""
    _shares: dict[str, int]
    _stops: frozenset[int]
    _further: int = 0
    """Number of steps that only a new or an ended request can prevent."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step in vLLM's own way."""
        output = super().schedule(throttle_prefills)
        shares = output.num_scheduled_tokens
        scheduled = [request for request in self.running if request.request_id in shares]
        self._decoding = None
        if len(shares) == len(scheduled) > 0 and all(map(self._only_decodes, scheduled)):
            self._decoding = self._active = scheduled
            self._idle, self._shares, self._further = [], dict.fromkeys(shares, 1), 0
            self._left_out = [request for request in self.running if request.request_id not in shares]
            self._stops = frozenset().union(*map(_stops, scheduled))
        return output

    def schedule_further(self) -> IncrementalStep | None:
        """Return the next step, one token for each sequence of vLLM's last own step that need not wait; None if any
        other sequence takes part, or if all must wait.

        After a wait of all, a later call may still return a step, unless vLLM schedules one before.
        """
        if self._decoding is None or self.paused or not self._can_continue(self._decoding):
            return None
        new_blocks = self._allocate(self._active)
        for request in self._active:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.current_step += 1
        self._further -= 1
        return IncrementalStep(self._shares, new_blocks, self._active, self._stops)

    def steps_ahead(self, request: Request) -> int:
        """Return the number of one-token steps for which a decoding request can certainly be scheduled."""
        # Its last two steps are left to vLLM, which knows how many of its codes have come.
        limit = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens) - 2
        return max(0, limit - request.num_computed_tokens)

    def waits(self, request: Request) -> bool:
        """True if a running request could not be scheduled now."""
        del request
        return False

    def _only_decodes(self, request: Request) -> bool:
        """True if a step needs only the next token of each request."""
        if request.is_prefill_chunk or request.use_structured_output:
            return False
        return not self.encoder_cache_manager.get_cached_input_ids(request)

    def _can_continue(self, decoding: list[Request]) -> bool:
        # Only vLLM's own step passes these on to the runner.
        if self.finished_req_ids or self.needs_kv_cache_zeroing or self.encoder_cache_manager.freed:
            return False
        if len(self.running) != len(decoding) + len(self._left_out) or not all(map(self.waits, self._left_out)):
            return False
        if self.waiting and len(self.running) < self.max_num_running_reqs:
            return False
        if self._further < 1 or not all(map(self.waits, self._idle)):
            self._choose(decoding)
        # Each may need one more.
        return self._further > 0 and self.kv_cache_manager.block_pool.get_num_free_blocks() >= len(self._active)

    def _choose(self, decoding: list[Request]) -> None:
        """Find the sequences that must wait now, and the number of steps for which the others need not."""
        active = [request for request in decoding if not self.waits(request)]
        if not active:
            # After the wait mostly the same sequences continue, and the runner need not prepare them anew.
            self._further = 0
            return
        if active != self._active:
            self._active, self._shares = active, dict.fromkeys([request.request_id for request in active], 1)
            self._idle = [request for request in decoding if request.request_id not in self._shares]
        self._further = min(map(self.steps_ahead, active), default=0)

    def _allocate(self, decoding: list[Request]) -> list[tuple[str, tuple[list[int], ...]]]:
        """Give a block to each request whose next token begins one."""
        given = []
        for request in decoding:
            if request.num_computed_tokens % self.block_size:
                continue
            blocks = self.kv_cache_manager.allocate_slots(request, 1)
            if blocks is None:
                raise RuntimeError(f"no cache block for {request.request_id}, although blocks are free")
            given.append((request.request_id, blocks.get_block_ids()))
        if given:
            # vLLM's list of blocks to zero would grow otherwise.
            self.kv_cache_manager.take_new_block_ids()
        return given

    def update_from_output(self, scheduler_output: Any, model_runner_output: ModelRunnerOutput) -> Any:
        """Take a step's draws; in vLLM's own way if one may end its request, or if a request is gone."""
        if not self._nothing_ends(scheduler_output, model_runner_output):
            return super().update_from_output(scheduler_output, model_runner_output)
        rows, drawn, outputs = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids, []
        for request in scheduler_output.requests:
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= 1
            ids = drawn[rows[request.request_id]]
            request.append_output_token_ids(ids)
            outputs.append(EngineCoreOutput(request.request_id, ids))
        return {0: EngineCoreOutputs(outputs=outputs)}

    def _nothing_ends(self, step: object, output: ModelRunnerOutput) -> bool:
        """True if a step's result is one id for each of its requests and ends none of them.

        None can end by its length: `steps_ahead` leaves the last steps to vLLM.
        """
        return (
            isinstance(step, IncrementalStep)
            and all(request.request_id in self.requests for request in step.requests)
            and step.stops.isdisjoint(ids[0] for ids in output.sampled_token_ids)
            # Requests that went back to the queue and run again since.
            and not any(request.num_stale_output_tokens for request in step.requests)
        )


class IncrementalAsyncScheduler(IncrementalScheduleMixin, MediaScheduleMixin, AsyncScheduler):
    """For steps scheduled while the device still runs the one before."""


def _stops(request: Request) -> set[int]:
    """Ids that may end a request."""
    parameters = request.sampling_params
    if parameters is None:
        return set()
    return {
        *(parameters.stop_token_ids or ()),
        *(() if parameters.eos_token_id is None else (parameters.eos_token_id,)),
    }


# --- the engine -------------------------------------------------------------------------------------------------------


NAP_S: Final = 0.001
"""A step that found nothing to do sleeps for so long, as vLLM's own processes do."""


def core_step(client: Any, runner: Any) -> list[EngineCoreOutput]:
    """Return the result of one step; with asynchronous scheduling that of the previous one.

    Sleeps for `NAP_S` if no sequence can continue now, such as one whose grammar is being compiled.

    Args:
        client: vLLM's in-process client of its engine's core.
        runner: the model runner of this process, the only one where the scheduler is a `IncrementalScheduleMixin`.
    """
    core = client.engine_core
    # All steps of other schedulers, such as synchronous ones, are vLLM's own.
    step = core.scheduler.schedule_further() if isinstance(core.scheduler, IncrementalScheduleMixin) else None
    given = _whole_step(client) if step is None else _incremental_step(core, runner, step)
    if not given and core.scheduler.idle and _is_blocked(core):
        with LoopActivity("input"):
            time.sleep(NAP_S)
    return given


def _whole_step(client: Any) -> list[EngineCoreOutput]:
    with LoopActivity("vllm_step"):
        given: list[EngineCoreOutput] = client.get_output().outputs
        return given


def _is_blocked(core: Any) -> bool:
    """True if no step computes anything although a request waits for service."""
    under_way = core.batch_queue or ()
    if any(scheduled.total_num_scheduled_tokens for _, scheduled, _ in under_way):
        return False
    return bool(core.scheduler.has_unfinished_requests())


def _incremental_step(core: Any, runner: Any, step: IncrementalStep) -> list[EngineCoreOutput]:
    """vLLM's `EngineCore.step_with_batch_queue` for an incremental step: launch it, then take the one before."""
    launched = runner.launch_incremental(step)
    core.batch_queue.appendleft((launched, step, launched))
    if len(core.batch_queue) < core.batch_queue_size:
        return []
    oldest, scheduled, _ = core.batch_queue.pop()
    with LoopActivity("device"):
        result = oldest.result()
    outputs = core.scheduler.update_from_output(scheduled, result).get(0)
    return [] if outputs is None else outputs.outputs

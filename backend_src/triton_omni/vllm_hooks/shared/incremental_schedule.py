# SPDX-License-Identifier: Apache-2.0
"""A scheduler that knows when a step only goes on, and then schedules it and takes its result in a few operations.

vLLM decides about every sequence anew at every step. While those that decoded go on or wait, nothing is to be decided
but who needs a cache block; for how many steps that stays so is known in advance. A waiting sequence keeps its place in
the runner's batch. So the others' steps stay incremental, and its own after the wait. Everything else is left to vLLM's
own way. It does not know why a sequence waits. `core_step` is a step of vLLM's engine in either way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from triton_omni.core.metrics import SpentOn
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

    Where the next ids depend on what the last were (a grammar), and while a prompt's media are kept, every step is
    vLLM's.

    Put it before `AsyncScheduler` in the bases.
    """

    _decoding: list[Request] | None = None
    """The requests of the last step of vLLM's own, if it drew for them all, so that they decode from there on."""
    _left_out: list[Request]
    """Those that ran too, but had to wait."""
    _active: list[Request]
    """Those that decode of the first."""
    _idle: list[Request]
    """Those of them that wait now."""
    _shares: dict[str, int]
    _stops: frozenset[int]
    _further: int = 0
    """For how many steps nothing but a new or an ended request can stop one of them."""

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
        """The next step, if it is one of no other sequences than the last of vLLM's own, one token each of those that
        need not wait; otherwise None.

        Where all have to wait, a later call may still give it, unless vLLM schedules another step before.
        """
        if self._decoding is None or self.paused or not self._goes_on(self._decoding):
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
        """Steps of one token that a decoding request can surely be scheduled for from now on."""
        # Its last two steps are vLLM's to judge, which knows how many of its codes have come.
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

    def _goes_on(self, decoding: list[Request]) -> bool:
        # A step of vLLM's tells the runner of them.
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
        """See who has to wait now, and for how many steps the others need not."""
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
        """Take a step's draws; where one may end its request, or a request is gone, in vLLM's own way."""
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

        By its length none can end: `steps_ahead` leaves the last steps to vLLM.
        """
        return (
            isinstance(step, IncrementalStep)
            and all(request.request_id in self.requests for request in step.requests)
            and step.stops.isdisjoint(ids[0] for ids in output.sampled_token_ids)
            # Given back to the queue and running again since.
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

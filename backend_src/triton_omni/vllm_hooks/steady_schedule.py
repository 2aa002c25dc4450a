# SPDX-License-Identifier: Apache-2.0
"""A scheduler that knows when a step only goes on, and then schedules it and takes its result in a few operations.

vLLM decides about every sequence anew at every step. While all that run have decoded and go on, nothing is to be
decided but who needs a cache block; for how many steps that stays so is known in advance. Everything else is left to
vLLM's own way. What makes a sequence wait, it does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton_omni.vllm_hooks.compat import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Request,
    SchedulerOutput,
)
from triton_omni.vllm_hooks.steady_decode import SteadyStep

if TYPE_CHECKING:
    _Scheduler = AsyncScheduler
else:
    _Scheduler = object


class SteadyScheduleMixin(_Scheduler):
    """Adds `schedule_further` to vLLM's asynchronous scheduler, for requests without prefix cache, media or grammar.

    Put it before `AsyncScheduler` in the bases.
    """

    _decoding: list[Request] | None = None
    """The requests of the last step, if it decoded all that run."""
    _shares: dict[str, int]
    _further: int = 0
    """For how many steps nothing but a new or an ended request can stop one of them."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step in vLLM's own way."""
        output = super().schedule(throttle_prefills)
        shares = output.num_scheduled_tokens
        decoded = len(shares) == len(self.running) == output.total_num_scheduled_tokens > 0
        self._decoding = None
        if decoded and not any(request.is_prefill_chunk for request in self.running):
            self._decoding, self._shares, self._further = list(self.running), shares, 0
        return output

    def schedule_further(self) -> SteadyStep | None:
        """The next step, if it is one of just the sequences of the last, one token each; otherwise None."""
        if not self._goes_on():
            self._decoding = None
            return None
        new_blocks = self._allocate()
        for request in self.running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.current_step += 1
        self._further -= 1
        return SteadyStep(self._shares, new_blocks)

    def steps_ahead(self, request: Request) -> int:
        """Steps of one token that a decoding request can surely be scheduled for from now on."""
        # Its last two steps are vLLM's to judge, which knows how many of its codes have come.
        limit = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens) - 2
        return max(0, limit - request.num_computed_tokens)

    def _goes_on(self) -> bool:
        if self._decoding is None or self.finished_req_ids or self._decoding != self.running:
            return False
        if self.needs_kv_cache_zeroing:
            return False
        if self.waiting and len(self.running) < self.max_num_running_reqs:
            return False
        if self._further < 1:
            self._further = min(self.steps_ahead(request) for request in self.running)
        # Each may need one more.
        return self._further > 0 and self.kv_cache_manager.block_pool.get_num_free_blocks() >= len(self.running)

    def _allocate(self) -> list[tuple[str, tuple[list[int], ...]]]:
        """Give a block to each request whose next token begins one."""
        given = []
        for request in self.running:
            if request.num_computed_tokens % self.block_size:
                continue
            blocks = self.kv_cache_manager.allocate_slots(request, 1)
            if blocks is None:
                raise RuntimeError(f"no cache block for {request.request_id}, although blocks are free")
            given.append((request.request_id, blocks.get_block_ids()))
        if given:
            # What vLLM keeps for caches that are zeroed would grow otherwise.
            self.kv_cache_manager.take_new_block_ids()
        return given

    def update_from_output(self, scheduler_output: Any, model_runner_output: ModelRunnerOutput) -> Any:
        """Take a step's draws; where one may end its request, or a request is gone, in vLLM's own way."""
        drawn = self._drawn(scheduler_output, model_runner_output)
        if drawn is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        for request, ids in drawn:
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= 1
            request.append_output_token_ids(ids)
        outputs = [EngineCoreOutput(request.request_id, ids) for request, ids in drawn]
        return {0: EngineCoreOutputs(outputs=outputs)}

    def _drawn(self, step: object, output: ModelRunnerOutput) -> list[tuple[Request, list[int]]] | None:
        """The requests of a steady step and what each drew; None where vLLM must look at any of them."""
        if not isinstance(step, SteadyStep):
            return None
        rows, sampled, found = output.req_id_to_index, output.sampled_token_ids, []
        for request_id in step.num_scheduled_tokens:
            request, ids = self.requests.get(request_id), sampled[rows[request_id]]
            if request is None or self._may_end(request, ids[0]):
                return None
            found.append((request, ids))
        return found

    def _may_end(self, request: Request, drawn: int) -> bool:
        """Whether vLLM must look whether a request ends with an id, or it is not in its normal course."""
        parameters = request.sampling_params
        return (
            parameters is None
            or drawn in (parameters.stop_token_ids or ())
            or drawn == parameters.eos_token_id
            or request.num_tokens + 1 >= min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
            or request.num_output_placeholders < 1
            or request.num_stale_output_tokens > 0
            or request.is_finished()
        )

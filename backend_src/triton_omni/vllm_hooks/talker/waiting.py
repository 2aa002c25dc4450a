# SPDX-License-Identifier: Apache-2.0
"""Schedulers that run a talker sequence as far as its hidden rows have come, and not further.

One mixin over vLLM's two schedulers. It asks how many positions are ready; what a row is, it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from triton_omni.vllm_hooks.shared.compat import Request, Scheduler, SchedulerOutput
from triton_omni.vllm_hooks.shared.incremental_schedule import IncrementalAsyncScheduler
from triton_omni.vllm_hooks.shared.pausing import PausableMixin

if TYPE_CHECKING:
    _Scheduler = Scheduler
else:
    _Scheduler = object


STARVED_S: Final = 0.02
"""How long a sequence for which there were no cache blocks is not tried again, unless one comes free."""


class WaitingMixin(PausableMixin, _Scheduler):
    """Caps what a step may compute of a sequence by the positions whose row has arrived.

    It extends `_reserve_prefill_lookahead`, which vLLM asks for every running and every new sequence to shorten the
    tokens it is about to schedule. A running sequence shortened to nothing is passed over and the others go on; so
    one rule serves chunked prefill over half a prompt and decoding alike. `num_computed_tokens` already counts the
    step in flight, so it is the next position.
    """

    _ready_positions: Callable[[str], int] | None = None
    _starved_until = 0.0
    _starved_with = 0
    """Cache blocks that were free at that step."""

    def wait_for(self, ready_positions: Callable[[str], int]) -> None:
        """Ask `ready_positions(request_id)` from now on; a sequence must be ready for one position when added."""
        self._ready_positions = ready_positions

    def can_advance(self) -> bool:
        """True if `schedule` would give a step anything to compute now."""
        if self.held:
            return False
        if not all(map(self.waits, self.running)):
            return True
        return bool(self.waiting) and len(self.running) < self.max_num_running_reqs and not self._is_starved

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step in vLLM's own way; where it is empty, those that have no place lack cache blocks."""
        output = super().schedule(throttle_prefills)
        # A step that takes a place away tries nobody who has none.
        if self.idle and self.waiting and not output.preempted_req_ids:
            self._starved_until, self._starved_with = time.monotonic() + STARVED_S, self._blocks_there
        return output

    @property
    def _is_starved(self) -> bool:
        """True if waiting sequences were just tried in vain. The places of sequences that wait for rows come free once
        these have come; until then vLLM would run one empty step after the other.
        """
        return self._blocks_there <= self._starved_with and time.monotonic() < self._starved_until

    @property
    def _blocks_there(self) -> int:
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def waits(self, request: Request) -> bool:
        """True if the next row of a running request is missing."""
        # First what is nearly always the reason: each is asked some times a step.
        if self._ready_positions is not None and request.num_computed_tokens >= self._ready_positions(
            request.request_id
        ):
            return True
        return not self._reserve_prefill_lookahead(request, request.num_computed_tokens, 1)

    def has_requests(self) -> bool:
        """True if vLLM should schedule a step now.

        It would otherwise run empty steps while everybody waits, and after an empty step the runner puts its whole
        batch together again.
        """
        return bool(super().has_requests()) and self.can_advance()

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        allowed: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self._ready_positions is None:
            return allowed
        if self._awaits_its_own_code(request):
            return 0
        return max(0, min(allowed, self._ready_positions(request.request_id) - num_computed_tokens))

    def _awaits_its_own_code(self, request: Request) -> bool:
        """True if neither the host nor the previous step knows the code that this sequence must read next.

        The runner takes the code of the step in flight from the device only for sequences of the previous step. A
        sequence that was passed over continues once the host knows its code.
        """
        return request.num_output_placeholders > 0 and request.request_id not in self.prev_step_scheduled_req_ids


class WaitingScheduler(WaitingMixin, Scheduler):
    """For synchronous steps (the CPU, or asynchronous scheduling switched off)."""


class WaitingAsyncScheduler(WaitingMixin, IncrementalAsyncScheduler):
    """For steps scheduled while the device still runs the one before."""

    def steps_ahead(self, request: Request) -> int:
        """Steps for which the request's rows are there too."""
        steps: int = super().steps_ahead(request)
        if self._ready_positions is None:
            return steps
        return min(steps, self._ready_positions(request.request_id) - request.num_computed_tokens)

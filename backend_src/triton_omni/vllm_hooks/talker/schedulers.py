# SPDX-License-Identifier: Apache-2.0
"""The talker's schedulers, with or without a prefix cache: a sequence runs as far as its hidden rows have arrived.

One mixin over vLLM's two schedulers asks how many positions are ready; it knows nothing of rows.

A block of the talker's cache depends on the hidden rows up to its end, and these on the thinker's prompt. The voice
comes after the prompt. So the names of the thinker's prefixes also name these blocks, whatever the voice. Blocks of the
prompt enter the cache with the sequence's first code, which proves that they are finite; blocks of codes never do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from triton_omni.session.engine import PrefixKeys
from triton_omni.vllm_hooks.shared.compat import (
    BlockHash,
    KVCacheBlock,
    KVCacheBlocks,
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerOutput,
)
from triton_omni.vllm_hooks.shared.incremental_schedule import IncrementalAsyncScheduler
from triton_omni.vllm_hooks.shared.schedulers import PausableMixin, PrefixCacheMixin

if TYPE_CHECKING:
    _Scheduler = Scheduler
else:
    _Scheduler = object

STARVED_S: Final = 0.02
"""Seconds until a sequence without cache blocks is tried again, unless one comes free."""


class WaitingMixin(PausableMixin, _Scheduler):
    """Limits a sequence's tokens in a step to the positions whose row has arrived.

    It extends `_reserve_prefill_lookahead`, which vLLM asks for every running and every new sequence to shorten the
    tokens it is about to schedule. vLLM skips a running sequence that is shortened to nothing, so
    one rule serves both chunked prefill over half a prompt and decoding. `num_computed_tokens` already counts the
    step in flight, so it is the next position.
    """

    _ready_positions: Callable[[str], int] | None = None
    _starved_until = 0.0
    _starved_with = 0
    """Cache blocks that were free when sequences starved."""

    def wait_for(self, ready_positions: Callable[[str], int]) -> None:
        """Ask `ready_positions(request_id)` from now on; a sequence must be ready for one position when added."""
        self._ready_positions = ready_positions

    def can_advance(self) -> bool:
        """True if `schedule` would give a step anything to compute now."""
        if self.paused:
            return False
        if not all(map(self.waits, self.running)):
            return True
        return bool(self.waiting) and len(self.running) < self.max_num_running_reqs and not self._is_starved

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step in vLLM's own way. If it is empty, the sequences without a place lack cache blocks."""
        output = super().schedule(throttle_prefills)
        # A step that preempts a sequence tries no waiting one.
        if self.idle and self.waiting and not output.preempted_req_ids:
            self._starved_until, self._starved_with = time.monotonic() + STARVED_S, self._blocks_there
        return output

    @property
    def _is_starved(self) -> bool:
        """True if waiting sequences were just tried in vain. Blocks come free once sequences that wait for rows get
        them and end; until then vLLM would run one empty step after the other.
        """
        return self._blocks_there <= self._starved_with and time.monotonic() < self._starved_until

    @property
    def _blocks_there(self) -> int:
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def waits(self, request: Request) -> bool:
        """True if the next row of a running request is missing."""
        # The most frequent reason first, since each sequence is asked several times a step.
        if self._ready_positions is not None and request.num_computed_tokens >= self._ready_positions(
            request.request_id
        ):
            return True
        return not self._reserve_prefill_lookahead(request, request.num_computed_tokens, 1)

    def has_requests(self) -> bool:
        """True if vLLM should schedule a step now.

        It would otherwise run empty steps while all sequences wait, and after an empty step the runner rebuilds its
        whole batch.
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
        skipped sequence continues once the host knows its code.
        """
        return request.num_output_placeholders > 0 and request.request_id not in self.prev_step_scheduled_req_ids


class WaitingScheduler(WaitingMixin, Scheduler):
    """For synchronous steps (the CPU, or asynchronous scheduling switched off)."""


class WaitingAsyncScheduler(WaitingMixin, IncrementalAsyncScheduler):
    """For steps scheduled while the device still runs the one before."""

    def steps_ahead(self, request: Request) -> int:
        """Return the number of steps for which the request's rows have arrived too."""
        steps: int = super().steps_ahead(request)
        if self._ready_positions is None:
            return steps
        return min(steps, self._ready_positions(request.request_id) - request.num_computed_tokens)


# --- the prefix cache -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HeldPrefix:
    """The blocks that an open sequence shares, or may share, with others.

    Attributes:
        names: names of all whole blocks of its prompt.
        blocks: the first blocks, which the cache had when the sequence opened; they stay while it is open.
        is_proven: True once its prompt is known to be finite.
    """

    names: list[BlockHash]
    blocks: list[KVCacheBlock]
    is_proven: bool = False


class HeldPrefixMixin(PrefixCacheMixin):
    """Begins each sequence right after the blocks pinned when it opened. The rows of these blocks never come, so the
    sequence begins there again after a preemption.

    Put it first in the bases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failed_id = -1
        """Id that a sequence draws after a non-finite value."""
        manager = self.kv_cache_manager
        self._pool, self._pins = manager.block_pool, Counter[int]()
        # The longest sequence finds room beside all pins, so one sequence can always continue, and pins come free.
        self._most_pins = self._pool.num_gpu_blocks - 1 - -(-self.max_model_len // self.block_size)
        self._served: dict[str, HeldPrefix] = {}
        self._unproven: dict[str, HeldPrefix] = {}
        manager.get_computed_blocks = self._begin_after_pins  # type: ignore[method-assign]

    def pin(self, prefixes: PrefixKeys, tokens: int) -> HeldPrefix:
        """Pin the cached blocks of a prompt of `tokens` tokens, until `release`."""
        names = [BlockHash(name) for name in prefixes.of_blocks(self.block_size, tokens)]
        (found,), *_ = self.kv_cache_manager.coordinator.find_longest_cache_hit(names, len(names) * self.block_size)
        pinned = []
        for block in found:
            if block.block_id not in self._pins and len(self._pins) >= self._most_pins:
                break
            self._pins[block.block_id] += 1
            pinned.append(block)
        self._pool.touch(pinned)
        return HeldPrefix(names, pinned)

    def held_tokens(self, prefix: HeldPrefix) -> int:
        """Tokens of the pinned blocks."""
        return len(prefix.blocks) * self.block_size

    def serve(self, request_id: str, prefix: HeldPrefix) -> None:
        """Begin this new sequence after its prefix."""
        self.requests[request_id].block_hashes = prefix.names
        self._served[request_id] = self._unproven[request_id] = prefix

    def release(self, request_id: str | None, prefix: HeldPrefix, *, failed: bool) -> list[int]:
        """Unpin the prefix of a sequence that has left the scheduler, or never was in it.

        If the sequence `failed` before its prompt was proven, its pinned blocks may be the cause, so they leave the
        cache.

        Returns:
            The blocks among them that no other sequence has, to be zeroed.
        """
        if request_id is not None:
            self._served.pop(request_id, None)
            self._unproven.pop(request_id, None)
        self._pins.subtract(block.block_id for block in prefix.blocks)
        self._pins = +self._pins
        distrusted = failed and not prefix.is_proven
        if distrusted:
            self.kv_cache_manager.evict_blocks({block.block_id for block in prefix.blocks})
        self._pool.free_blocks(reversed(prefix.blocks))
        return [block.block_id for block in prefix.blocks if distrusted and not block.ref_cnt]

    def update_from_output(self, scheduler_output: Any, model_runner_output: ModelRunnerOutput) -> Any:
        """Cache the prompts that a step's result proves, then take the result, which may end sequences."""
        rows, drawn = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        for request_id in [request_id for request_id in self._unproven if request_id in rows]:
            ids = drawn[rows[request_id]] if drawn else []
            if len(ids) and ids[0] != self.failed_id:
                self._prove(request_id)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _prove(self, request_id: str) -> None:
        prefix = self._unproven[request_id]
        if self.verify(request_id, len(prefix.names) * self.block_size):
            prefix.is_proven = True
            del self._unproven[request_id]

    def _may_share(self, request: Request) -> bool:
        return request.request_id in self._served

    def _begin_after_pins(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        prefix, manager = self._served.get(request.request_id), self.kv_cache_manager
        if prefix is None or not prefix.blocks:
            return manager.empty_kv_cache_blocks, 0, 0
        return manager.create_kv_cache_blocks((prefix.blocks,)), self.held_tokens(prefix), 0


class PrefixWaitingScheduler(HeldPrefixMixin, WaitingScheduler):
    """For synchronous steps."""


class PrefixWaitingAsyncScheduler(HeldPrefixMixin, WaitingAsyncScheduler):
    """For steps scheduled while the device still runs the one before."""


def scheduler_name(*, ahead: bool, prefix_caching: bool) -> str:
    """Return the class's path; `ahead`: a step is launched while the device runs the one before."""
    if prefix_caching:
        return f"{__name__}.{'PrefixWaitingAsyncScheduler' if ahead else 'PrefixWaitingScheduler'}"
    kind = "WaitingAsyncScheduler" if ahead else "WaitingScheduler"
    return f"triton_omni.vllm_hooks.talker.schedulers.{kind}"

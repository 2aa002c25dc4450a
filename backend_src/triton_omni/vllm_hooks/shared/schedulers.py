# SPDX-License-Identifier: Apache-2.0
"""Mixins of both stages' schedulers and runners: pauses, encoded media, a prefix cache of finite blocks.

It knows neither thinker nor talker.

- *Pauses*: vLLM's own pause is for rare changes of an engine's state, and is logged each time.
- *The prefix cache*: vLLM enters a block when it schedules the block's tokens, before it computes them. A sequence that
  hits the block would share a later failure. Here the engine enters a block once its values are known to be finite. So
  no block has to be taken back, and every shared block is sound.
- *Released blocks*: attention multiplies values after a sequence's end by zero, and zero times NaN is NaN. So blocks
  that a sequence leaves before all of it is known to be finite are zeroed before another sequence gets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from triton_omni.vllm_hooks.shared.compat import (
    AsyncScheduler,
    EncoderCacheManager,
    GPUModelRunner,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)

if TYPE_CHECKING:
    _Scheduler = Scheduler
    _Runner = GPUModelRunner
else:
    _Scheduler = object
    _Runner = object

# --- media ------------------------------------------------------------------------------------------------------------


class MediaScheduleMixin(_Scheduler):
    """Encodes a medium with its first token, not before.

    vLLM encodes all media within a step's reach that fit, and ends the step before the first that does not. A video and
    its sound begin at one token: the video would keep its memory while its sound waits for room. Several such prompts
    would wait for each other for ever.

    Put it before vLLM's scheduler in the bases.
    """

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        shift_computed_tokens: int = 0,
    ) -> tuple[list[int], int, int, list[int], list[int]]:
        media, tokens, budget, loaded, repeated = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, shift_computed_tokens
        )
        end = num_computed_tokens + tokens
        early = [medium for medium in media if request.mm_features[medium].mm_position.offset >= end]
        budget += sum(map(request.get_num_encoder_embeds, early))
        return [medium for medium in media if medium not in early], tokens, budget, loaded, repeated


class EagerEncoderCacheManager(EncoderCacheManager):
    """Manager of encoded media that drops a medium as soon as no request needs it.

    vLLM's own keeps a medium until there is no room for another, in case a later request brings the same. Here a later
    request finds the medium's tokens in the prefix cache, or, without a salt, has another identifier.
    """

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Drop a request's reference to a medium, and the medium with its last reference."""
        super().free_encoder_input(request, input_id)
        identifier = request.mm_features[input_id].identifier
        size = self.freeable.pop(identifier, None)
        if size is not None:
            del self.cached[identifier], self.num_embeds_by_hash[identifier]
            # The next step tells the runner.
            self.freed.append(identifier)
            self.num_free_slots += size


# --- pauses -----------------------------------------------------------------------------------------------------------


class PausableMixin(_Scheduler):
    """While `paused`, there is nothing to schedule."""

    paused = False
    idle = False
    """True if vLLM's last step was empty."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step in vLLM's own way."""
        output = super().schedule(throttle_prefills)
        self.idle = not output.total_num_scheduled_tokens
        return output

    def has_requests(self) -> bool:
        """True if vLLM should schedule a step now."""
        return not self.paused and bool(super().has_requests())


class PausableScheduler(PausableMixin, MediaScheduleMixin, Scheduler):
    """For synchronous steps (the CPU, or asynchronous scheduling switched off)."""


class PausableAsyncScheduler(PausableMixin, MediaScheduleMixin, AsyncScheduler):
    """For steps scheduled while the device still runs the one before."""


# --- the prefix cache -------------------------------------------------------------------------------------------------


class PrefixCacheMixin(_Scheduler):
    """Caches the blocks that `verify` confirms, for requests with a salt alone, so that others find nothing.

    Put it first in the bases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.collect: Callable[[], object] = lambda: None
        """Called before a step's results, which may end sequences; it calls `verify` for rows that arrived."""
        self.kept: dict[str, int] = {}
        """Cached blocks of sequences that lost their blocks since the last `schedule`."""
        self._early: dict[str, int] = {}
        """Counts from `verify` beyond the known ids: without its ids a block has no hash."""
        coordinator = self.kv_cache_manager.coordinator
        (self._of_sequences,) = coordinator.single_type_managers
        self._enter_blocks = coordinator.cache_blocks
        # vLLM's own caching, when it allocates blocks and when it takes a step's ids.
        coordinator.cache_blocks = lambda *_: None  # type: ignore[method-assign]

    def verify(self, request_id: str, tokens: int) -> bool:
        """Note that the first `tokens` of a sequence are computed and finite.

        Returns:
            False if the sequence shares nothing or lost its blocks, so that the call has no effect.
        """
        request = self.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING or not self._may_share(request):
            return False
        # Called for each step; few steps complete a block.
        if tokens // self.block_size > self._entered(request_id):
            self._enter_blocks(request, min(tokens, request.num_tokens))
            if tokens > request.num_tokens:
                self._early[request_id] = tokens
        return True

    def _entered(self, request_id: str) -> int:
        """Return the number of a sequence's blocks that are in the cache, or were when it hit them."""
        return self._of_sequences.num_cached_block.get(request_id, 0)

    def _may_share(self, request: Request) -> bool:
        return request.cache_salt is not None

    def distrust(self, request_id: str) -> None:
        """Take the blocks of this running sequence out of the cache; sequences that share them keep them."""
        for blocks in self.kv_cache_manager.get_block_ids(request_id):
            self.kv_cache_manager.evict_blocks(set(blocks))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step as the class after this one does; note the `kept_blocks` of preempted sequences."""
        self.kept.clear()
        output = super().schedule(throttle_prefills)
        output.kept_blocks = dict(self.kept)  # type: ignore[attr-defined]
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: ModelRunnerOutput) -> Any:
        """Take a step's result, after its rows."""
        early, self._early = self._early, {}
        for request_id, tokens in early.items():
            self.verify(request_id, tokens)
        self.collect()
        return super().update_from_output(scheduler_output, model_runner_output)

    def _free_request_blocks(self, request: Request) -> None:
        self.kept[request.request_id] = self._entered(request.request_id)
        super()._free_request_blocks(request)


# --- blocks -----------------------------------------------------------------------------------------------------------


class ReleasedBlocksMixin(_Runner):
    """Zeroes the blocks that a sequence gives up, once, and only while no other sequence has them.

    vLLM's scheduler gives the blocks of a preempted sequence away at once, and tells the runner with the step that may
    use them. vLLM's runner still names the former blocks until the sequence resumes.

    Put it before the platform's runner in the bases.
    """

    def clear_cache_of(self, request_id: str, kept: int = 0) -> None:
        """Zero the blocks of a sequence that failed, or may have, and forget them; unknown sequences are ignored.

        The first `kept` blocks stay: they are finite and in the prefix cache, where others may share them. The call
        takes effect after every step already launched. The sequence may have ended: until the next step its blocks are
        still known here and belong to no other.
        """
        state = self.requests.get(request_id)
        if state is None:
            return
        self.clear_blocks([block for group in state.block_ids for block in group[kept:]])
        state.block_ids = tuple([] for _ in state.block_ids)

    @torch.inference_mode()
    def clear_blocks(self, blocks: list[int]) -> None:
        """Zero KV cache blocks; the first call on a GPU compiles the kernel."""
        if self.device.type != "cpu" and not hasattr(self, "_kv_block_zeroer"):
            self._init_kv_zero_meta()
        self._zero_block_ids(blocks)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Zero the blocks of preempted sequences first: in this step they may already be another's."""
        # Schedulers without a prefix cache keep none.
        kept = getattr(scheduler_output, "kept_blocks", {})
        for request_id in scheduler_output.preempted_req_ids or ():
            self.clear_cache_of(request_id, kept.get(request_id, 0))
        return super()._update_states(scheduler_output)

# SPDX-License-Identifier: Apache-2.0
"""Schedulers with a prefix cache that holds nothing but blocks known to be finite.

vLLM enters a block when it schedules the block's tokens, before they are computed: whoever hit it would share what
fails later. Here the engine enters blocks once it has seen what was computed. So nothing in the cache has to be taken
back, and every block that two sequences share is sound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from triton_omni.vllm_hooks.shared.compat import (
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)

if TYPE_CHECKING:
    _Scheduler = Scheduler
else:
    _Scheduler = object


class PrefixCacheMixin(_Scheduler):
    """Caches what `verify` is told, for requests with a salt alone, so that others find nothing.

    Put it first in the bases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.collect: Callable[[], object] = lambda: None
        """Called before a step's results are taken, which may end sequences: tells `verify` of rows that arrived."""
        self.kept: dict[str, int] = {}
        """Cached blocks of sequences that lost their blocks since the last `schedule`."""
        self._early: dict[str, int] = {}
        """Counts of `verify` that go beyond the known ids: without its ids a block has no hash."""
        coordinator = self.kv_cache_manager.coordinator
        (self._of_sequences,) = coordinator.single_type_managers
        self._enter_blocks = coordinator.cache_blocks
        # vLLM's own calls, as it allocates blocks and as it takes a step's ids.
        coordinator.cache_blocks = lambda *_: None  # type: ignore[method-assign]

    def verify(self, request_id: str, tokens: int) -> bool:
        """The first `tokens` of a sequence are computed and finite; False where that is ignored, since it shares
        nothing or lost its blocks."""
        request = self.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING or not self._may_share(request):
            return False
        # It is told of each step, of which few complete a block.
        if tokens // self.block_size > self._entered(request_id):
            self._enter_blocks(request, min(tokens, request.num_tokens))
            if tokens > request.num_tokens:
                self._early[request_id] = tokens
        return True

    def _entered(self, request_id: str) -> int:
        """Number of a sequence's blocks that are in the cache, or were when it began with them."""
        return self._of_sequences.num_cached_block.get(request_id, 0)

    def _may_share(self, request: Request) -> bool:
        return request.cache_salt is not None

    def distrust(self, request_id: str) -> None:
        """Let nobody hit the blocks of this running sequence any more; those who share them keep them."""
        for blocks in self.kv_cache_manager.get_block_ids(request_id):
            self.kv_cache_manager.evict_blocks(set(blocks))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step in the way of the scheduler after this class, with `kept_blocks` of the preempted sequences."""
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

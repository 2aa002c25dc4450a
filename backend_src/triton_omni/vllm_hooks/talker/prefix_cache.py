# SPDX-License-Identifier: Apache-2.0
"""The talker's schedulers, with a prefix cache or without.

A block of the talker's cache depends on the hidden rows of its prompt up to it, these on the thinker's prompt, and the
voice follows the prompt. So the names of the thinker's prefixes name these blocks, whatever the voice. Blocks enter the
cache with their sequence's first code, which tells that all of the prompt was finite; blocks of codes never do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from triton_omni.session.engine import PrefixKeys
from triton_omni.vllm_hooks.shared.compat import BlockHash, KVCacheBlock, KVCacheBlocks, ModelRunnerOutput, Request
from triton_omni.vllm_hooks.shared.prefix_cache import PrefixCacheMixin
from triton_omni.vllm_hooks.talker.waiting import WaitingAsyncScheduler, WaitingScheduler


@dataclass(eq=False)
class HeldPrefix:
    """The blocks that an open sequence shares with others, or may.

    Attributes:
        names: of all whole blocks of its prompt.
        blocks: the first of them, which the cache had when the sequence opened; they stay while it is open.
        is_proven: True once its prompt is known to be finite.
    """

    names: list[BlockHash]
    blocks: list[KVCacheBlock]
    is_proven: bool = False


class HeldPrefixMixin(PrefixCacheMixin):
    """Begins each sequence right after the blocks that were pinned when it opened. Their rows never come, so it begins
    there again after a preemption.

    Put it first in the bases.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failed_id = -1
        """Drawn by a sequence that met something non-finite."""
        manager = self.kv_cache_manager
        self._pool, self._pins = manager.block_pool, Counter[int]()
        # The longest sequence finds room beside all pins. So one sequence can always go on, and pins come free.
        self._most_pins = self._pool.num_gpu_blocks - 1 - -(-self.max_model_len // self.block_size)
        self._served: dict[str, HeldPrefix] = {}
        self._unproven: dict[str, HeldPrefix] = {}
        manager.get_computed_blocks = self._begin_after_pins  # type: ignore[method-assign]

    def pin(self, prefixes: PrefixKeys, tokens: int) -> HeldPrefix:
        """Keep what the cache has of a prompt of `tokens` tokens, until `release`."""
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

        If the sequence `failed` before its prompt was proven, its pinned blocks may be the cause: nobody hits them
        any more.

        Returns:
            Those of them that nobody else has, to be zeroed.
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
        """Take a step's result, which may end sequences, once the prompts that it proves are in the cache."""
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
    """Name of the class; `ahead`: a step is launched while the device runs the one before."""
    if prefix_caching:
        return f"{__name__}.{'PrefixWaitingAsyncScheduler' if ahead else 'PrefixWaitingScheduler'}"
    kind = "WaitingAsyncScheduler" if ahead else "WaitingScheduler"
    return f"triton_omni.vllm_hooks.talker.waiting.{kind}"

# SPDX-License-Identifier: Apache-2.0
"""The thinker's schedulers, with a prefix cache or without, and the names of a prompt's prefixes.

The engine enters blocks once their rows have arrived, and only those of prompts with a salt. The names are the hashes
of vLLM's prefix cache, computed before vLLM has the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from triton_omni.session.engine import PrefixKeys
from triton_omni.vllm_hooks.shared.incremental_schedule import IncrementalAsyncScheduler
from triton_omni.vllm_hooks.shared.schedulers import PausableAsyncScheduler, PausableScheduler, PrefixCacheMixin


class PrefixScheduler(PrefixCacheMixin, PausableScheduler):
    """For synchronous steps."""


class PrefixAsyncScheduler(PrefixCacheMixin, PausableAsyncScheduler):
    """For steps scheduled while the device still runs the one before."""


class PrefixIncrementalScheduler(PrefixCacheMixin, IncrementalAsyncScheduler):
    """For steps scheduled ahead, with incremental decode steps."""


def scheduler_name(*, ahead: bool, incremental: bool, prefix_caching: bool) -> str:
    """Return the class's path.

    Args:
        ahead: a step is launched while the device runs the one before.
        incremental: decode steps are incremental where possible; needs `ahead`.
        prefix_caching: cached prompts are used again.
    """
    if prefix_caching:
        kind = ("PrefixIncrementalScheduler" if incremental else "PrefixAsyncScheduler") if ahead else "PrefixScheduler"
        return f"triton_omni.vllm_hooks.thinker.prefix_cache.{kind}"
    if ahead and incremental:
        return "triton_omni.vllm_hooks.shared.incremental_schedule.IncrementalAsyncScheduler"
    return f"triton_omni.vllm_hooks.shared.schedulers.{'PausableAsyncScheduler' if ahead else 'PausableScheduler'}"


# --- keys of prefixes -------------------------------------------------------------------------------------------------


Hasher = Callable[[Any], list[bytes]]


def salted(hasher: Hasher) -> Hasher:
    """Restrict vLLM's hasher to requests with a salt; others share nothing, so their blocks need no names."""
    return lambda request: [] if request.cache_salt is None else hasher(request)


def prefix_keys(hasher: Hasher, block_size: int, engine_input: Mapping[str, Any]) -> PrefixKeys | None:
    """Names of the prefixes of a prompt; None if it has no salt, and so shares nothing.

    Args:
        hasher: vLLM's, of its requests.
        block_size: tokens of a block.
        engine_input: vLLM's, of the prompt.
    """
    salt, ids = engine_input.get("cache_salt"), engine_input["prompt_token_ids"]
    if salt is None:
        return None
    names, places = engine_input.get("mm_hashes", {}), engine_input.get("mm_placeholders", {})
    media = [
        SimpleNamespace(identifier=name, mm_position=place)
        for kind, found in places.items()
        for name, place in zip(names[kind], found, strict=True)
    ]
    media.sort(key=lambda medium: medium.mm_position.offset)
    # The hasher reads these attributes of a request.
    request = SimpleNamespace(
        all_token_ids=ids,
        num_tokens=len(ids),
        block_hashes=[],
        mm_features=media,
        cache_salt=salt,
        lora_request=None,
        prompt_embeds=None,
    )
    return PrefixKeys(block_size, tuple(hasher(request)))

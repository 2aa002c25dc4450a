# SPDX-License-Identifier: Apache-2.0
"""Prompts whose M-RoPE positions are known before vLLM's runner hears of them.

The first message of a session carries them, so they are computed while the request is prepared. vLLM would compute them
again in a prompt's first step, for which all wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from triton_omni.vllm_hooks.shared.compat import CachedRequestState, GPUModelRunner

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object


class PlacedPromptsMixin(_Runner):
    """Takes the positions of prompts that were placed, and has vLLM compute those of others, as on other ranks.

    Put it before the platform's runner in the bases. `place` and `forget_place` are called between steps, on the thread
    that steps the engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placed: dict[str, Tensor] = {}

    def place(self, request_id: str, positions: Tensor) -> None:
        """Lay the prompt of this request at `positions`, int64 [3, P] on the CPU."""
        self._placed[request_id] = positions

    def forget_place(self, request_id: str) -> None:
        """The request will not be scheduled any more; an unknown one is ignored."""
        self._placed.pop(request_id, None)

    def _init_mrope_positions(self, req_state: CachedRequestState) -> None:
        """Once a request, when it is first scheduled."""
        positions = self._placed.pop(req_state.req_id, None)
        if positions is None:
            super()._init_mrope_positions(req_state)
            return
        req_state.mrope_positions = positions
        req_state.mrope_position_delta = int(positions.max()) + 1 - positions.shape[1]

# SPDX-License-Identifier: Apache-2.0
"""When the media of a prompt are encoded, and how long what the encoders made of them is kept.

It knows vLLM's scheduler and its account of encoded media, not where these lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_omni.vllm_hooks.shared.compat import EncoderCacheManager, Request, Scheduler

if TYPE_CHECKING:
    _Scheduler = Scheduler
else:
    _Scheduler = object


class MediaScheduleMixin(_Scheduler):
    """Encodes a medium with its first token, not before.

    vLLM encodes the media within a step's reach that fit, and ends the step before the first that does not. A video and
    its sound begin at one token: the video would be kept while its sound waits for room, and several such prompts would
    wait for each other for ever.

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


class MediaCache(EncoderCacheManager):
    """vLLM's account of encoded media, from which one goes at once when no request needs it any more.

    vLLM keeps it until there is no room for another, in case a request brings the same. Here a later request finds its
    tokens in the prefix cache, or, without a salt, has an identifier of its own.
    """

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Give up a request's claim to a medium, and the medium with the last claim."""
        super().free_encoder_input(request, input_id)
        identifier = request.mm_features[input_id].identifier
        size = self.freeable.pop(identifier, None)
        if size is not None:
            del self.cached[identifier], self.num_embeds_by_hash[identifier]
            # The runner is told with the next step.
            self.freed.append(identifier)
            self.num_free_slots += size

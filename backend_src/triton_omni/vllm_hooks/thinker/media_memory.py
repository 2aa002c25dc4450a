# SPDX-License-Identifier: Apache-2.0
"""A medium for which the device has no memory fails its own request alone.

The pass of media through their encoders is the only part of a step whose size depends on requests; all other memory of
a step is allocated at the start. It knows vLLM's encoder pass, not what fails a request.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from triton_omni.vllm_hooks.shared.compat import GPUModelRunner, MultiModalFeatureSpec, SchedulerOutput

if TYPE_CHECKING:
    _Runner = GPUModelRunner
else:
    _Runner = object

logger = logging.getLogger(__name__)


class MediaMemoryMixin(_Runner):
    """Encodes media one by one if there is no memory for all of a step's.

    Put it before the platform's runner in the bases. With several ranks an error is left to end them all: another rank
    may wait within a collective of the pass, which cannot be begun again.

    Attributes:
        without_memory: vLLM's ids of requests with a medium that did not fit alone, and its modality; also of those
            that share it in this step. The step goes on with NaN in its place, so that nobody can take it for a
            medium; whoever fails the requests takes them out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.without_memory: dict[str, str] = {}
        self._nothing = torch.full((), float("nan"), dtype=cast(torch.dtype, self.dtype), device=self.device)

    def _execute_mm_encoder(self, scheduler_output: SchedulerOutput) -> list[Tensor]:
        """Run vLLM's pass, which keeps no results if it is interrupted."""
        if self.parallel_config.world_size > 1:
            return super()._execute_mm_encoder(scheduler_output)
        scheduled = scheduler_output.scheduled_encoder_inputs
        try:
            return super()._execute_mm_encoder(scheduler_output)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for the media of %d requests together: %s", len(scheduled), str(error))
        # Outside the handler nothing refers to the error, not even a log record, so the attempt's memory is free.
        return [
            embedding
            for request_id, numbers in scheduled.items()
            for number in numbers
            for embedding in self._encode_alone(scheduler_output, request_id, number)
        ]

    def _encode_alone(self, scheduler_output: SchedulerOutput, request_id: str, number: int) -> list[Tensor]:
        torch.cuda.empty_cache()
        alone = replace(scheduler_output, scheduled_encoder_inputs={request_id: [number]})
        try:
            return super()._execute_mm_encoder(alone)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for a medium by itself: %s", str(error))
        medium = self.requests[request_id].mm_features[number]
        sharers = [
            name for name in scheduler_output.num_scheduled_tokens if self._reads(scheduler_output, name, medium)
        ]
        self.without_memory |= dict.fromkeys(sharers, medium.modality)
        # A single number, expanded to the medium's size.
        nothing = self._nothing.expand(medium.mm_position.get_num_embeds(), self.inputs_embeds_size)
        self.encoder_cache[medium.identifier] = nothing
        return [nothing]

    def _reads(self, step: SchedulerOutput, request_id: str, medium: MultiModalFeatureSpec) -> bool:
        """True if tokens of the request in this step stand for such a medium."""
        state = self.requests[request_id]
        begin, end = state.num_computed_tokens, state.num_computed_tokens + step.num_scheduled_tokens[request_id]
        return any(
            place.offset < end and begin < place.offset + place.length
            for other in state.mm_features
            if other.identifier == medium.identifier and (place := other.mm_position)
        )

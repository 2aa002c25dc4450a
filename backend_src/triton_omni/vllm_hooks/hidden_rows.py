# SPDX-License-Identifier: Apache-2.0
"""Hidden rows out of vLLM's V1 model runner: input embedding plus last hidden state of scheduled positions.

One gather a step for the whole batch; nothing is copied per request and nothing waits for the device.
It knows positions and request ids, not what a row is for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _Runner = GPUModelRunner
else:
    _Runner = object


@dataclass(frozen=True)
class Segment:
    """Rows of one request within a step: positions [start, stop), at `offset` of the step's rows."""

    request_id: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class StepRows:
    """Rows of one engine step.

    Attributes:
        segments: which rows are whose, in the order of the batch.
        rows: [n, H] on the device, engine dtype; a tensor of its own, no view of a graph's pool.
        finite: bool [n] on the host; valid once `arrived` is true.
        ready: recorded on the engine's stream after `rows` and `finite` were written; None on the CPU.
    """

    segments: tuple[Segment, ...]
    rows: Tensor
    finite: Tensor
    ready: torch.cuda.Event | None

    @property
    def arrived(self) -> bool:
        """Whether `finite` can be read; does not wait."""
        return self.ready is None or bool(self.ready.query())  # type: ignore[no-untyped-call]


class RowTap:
    """Which requests want rows, and the steps' rows that wait to be taken.

    `want` and `forget` are called between steps, on the thread that steps the engine.
    """

    def __init__(self) -> None:
        self._placeholders: dict[str, NDArray[np.bool_]] = {}
        self.steps: deque[StepRows] = deque()

    def want(self, request_id: str, placeholders: NDArray[np.bool_]) -> None:
        """Give rows of this request; `placeholders` bool [P] marks media positions, whose embedding counts as zero."""
        self._placeholders[request_id] = placeholders

    def forget(self, request_id: str) -> None:
        """Give no more rows of this request; an unknown one is ignored."""
        self._placeholders.pop(request_id, None)

    def plan(
        self, request_ids: list[str], starts: NDArray[np.integer[Any]], bounds: NDArray[np.integer[Any]]
    ) -> GatherPlan | None:
        """What to gather from a step's batch, or None when nobody wants rows.

        Args:
            request_ids: of the batch, in its order.
            starts: [B] position of each request's first scheduled token.
            bounds: [B + 1] where each request's tokens begin in the batch, and the end.
        """
        segments, indices, masks, offset = [], [], [], 0
        for row, request_id in enumerate(request_ids):
            placeholders = self._placeholders.get(request_id)
            if placeholders is None:
                continue
            first, count = int(starts[row]), int(bounds[row + 1] - bounds[row])
            segments.append(Segment(request_id, first, first + count, offset))
            indices.append(np.arange(bounds[row], bounds[row + 1], dtype=np.int64))
            masks.append(_window(placeholders, first, count))
            offset += count
        if not segments:
            return None
        return GatherPlan(tuple(segments), np.concatenate(indices), np.concatenate(masks))


@dataclass(frozen=True)
class GatherPlan:
    """Rows of a batch to be taken: `indices` int64 [n] into its tokens, `zeroed` bool [n] without embedding."""

    segments: tuple[Segment, ...]
    indices: NDArray[np.int64]
    zeroed: NDArray[np.bool_]

    def gather(self, embeddings: Tensor, hidden: Tensor) -> StepRows:
        """Row = embedding (zero at media) + last hidden state, as HF sums them for the talker.

        Source: `Qwen2_5OmniForConditionalGeneration.generate` of transformers.

        Args:
            embeddings, hidden: [tokens of the batch, padding included; H], same device and dtype.
        """
        index = _to_device(torch.from_numpy(self.indices), hidden.device)
        rows = embeddings.index_select(0, index)
        if self.zeroed.any():
            rows.masked_fill_(_to_device(torch.from_numpy(self.zeroed), hidden.device).unsqueeze(1), 0)
        rows += hidden.index_select(0, index)
        return _with_flags(self.segments, rows)


class HiddenRowsMixin(_Runner):
    """Adds `row_tap` to vLLM's V1 model runner. Put it before the platform's runner in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row_tap = RowTap()

    def _model_forward(
        self,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the model, then take the rows of this step; the batch is laid out by `_prepare_inputs` before."""
        hidden = super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        batch = self.input_batch
        plan = self.row_tap.plan(batch.req_ids, batch.num_computed_tokens_cpu, self.query_start_loc.np)
        if plan is not None:
            if inputs_embeds is None:
                raise RuntimeError("the thinker ran on token ids: rows need a multimodal model's input embeddings")
            self.row_tap.steps.append(plan.gather(inputs_embeds, hidden))
        return hidden


def _window(mask: NDArray[np.bool_], start: int, count: int) -> NDArray[np.bool_]:
    """`mask[start : start + count]`, false beyond its end (reply tokens are never media)."""
    window = np.zeros(count, dtype=np.bool_)
    part = mask[start : start + count]
    window[: len(part)] = part
    return window


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting: from pinned memory, which torch keeps until the copy is done."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _with_flags(segments: tuple[Segment, ...], rows: Tensor) -> StepRows:
    """Add the finite flags, on their way to the host, and the event that says when they and the rows are there."""
    finite = torch.isfinite(rows).all(dim=1)
    if rows.device.type == "cpu":
        return StepRows(segments, rows, finite, None)
    host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
    host.copy_(finite, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return StepRows(segments, rows, host, ready)

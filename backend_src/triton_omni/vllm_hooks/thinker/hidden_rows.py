# SPDX-License-Identifier: Apache-2.0
"""Hidden rows out of vLLM's V1 model runner: input embedding plus last hidden state of scheduled positions.

One gather a step for the whole batch; nothing is copied per request and nothing waits for the device.
It knows positions and request ids; `rows.py` decides when a row may be given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triton_omni.core.gpu import record_event, to_device, to_host

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _Runner = GPUModelRunner
else:
    _Runner = object


class Segment(NamedTuple):
    """Tokens of one request within a step: positions [start, stop), from `flag_offset` on in the batch."""

    request_id: str
    start: int
    stop: int
    flag_offset: int
    row_offset: int | None
    """Start of the request's rows in the step's rows; None when it wants none."""


@dataclass(frozen=True)
class StepRows:
    """Rows of one engine step.

    Attributes:
        segments: the tokens of each request, in the order of the batch.
        rows: [n, H] on the device, engine dtype, a tensor of its own and no view of a graph's pool; None when
            nobody wants rows.
        finite: bool [tokens] on the host: the token's hidden state has no NaN or infinity; valid once `arrived`.
        ready: recorded on the engine's stream after `rows` and `finite` were written; None on the CPU.
        are_cached: an earlier sequence computed them.
    """

    segments: tuple[Segment, ...]
    rows: Tensor | None
    finite: Tensor
    ready: torch.cuda.Event | None
    are_cached: bool = False

    @property
    def arrived(self) -> bool:
        """True if `finite` can be read; it does not wait."""
        return self.ready is None or bool(self.ready.query())  # type: ignore[no-untyped-call]


class Kept(NamedTuple):
    """A second place in which rows of a step are kept."""

    table: Tensor
    """[slots, H], of the rows' dtype."""
    slots: Tensor
    """int64 [n], the place of each row in it."""


@dataclass(frozen=True)
class GatherPlan:
    """Tokens of a batch that become rows: `indices` int64 [n], ascending, and `zeroed` bool [n] without their
    embedding.
    """

    segments: tuple[Segment, ...]
    indices: NDArray[np.int64]
    zeroed: NDArray[np.bool_]

    def take_embeddings(self, embeddings: Tensor) -> Tensor | None:
        """Return the input embeddings [n, H] of the rows, zero at media; call this before the model runs.

        vLLM's fused norm on a GPU adds the residual stream into the very buffer that holds the embeddings.

        Args:
            embeddings: [tokens of the batch, padding included; H].
        """
        if not len(self.indices):
            return None
        taken = self._rows_of(embeddings).clone() if self._are_first else self._rows_of(embeddings)
        if self.zeroed.any():
            taken.masked_fill_(to_device(torch.from_numpy(self.zeroed), embeddings.device).unsqueeze(1), 0)
        return taken

    def complete_apart(self, taken: Tensor | None, hidden: Tensor) -> Tensor | None:
        """Complete rows unless they are those of the batch's first tokens; return all that are left, or None.

        Args:
            taken: what `take_embeddings` gave.
            hidden: [tokens of the batch, padding included; H], same device and dtype.
        """
        if taken is None or self._are_first:
            return taken
        taken.add_(self._rows_of(hidden))
        return None

    def select(self, rows: Tensor) -> Tensor | None:
        """Return the rows [n, H] among those of all tokens [tokens of the batch, H]; a view if they are the first."""
        return self._rows_of(rows) if len(self.indices) else None

    @property
    def _are_first(self) -> bool:
        """True if the rows are those of the batch's first tokens, as when all sequences decode and want rows."""
        return bool(self.indices[-1] == len(self.indices) - 1)

    def _rows_of(self, tokens: Tensor) -> Tensor:
        """Select the rows from [tokens of the batch, H]; a view if they are the first."""
        if self._are_first:
            return tokens[: len(self.indices)]
        return tokens.index_select(0, to_device(torch.from_numpy(self.indices), tokens.device))


@dataclass
class _Followed:
    """A request: its media's positions bool [P], whether it wants rows, and the first position not taken yet."""

    media: NDArray[np.bool_]
    wants_rows: bool
    untaken: int = 0

    def claim(self, start: int, stop: int) -> int:
        """Take positions [start, stop); return the first that was not taken before."""
        first = start if start >= self.untaken else min(self.untaken, stop)
        self.untaken = max(self.untaken, stop)
        return first


class HiddenRowCollector:
    """Keeps the rows of steps, by request, until they are taken.

    Each row is taken once, also if a preempted sequence computes it again. `follow` and `forget` are called between
    steps, on the thread that steps the engine.
    """

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}
        self.shared: set[str] = set()
        """Requests whose cached tokens later ones may reuse."""
        self.finish: Callable[[Tensor | None, Tensor, Kept | None], Tensor] = finish
        """Replacement of `finish`."""
        self.steps: deque[StepRows] = deque()

    def follow(
        self, request_id: str, media: NDArray[np.bool_], *, wants_rows: bool = True, is_shared: bool = False
    ) -> None:
        """Give rows, or flags alone, of this request; if it `is_shared`, later ones may reuse its cached tokens.

        `media` bool [P] marks the prompt's positions whose embedding counts as zero.
        """
        self._followed[request_id] = _Followed(media, wants_rows)
        if is_shared:
            self.shared.add(request_id)

    def forget(self, request_id: str) -> None:
        """Give no more rows of this request; an unknown one is ignored."""
        self._followed.pop(request_id, None)
        self.shared.discard(request_id)

    def skipped(self, request_ids: list[str], starts: NDArray[np.integer[Any]]) -> list[Segment]:
        """Take the positions that a request skips because they are cached, unless they were taken before. The rows of
        all requests are contiguous, whether wanted or not.

        Args:
            request_ids, starts: as in `plan`, which is called after this.
        """
        found, total = [], 0
        for request_id, first in zip(request_ids, starts[: len(request_ids)].tolist(), strict=True):
            followed = self._followed.get(request_id)
            if followed is None or first <= followed.untaken:
                continue
            start, followed.untaken = followed.untaken, first
            found.append(Segment(request_id, start, first, total, total if followed.wants_rows else None))
            total += first - start
        return found

    def media_places(
        self, request_ids: list[str], starts: NDArray[np.integer[Any]], bounds: NDArray[np.integer[Any]]
    ) -> NDArray[np.int64]:
        """Tokens of a step's batch that stand for media, ascending; the arguments are those of `plan`."""
        count, parts = len(request_ids), [np.zeros(0, np.int64)]
        for request_id, first, begin, end in zip(
            request_ids, starts[:count].tolist(), bounds[:count].tolist(), bounds[1 : count + 1].tolist(), strict=True
        ):
            followed = self._followed.get(request_id)
            if followed is not None and first < len(followed.media):
                parts.append(begin + np.flatnonzero(followed.media[first : first + end - begin]))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def plan(
        self, request_ids: list[str], starts: NDArray[np.integer[Any]], bounds: NDArray[np.integer[Any]]
    ) -> GatherPlan:
        """Return the rows to take from a step's batch; called once a step.

        Args:
            request_ids: of the batch, in its order.
            starts: [B] position of each request's first scheduled token.
            bounds: [B + 1] start of each request's tokens in the batch, and the end.
        """
        count = len(request_ids)
        firsts, edges = starts[:count].tolist(), bounds[: count + 1].tolist()
        segments, total, media_spans = [], 0, []
        runs: list[tuple[int, int]] = []
        for request_id, first, begin, end in zip(request_ids, firsts, edges, edges[1:], strict=False):
            followed, stop = self._followed.get(request_id), first + end - begin
            start = first if followed is None else followed.claim(first, stop)
            if start == stop:
                continue
            fresh = begin + start - first
            if followed is None or not followed.wants_rows:
                segments.append(Segment(request_id, start, stop, fresh, None))
                continue
            if start < len(followed.media):
                media_spans.append((total, followed.media[start:stop]))
            segments.append(Segment(request_id, start, stop, fresh, total))
            _extend(runs, fresh, end)
            total += stop - start
        zeroed = np.zeros(total, dtype=np.bool_)
        for offset, span in media_spans:
            zeroed[offset : offset + len(span)] = span
        return GatherPlan(tuple(segments), _indices(runs), zeroed)

    def record(self, plan: GatherPlan, taken: Tensor | None, hidden: Tensor) -> None:
        """Complete a step's rows and flags, off the device's buffers; nothing here waits for the device.

        Rows are embedding (zero at media) + last hidden state, as HF sums them for the talker.

        Source: `Qwen2_5OmniForConditionalGeneration.generate` of transformers.
        """
        finite = self.finish(plan.complete_apart(taken, hidden), hidden, None)
        self.steps.append(StepRows(plan.segments, taken, finite, record_event(hidden.device)))

    def record_kept(self, plan: GatherPlan, embeddings: Tensor, hidden: Tensor, kept: Kept) -> None:
        """Do as `record`, and keep the rows of all tokens of the batch, whether they are wanted or not.

        Args:
            embeddings: [tokens of the batch, H], zero at media; overwritten with the rows.
        """
        finite = self.finish(embeddings, hidden, kept)
        self.steps.append(StepRows(plan.segments, plan.select(embeddings), finite, record_event(hidden.device)))


def finish(rows: Tensor | None, hidden: Tensor, kept: Kept | None = None) -> Tensor:
    """Add the first hidden states to `rows`, and see which of all are finite.

    Args:
        rows: [n, H] in place, n <= N; None = there are none to complete.
        hidden: [N, H], same device and dtype.
        kept: where to copy the completed rows, if there are some.

    Returns:
        bool [N] on the host, valid once the device has come so far: whether there is no NaN or infinity.
    """
    if rows is not None:
        rows.add_(hidden[: rows.shape[0]])
        if kept is not None:
            kept.table.index_copy_(0, kept.slots, rows)
    # Three kernels instead of the five of `isfinite` and `all`; NaN is the largest of any row that has it.
    return to_host(hidden.abs().amax(dim=1) < float("inf"))


class HiddenRowsMixin(_Runner):
    """Adds `row_collector` to vLLM's V1 model runner. Put it before the platform's runner in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row_collector = HiddenRowCollector()
        # Every rank has all rows; those of rank 0 are taken.
        self._gives_rows = not self.parallel_config.rank

    def _model_forward(
        self,
        input_ids: Tensor | None = None,
        positions: Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the model and take the rows of this step; the batch is laid out by `_prepare_inputs` before."""
        if inputs_embeds is None:
            raise RuntimeError("the thinker ran on token ids: rows need a multimodal model's input embeddings")
        batch, bounds = self.input_batch, self.query_start_loc.np
        # A recorded step may have more rows than tokens. vLLM leaves those as they are, and the network adds its
        # residual stream into them: from step to step they would grow, and what is not finite would stay.
        inputs_embeds[int(bounds[len(batch.req_ids)]) :].zero_()
        if not self._gives_rows:
            return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        plan = self.row_collector.plan(batch.req_ids, batch.num_computed_tokens_cpu, bounds)
        taken = self._take_embeddings(plan, inputs_embeds)
        hidden = super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs)
        self._record_rows(plan, taken, hidden)
        return hidden

    def _take_embeddings(self, plan: GatherPlan, inputs_embeds: Tensor) -> Tensor | None:
        return plan.take_embeddings(inputs_embeds)

    def _record_rows(self, plan: GatherPlan, taken: Tensor | None, hidden: Tensor) -> None:
        self.row_collector.record(plan, taken, hidden)


def _extend(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add [begin, end) to ranges that do not adjoin. Mostly all are one: an array operation takes as long as many of
    these."""
    if runs and runs[-1][1] == begin:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((begin, end))


def _indices(runs: list[tuple[int, int]]) -> NDArray[np.int64]:
    """The numbers of all these ranges, int64 [n]."""
    parts = [np.arange(begin, end) for begin, end in runs]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

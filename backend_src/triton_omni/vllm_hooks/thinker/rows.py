# SPDX-License-Identifier: Apache-2.0
"""Decides which hidden rows of a sequence may be given, and keeps the rows of cached tokens.

A row is given once and in order, none past the last known token. A sequence that begins after a cached prefix computes
no rows of the prefix, so they are kept. They have the slots of the key-value cache: a row is valid if its keys and
values are. So no other table or eviction than vLLM's is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.gpu import record_event, to_device, to_host
from triton_omni.vllm_hooks.thinker.hidden_rows import GatherPlan, HiddenRowsMixin, Kept, Segment, StepRows


@dataclass(frozen=True)
class Piece:
    """Positions [start, stop) of one sequence from one engine step.

    Attributes:
        finite: bool [stop - start], host; None = all of them are.
        rows: [stop - start, H] on the device, None for a sequence that wants none.
        ready: recorded after `rows` was written, where the device is a GPU.
    """

    start: int
    stop: int
    finite: Tensor | None
    rows: Tensor | None
    ready: torch.cuda.Event | None

    @property
    def is_finite(self) -> bool:
        """True if no hidden state of it has a NaN or an infinity."""
        return self.finite is None or bool(self.finite.all())

    @classmethod
    def of(cls, step: StepRows, segment: Segment, *, finite: bool) -> Piece:
        """Return views of a sequence's part of a step. `finite` is True if all of the step is finite, which is checked
        once and not for each sequence.
        """
        count, rows = segment.stop - segment.start, None
        if segment.row_offset is not None and step.rows is not None:
            rows = step.rows[segment.row_offset : segment.row_offset + count]
        flags = None if finite else step.finite[segment.flag_offset : segment.flag_offset + count]
        return cls(segment.start, segment.stop, flags, rows, step.ready)

    def part(self, start: int, stop: int) -> Piece:
        """The positions [start, stop) of this piece."""
        if (start, stop) == (self.start, self.stop):
            return self
        window = slice(start - self.start, stop - self.start)
        rows = None if self.rows is None else self.rows[window]
        finite = None if self.finite is None else self.finite[window]
        return Piece(start, stop, finite, rows, self.ready)


class Cut:
    """Counts the spoken tokens of a reply, of whose text perhaps only the first characters are spoken.

    A token is spoken if one of its characters is.
    """

    def __init__(self) -> None:
        self.kept = 0
        """Tokens that are spoken, from the first on."""
        self._length = 0
        self._starts: deque[int] = deque()

    def count_token(self, length: int) -> None:
        """Count a token; with it the text has `length` characters."""
        self._starts.append(self._length)
        self._length = length

    def keep_before(self, length: int) -> None:
        """Note that the first `length` characters are spoken in any case."""
        while self._starts and self._starts[0] < length:
            self._starts.popleft()
            self.kept += 1

    def keep_all(self) -> None:
        """Note that the reply is over, and that all of it is spoken."""
        self.keep_before(self._length + 1)


class StopCut(Cut):
    """The cut of a reply that a stop string may end.

    A stop string whose end has not come yet begins less than its own length before the text's present end.

    Args:
        stop: the stop strings, none empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        super().__init__()
        self._reach = max(map(len, stop)) - 1

    def count_token(self, length: int) -> None:
        """Count a token; with it the text has `length` characters."""
        super().count_token(length)
        self.keep_before(length - self._reach)

    def close(self, length: int | None) -> None:
        """Note that the reply is over; a stop string left `length` characters (None = no stop string ended it)."""
        if length is None:
            self.keep_all()
        else:
            self.keep_before(length)


@dataclass
class RowRelease:
    """Holds back a sequence's rows until they may be given.

    Prompt rows may be given at once. A reply token's row waits until the next token is known, since the last reply
    token has none, and until neither stop string nor call can take it away. So a step that ran too far (async
    scheduling) gives nothing, and what is computed again after a preemption is not given twice.
    """

    prompt_tokens: int
    reply_tokens: int = 0
    next_position: int = 0
    cuts: Sequence[Cut] = ()
    """Cuts of a reply that stop strings or calls may end; a token is spoken if every cut speaks it."""
    is_sound: bool = True
    """False once a hidden state was not finite, given or not."""
    has_computed: bool = False
    """True once it computed a finite row, which proves that everything before the row is sound."""
    held: deque[Piece] = field(default_factory=deque)

    @property
    def limit(self) -> int:
        """Rows of positions from here on are not given (yet): P, then P + n_out - 1, or those of spoken tokens."""
        return self.prompt_tokens + min((max(self.reply_tokens - 1, 0), *(cut.kept for cut in self.cuts)))

    @property
    def held_rows(self) -> int:
        """Rows of device memory held back now."""
        return sum(len(piece.rows) for piece in self.held if piece.rows is not None)

    def drop_if_spoken(self) -> bool:
        """Once nothing more is spoken: return True if all rows of spoken tokens were given, and drop the others."""
        is_over = self.next_position == self.prompt_tokens + min(cut.kept for cut in self.cuts)
        if is_over:
            self.held.clear()
        return is_over

    def pop_pieces(self) -> list[Piece]:
        """Return the pieces that may be given now, without gaps; each position only once."""
        given = []
        while self.held and self.held[0].start < self.limit:
            piece = self.held.popleft()
            stop = min(piece.stop, self.limit)
            if stop > self.next_position:
                given.append(piece.part(self.next_position, stop))
                self.next_position = stop
            if stop < piece.stop:
                self.held.appendleft(piece.part(stop, piece.stop))
        return given


# --- the mirror -------------------------------------------------------------------------------------------------------


class RowMirror:
    """Rows [slots, H], a slot for each token that the cache holds.

    Args:
        blocks, block_size: of the cache.
        like: any tensor of rows, which gives their width, dtype and device.
    """

    def __init__(self, blocks: int, block_size: int, like: Tensor) -> None:
        self.rows = like.new_zeros(blocks * block_size, like.shape[-1])
        self._block_size = block_size

    def read(self, parts: Sequence[Segment], blocks: Sequence[Sequence[int]]) -> StepRows:
        """Return the rows of sequences' cached tokens in the form of a step, with a flag for each row.

        Args:
            parts: the tokens of each sequence.
            blocks: each sequence's blocks of the cache.
        """
        slots = [self._slots(part, mine) for part, mine in zip(parts, blocks, strict=True)]
        rows = self.rows.index_select(0, to_device(torch.from_numpy(np.concatenate(slots)), self.rows.device))
        finite = to_host(rows.abs().amax(dim=1) < float("inf"))
        return StepRows(tuple(parts), rows, finite, record_event(rows.device), are_cached=True)

    def _slots(self, part: Segment, blocks: Sequence[int]) -> Any:
        positions = np.arange(part.start, part.stop)
        return np.asarray(blocks)[positions // self._block_size] * self._block_size + positions % self._block_size


class RowMirrorMixin(HiddenRowsMixin):
    """Keeps the mirror if there is a prefix cache. While no request shares its tokens, steps run as without a mirror.

    The kernel that completes a step's rows also writes them to the mirror, outside of the recorded graph. So a decode
    step of sequences that want their rows launches no further kernel.
    """

    mirror: RowMirror | None = None

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and the mirror on the rank that gives rows."""
        super().initialize_kv_cache(*args, **kwargs)
        if self.cache_config.enable_prefix_caching and not self.parallel_config.rank:
            config, inputs = self.kv_cache_config, self.inputs_embeds.gpu
            (group,) = config.kv_cache_groups
            self.mirror = RowMirror(config.num_blocks, group.kv_cache_spec.block_size, inputs)
            # Compiles the kernel, if it is one; all values here are zero and stay zero.
            first = Kept(self.mirror.rows, torch.zeros(1, dtype=torch.int64, device=inputs.device))
            self.row_collector.finish(torch.zeros_like(inputs[:1]), torch.zeros_like(inputs[:1]), first)

    @property
    def _used_mirror(self) -> RowMirror | None:
        return self.mirror if self.row_collector.shared else None

    def _model_forward(self, *args: Any, **named: Any) -> Any:
        batch, mirror = self.input_batch, self._used_mirror
        if mirror is not None and (parts := self.row_collector.skipped(batch.req_ids, batch.num_computed_tokens_cpu)):
            blocks = [self.requests[part.request_id].block_ids[0] for part in parts]
            self.row_collector.steps.append(mirror.read(parts, blocks))
        return super()._model_forward(*args, **named)

    def _take_embeddings(self, plan: GatherPlan, inputs_embeds: Tensor) -> Tensor | None:
        """Take the embeddings of all tokens, zero at media: the mirror keeps rows that nobody wants now."""
        if self._used_mirror is None:
            return super()._take_embeddings(plan, inputs_embeds)
        batch, bounds = self.input_batch, self.query_start_loc.np
        embeddings = inputs_embeds[: int(bounds[len(batch.req_ids)])].clone()
        media = self.row_collector.media_places(batch.req_ids, batch.num_computed_tokens_cpu, bounds)
        if len(media):
            embeddings.index_fill_(0, to_device(torch.from_numpy(media), embeddings.device), 0)
        return embeddings

    def _record_rows(self, plan: GatherPlan, taken: Tensor | None, hidden: Tensor) -> None:
        if (mirror := self._used_mirror) is None or taken is None:
            super()._record_rows(plan, taken, hidden)
            return
        slots = self.input_batch.block_table[0].slot_mapping.gpu[: taken.shape[0]]
        self.row_collector.record_kept(plan, taken, hidden, Kept(mirror.rows, slots))

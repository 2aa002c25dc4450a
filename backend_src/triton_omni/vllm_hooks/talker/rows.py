# SPDX-License-Identifier: Apache-2.0
"""Device memory of talker sequences: their hidden rows, the ids they have used, the faults they met.

Everything is allocated once and indexed by slot, so that a step needs no loop of device operations over
sequences. It knows neither vLLM nor how a step is scheduled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.errors import InternalError, Overloaded
from triton_omni.core.gpu import record_event
from triton_omni.core.spans import FirstFit
from triton_omni.session.engine import TalkerPrompt
from triton_omni.vllm_hooks.talker.conditioning import Indices, can_speak, pool_rows, split_at_text_bos, stored_rows

TEXT_EOS_ROW: Final = 0
TEXT_PAD_ROW: Final = 1
_TAIL_ROWS: Final = 2
MOST_FED: Final = 512
"""Maximum rows that wait for a step before they are copied to the pool: a long prompt, which no step reads before all
of it has arrived, would keep its memory twice."""
UNBOUNDED: Final = 1 << 40
"""Positions that may be computed once the tail has begun."""
_RETRY_MS: Final = 250


class Column(IntEnum):
    """Inputs of a step for each token; one int64 each, so that all of them are one copy to the device."""

    ROW = 0
    """Its row in the pool."""
    SLOT = 1
    """The slot of its sequence."""
    PLACE = 2
    """Its position in its sequence."""
    UNIFORM = 3
    """Bits of the float64 that draws the next id."""
    FOLLOWS = 4
    """1 if it is the last decode step's draw in the same row; the step then lays it out by the next two columns."""
    AXIS = 5
    """Its position on the axes of M-RoPE, which are equal after the prompt."""
    CACHE = 6
    """Its slot in the key-value cache, below 0 for none."""
    LENGTH = 7
    """Positions that attention reads for it, including its own; 0 = no sequence. The kernel that copies this table to
    the device writes the lengths: attention may read them before the step's own kernels have run."""


class SampledStep(NamedTuple):
    """Ids that a sequence drew in one engine step, or in several in order."""

    ids: Tensor
    """int32 [N] on the device."""
    ready: torch.cuda.Event | None
    """Recorded after `ids` was written, where the device is a GPU."""


@dataclass
class Sequence:
    """One open talker sequence; `slot` and `base` name its share of the device memory."""

    key: str
    prompt: TalkerPrompt
    parameters: object
    """Sampling parameters of the sequence, in the engine's own form."""
    slot: int
    base: int
    """Index in the pool of the row of position 0; it may lie before the pool's start."""
    reserved: int
    """Positions with a place in the pool, those before `begin` counted with them."""
    priority: int = 0
    """The lowest gets the next place in the engine's batch."""
    begin: int = 0
    """The first position that is computed; rows before it never come."""
    fed: int = 0
    """Rows that came, those before `begin` counted with them."""
    ended: bool = False
    request_id: str | None = None
    """vLLM's id, from the first reply row on."""
    sampled: deque[SampledStep] = field(default_factory=deque)
    """Steps whose id vLLM has not yet accepted, oldest first."""

    @property
    def speaks(self) -> bool:
        """True if a reply row came."""
        return can_speak(self.prompt.prompt_rows, self.fed)

    @property
    def ready_positions(self) -> int:
        """Return the number of positions, from 0 on, that have their row."""
        return UNBOUNDED if self.ended else stored_rows(self.prompt.prompt_rows, self.fed)

    def accept(self, count: int, spoken: int) -> SampledStep | None:
        """Take the oldest `count` draws, which vLLM has accepted, and return the first `spoken` of them as codes."""
        if count == spoken == 1:
            return self.sampled.popleft()
        taken = [self.sampled.popleft() for _ in range(count)][:spoken]
        if not taken:
            return None
        joined = torch.cat([step.ids for step in taken])
        return SampledStep(joined, record_event(joined.device))


class _Fed(NamedTuple):
    """Rows [N, H] of a slot's sequence on their way into the pool."""

    slot: int
    start: int
    """The pool's index of the first."""
    rows: Tensor


class TalkerRows:
    """The row pool and the per-slot state of every open sequence.

    Args:
        tail: [2, H], the text embeddings of text_eos and text_pad; gives dtype, device and width of the pool.
        rows: rows that all open sequences share.
        slots: sequences open at once.
        prompt_ids: bool [V] on the same device, ids that count as used before the first code.
        max_positions: positions of the longest sequence; rows past it are never used and not kept.
    """

    def __init__(self, tail: Tensor, rows: int, slots: int, prompt_ids: Tensor, max_positions: int) -> None:
        device = tail.device
        self.pool = torch.zeros(_TAIL_ROWS + rows, tail.shape[1], dtype=tail.dtype, device=device)
        self.pool[:_TAIL_ROWS].copy_(tail)
        self.idle_slot = slots
        """Slot of no sequence: rows of the batch whose draws are discarded write there."""
        self.used = torch.zeros(slots + 1, prompt_ids.shape[0], dtype=torch.int32, device=device)
        """Number of times each id was read, by slot; at least 1 for ids of the prompt."""
        self.faults = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        """Number of rows read that are not finite, by slot."""
        self._prompt_ids = prompt_ids.to(torch.int32)
        self._max_positions = max_positions
        self._bases = np.zeros(slots + 1, dtype=np.int64)
        self._stored = np.zeros(slots + 1, dtype=np.int64)
        self._free_slots = list(range(slots))
        self._spans = FirstFit(rows)
        self._fed: list[_Fed] = []
        """Rows that the pool does not hold yet, oldest first."""
        self._fed_rows = 0
        """Upper bound of their number; rows of sequences closed since count too."""

    @property
    def rows_used(self) -> int:
        """Rows reserved by open sequences."""
        return self._spans.used

    def open(self, key: str, prompt: TalkerPrompt, text_bos: Tensor, parameters: object, begin: int = 0) -> Sequence:
        """Reserve a sequence's slot and its rows from `begin` on; `text_bos` [H] is its speaker's row.

        Raises:
            Overloaded: no slot, or no gap for the rows.
        """
        reserved = min(prompt.max_rows + 1, self._max_positions)
        start = self._spans.allocate(reserved - begin) if self._free_slots else None
        if start is None:
            raise Overloaded(
                f"the talker has no room for {reserved - begin} hidden rows: {self.rows_used} of "
                f"{self._spans.capacity} rows and {self.idle_slot - len(self._free_slots)} of {self.idle_slot} "
                "sequences are taken",
                stage="talker",
                retry_after_ms=_RETRY_MS,
            )
        slot, base = self._free_slots.pop(), start + _TAIL_ROWS - begin
        self.faults[slot].zero_()
        self._bases[slot], self._stored[slot] = base, 0
        sequence = Sequence(key, prompt, parameters, slot, base, reserved, begin=begin, fed=begin)
        self._keep(sequence, prompt.prompt_rows, text_bos.unsqueeze(0))
        return sequence

    def feed(self, sequence: Sequence, rows: Tensor) -> None:
        """Take the next rows [N, H] of a sequence, which `store` copies into its reserve before the next step; until
        then they must stay as they are.

        Raises:
            InternalError: the rows do not fit what was announced at open, or come after the end.
        """
        if sequence.ended:
            raise InternalError(f"talker rows {tuple(rows.shape)} after the end of the sequence", stage="talker")
        count, width = rows.shape
        limit = sequence.prompt.max_rows
        if width != self.pool.shape[1] or sequence.fed + count > limit:
            raise InternalError(
                f"talker rows {tuple(rows.shape)} after {sequence.fed} rows: the width must be {self.pool.shape[1]} "
                f"and {limit} rows in all were announced",
                stage="talker",
            )
        if rows.device != self.pool.device:
            # A stream that waits for this event may then use the other device's memory again.
            rows = rows.to(self.pool.device)
        prompt_rows, fed = sequence.prompt.prompt_rows, sequence.fed
        if can_speak(prompt_rows, fed):
            # Nearly every step brings a row of every sequence: a view of it would take as long as everything else.
            self._keep(sequence, stored_rows(prompt_rows, fed), rows)
        else:
            first, second, at_first, at_second = split_at_text_bos(prompt_rows, fed, count)
            self._keep(sequence, at_first, rows[first])
            self._keep(sequence, at_second, rows[second])
        sequence.fed += count
        self._stored[sequence.slot] = stored_rows(prompt_rows, sequence.fed)
        if self._fed_rows >= MOST_FED:
            self.store()

    def _keep(self, sequence: Sequence, position: int, rows: Tensor) -> None:
        count, room = rows.shape[0], max(sequence.reserved - position, 0)
        if count > room:
            count, rows = room, rows[:room]
        if count:
            self._fed.append(_Fed(sequence.slot, sequence.base + position, rows))
            self._fed_rows += count

    def store(self) -> None:
        """Copy the rows fed since the last call into the pool, before a step that reads them.

        One kernel stores the rows of a hundred messages. Single copies would take the stepping thread longer than the
        step: each releases the GIL and then competes with the threads that read and write messages.
        """
        fed, self._fed, self._fed_rows = self._fed, [], 0
        if fed:
            places = [self.pool[one.start : one.start + one.rows.shape[0]] for one in fed]
            torch._foreach_copy_(places, [one.rows for one in fed])

    def close(self, sequence: Sequence) -> None:
        """Free what `open` reserved. Steps in flight may still read it: later writes are queued after them."""
        # Another sequence may get its rows' places before the next step.
        self._fed = [one for one in self._fed if one.slot != sequence.slot]
        self._free_slots.append(sequence.slot)
        self._spans.free(sequence.base + sequence.begin - _TAIL_ROWS)
        sequence.sampled.clear()

    def pool_rows(self, slots: Indices, positions: Indices) -> Indices:
        """Pool index of the row of each (slot, position), int64 [N] each."""
        return pool_rows(
            positions, self._bases[slots], self._stored[slots], text_eos=TEXT_EOS_ROW, text_pad=TEXT_PAD_ROW
        )

    def gather(self, index: Tensor, slots: Tensor) -> Tensor:
        """The rows [N, H] of a whole step.

        A value that is not finite counts against its sequence and is given as 0, so that it never reaches a cache.

        Args:
            index: int64 [N] on the device, as `pool_rows` gives it.
            slots: int64 [N] on the device, the sequence of each row.
        """
        rows = self.pool.index_select(0, index)
        self.faults.index_add_(0, slots, (~_rows_are_finite(rows)).to(torch.int32))
        return rows.nan_to_num_(0.0, 0.0, 0.0)

    def reset_used(self, slot: int) -> None:
        """Reset a sequence's used ids to those of its prompt, also when it is computed again from its begin."""
        self.used[slot].copy_(self._prompt_ids)

    def count(self, slots: Tensor, ids: Tensor) -> None:
        """Count ids [N], read by the sequences of `slots` int64 [N], as used once more from now on."""
        self.used.view(-1).index_add_(0, slots * self.used.shape[1] + ids, torch.ones_like(ids, dtype=torch.int32))

    def sound(self, slots: Tensor, logits: Tensor) -> Tensor:
        """bool [B]: whether every row that the sequences used so far, and their `logits` [B, V], are finite."""
        return (self.faults[slots] == 0) & _rows_are_finite(logits)


def _rows_are_finite(values: Tensor) -> Tensor:
    """bool [N] of values [N, ...]; a sum is finite only where every term is."""
    return values.sum(dim=-1, dtype=torch.float32).abs() < float("inf")

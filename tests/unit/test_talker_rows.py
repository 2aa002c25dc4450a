# SPDX-License-Identifier: Apache-2.0
"""Hidden rows on their way into the talker's pool: what was fed since the last step, by one copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_omni.session.engine import TalkerPrompt
from triton_omni.vllm_hooks.talker.rows import Sequence, TalkerRows

WIDTH, PROMPT, LONGEST = 4, 3, 10
BOS = 9.0


@pytest.fixture
def rows() -> TalkerRows:
    return TalkerRows(torch.ones(2, WIDTH), 60, 4, torch.zeros(16, dtype=torch.bool), 20)


def begin(rows: TalkerRows, key: str) -> Sequence:
    prompt = TalkerPrompt(PROMPT, torch.arange(PROMPT + 2).expand(3, -1), 0, max_rows=LONGEST)
    return rows.open(key, prompt, torch.full((WIDTH,), BOS), None)


def rows_of(first: float, count: int) -> Tensor:
    return torch.arange(first, first + count).unsqueeze(-1).expand(-1, WIDTH).clone()


def stored(rows: TalkerRows, sequence: Sequence, count: int) -> list[float]:
    return rows.pool[sequence.base : sequence.base + count, 0].tolist()


def test_what_many_sequences_were_fed_is_stored_together(rows: TalkerRows, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (copies.append(len(to)), copy(to, of)))
    open_now = [begin(rows, str(number)) for number in range(3)]
    for number, sequence in enumerate(open_now):
        rows.feed(sequence, rows_of(100 * number, 2))
        rows.feed(sequence, rows_of(100 * number + 2, 3))
    assert not rows.pool[2:].any(), "a step reads the pool, nobody before"
    rows.store()
    for number, sequence in enumerate(open_now):
        first = 100.0 * number
        assert stored(rows, sequence, 6) == [first, first + 1, first + 2, BOS, first + 3, first + 4]
    rows.store()
    assert len(copies) == 1


def test_what_was_fed_to_a_sequence_that_ended_is_not_stored_over_the_next_in_its_place(rows: TalkerRows) -> None:
    gone, stays = begin(rows, "gone"), begin(rows, "stays")
    rows.feed(gone, rows_of(1, 5))
    rows.feed(stays, rows_of(50, 5))
    rows.close(gone)
    again = begin(rows, "again")
    assert (again.slot, again.base) == (gone.slot, gone.base)
    rows.feed(again, rows_of(20, 2))
    rows.store()
    assert stored(rows, again, 6) == [20.0, 21.0, 0.0, BOS, 0.0, 0.0]
    assert stored(rows, stays, 6) == [50.0, 51.0, 52.0, BOS, 53.0, 54.0]


def test_a_long_prompt_is_stored_as_it_comes(rows: TalkerRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step reads a prompt before all of it is there, and so much memory is not kept besides."""
    monkeypatch.setattr("triton_omni.vllm_hooks.talker.rows.MOST_FED", 4)
    first, second = begin(rows, "first"), begin(rows, "second")
    rows.feed(first, rows_of(1, 1))
    assert stored(rows, first, 1) == [0.0]
    rows.feed(second, rows_of(100, 1))
    assert (stored(rows, first, 1), stored(rows, second, 1)) == ([1.0], [100.0]), (
        "with two rows of text_bos they are four"
    )
    rows.feed(first, rows_of(2, 1))
    assert stored(rows, first, 2) == [1.0, 0.0]


def test_rows_past_the_longest_sequence_are_not_kept(rows: TalkerRows) -> None:
    """A reserve is never longer than the positions that a sequence may have."""
    prompt = TalkerPrompt(PROMPT, torch.arange(PROMPT + 2).expand(3, -1), 0, max_rows=40)
    first = rows.open("long", prompt, torch.full((WIDTH,), BOS), None)
    second = begin(rows, "behind it")
    rows.feed(first, rows_of(1, 40))
    rows.feed(second, rows_of(100, 4))
    rows.store()
    assert first.reserved == 20
    assert stored(rows, first, 20) == [1.0, 2.0, 3.0, BOS, *map(float, range(4, 20))]
    assert stored(rows, second, 5) == [100.0, 101.0, 102.0, BOS, 103.0]

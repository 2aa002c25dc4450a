# SPDX-License-Identifier: Apache-2.0
"""Gathering hidden rows from a batch and releasing them in order, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import strategies as st
from torch import Tensor

from triton_omni.vllm_hooks.thinker.hidden_rows import HiddenRowCollector, HiddenRowsMixin, Segment, StepRows
from triton_omni.vllm_hooks.thinker.rows import Cut, Piece, RowRelease, StopCut

HIDDEN = 4


def batch(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Embeddings and hidden states [tokens, H]."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, tokens, HIDDEN, generator=generator)
    return both[0], both[1]


def record(
    collector: HiddenRowCollector, tokens: dict[str, tuple[int, int]], hidden: Tensor, embeds: Tensor
) -> StepRows:
    """One step over `tokens`: of each request its first position and how many."""
    starts, counts = zip(*tokens.values(), strict=True)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    plan = collector.plan(list(tokens), np.array(starts), bounds)
    buffer = embeds.clone()
    taken = plan.take_embeddings(buffer)
    # The model uses the buffer of its inputs for the residual stream.
    buffer.fill_(float("nan"))
    collector.record(plan, taken, hidden)
    return collector.steps.pop()


def test_a_row_is_embedding_plus_hidden_and_media_embeddings_count_as_zero() -> None:
    collector = HiddenRowCollector()
    media = np.array([False, True, True, False, False])
    collector.follow("a", media)
    embeds, hidden = batch(5)
    step = record(collector, {"a": (0, 5)}, hidden, embeds)
    torch.testing.assert_close(step.rows, hidden + embeds * torch.tensor(~media).unsqueeze(1))


def test_media_positions_are_found_in_every_chunk_of_a_prompt_and_never_in_the_reply() -> None:
    collector = HiddenRowCollector()
    media = np.array([False, False, True, True])
    collector.follow("a", media)
    embeds, hidden = batch(3)
    second = record(collector, {"a": (3, 3)}, hidden, embeds)
    expected = hidden + embeds
    expected[0] = hidden[0]
    torch.testing.assert_close(second.rows, expected)


def test_only_requests_that_want_rows_are_gathered_but_all_are_flagged() -> None:
    collector = HiddenRowCollector()
    for wanting in ("a", "c"):
        collector.follow(wanting, np.zeros(8, dtype=bool))
    embeds, hidden = batch(7)  # one token of padding at the end
    hidden[3, 1] = float("inf")
    step = record(collector, {"a": (0, 2), "b": (5, 3), "c": (2, 1)}, hidden, embeds)
    pieces = {segment.request_id: Piece.of(step, segment, finite=False) for segment in step.segments}
    assert step.rows is not None
    assert step.rows.shape == (3, HIDDEN)
    torch.testing.assert_close(pieces["a"].rows, (hidden + embeds)[0:2])
    torch.testing.assert_close(pieces["c"].rows, (hidden + embeds)[5:6])
    assert pieces["b"].rows is None
    assert {key: piece.is_finite for key, piece in pieces.items()} == {"a": True, "b": False, "c": True}
    assert (pieces["b"].start, pieces["b"].stop) == (5, 8)


def test_neighbours_behind_one_that_wants_no_rows_have_their_own() -> None:
    collector = HiddenRowCollector()
    for wanting in "acdfg":
        collector.follow(wanting, np.zeros(8, dtype=bool))
    embeds, hidden = batch(10)
    tokens = {"a": (0, 2), "b": (5, 1), "c": (1, 2), "d": (4, 1), "e": (0, 1), "f": (0, 2), "g": (3, 1)}
    step = record(collector, tokens, hidden, embeds)
    torch.testing.assert_close(step.rows, (hidden + embeds)[[0, 1, 3, 4, 5, 7, 8, 9]])


def test_rows_do_not_share_memory_with_the_buffers_of_the_step() -> None:
    collector = HiddenRowCollector()
    collector.follow("a", np.zeros(2, dtype=bool))
    embeds, hidden = batch(2)
    step = record(collector, {"a": (0, 2)}, hidden, embeds)
    expected = embeds + hidden
    hidden.zero_()
    torch.testing.assert_close(step.rows, expected)


def test_a_step_in_which_nobody_wants_rows_gathers_none() -> None:
    collector = HiddenRowCollector()
    collector.follow("a", np.zeros(2, dtype=bool))
    collector.forget("a")
    collector.forget("never seen")
    embeds, hidden = batch(2)
    assert record(collector, {"a": (0, 2)}, hidden, embeds).rows is None


def test_what_is_computed_again_is_not_taken_again() -> None:
    collector = HiddenRowCollector()
    collector.follow("a", np.array([True, False, False, False]))
    embeds, hidden = batch(8)
    assert len(record(collector, {"a": (0, 6)}, hidden, embeds).segments) == 1
    again = record(collector, {"b": (3, 2), "a": (0, 4)}, hidden, embeds)
    assert again.rows is None
    assert [segment.request_id for segment in again.segments] == ["b"]
    last = record(collector, {"a": (4, 3), "b": (5, 1)}, hidden, embeds)
    assert [(segment.start, segment.stop, segment.flag_offset) for segment in last.segments] == [(6, 7, 2), (5, 6, 3)]
    torch.testing.assert_close(last.rows, (hidden + embeds)[2:3])


def test_a_step_has_arrived_with_its_event_and_at_once_without() -> None:
    on_the_way: Any = SimpleNamespace(query=lambda: False)
    arrived: Any = SimpleNamespace(query=lambda: True)
    found = [StepRows((), None, torch.ones(1), ready).arrived for ready in (None, on_the_way, arrived)]
    assert found == [True, False, True]


class ResidualRunner:
    """A runner whose network adds 1 to every row of its inputs, in place."""

    def _model_forward(self, input_ids: Any, positions: Any, intermediate: Any, inputs_embeds: Tensor) -> Tensor:
        return inputs_embeds.add_(1.0)


class PaddedRunner(HiddenRowsMixin, ResidualRunner):
    """Two tokens of one request; every further row of a step is padding."""

    input_batch: Any = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=np.zeros(1, dtype=np.int32))
    query_start_loc: Any = SimpleNamespace(np=np.array([0, 2, 2]))

    def __init__(self, rank: int) -> None:
        self.parallel_config: Any = SimpleNamespace(rank=rank)
        super().__init__()


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_behind_a_steps_tokens_begin_at_zero_in_every_step(rank: int) -> None:
    runner, embeds = PaddedRunner(rank), torch.zeros(4, HIDDEN)
    embeds[3] = float("nan")
    for step in (1, 2):
        assert runner._model_forward(inputs_embeds=embeds) is embeds
        assert embeds[:, 0].tolist() == [step, step, 1, 1]
        # Nobody takes what another rank would give.
        assert len(runner.row_collector.steps) == (0 if rank else step)


def test_a_step_on_token_ids_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ran on token ids"):
        PaddedRunner(0)._model_forward(input_ids=torch.zeros(2, dtype=torch.long))


def piece(start: int, stop: int) -> Piece:
    """Rows whose values are their positions."""
    rows = torch.arange(start, stop, dtype=torch.float32).unsqueeze(1)
    return Piece(start, stop, torch.ones(stop - start, dtype=torch.bool), rows, None)


def given(release: RowRelease) -> list[float]:
    return [value for part in release.pop_pieces() if part.rows is not None for value in part.rows[:, 0].tolist()]


def test_prompt_rows_are_given_chunk_by_chunk() -> None:
    release = RowRelease(prompt_tokens=5)
    release.held.append(piece(0, 3))
    assert given(release) == [0, 1, 2]
    release.held.append(piece(3, 5))
    release.reply_tokens = 1
    assert given(release) == [3, 4]
    assert release.held_rows == 0


@pytest.mark.parametrize("reply", [1, 2, 5])
def test_a_finished_reply_has_given_a_row_a_token_but_the_last(reply: int) -> None:
    release, rows = RowRelease(prompt_tokens=3), []
    release.held.append(piece(0, 3))
    for token in range(reply):
        release.reply_tokens = token + 1
        rows += given(release)
        release.held.append(piece(3 + token, 4 + token))  # the next step, which runs ahead of the ending
    assert rows == list(range(3 + reply - 1))
    assert release.next_position == release.limit
    assert given(release) == []


def test_a_step_that_runs_ahead_is_held_until_its_token_is_known() -> None:
    release = RowRelease(prompt_tokens=2, reply_tokens=1)
    release.held.extend([piece(0, 2), piece(2, 3), piece(3, 4)])
    assert given(release) == [0, 1]
    assert release.held_rows == 2
    release.reply_tokens = 3
    assert given(release) == [2, 3]


def test_what_a_preempted_sequence_computes_again_is_not_given_twice() -> None:
    release = RowRelease(prompt_tokens=4, reply_tokens=3)
    release.held.extend([piece(0, 4), piece(4, 5), piece(5, 6)])
    assert given(release) == [0, 1, 2, 3, 4, 5]
    release.held.extend([piece(0, 4), piece(4, 7)])
    release.reply_tokens = 4
    assert given(release) == [6]
    assert release.held_rows == 0


def test_what_is_computed_again_up_to_where_rows_were_given_is_no_piece() -> None:
    release = RowRelease(prompt_tokens=4, reply_tokens=3)
    release.held.append(piece(0, 6))
    assert given(release) == [0, 1, 2, 3, 4, 5]
    release.held.append(piece(0, 6))
    assert release.pop_pieces() == []
    assert not release.held


def test_a_part_of_a_piece_has_its_own_rows_and_flags() -> None:
    whole = piece(5, 9)
    assert whole.finite is not None
    whole.finite[3] = False
    parts = [whole.part(5, 8), whole.part(8, 9)]
    assert [(part.start, part.stop, part.is_finite) for part in parts] == [(5, 8, True), (8, 9, False)]
    assert [part.rows[:, 0].tolist() for part in parts if part.rows is not None] == [[5, 6, 7], [8]]


def test_a_piece_of_a_finite_step_has_no_flags_and_may_want_no_rows() -> None:
    step = StepRows((Segment("a", 5, 9, 2, None),), None, torch.ones(6, dtype=torch.bool), None)
    part = Piece.of(step, step.segments[0], finite=True).part(6, 8)
    assert part == Piece(6, 8, None, None, None)
    assert part.is_finite


def test_a_piece_that_reaches_past_the_known_tokens_is_split() -> None:
    release = RowRelease(prompt_tokens=4, reply_tokens=2)
    release.held.append(piece(0, 7))
    assert given(release) == [0, 1, 2, 3, 4]
    assert release.held_rows == 2
    release.reply_tokens = 4
    assert given(release) == [5, 6]


def cut_by(pieces: list[str], stop: list[str]) -> tuple[str, int]:
    """The text that the first completed stop string leaves, and how many tokens came until then, by vLLM's rule."""
    text = ""
    for count, part in enumerate(pieces, start=1):
        text += part
        ends = [(text.index(string) + len(string), string) for string in stop if string in text]
        if ends:
            return text[: text.index(min(ends)[1])], count
    return text, len(pieces)


@for_all(
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_a_token_is_kept_when_a_character_of_it_is_and_never_taken_back(pieces: list[str], stop: list[str]) -> None:
    stop = [*stop, "c"]
    left, count = cut_by(pieces, stop)
    stopped = left != "".join(pieces)
    starts = [len("".join(pieces[:index])) for index in range(count)]
    expected = sum(start < len(left) for start in starts) if stopped else count
    cut, seen = StopCut(stop), 0
    for index in range(count):
        cut.count_token(len(left) if stopped and index == count - 1 else len("".join(pieces[: index + 1])))
        assert seen <= cut.kept <= expected
        seen = cut.kept
    cut.close(len(left) if stopped else None)
    assert cut.kept == expected


def test_rows_of_tokens_that_a_stop_string_may_take_wait() -> None:
    cut = StopCut(["xyz"])
    release, rows = RowRelease(prompt_tokens=2, cuts=[cut]), []
    release.held.append(piece(0, 2))
    for token, length in enumerate((1, 2, 3, 4)):
        release.reply_tokens = token + 1
        cut.count_token(length)
        rows += given(release)
        release.held.append(piece(2 + token, 3 + token))
    # The last two of four characters may begin a stop string.
    assert rows == [0, 1, 2, 3]
    cut.close(3)
    assert given(release) == [4]
    assert release.next_position == release.limit == 5


def test_of_a_reply_with_a_call_the_rows_of_what_is_said_are_given_and_the_others_let_go() -> None:
    stop, call = StopCut(["xyz"]), Cut()
    release, rows = RowRelease(prompt_tokens=2, cuts=[stop, call]), []
    release.held.append(piece(0, 2))
    for token, (length, said) in enumerate([(4, 4), (8, 8), (12, 10), (16, 10), (20, 10), (24, 10)]):
        release.reply_tokens = token + 1
        for cut in (stop, call):
            cut.count_token(length)
        call.keep_before(said)
        rows += given(release)
        assert not release.drop_if_spoken() or token > 2
        release.held.append(piece(2 + token, 3 + token))
    # The third token begins before the call, and waited for the next one.
    assert rows == [0, 1, 2, 3, 4]
    assert release.next_position == release.limit == 5
    assert release.drop_if_spoken()
    assert not release.held

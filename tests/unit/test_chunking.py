# SPDX-License-Identifier: Apache-2.0
"""The window plan: every code is spoken once, windows follow from the length alone, the first chunk comes early."""

from __future__ import annotations

import itertools

import pytest
from pydantic import ValidationError

from triton_omni.core.settings import StreamingPlan
from triton_omni.token2wav.chunking import Chunk, Span, WindowPlan, offline_plan, streaming_plan

PLANS = [
    StreamingPlan(chunk_blocks=blocks, look_ahead_codes=ahead, vocoder_context_frames=context)
    for blocks, ahead, context in itertools.product(
        [(1,), (2,), (1, 2, 3), (4, 1)], [0, 5, 9, 12, 36, 40], [1, 12, 24, 30, 90]
    )
    if blocks[0] * 24 + ahead * 2 > context
]
LENGTHS = [0, 1, 2, 11, 12, 13, 23, 24, 25, 36, 37, 60, 72, 100, 143, 144, 145]


def in_codes(plan: StreamingPlan) -> WindowPlan:
    return streaming_plan(plan, block_frames=24, frames_per_code=2)


def chunks_of(plan: WindowPlan, codes: int) -> list[Chunk]:
    """All chunks of a whole reply."""
    chunks: list[Chunk] = []
    while not chunks or not chunks[-1].final:
        chunk = plan.chunk(len(chunks), codes, ended=True)
        assert chunk is not None
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_chunks_cover_every_frame_once_and_each_sample_has_its_context(settings: StreamingPlan) -> None:
    plan = in_codes(settings)
    for codes in LENGTHS:
        chunks, total = chunks_of(plan, codes), codes * 2
        for what in ("kept", "audio"):
            spans: list[Span] = [getattr(chunk, what) for chunk in chunks]
            assert spans[0].start == 0
            assert spans[-1].end == total
            assert all(left.end == right.start for left, right in itertools.pairwise(spans))
        for chunk in chunks:
            begins = max(0, chunk.audio.start - plan.vocoder_context)
            assert chunk.vocoder.start <= begins if chunk.final else chunk.vocoder.start == begins
            assert chunk.vocoder.end == min(total, chunk.audio.end + plan.vocoder_context)
            assert chunk.kept.start == chunk.solved.start
            assert chunk.final or len(chunk.kept) % 24 == 0  # its last block is whole: the next window's past
            assert chunk.kept.end <= chunk.solved.end
            assert len(chunk.audio) > 0 or codes == 0
            assert len(chunk.overlap) == (0 if chunk.final else 1)


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_mel_frames_for_the_vocoder_are_there_when_the_chunk_runs(settings: StreamingPlan) -> None:
    plan = in_codes(settings)
    for codes in LENGTHS:
        tail = Span(0, 0)
        for chunk in chunks_of(plan, codes):
            assert tail.end == chunk.kept.start
            assert tail.start <= chunk.vocoder.start <= chunk.solved.end
            assert chunk.vocoder.end <= chunk.solved.end
            tail = Span(plan.tail_start(chunk), chunk.kept.end)
            assert len(tail) <= plan.vocoder_lengths[-1] + plan.vocoder_context


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_the_vocoder_is_given_as_many_frames_of_a_final_chunk_as_of_some_regular_one(settings: StreamingPlan) -> None:
    plan = in_codes(settings)
    regular = {len(chunk.vocoder) for chunk in chunks_of(plan, 1000)[:-1]}
    assert set(plan.vocoder_lengths) == regular
    for codes in LENGTHS:
        final = chunks_of(plan, codes)[-1]
        needed = final.vocoder.end - max(0, final.audio.start - plan.vocoder_context)
        fitting = [length for length in regular if needed <= length <= 2 * codes]
        assert len(final.vocoder) == min(fitting, default=needed)


def test_replies_of_many_lengths_need_few_lengths_of_the_vocoder() -> None:
    plan = in_codes(StreamingPlan())
    assert {len(chunk.vocoder) for codes in range(24, 500) for chunk in chunks_of(plan, codes)} <= {
        *plan.vocoder_lengths,
        *range(24 + 12, 24 + 2 * 12 + 1),
    }


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_a_chunk_is_the_same_whenever_it_becomes_due(settings: StreamingPlan) -> None:
    plan = in_codes(settings)
    for total in LENGTHS:
        for chunk in chunks_of(plan, total):
            seen = [plan.chunk(chunk.index, codes, ended=False) for codes in range(total + 1)]
            first = next((n for n, one in enumerate(seen) if one is not None), len(seen))
            assert all(one is None for one in seen[:first])
            assert all(one == chunk for one in seen[first:])
            assert chunk.final == (first == len(seen))


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_windows_stay_bounded_however_long_the_stream(settings: StreamingPlan) -> None:
    widest = max(settings.chunk_blocks) * 24 + settings.look_ahead_codes * 2
    assert all(len(chunk.solved) <= widest for chunk in chunks_of(in_codes(settings), 1000))


def test_default_plan_speaks_after_one_block_and_its_look_ahead() -> None:
    plan = in_codes(StreamingPlan())
    assert plan.chunk(0, 18, ended=False) is None
    chunk = plan.chunk(0, 19, ended=False)
    assert chunk == Chunk(0, False, solved=Span(0, 38), kept=Span(0, 24), vocoder=Span(0, 38), audio=Span(0, 26))


def test_chunk_sizes_follow_the_plan_and_the_last_one_repeats() -> None:
    plan = in_codes(StreamingPlan(chunk_blocks=(1, 2, 3)))
    assert [len(chunk.kept) / 24 for chunk in chunks_of(plan, 12 * 13)] == [1, 2, 3, 3, 3, 1]
    assert [len(chunk.kept) / 24 for chunk in chunks_of(plan, 12 * 13 - 6)] == [1, 2, 3, 3, 3 + 6 / 12]


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_a_chunk_is_due_with_the_codes_it_needs_and_no_earlier(settings: StreamingPlan) -> None:
    plan = in_codes(settings)
    for index in range(8):
        needed = plan.codes_needed(index)
        assert plan.chunk(index, needed - 1, ended=False) is None
        chunk = plan.chunk(index, needed, ended=False)
        assert chunk is not None
        assert not chunk.final


def test_later_chunks_begin_with_their_first_new_frame_and_look_ahead() -> None:
    chunk = in_codes(StreamingPlan(chunk_blocks=(1, 2, 3))).chunk(2, 1000, ended=False)
    assert chunk == Chunk(
        2, False, solved=Span(72, 158), kept=Span(72, 144), vocoder=Span(62, 158), audio=Span(74, 146)
    )


def test_without_look_ahead_the_audio_lags_by_the_vocoder_context() -> None:
    plan = in_codes(StreamingPlan(chunk_blocks=(2,), look_ahead_codes=0, vocoder_context_frames=24))
    first, second = plan.chunk(0, 49, ended=False), plan.chunk(1, 49, ended=False)
    assert first == Chunk(0, False, solved=Span(0, 48), kept=Span(0, 48), vocoder=Span(0, 48), audio=Span(0, 24))
    assert second == Chunk(1, False, solved=Span(48, 96), kept=Span(48, 96), vocoder=Span(0, 96), audio=Span(24, 72))


def test_with_more_look_ahead_than_vocoder_context_the_audio_leads() -> None:
    plan = in_codes(StreamingPlan(chunk_blocks=(1, 2), look_ahead_codes=9, vocoder_context_frames=12))
    first, second = plan.chunk(0, 21, ended=False), plan.chunk(1, 45, ended=False)
    assert first == Chunk(0, False, solved=Span(0, 42), kept=Span(0, 24), vocoder=Span(0, 42), audio=Span(0, 30))
    assert second == Chunk(1, False, solved=Span(24, 90), kept=Span(24, 72), vocoder=Span(18, 90), audio=Span(30, 78))
    final = plan.chunk(1, 21, ended=True)
    assert final is not None
    assert final.audio == Span(30, 42), "all that is left"


def test_offline_is_one_window_when_the_stream_has_ended() -> None:
    plan = offline_plan(frames_per_code=2)
    assert plan.chunk(0, 4096, ended=False) is None
    whole = Span(0, 200)
    assert plan.chunk(0, 100, ended=True) == Chunk(0, True, solved=whole, kept=whole, vocoder=whole, audio=whole)


def test_a_plan_whose_first_chunk_has_no_sound_is_refused() -> None:
    with pytest.raises(ValidationError, match="vocoder_context_frames 24 leaves no sound of the first chunk"):
        StreamingPlan(chunk_blocks=(1,), look_ahead_codes=0, vocoder_context_frames=24)

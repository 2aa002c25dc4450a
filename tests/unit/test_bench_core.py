# SPDX-License-Identifier: Apache-2.0
"""The benchmark's figures: hand-computed cases, and properties over random arrivals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.bench.metrics import audio_gaps, metrics_of, text_gaps
from triton_omni_client.bench.player import Playback, play
from triton_omni_client.bench.records import INTERRUPTED, Chunk, Load, RecordBuilder, RequestRecord
from triton_omni_client.bench.schedule import poisson_arrivals
from triton_omni_client.bench.statistics import Distribution, distribution, percentile, samples_needed
from triton_omni_client.bench.summary import summarise
from triton_omni_client.errors import Overloaded
from triton_omni_client.messages import AudioDelta, Info, TextDelta

RECORD = RequestRecord(
    index=0,
    start_s=10.0,
    sent_s=10.0,
    end_s=2.0,
    text_at_s=(0.1, 0.3, 0.5),
    chunks=(Chunk(0.5, 0.25), Chunk(0.75, 0.5), Chunk(1.5, 0.25)),
    prompt_tokens=7,
    reply_tokens=10,
)

moments = st.lists(
    st.tuples(st.integers(0, 5_000), st.integers(1, 2_000)), min_size=1, max_size=12
)  # milliseconds since the chunk before, and of sound


def chunks_of(steps: list[tuple[int, int]]) -> list[Chunk]:
    arrivals = itertools.accumulate(gap for gap, _ in steps)
    return [Chunk(at / 1000, length / 1000) for at, (_, length) in zip(arrivals, steps, strict=True)]


# --- the player


def test_a_reply_of_no_chunks_has_no_underrun() -> None:
    assert play([]) == Playback(0, 0.0, 0.0, 0.0)


def test_chunks_that_come_in_time_play_without_a_gap() -> None:
    assert play([Chunk(3.0, 1.0), Chunk(3.5, 1.0), Chunk(5.0, 1.0)]) == Playback(0, 0.0, 0.0, 6.0)


def test_a_late_chunk_is_an_underrun_of_the_time_it_was_late() -> None:
    assert play([Chunk(1.0, 0.5), Chunk(2.0, 0.5)]) == Playback(1, 0.5, 0.5, 2.5)


def test_a_silence_puts_off_all_that_follows() -> None:
    # Plays 1.0-1.5, is silent until 2.0, plays 2.0-2.5 (not 1.5-2.0), so a chunk at 2.25 is in time; then 0.25 late.
    found = play([Chunk(1.0, 0.5), Chunk(2.0, 0.5), Chunk(2.25, 0.25), Chunk(3.0, 1.0)])
    assert found == Playback(2, 0.75, 0.5, 4.0)


# Other tests run beside it, and one example may take as long as they let it.
@given(moments)
def test_silence_is_the_head_start_that_would_have_avoided_it(steps: list[tuple[int, int]]) -> None:
    chunks = chunks_of(steps)
    played = np.cumsum([0.0, *(chunk.seconds for chunk in chunks[:-1])])
    late = [chunk.at_s - chunks[0].at_s - before for chunk, before in zip(chunks, played, strict=True)]
    assert play(chunks).silence_s == pytest.approx(max(late), abs=1e-9)


@given(moments, st.integers(0, 10_000))
def test_when_a_reply_begins_does_not_matter_to_the_player(steps: list[tuple[int, int]], shift: int) -> None:
    chunks = chunks_of(steps)
    later = [replace(chunk, at_s=chunk.at_s + shift / 1000) for chunk in chunks]
    assert play(later).silence_s == pytest.approx(play(chunks).silence_s, abs=1e-9)


@given(moments)
def test_a_server_that_sends_all_at_once_never_underruns(steps: list[tuple[int, int]]) -> None:
    found = play([Chunk(1.0, length / 1000) for _, length in steps])
    over_s = 1.0 + sum(length for _, length in steps) / 1000
    assert found == Playback(0, 0.0, 0.0, pytest.approx(over_s, abs=1e-9))


@given(moments)
def test_playing_takes_sound_and_silence_together(steps: list[tuple[int, int]]) -> None:
    chunks = chunks_of(steps)
    found = play(chunks)
    assert found.underruns < len(chunks)
    assert found.longest_silence_s <= found.silence_s + 1e-9
    end = chunks[0].at_s + sum(chunk.seconds for chunk in chunks) + found.silence_s
    assert end >= chunks[-1].at_s + chunks[-1].seconds - 1e-9


# --- percentiles


@pytest.mark.parametrize(("percent", "fewest"), [(50, 2), (90, 10), (95, 20), (99, 100)])
def test_no_percentile_is_claimed_of_too_few_samples(percent: int, fewest: int) -> None:
    assert samples_needed(percent) == fewest
    assert percentile([1.0] * (fewest - 1), percent) is None
    assert percentile([1.0] * fewest, percent) == 1.0


def test_percentiles_interpolate_between_the_nearest_ranks() -> None:
    found = distribution(float(value) for value in range(101))
    assert found == Distribution(101, mean=50.0, min=0.0, max=100.0, p50=50.0, p90=90.0, p95=95.0, p99=99.0)
    assert percentile([1.0, 2.0], 50) == 1.5


def test_what_was_not_measured_is_no_sample() -> None:
    assert distribution([None, 3.0, None]) == Distribution(1, mean=3.0, min=3.0, max=3.0)
    assert distribution([None]) == Distribution(0)


@given(st.lists(st.floats(0, 1e6), min_size=100, max_size=130))
def test_percentiles_are_in_order_and_within_the_samples(samples: list[float]) -> None:
    found = distribution(samples)
    order = [found.min, found.p50, found.p90, found.p95, found.p99, found.max]
    assert None not in order
    assert order == sorted(order)  # type: ignore[type-var]


# --- arrivals


def test_poisson_arrivals_are_of_the_seed() -> None:
    first, again, other = (list(itertools.islice(poisson_arrivals(4, seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first == sorted(first)


def test_times_between_poisson_arrivals_are_exponential() -> None:
    arrivals = np.array(list(itertools.islice(poisson_arrivals(4, 0), 20_000)))
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        poisson_arrivals(rate, 0)


# --- one request


def test_the_figures_of_a_request() -> None:
    found = metrics_of(RECORD)
    assert (found.time_to_first_text_s, found.time_to_first_audio_s, found.latency_s) == (0.1, 0.5, 2.0)
    assert (found.audio_s, found.real_time_factor) == (1.0, 2.0)
    assert found.text_tokens_per_s == 20.0  # ten tokens in half a second
    assert found.longest_audio_gap_s == 0.75
    assert (found.underruns, found.silence_s) == (1, 0.25)  # played until 1.25, the next came at 1.5
    assert audio_gaps(RECORD) == [0.25, 0.75]
    assert text_gaps(RECORD) == pytest.approx([0.2, 0.2])


def test_a_reply_without_speech_has_no_audio_figures() -> None:
    found = metrics_of(replace(RECORD, chunks=()))
    assert (found.time_to_first_audio_s, found.real_time_factor, found.underruns, found.silence_s) == (None,) * 4
    assert found.longest_audio_gap_s is None
    assert found.audio_s == 0


def test_a_reply_without_text_or_count_has_no_token_rate() -> None:
    assert metrics_of(replace(RECORD, text_at_s=())).text_tokens_per_s is None
    assert metrics_of(replace(RECORD, text_at_s=(0.0,))).text_tokens_per_s is None
    assert metrics_of(replace(RECORD, reply_tokens=None)).text_tokens_per_s is None


def test_a_record_counts_its_pieces_from_the_scheduled_arrival() -> None:
    builder = RecordBuilder(3, start_s=5.0, sent_s=5.5, warm_up=True)
    builder.add(TextDelta("Hi"), 6.0)
    builder.add(AudioDelta(np.zeros(SAMPLE_RATE // 2, np.float32)), 6.5)
    info = {"usage": {"reply_tokens": 2, "prompt_tokens": 4, "codes": 25}, "seed": 9, "finish_reason": {"talker": None}}
    builder.add(Info.from_json(str(info).replace("'", '"').replace("None", "null")), 6.75)
    record = builder.build(7.0)
    assert record == RequestRecord(
        index=3,
        start_s=5.0,
        sent_s=5.5,
        end_s=2.0,
        warm_up=True,
        text_at_s=(1.0,),
        chunks=(Chunk(1.5, 0.5),),
        prompt_tokens=4,
        reply_tokens=2,
        codes=25,
        seed=9,
        finish_reason={"talker": None},
    )
    assert record.ok


def test_a_record_keeps_what_came_before_an_error() -> None:
    builder = RecordBuilder(0, 0.0, 0.0)
    builder.add(TextDelta("Hi"), 1.0)
    builder.fail(Overloaded("no free session", stage="thinker"))
    record = builder.build(2.0)
    assert (record.ok, record.error, record.message, record.stage) == (
        False,
        "overloaded",
        "no free session",
        "thinker",
    )
    assert record.text_at_s == (1.0,)


# --- a run


def test_a_run_counts_whole_replies_and_names_the_rest() -> None:
    records = [
        replace(RECORD, start_s=0.0, warm_up=True, end_s=99.0),
        RECORD,
        replace(RECORD, start_s=11.0, sent_s=11.5, end_s=3.0),
        replace(RECORD, start_s=10.5, end_s=0.25, error="overloaded"),
        replace(RECORD, start_s=10.5, end_s=0.25, error="overloaded"),
        replace(RECORD, start_s=10.5, end_s=0.25, error="internal"),
        replace(RECORD, start_s=13.0, end_s=1.0, error=INTERRUPTED),
    ]
    found = summarise(records)
    assert (found.requests, found.completed, found.interrupted) == (6, 2, 1)
    assert found.errors == {"internal": 1, "overloaded": 2}
    assert found.duration_s == 4.0  # from 10 to 14
    assert (found.requests_per_s, found.audio_seconds_per_s, found.text_tokens_per_s) == (0.5, 0.5, 5.0)
    assert (found.underruns, found.requests_with_underruns, found.silence_s, found.silence_share) == (2, 2, 0.5, 0.25)
    assert (found.latency_s.count, found.latency_s.p50, found.latency_s.p90) == (2, 2.5, None)
    assert found.audio_gap_s.count == 4
    assert found.text_gap_s.count == 4
    assert found.send_delay_s.max == 0.5


def test_of_replies_in_one_piece_nothing_is_known_of_underruns() -> None:
    whole = replace(RECORD, chunks=(Chunk(2.0, 1.0),))
    found = summarise([whole, whole], streamed=False)
    assert (found.underruns, found.requests_with_underruns, found.silence_s, found.silence_share) == (None,) * 4
    assert (found.silence_per_request_s.count, found.real_time_factor.max) == (0, 2.0)
    assert (metrics_of(whole).underruns, metrics_of(whole, streamed=False).underruns) == (0, None)


def test_requests_sent_a_second_are_counted_between_the_first_and_the_last() -> None:
    due = [replace(RECORD, start_s=at, sent_s=at + 0.5) for at in (10.0, 10.5, 12.0)]
    late = replace(RECORD, start_s=12.5, sent_s=14.5, error="overloaded")
    assert summarise([replace(RECORD, sent_s=0.0, warm_up=True), *due, late]).sent_per_s == 0.75
    assert summarise([RECORD]).sent_per_s is None


def test_a_run_of_nothing_has_no_figures() -> None:
    found = summarise([])
    assert (found.requests, found.duration_s, found.requests_per_s, found.silence_share) == (0, 0.0, None, None)
    assert found.sent_per_s is None
    assert found.time_to_first_audio_s == Distribution(0)


def test_a_run_of_less_than_a_second_has_rates() -> None:
    found = summarise([replace(RECORD, end_s=0.5)])
    assert (found.requests_per_s, found.audio_seconds_per_s, found.text_tokens_per_s) == (2.0, 2.0, 20.0)


def test_tokens_a_second_are_unknown_where_one_reply_does_not_say() -> None:
    assert summarise([RECORD, replace(RECORD, reply_tokens=None)]).text_tokens_per_s is None


def test_a_load_is_named_by_its_kind() -> None:
    assert [Load("closed", 4).label, Load("open", 2.5).label] == ["concurrency 4", "rate 2.5/s"]

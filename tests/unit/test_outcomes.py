# SPDX-License-Identifier: Apache-2.0
"""Figures of requests and of what stays too long: every request is counted once, and nothing young is a leak."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_omni.core.errors import BadRequest, DeadlineExceeded, ErrorCode, InternalError, Overloaded, StageName
from triton_omni.core.metrics import LEAKED_AFTER_S, POWERS, SECONDS, Histogram, LeakWatch
from triton_omni.link.receiver import BOUNDS_S
from triton_omni.session.outcome import Outcome, RequestOutcome
from triton_omni.thinker.request_metrics import OutcomeCounter

ENDINGS = st.builds(
    RequestOutcome, st.none() | st.sampled_from(get_args(ErrorCode)), st.sampled_from(get_args(StageName))
)


@given(ENDINGS)
def test_an_ending_passes_through_the_ledger_as_a_small_positive_number(ending):
    number = ending.to_number()
    assert 0 < number < 1 << 16
    assert RequestOutcome.from_number(number) == ending


@given(st.lists(ENDINGS), st.integers(0, 5))
def test_what_is_received_is_what_has_ended_and_what_is_open(endings, still_open):
    outcomes = OutcomeCounter()
    for _ in range(len(endings) + still_open):
        outcomes.receive()
    for ending in endings:
        outcomes.end(ending)
    found = list(outcomes.metrics())
    ended = {figure.labels["outcome"]: figure.value for figure in found if figure.name == "omni_requests_ended_total"}
    assert ended.keys() == set(get_args(Outcome))
    assert ended == Counter(ending.outcome for ending in endings) | {name: ended[name] for name in ended}
    assert sum(ended.values()) + still_open == found[-1].value == len(endings) + still_open
    errors = sum(figure.value for figure in found if figure.name == "omni_errors_total")
    assert errors == sum(ending.code is not None for ending in endings)


@pytest.mark.parametrize(
    ("error", "outcome", "stage"),
    [
        (BadRequest("x"), "refused", "talker"),
        (Overloaded("x", stage="unary"), "refused", "unary"),
        (DeadlineExceeded("x"), "timed_out", "talker"),
        (InternalError("x", stage="token2wav"), "failed", "token2wav"),
    ],
)
def test_an_error_ends_a_request_in_its_own_way_at_the_stage_that_it_names(error, outcome, stage):
    ending = RequestOutcome.of(error, "talker")
    assert (ending.outcome, ending.stage, ending.by) == (outcome, stage, stage)


@pytest.mark.parametrize("code", [None, "cancelled"])
def test_no_stage_is_blamed_for_an_answer_or_for_a_client_that_left(code):
    assert RequestOutcome(code, "token2wav").by is None


def test_a_leak_is_what_was_there_at_every_look_for_long():
    watch = LeakWatch()
    assert watch.count({"a", "b"}, 100.0) == 0
    assert watch.count({"a", "b"}, 100.0 + LEAKED_AFTER_S - 0.1) == 0
    assert watch.count({"a"}, 100.0 + LEAKED_AFTER_S) == 1
    assert watch.count({"a", "b"}, 101.0 + LEAKED_AFTER_S) == 1, "b was gone in between"
    assert watch.count((), 200.0) == 0


def test_a_histogram_counts_a_value_in_every_bucket_that_holds_it():
    sizes = Histogram((1, 2, 4))
    for value in (1, 2, 3, 9):
        sizes.observe(value)
    found = [(figure.name, figure.labels.get("le"), figure.value) for figure in sizes.metrics("x", until="y")]
    buckets = [("x_bucket", bound, count) for bound, count in (("1", 1), ("2", 2), ("4", 3), ("+Inf", 4))]
    assert found == [*buckets, ("x_count", None, 4), ("x_sum", None, 15)]


@pytest.mark.parametrize("bounds", [SECONDS, POWERS, BOUNDS_S])
def test_bounds_of_histograms_ascend_from_above_nothing(bounds):
    assert list(bounds) == sorted(set(bounds))
    assert bounds[0] > 0

# SPDX-License-Identifier: Apache-2.0
"""Error texts carry their code through Triton: what is written is read back, whatever Triton adds in front."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_omni.core import errors
from triton_omni.core.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    OmniError,
    Overloaded,
    TooLarge,
)

KINDS = [BadRequest, TooLarge, Overloaded, Cancelled, DeadlineExceeded, InternalError]
STAGES = ["thinker", "talker", "token2wav", "unary"]

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)


@each_kind
@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("retry_after_ms", [None, 0, 250])
def test_an_error_is_read_back_as_it_was(kind, stage, retry_after_ms):
    error = errors.parse(kind("no room: 3 of 2", stage=stage, retry_after_ms=retry_after_ms).to_text())
    assert type(error) is kind
    assert (error.message, error.stage, error.retry_after_ms) == ("no room: 3 of 2", stage, retry_after_ms)


@each_kind
def test_the_prefix_of_tritons_ensemble_stays_in_the_message(kind):
    text = "in ensemble 'qwen2_5_omni', Failed to process the request(s): " + kind("too late", stage="talker").to_text()
    error = errors.parse(text)
    assert type(error) is kind
    assert error.stage == "talker"
    assert error.message == "in ensemble 'qwen2_5_omni', Failed to process the request(s): too late"


def test_the_text_is_as_documented():
    error = Overloaded("no free session", stage="thinker", retry_after_ms=250)
    assert error.to_text() == "no free session [omni:overloaded;stage=thinker;retry_after_ms=250]"
    assert BadRequest("voice: unknown").to_text() == "voice: unknown [omni:bad_request]"


@given(message=st.text(), stage=st.sampled_from([None, *STAGES]), kind=st.sampled_from(KINDS))
def test_any_message_keeps_class_and_stage(message, stage, kind):
    error = errors.parse(kind(message, stage=stage).to_text())
    assert (type(error), error.stage) == (kind, stage)
    assert error.message == message.rstrip()


def test_only_the_last_part_counts_when_a_message_quotes_an_error():
    quoted = Overloaded("inner", stage="thinker").to_text()
    error = errors.parse(BadRequest(f"cannot use {quoted!r}").to_text())
    assert type(error) is BadRequest
    assert quoted in error.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bare text", "bare text"),
        ("", ""),
        ("[omni:] nothing", "[omni:] nothing"),
        ("quoted [omni:overloaded] in the middle", "quoted [omni:overloaded] in the middle"),
        ("of a later version [omni:quota_exceeded;stage=thinker]", "of a later version"),
    ],
)
def test_what_is_not_ours_is_internal(text, message):
    error = errors.parse(text)
    assert type(error) is InternalError
    assert error.message == message


def test_unknown_stages_fields_and_hints_are_ignored():
    error = errors.parse("busy [omni:overloaded;stage=vocoder;colour=red;retry_after_ms=soon]")
    assert type(error) is Overloaded
    assert (error.stage, error.retry_after_ms) == (None, None)


def test_an_unknown_code_is_internal():
    error = errors.from_code("quota_exceeded", "no quota", stage="unary")
    assert type(error) is InternalError
    assert (error.message, error.stage) == ("no quota", "unary")


@each_kind
def test_every_class_names_a_code_that_triton_has(kind):
    """The codes of `TritonError` in Triton's Python backend."""
    known = {"UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS"}
    assert kind.triton_code in known | {"CANCELLED"}
    assert issubclass(kind, OmniError)

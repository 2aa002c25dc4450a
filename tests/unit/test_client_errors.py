# SPDX-License-Identifier: Apache-2.0
"""The client's reader of the machine-readable part of an error text."""

from __future__ import annotations

import pytest

from triton_omni_client import errors
from triton_omni_client.errors import BadRequest, Internal, OmniClientError, Overloaded, from_text


def test_code_stage_and_retry_are_read_and_cut_off_the_message() -> None:
    error = from_text("no free session [omni:overloaded;stage=thinker;retry_after_ms=250]")
    assert type(error) is Overloaded
    assert (error.message, error.stage, error.retry_after_ms) == ("no free session", "thinker", 250)


def test_only_the_end_of_the_text_counts() -> None:
    error = from_text("text_input: '[omni:overloaded]' is refused [omni:bad_request]")
    assert type(error) is BadRequest
    assert error.message == "text_input: '[omni:overloaded]' is refused"


@pytest.mark.parametrize("code", ["bad_request", "too_large", "overloaded", "cancelled", "timeout", "internal"])
def test_every_code_of_the_contract_has_its_class(code: str) -> None:
    assert from_text(f"x [omni:{code}]").code == code


def test_an_unknown_code_is_internal_whatever_the_transport_says() -> None:
    assert type(from_text("x [omni:new_kind]", otherwise=BadRequest)) is Internal


@pytest.mark.parametrize("retry", ["", "-5", "soon", "²"])
def test_a_retry_time_that_is_no_number_is_none(retry: str) -> None:
    assert from_text(f"x [omni:overloaded;retry_after_ms={retry}]").retry_after_ms is None


def test_a_text_without_the_part_is_what_the_transport_says() -> None:
    assert type(from_text("unknown model")) is Internal
    error = from_text("unknown model", otherwise=BadRequest)
    assert (type(error), error.message, error.stage) == (BadRequest, "unknown model", None)


@pytest.mark.parametrize("process", ["token2wav_0_0", "token2wav_0"])
def test_what_triton_says_of_a_dead_stage_names_it_and_is_no_fault_of_the_request(process: str) -> None:
    error = from_text(f"in ensemble 'qwen2_5_omni', Stub process '{process}' is not healthy.", otherwise=BadRequest)
    assert (type(error), error.stage) == (Internal, "token2wav")


def test_every_class_is_exported_and_has_a_code_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, OmniClientError)]
    named = [kind for kind in kinds if kind is not OmniClientError]
    assert len({kind.code for kind in named}) == len(named) == 7
    import triton_omni_client

    assert all(kind.__name__ in triton_omni_client.__all__ for kind in kinds)

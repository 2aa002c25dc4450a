# SPDX-License-Identifier: Apache-2.0
"""A server whose token2wav is `deterministic`: a reply's samples are the same to the bit, alone and among others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from server.asking import DIFFERENT, ask, ask_together, request
from server.serving import TINY, Served, serve

DETERMINISTIC = {**TINY, "token2wav": {**TINY["token2wav"], "deterministic": True}}


@pytest.fixture(scope="module")
def deterministic(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("deterministic"), tiny_checkpoint, DETERMINISTIC) as served:
        yield served
        served.stop()


def test_eight_different_requests_at_once_get_the_bits_that_each_gets_alone(deterministic: Served) -> None:
    alone = {name: ask(deterministic, f"alone: {name}", **options) for name, options in DIFFERENT.items()}
    asked = {name: request(f"together: {name}", **options) for name, options in DIFFERENT.items()}
    together = ask_together(deterministic, asked)
    for name, reply in alone.items():
        assert together[name].text == reply.text
        assert deterministic.records.codes(f"together: {name}") == deterministic.records.codes(f"alone: {name}")
        assert len(reply.audio) > 0
        np.testing.assert_array_equal(together[name].audio, reply.audio)


def test_a_reply_asked_for_twice_has_the_same_bits(deterministic: Served) -> None:
    one, two = (ask(deterministic, f"twice: {number}", text="hello", seed=5, audio_format="pcm16") for number in (1, 2))
    assert one.text == two.text
    np.testing.assert_array_equal(one.audio, two.audio)

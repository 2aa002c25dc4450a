# SPDX-License-Identifier: Apache-2.0
"""What a request may say of the thinker's reply besides sampling it, on the tiny checkpoint in float32.

Penalties and biases against HF's logits processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference.hf import HfReference
from reference.thinker_rig import NOTHING_HELD, REPLY, ask, assert_equals_hf, make_engine, run
from triton_omni.engine import Sampling
from triton_omni.errors import BadRequest

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

QUESTION = "hello"


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Any]:
    made = make_engine(tiny_checkpoint)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Any) -> Iterator[None]:
    yield
    assert engine.stats() == NOTHING_HELD


@pytest.fixture(scope="module")
def plain_ids(engine: Any, hf: HfReference) -> tuple[int, ...]:
    """The greedy reply to `QUESTION` when nothing is asked of it."""
    return run(engine, {"plain": ask(hf, QUESTION)})["plain"].token_ids


PENALTIES = (
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_are_those_of_the_reply_alone(
    engine: Any, hf: HfReference, plain_ids: tuple[int, ...], penalties: dict[str, float]
) -> None:
    sampling = Sampling(max_tokens=64, **penalties)
    answer = run(engine, {"penalised": ask(hf, QUESTION)}, sampling)["penalised"]
    assert_equals_hf(answer, hf.thinker(hf.ask(QUESTION), sampling))
    assert answer.token_ids != plain_ids


def test_biased_ids_are_those_of_hf(engine: Any, hf: HfReference, plain_ids: tuple[int, ...]) -> None:
    often = [token for token, _ in Counter(plain_ids[:-1]).most_common(3)]
    rare = next(token for token in range(300) if token not in plain_ids)
    sampling = Sampling(max_tokens=64, logit_bias=(*((token, -2.5) for token in often), (rare, 3.0)))
    answer = run(engine, {"biased": ask(hf, QUESTION)}, sampling)["biased"]
    assert_equals_hf(answer, hf.thinker(hf.ask(QUESTION), sampling))
    assert answer.token_ids != plain_ids


def test_a_bias_of_minus_100_forbids_and_of_100_forces(
    engine: Any, hf: HfReference, plain_ids: tuple[int, ...]
) -> None:
    forbidden = Sampling(max_tokens=16, logit_bias=((plain_ids[0], -100.0),))
    forced = Sampling(max_tokens=16, logit_bias=((plain_ids[0], 100.0),))
    answers = run(engine, dict.fromkeys(("no", "yes"), ask(hf, QUESTION)), {"no": forbidden, "yes": forced})
    assert plain_ids[0] not in answers["no"].token_ids
    assert set(answers["yes"].token_ids) == {plain_ids[0]}


def test_what_one_request_asks_for_leaves_the_others_as_they_were(
    engine: Any, hf: HfReference, plain_ids: tuple[int, ...]
) -> None:
    asked = {
        "penalised": Sampling(max_tokens=64, **PENALTIES[0]),
        "biased": Sampling(max_tokens=64, logit_bias=((plain_ids[0], -100.0),)),
    }
    keys = ("plain", "penalised", "between", "biased", "behind")
    answers = run(engine, dict.fromkeys(keys, ask(hf, QUESTION)), {key: asked.get(key, REPLY) for key in keys})
    assert [key for key in keys if answers[key].token_ids == plain_ids] == ["plain", "between", "behind"]


def test_an_id_outside_the_vocabulary_is_refused(engine: Any, hf: HfReference) -> None:
    placed = engine.prepare(ask(hf, QUESTION))
    with pytest.raises(BadRequest, match=r"the thinker refused the request: .*logit_bias"):
        engine.add("far", placed, Sampling(max_tokens=4, logit_bias=((1 << 28, 1.0),)), want_rows=True)

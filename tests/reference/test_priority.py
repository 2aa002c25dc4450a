# SPDX-License-Identifier: Apache-2.0
"""The order of places in the thinker's batch; `talker/test_talker_lifecycle.py` has the talker's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference.hf import HfReference
from reference.thinker_rig import NOTHING_HELD, Answer, ask, drain, make_engine, run
from triton_omni.session.engine import Sampling

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SHORT = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Any]:
    made = make_engine(tiny_checkpoint, max_num_seqs=1)
    yield made
    made.close()


def test_the_lowest_number_is_next_and_among_equals_the_oldest(engine: Any, hf: HfReference) -> None:
    placed = engine.prepare(ask(hf, "hello"))
    expected = run(engine, {"alone": placed}, SHORT)["alone"].token_ids
    engine.add_sequence("first", placed, SHORT, want_rows=True)
    begun = [output.key for output in engine.step()]
    waiting = {"late": 5, "old": 0, "young": 0, "soon": -5, "last": 100}
    for key, priority in waiting.items():
        engine.add_sequence(key, placed, SHORT, want_rows=True, priority=priority)
    answers = {key: Answer() for key in ("first", *waiting)}
    finished = []
    while engine.has_work():
        for output in engine.step():
            begun.append(output.key)
            answers[output.key].outputs.append(output)
            finished += [output.key] if output.finish_reason else []
    assert list(dict.fromkeys(begun)) == finished == ["first", "soon", "old", "young", "late", "last"]
    assert all(answers[key].token_ids == expected for key in waiting)
    assert engine.stats() == NOTHING_HELD


def test_a_waiting_sequence_can_be_dropped(engine: Any, hf: HfReference) -> None:
    placed = engine.prepare(ask(hf, "hello"))
    for key, priority in {"first": 0, "dropped": -1, "kept": 1}.items():
        engine.add_sequence(key, placed, SHORT, want_rows=True, priority=priority)
    engine.abort("dropped")
    answers = drain(engine, {"first": Answer(), "kept": Answer()})
    assert answers["first"].token_ids == answers["kept"].token_ids
    assert engine.stats() == NOTHING_HELD

# SPDX-License-Identifier: Apache-2.0
"""A request's options for the thinker's reply besides sampling, on the tiny checkpoint in float32.

Penalties and biases are compared with HF's logits processors. Stop strings follow vLLM's definition, and the rows of
the remaining text equal HF's of a reply of that length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reference.hf import HfReference
from reference.thinker_rig import (
    NOTHING_HELD,
    REPLY,
    ROW_TOLERANCE,
    Answer,
    ask,
    assert_equals_hf,
    drain,
    engine_of,
    run,
)
from triton_omni.core.errors import BadRequest
from triton_omni.session.engine import Sampling, ThinkerOutput

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

QUESTION = "hello"


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "scheduled ahead"])
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[Any]:
    with engine_of(tiny_checkpoint, ahead=request.param) as made:
        yield made


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
        engine.add_sequence("far", placed, Sampling(max_tokens=4, logit_bias=((1 << 28, 1.0),)), want_rows=True)


@pytest.fixture(scope="module")
def plain(engine: Any, hf: HfReference) -> Answer:
    return run(engine, {"plain": ask(hf, QUESTION)})["plain"]


def tokens_that_stay(hf: HfReference, token_ids: tuple[int, ...], length: int) -> int:
    """Count a reply's tokens that have a character among the first `length` of its text, by decoding every prefix."""
    decode = hf.processor.tokenizer.decode
    prefixes = [decode(token_ids[:count], skip_special_tokens=True) for count in range(len(token_ids) + 1)]
    # A character of several tokens is there with the last of them.
    return sum(len(prefix.rstrip("\ufffd")) < length for prefix in prefixes[:-1])


def stop_strings(hf: HfReference, plain: Answer) -> list[str]:
    """Parts of the plain reply of 1 to 9 characters, most across the boundaries of tokens."""
    clean = plain.text.rstrip("\ufffd")
    found = [clean[start : start + 1 + start % 9] for start in range(0, len(clean), 3)]
    return [part for part in dict.fromkeys(found) if part and "\ufffd" not in part]


def test_a_reply_ends_before_its_stop_string_and_its_rows_end_with_its_text(
    engine: Any, hf: HfReference, plain: Answer
) -> None:
    parts = stop_strings(hf, plain)
    asked = {part: Sampling(max_tokens=64, stop=("never \u2603 there", part)) for part in parts}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    prompt = len(hf.ask(QUESTION)["input_ids"][0])
    across = 0
    for part, answer in answers.items():
        cut = plain.text.index(part)
        assert (answer.last.finish_reason, answer.last.stop_string) == ("stop", part)
        # Deltas are never taken back, so no part of the stop string was ever shown.
        assert answer.text == plain.text[:cut]
        count = len(answer.token_ids)
        assert answer.token_ids == plain.token_ids[:count]
        stay = tokens_that_stay(hf, answer.token_ids, cut)
        rows = prompt + min(stay, count - 1)
        assert answer.rows.shape[0] == rows
        torch.testing.assert_close(answer.rows, plain.rows[:rows], rtol=2e-5, atol=ROW_TOLERANCE)
        across += stay < count - 1
    assert across, "no stop string was longer than a token"


def test_what_is_spoken_of_a_stopped_reply_is_what_hf_speaks_of_one_of_that_length(
    engine: Any, hf: HfReference, plain: Answer
) -> None:
    part = max(stop_strings(hf, plain), key=len)
    answer = run(engine, {"stopped": ask(hf, QUESTION)}, Sampling(max_tokens=64, stop=(part,)))["stopped"]
    stay = tokens_that_stay(hf, answer.token_ids, plain.text.index(part))
    assert 1 < stay < len(answer.token_ids)
    # HF's last token has no row, so the reply with as many rows has one token more.
    expected = hf.thinker(hf.ask(QUESTION), Sampling(max_tokens=stay + 1))
    torch.testing.assert_close(answer.rows, expected.rows, rtol=2e-5, atol=ROW_TOLERANCE)


def test_a_stop_string_that_never_comes_holds_text_and_rows_back_and_takes_nothing(
    engine: Any, hf: HfReference, plain: Answer
) -> None:
    never = "\u2603" * 20
    answer = run(engine, {"kept": ask(hf, QUESTION)}, Sampling(max_tokens=64, stop=(never,)))["kept"]
    assert (answer.text, answer.token_ids) == (plain.text, plain.token_ids)
    assert (answer.last.finish_reason, answer.last.stop_string) == (plain.last.finish_reason, None)
    torch.testing.assert_close(answer.rows, plain.rows, rtol=2e-5, atol=ROW_TOLERANCE)
    shown = text_so_far(answer.outputs)
    written = text_so_far(plain.outputs)
    assert all(len(text) == max(0, len(whole) - 19) for text, whole in zip(shown, written, strict=True))


def text_so_far(outputs: list[ThinkerOutput]) -> list[str]:
    """The text up to each token but the last."""
    joined, found = "", []
    for output in outputs:
        joined += output.text
        found += [joined] * len(output.token_ids)
    return found[:-1]


def test_min_tokens_lets_an_early_stop_string_pass(engine: Any, hf: HfReference, plain: Answer) -> None:
    part = stop_strings(hf, plain)[0]
    sampling = Sampling(max_tokens=30, min_tokens=20, stop=(part,))
    answer = run(engine, {"late": ask(hf, QUESTION)}, sampling)["late"]
    assert len(answer.token_ids) > 20
    assert answer.text.startswith(plain.text[: plain.text.index(part) + len(part)])


def test_stopped_replies_leave_the_others_as_they_were(
    engine: Any, hf: HfReference, plain: Answer, plain_ids: tuple[int, ...]
) -> None:
    parts = stop_strings(hf, plain)[:6]
    keys = ["plain", *parts, "behind"]
    asked = {key: Sampling(max_tokens=64, stop=(key,)) if key in parts else REPLY for key in keys}
    answers = run(engine, dict.fromkeys(keys, ask(hf, QUESTION)), asked, want_rows={"plain"})
    assert answers["plain"].token_ids == answers["behind"].token_ids == plain_ids
    torch.testing.assert_close(answers["plain"].rows, plain.rows, rtol=2e-5, atol=ROW_TOLERANCE)
    assert all(answers[part].last.stop_string == part for part in parts)


def test_a_hold_begins_no_step_and_gives_what_is_under_way(engine: Any, hf: HfReference) -> None:
    engine.add_sequence("one", engine.prepare(ask(hf, "hello")), REPLY, want_rows=True)
    answer = Answer()
    for steps in (4, 1, 2):
        for _ in range(steps):
            answer.outputs += engine.step()
        under_way, known = engine.steps_under_way, len(answer.token_ids)
        assert under_way == (engine._core.batch_queue is not None)
        engine.pause(True)
        drain(engine, {"one": answer})
        assert len(answer.token_ids) == known + under_way
        engine.pause(False)
    assert_equals_hf(drain(engine, {"one": answer})["one"], hf.thinker(hf.ask("hello"), REPLY))

# SPDX-License-Identifier: Apache-2.0
"""The thinker's incremental steps give the ids, rows and records of vLLM's own steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from media_samples import picture, tone
from reference.hf import HfReference
from reference.thinker_rig import NOTHING_HELD, Answer, ask, assert_equals_hf, engine_of, token_ids
from reference.vllm_records import different_records
from triton_omni.core.metrics import LoopClock
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

GREEDY = Sampling(max_tokens=40, min_tokens=40)
SAMPLED = Sampling(temperature=0.9, top_p=0.9, top_k=50, max_tokens=40, min_tokens=40, seed=7)
ASKED = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": replace(SAMPLED, seed=8, presence_penalty=1.5, repetition_penalty=1.2),
    "biased": replace(GREEDY, logit_bias=((65, 3.0), (66, -100.0))),
    "not so improbable": replace(SAMPLED, seed=9, min_p=0.2, top_k=0, top_p=1.0),
    "at least ten": Sampling(max_tokens=40, min_tokens=10),
}
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
BATCHED = 128
"""Tokens of a step at most."""
COMPILED_S = 300
"""Seconds in which a schema is compiled on the slowest machine."""


class Pair:
    """Two engines of the same calls: one takes incremental steps where it can, the other only vLLM's own."""

    def __init__(self, engines: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.engines = engines
        self.answers: list[dict[str, Answer]] = [{}, {}]
        self.incremental: list[int] = []
        """Sequences of each incremental step."""
        launch_incremental = engines[0]._runner.launch_incremental

        def watched(step: Any) -> Any:
            self.incremental.append(len(step.num_scheduled_tokens))
            return launch_incremental(step)

        monkeypatch.setattr(engines[0]._runner, "launch_incremental", watched)

    def add(self, key: str, prompt: ThinkerPrompt, sampling: Sampling, *, want_rows: bool = True) -> None:
        for engine, answers in zip(self.engines, self.answers, strict=True):
            engine.add_sequence(key, engine.prepare(prompt), sampling, want_rows=want_rows)
            answers[key] = Answer()
            # Compiled on another thread: each engine would begin the sequence at a step of its own.
            wait_for_schema(engine._sequences[key].structured)

    def each(self, method: str, *arguments: Any) -> None:
        for engine in self.engines:
            getattr(engine, method)(*arguments)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for engine, answers in zip(self.engines, self.answers, strict=True):
                for output in engine.step():
                    answers[output.key].outputs.append(output)
            assert different_records(*self.engines) == []

    def drain(self) -> dict[str, Answer]:
        """Answers of the fast one, which are the plain one's."""
        while any(engine.has_work() for engine in self.engines):
            self.step()
        fast, plain = self.answers
        for key, answer in plain.items():
            assert fast[key].token_ids == answer.token_ids
            assert (fast[key].text, fast[key].last.error) == (answer.text, answer.last.error)
            assert fast[key].last.finish_reason == answer.last.finish_reason
            rows = zip(rows_of(fast[key]), rows_of(answer), strict=True)
            assert all(torch.equal(one, other) for one, other in rows)
        for engine in self.engines:
            assert engine.stats() == NOTHING_HELD
        return fast


def wait_for_schema(structured: Any) -> None:
    deadline = time.monotonic() + COMPILED_S
    while structured is not None and not structured.is_grammar_ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def rows_of(answer: Answer) -> list[torch.Tensor]:
    return [output.rows for output in answer.outputs if output.rows is not None]


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path) -> Iterator[Sequence[Any]]:
    """Two engines for all tests: leftovers of one test in vLLM's records are the same in both."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                engine_of(tiny_checkpoint, ahead=True, incremental=incremental, max_num_batched_tokens=BATCHED)
            )
            for incremental in (True, False)
        ]


@pytest.fixture
def pair(engines: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    pair = Pair(engines, monkeypatch)
    yield pair
    # Leftovers of a failed test would fail the next one too.
    for engine, answers in zip(engines, pair.answers, strict=True):
        for key in answers:
            engine.abort(key)
        while engine.has_work():
            engine.step()


def test_incremental_steps_are_vllm_s_however_is_drawn(pair: Pair, hf: HfReference) -> None:
    for key, sampling in ASKED.items():
        pair.add(key, ask(hf, key), sampling)
        pair.step(5)
    pair.drain()
    assert set(range(1, len(ASKED) + 1)) <= set(pair.incremental)


def test_incremental_steps_give_what_hf_does(pair: Pair, hf: HfReference) -> None:
    texts = ("hello", "why?", "a longer question, of more than one block of the cache of keys and values")
    for text in texts:
        pair.add(text, ask(hf, text), Sampling(max_tokens=64))
    answers = pair.drain()
    assert len(pair.incremental) > 40
    for text in texts:
        assert_equals_hf(answers[text], hf.thinker(hf.ask(text), Sampling(max_tokens=64)))


def test_a_stage_s_clock_tells_steps_of_vllm_s_own_from_waits_for_incremental_ones(
    pair: Pair, hf: HfReference, clock: LoopClock
) -> None:
    pair.add("hello", ask(hf, "hello"), GREEDY)
    pair.drain()
    assert {"vllm_step", "device"} <= {metric.labels["doing"] for metric in clock.metrics()}


def test_sequences_that_begin_end_and_are_dropped_while_others_go_on(pair: Pair, hf: HfReference) -> None:
    for number in range(6):
        pair.add(str(number), ask(hf, "x" * (number + 1)), replace(SAMPLED, seed=number, max_tokens=40 + number * 9))
        pair.step(3)
    pair.each("abort", "2")
    pair.step(4)
    pair.add("late", ask(hf, "late"), GREEDY, want_rows=False)
    pair.step(3)
    pair.each("abort", "late")
    pair.drain()
    assert len(set(pair.incremental)) > 3


def test_a_stop_string_ends_a_sequence_within_incremental_steps(pair: Pair, hf: HfReference) -> None:
    pair.add("plain", ask(hf, "hello"), GREEDY)
    text = pair.drain()["plain"].text
    pair.add("stopped", ask(hf, "hello"), replace(GREEDY, min_tokens=0, stop=(text[20:23],)))
    pair.add("beside", ask(hf, "why"), GREEDY)
    answers = pair.drain()
    assert answers["stopped"].last.finish_reason == "stop"
    assert len(answers["beside"].token_ids) == 40


def test_a_schema_and_a_prompt_s_media_leave_the_steps_to_vllm(pair: Pair, hf: HfReference) -> None:
    pair.add("plain", ask(hf, "hello"), replace(GREEDY, max_tokens=80, min_tokens=80))
    pair.step(10)
    before = len(pair.incremental)
    assert before
    pair.add("json", ask(hf, "an object"), Sampling(max_tokens=24, json_schema=SCHEMA))
    pair.step(6)
    assert len(pair.incremental) == before
    audio = {"type": "audio"}
    heard = ThinkerPrompt(token_ids(hf, audio, {"type": "text", "text": "what?"}), {"audio": [tone(1.3)]})
    pair.add("sound", heard, GREEDY)
    pair.drain()
    assert len(pair.incremental) > before


def test_a_step_is_incremental_right_after_prompts(pair: Pair, hf: HfReference) -> None:
    for together in (1, 2, 3):
        # All but the first beside those that decode.
        pair.add(str(together), ask(hf, "hello" * together), replace(SAMPLED, seed=together))
        before = len(pair.incremental)
        pair.step()
        assert len(pair.incremental) == before
        pair.step(2)
        assert pair.incremental[before:] == [together, together]
    long = ask(hf, "x" * 200)
    # Others decode in each of the steps that its prompt takes.
    parts = -(-len(long.token_ids) // (BATCHED - 3))
    pair.add("long", long, GREEDY)
    before = len(pair.incremental)
    pair.step(parts)
    assert len(pair.incremental) == before
    pair.step()
    assert pair.incremental[before:] == [4]
    assert parts > 1
    pair.drain()


def test_a_step_is_incremental_after_a_prompt_beside_a_reply_to_an_image(pair: Pair, hf: HfReference) -> None:
    """The positions of that reply are lower than its places."""
    seen = token_ids(hf, {"type": "image"}, {"type": "text", "text": "what?"})
    pair.add("image", ThinkerPrompt(seen, {"image": [Image.fromarray(picture(64, 48))]}), GREEDY)
    pair.step(6)
    assert pair.incremental
    for key in ("one", "another"):
        pair.add(key, ask(hf, key), GREEDY)
    before = len(pair.incremental)
    pair.step(2)
    assert pair.incremental[before:] == [3]
    states = pair.engines[0]._runner.requests.values()
    assert [state.mrope_position_delta < 0 for state in states] == [True, False, False]
    pair.drain()


def test_steps_are_incremental_after_a_pause(pair: Pair, hf: HfReference) -> None:
    """A pause takes the steps under way and begins none; afterwards the same steps follow as without it."""
    pair.add("held", ask(hf, "hello"), GREEDY)
    pair.step(8)
    pair.each("pause", True)
    went_on = len(pair.incremental)
    pair.step(4)
    assert len(pair.incremental) == went_on
    assert all(engine.steps_under_way == 0 for engine in pair.engines)
    pair.each("pause", False)
    pair.drain()
    assert len(pair.incremental) > went_on


def test_a_sequence_that_is_not_finite_ends_alone_in_an_incremental_step(pair: Pair, hf: HfReference) -> None:
    for key in ("bad", "good"):
        pair.add(key, ask(hf, key), GREEDY)
    pair.step(10)
    for engine in pair.engines:
        state = engine._runner.requests[engine._sequences["bad"].request_id]
        with torch.inference_mode():
            engine._runner.kv_caches[0][state.block_ids[0][0]] = float("nan")
    answers = pair.drain()
    assert "not finite" in str(answers["bad"].last.error)
    assert len(answers["good"].token_ids) == 40

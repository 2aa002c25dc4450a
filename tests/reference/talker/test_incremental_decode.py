# SPDX-License-Identifier: Apache-2.0
"""Incremental steps give the codes of vLLM's own steps, and leave vLLM's records as those would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rig import GREEDY, SAMPLED, Spoken, assert_nothing_held, make_engine

from reference.vllm_records import different_records

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

LONG = replace(GREEDY, max_tokens=200, min_tokens=200)


class Pair:
    """Two engines of the same calls: one takes incremental steps where it can, the other only vLLM's own."""

    def __init__(self, engines, monkeypatch):
        self.engines = engines
        self.spoken = [Spoken(), Spoken()]
        self.incremental = []
        """Sequences of each incremental step."""
        plain = self.engines[1]
        monkeypatch.setattr(plain._core.scheduler, "schedule_further", lambda: None)
        for engine in engines:
            for name in ("launch_incremental", "execute_model"):
                self._watch(engine._runner, name, monkeypatch)

    def _watch(self, runner, name, monkeypatch):
        launch = getattr(runner, name)

        def watched(step, *arguments):
            shares = step.num_scheduled_tokens
            if name == "launch_incremental":
                self.incremental.append(len(shares))
            if shares:
                monkeypatch.setattr(runner, "taking_part", list(shares), raising=False)
            return launch(step, *arguments)

        monkeypatch.setattr(runner, name, watched)

    def each(self, method, *arguments):
        for engine in self.engines:
            getattr(engine, method)(*arguments)

    def speak(self, cases, *numbers):
        """Begin long replies of which all rows are there."""
        for number in numbers:
            self.each("open", str(number), cases[number].prompt, LONG)
            self.each("feed", str(number), cases[number].rows)
            self.each("end", str(number))

    def step(self, count=1):
        for _ in range(count):
            for engine, spoken in zip(self.engines, self.spoken, strict=True):
                spoken.step(engine)
            assert different_records(*self.engines) == []
            assert self.spoken[0].codes == self.spoken[1].codes

    def drain(self):
        while any(engine.has_work() for engine in self.engines):
            self.step()
        return self

    def close(self):
        for engine in self.engines:
            assert_nothing_held(engine)
        fast, plain = self.spoken
        assert (fast.codes, fast.finish, fast.errors) == (plain.codes, plain.finish, plain.errors)


@pytest.fixture(scope="module")
def engines(tiny_checkpoint):
    """Two engines for all tests: leftovers of one test in vLLM's records are the same in both."""
    made = [make_engine(tiny_checkpoint, ahead=True) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def pair(engines, monkeypatch):
    yield Pair(engines, monkeypatch)
    left = [(engine, key) for engine in engines for key in list(engine._open)]
    for engine, key in left:
        engine.abort(key)
    assert left == []


def test_incremental_steps_are_vllms_while_the_batch_changes(pair, cases):
    for number, case in enumerate(cases[:5]):
        # Each begins while the others decode, waits for rows in between, and ends when it will.
        pair.each("open", str(number), case.prompt, SAMPLED if number % 2 else GREEDY)
        pair.each("feed", str(number), case.rows[: case.prompt_rows + 1])
        pair.step(4)
        pair.each("feed", str(number), case.rows[case.prompt_rows + 1 :])
        pair.each("end", str(number))
        pair.step(6)
    pair.each("abort", "1")
    pair.drain().close()
    assert len(set(pair.incremental)) > 2
    assert len(pair.incremental) > 20


def test_a_step_is_incremental_right_after_prompts(pair, cases):
    for number in range(3):
        # All but the first beside those that decode.
        pair.speak(cases, number)
        before = len(pair.incremental)
        pair.step()
        assert len(pair.incremental) == before
        pair.step(2)
        assert pair.incremental[before:] == [number + 1, number + 1]
    # Behind a prompt's step, and its one row, somebody waits whose place is kept.
    pair.each("open", "short", cases[3].prompt, LONG)
    pair.each("feed", "short", cases[3].rows[: cases[3].prompt_rows + 1])
    before = len(pair.incremental)
    pair.step(4)
    assert pair.incremental[before:] == [3, 3, 3]
    pair.each("feed", "short", cases[3].rows[cases[3].prompt_rows + 1 :])
    pair.each("end", "short")
    pair.step(2)
    assert pair.incremental[before:] == [3, 3, 3, 4, 4]
    pair.drain().close()


def test_incremental_steps_are_vllms_where_rows_run_out(pair, cases):
    for number in (2, 4):
        pair.each("open", str(number), cases[number].prompt, LONG)
        pair.each("feed", str(number), cases[number].rows[: cases[number].prompt_rows + 6])
    pair.step(12)
    pair.each("feed", "2", cases[2].rows[cases[2].prompt_rows + 6 :])
    pair.drain()
    pair.each("feed", "4", cases[4].rows[cases[4].prompt_rows + 6 :])
    pair.each("end", "2")
    pair.each("end", "4")
    pair.drain().close()
    assert {1, 2} <= set(pair.incremental)


def test_incremental_steps_are_vllms_across_cache_blocks(pair, cases):
    """Sequences of different lengths reach the end of a block in different steps, two hundred steps on end."""
    for number, case in enumerate(cases[:4]):
        pair.each("open", str(number), case.prompt, LONG)
        pair.each("feed", str(number), case.rows)
        pair.each("end", str(number))
    pair.step(150)
    pair.each("abort", "2")
    pair.drain().close()
    assert len(pair.incremental) > 180


def test_a_sequence_ends_with_its_stop_code_while_others_go_on(pair, talker, cases):
    stopping = replace(GREEDY, max_tokens=300)
    for number, case in enumerate(cases):
        pair.each("open", str(number), case.prompt, stopping)
        pair.each("feed", str(number), case.rows)
        pair.each("end", str(number))
    pair.drain().close()
    assert "stop" in pair.spoken[0].finish.values()
    expected = [talker.codes(case, stopping) for case in cases]
    assert [pair.spoken[0].of(str(number)) for number in range(len(cases))] == expected


def test_a_sequence_that_is_not_finite_ends_alone_in_an_incremental_step(pair, cases):
    pair.speak(cases, 2, 4)
    pair.step(8)
    for engine in pair.engines:
        with torch.inference_mode():
            engine._rows.pool[engine._open["4"].base :][: engine._open["4"].reserved] = float("nan")
    pair.drain().close()
    assert list(pair.spoken[0].errors) == ["4"]
    assert len(pair.spoken[0].codes["2"]) == 200


@pytest.mark.parametrize("at_once", [1, 3])
def test_steps_are_incremental_after_a_wait_for_rows(pair, cases, at_once, monkeypatch):
    """A reply's rows come while the thinker writes it: every few codes the sequence waits, alone or with another."""
    numbers, rows, prepared, runner = (2, 4), 24, [], pair.engines[0]._runner
    look_ahead = runner._look_ahead
    monkeypatch.setattr(runner, "_look_ahead", lambda layout: prepared.append(layout) or look_ahead(layout))
    for number in numbers:
        pair.each("open", str(number), cases[number].prompt, LONG)
        pair.each("feed", str(number), cases[number].rows[: cases[number].prompt_rows + 1])
    pair.step(3)
    went_on = len(pair.incremental)
    for at in range(1, rows, at_once):
        for number in numbers:
            start = cases[number].prompt_rows + at
            pair.each("feed", str(number), cases[number].rows[start : start + at_once])
        while any(engine.has_work() for engine in pair.engines):
            pair.step()
    assert len(pair.incremental) - went_on >= rows - 6
    assert len(prepared) <= 3, "what is known of the next steps is known behind the wait, too"
    for number in numbers:
        pair.each("abort", str(number))
    pair.drain().close()


def test_steps_are_incremental_after_a_pause(pair, cases):
    """A pause takes the steps under way and begins none; afterwards the same steps follow as without it."""
    pair.speak(cases, 2, 4)
    pair.step(3)
    for length in range(1, 6):
        pair.step(length)
        went_on = len(pair.incremental)
        pair.each("pause", True)
        under_way = len(pair.spoken[0].codes["2"])
        while any(engine.has_work() for engine in pair.engines):
            pair.step()
        assert len(pair.spoken[0].codes["2"]) - under_way <= 2
        assert len(pair.incremental) == went_on
        pair.each("pause", False)
    pair.drain().close()


def test_steps_are_incremental_while_others_wait(pair, cases):
    """One has all its rows, two have few; one of these two gets some more of them, and joins until they are used."""
    pair.speak(cases, 4)
    for number, rows in ((2, 3), (7, 6)):
        pair.each("open", str(number), cases[number].prompt, LONG)
        pair.each("feed", str(number), cases[number].rows[: cases[number].prompt_rows + rows])
    pair.step(20)
    went_on = len(pair.incremental)
    pair.step(20)
    assert len(pair.incremental) - went_on == 20
    assert pair.incremental[-1] == 1
    assert [len(pair.spoken[0].codes[key]) for key in "27"] == [3, 6]
    first, second = cases[7].prompt_rows + 6, cases[7].prompt_rows + 12
    pair.each("feed", "7", cases[7].rows[first:second])
    pair.step(3)
    assert pair.incremental[-1] == 2
    pair.each("abort", "4")
    pair.step(12)
    assert len(pair.spoken[0].codes["7"]) == 12
    pair.each("feed", "7", cases[7].rows[second:])
    pair.each("feed", "2", cases[2].rows[cases[2].prompt_rows + 3 :])
    pair.each("end", "7")
    pair.each("end", "2")
    pair.drain().close()
    assert len(pair.spoken[0].codes["7"]) == len(pair.spoken[0].codes["2"]) == 200


def test_who_waits_keeps_its_place(pair, cases, monkeypatch):
    """The others' steps go on during the wait, and its own after it, whichever sequence waits at any time."""
    own, fast = [], pair.engines[0]._runner
    for number, rows in ((2, 8), (4, 10), (7, 12)):
        pair.each("open", str(number), cases[number].prompt, LONG)
        pair.each("feed", str(number), cases[number].rows[: cases[number].prompt_rows + rows])
    pair.step(6)
    assert pair.incremental[-1] == 3
    execute = fast.execute_model
    monkeypatch.setattr(fast, "execute_model", lambda *step: [own.append(step), execute(*step)][1])
    pair.drain()
    for number, start, stop in ((7, 12, 16), (2, 8, 10), (4, 10, 13)):
        rows = cases[number].rows[cases[number].prompt_rows :]
        pair.each("feed", str(number), rows[start:stop])
        pair.step(2)
    pair.drain()
    assert own == []
    assert {1, 2} <= set(pair.incremental[-12:])
    assert [len(pair.spoken[0].codes[key]) for key in "247"] == [10, 13, 16]
    for number, start in ((2, 10), (4, 13), (7, 16)):
        pair.each("feed", str(number), cases[number].rows[cases[number].prompt_rows + start :])
        pair.each("end", str(number))
    pair.step(20)
    assert own == []
    assert pair.incremental[-1] == 3
    pair.drain().close()


@pytest.mark.parametrize("way", ["aborted", "ended by its rows", "not finite"])
def test_a_sequence_that_is_left_out_ends_while_another_goes_on(pair, cases, way):
    for number in (2, 4):
        pair.each("open", str(number), cases[number].prompt, LONG)
    pair.each("feed", "4", cases[4].rows)
    pair.each("end", "4")
    pair.each("feed", "2", cases[2].rows[: cases[2].prompt_rows + 3])
    pair.step(8)
    assert pair.incremental[-1] == 1
    if way == "aborted":
        pair.each("abort", "2")
    else:
        if way == "not finite":
            for engine in pair.engines:
                with torch.inference_mode():
                    engine._rows.pool[:2] = float("nan")
            pair.each("abort", "4")
        pair.each("end", "2")
    pair.drain().close()
    assert ("2" in pair.spoken[0].errors) == (way == "not finite")

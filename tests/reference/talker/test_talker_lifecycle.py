# SPDX-License-Identifier: Apache-2.0
"""Talker sequences end and leave nothing; the engine names the input that it refuses."""

from __future__ import annotations

import dataclasses
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.talker.rig import (
    GREEDY,
    MAX_LEN,
    SAMPLED,
    Spoken,
    assert_nothing_held,
    make_engine,
    speak,
)
from triton_omni.core.errors import BadRequest, InternalError, Overloaded, TooLarge
from triton_omni.session.engine import Sampling, TalkerPrompt

# vLLM's import walks over every attribute of torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")


@pytest.fixture
def stop_code(engine, cases, expected):
    """Makes a code of the reference a stop id, so that sequences stop where it would be spoken."""

    def change(code):
        ids = engine._ids
        engine._ids = type(ids)(mask=ids.mask, pad=ids.pad, bos=ids.bos, eos=code)
        return ids

    original = engine._ids
    yield change
    engine._ids = original


def test_the_stop_id_is_not_spoken(engine, cases, expected, stop_code):
    code = expected[2][0][7]
    stop_code(code)
    codes, finish = speak(engine, [cases[2]], [GREEDY])[0]
    assert finish == "stop"
    assert codes == expected[2][0][: expected[2][0].index(code)]


def test_a_stop_id_first_speaks_nothing(engine, cases, expected, stop_code):
    stop_code(expected[2][0][0])
    assert speak(engine, [cases[2]], [GREEDY]) == [([], "stop")]


@pytest.mark.parametrize("rows", [0, 3, 12])
def test_without_a_reply_row_nothing_is_spoken(engine, cases, rows):
    case = cases[1]
    engine.open("s", case.prompt, GREEDY)
    engine.feed("s", case.rows[:rows])
    engine.end("s")
    assert engine.has_work()
    assert Spoken().drain(engine).of("s") == ([], "stop")


@pytest.mark.parametrize("rows", [0, 5, 12, 13, 15])
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("ended", [False, True])
def test_abort_leaves_nothing(engine, cases, rows, steps, ended):
    case = cases[1]
    engine.open("s", case.prompt, GREEDY)
    engine.feed("s", case.rows[:rows])
    if ended and rows > case.prompt_rows:
        engine.end("s")
    for _ in range(steps):
        engine.step()
    engine.abort("s")
    assert_nothing_held(engine)
    assert Spoken().drain(engine).codes == {}


def test_a_key_can_be_used_again_after_abort(engine, cases, expected):
    case = cases[1]
    engine.open("s1", case.prompt, GREEDY)
    engine.feed("s1", case.rows[:14])
    engine.step()
    engine.abort("s1")
    assert speak(engine, cases[:2], [GREEDY, GREEDY]) == expected[:2]


def test_abort_of_one_leaves_the_others(engine, cases, expected):
    for number in (2, 4):
        engine.open(f"s{number}", cases[number].prompt, GREEDY)
        engine.feed(f"s{number}", cases[number].rows)
        engine.end(f"s{number}")
    spoken = Spoken()
    for _ in range(5):
        spoken.step(engine)
    engine.abort("s2")
    assert spoken.drain(engine).of("s4") == expected[4]


def test_a_session_that_finds_no_memory_as_it_opens_leaves_the_others(engine, cases, expected, monkeypatch):
    """A session's device memory is reserved at the start, except for the row of a speaker that is new. That row is
    allocated before anything is reserved."""

    class Full:
        def to(self, **_):
            raise torch.OutOfMemoryError("tried to allocate too much")

    engine.open("s2", cases[2].prompt, GREEDY)
    engine.feed("s2", cases[2].rows)
    engine.end("s2")
    spoken = Spoken()
    spoken.step(engine)
    held = engine.stats()
    with monkeypatch.context() as patched:
        patched.setattr(engine._text_rows, "_rows", {})
        patched.setattr(engine._text_rows, "_read", lambda _: Full())
        with pytest.raises(torch.OutOfMemoryError):
            engine.open("s4", cases[4].prompt, GREEDY)
    assert engine.stats() == held
    assert spoken.drain(engine).of("s2") == expected[2]
    assert_nothing_held(engine)
    assert speak(engine, cases, [GREEDY] * 8) == expected


@pytest.mark.parametrize("verb", ["feed", "end", "abort"])
def test_unknown_keys_are_ignored(engine, verb, cases):
    getattr(engine, verb)("nobody", *([cases[0].rows] if verb == "feed" else []))
    assert not engine.has_work()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_its_sequence_alone(engine, cases, expected, value):
    for number in (2, 4):
        engine.open(f"s{number}", cases[number].prompt, GREEDY)
    broken = cases[4].rows.clone()
    broken[9, 3] = value
    engine.feed("s2", cases[2].rows)
    engine.feed("s4", broken)
    engine.end("s2")
    engine.end("s4")
    spoken = Spoken().drain(engine)
    assert spoken.of("s2") == expected[2]
    assert "not finite" in spoken.errors["s4"]
    assert speak(engine, cases, [GREEDY] * 8) == expected


def test_what_is_not_finite_ends_a_sequence_before_its_least_length(engine, cases):
    engine.open("s", cases[4].prompt, Sampling(max_tokens=40, min_tokens=40))
    engine.feed("s", cases[4].rows[:20])
    spoken = Spoken().drain(engine)
    engine.feed("s", torch.full_like(cases[4].rows[:1], float("nan")))
    spoken.drain(engine)
    assert "not finite" in spoken.errors["s"]
    assert 0 < len(spoken.codes["s"]) < 40


@pytest.mark.parametrize("end", ["by itself", "by abort"])
def test_a_sequence_that_overflows_inside_the_network_fails_alone(engine, cases, expected, end):
    """Others get its cache blocks next, and attention multiplies values after their last position by zero."""
    for number in (2, 4):
        engine.open(f"s{number}", cases[number].prompt, GREEDY)
        engine.feed(f"s{number}", cases[number].rows)
        engine.end(f"s{number}")
    spoken = Spoken()
    for _ in range(5):
        spoken.step(engine)
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    with torch.inference_mode():
        for cache in runner.kv_caches:
            cache[runner.requests[engine._open["s4"].request_id].block_ids[0]] = float("nan")
    if end == "by abort":
        engine.abort("s4")
    spoken.drain(engine)
    assert spoken.of("s2") == expected[2]
    assert ("s4" in spoken.errors) == (end == "by itself")
    assert not any(cache.isnan().any() for cache in runner.kv_caches)
    assert speak(engine, cases, [GREEDY] * 8) == expected


def test_overload_is_refused_at_open_and_heals(tiny_checkpoint, cases, expected):
    engine = make_engine(tiny_checkpoint, max_num_seqs=2)
    try:
        big = TalkerPrompt(12, cases[1].positions, cases[1].text_bos_id, max_rows=2 * MAX_LEN)
        engine.open("a", big, GREEDY)
        engine.open("b", big, GREEDY)
        with pytest.raises(Overloaded, match="1024 of 1024 rows") as refused:
            engine.open("c", big, GREEDY)
        assert refused.value.retry_after_ms
        engine.abort("a")
        engine.open("c", big, GREEDY)
        engine.feed("c", cases[1].rows)
        engine.end("c")
        assert Spoken().drain(engine).of("c") == expected[1]
        engine.abort("b")
        assert_nothing_held(engine)
    finally:
        engine.close()


def test_a_prompt_that_leaves_no_room_is_refused(engine, voices):
    prompt = TalkerPrompt(MAX_LEN - 2, torch.arange(MAX_LEN).expand(3, -1), voices[0], max_rows=MAX_LEN + 40)
    with pytest.raises(TooLarge, match="the prompt has 510 tokens, which leave the talker no room"):
        engine.open("s", prompt, GREEDY)


@pytest.mark.parametrize(
    ("position", "sentence"),
    [
        (-1, "talker positions begin at -1"),
        (-(2**63), "talker positions begin at -9223372036854775808"),
        (4 * 32768 - 20, "reach position 131072, the checkpoint's rotary table ends at 131071: send fewer"),
        (2**40, "reach position 1099511627796"),
    ],
)
@pytest.mark.parametrize("axis", range(3))
def test_a_position_outside_the_rotary_table_is_refused(engine, cases, axis, position, sentence):
    prompt = cases[1].prompt
    positions = prompt.positions.clone()
    positions[axis, 3] = position
    with pytest.raises(InternalError if position < 0 else TooLarge, match=sentence):
        engine.open("s", dataclasses.replace(prompt, positions=positions), Sampling(max_tokens=20))
    assert_nothing_held(engine)


def test_the_last_position_of_the_rotary_table_may_be_reached(engine, cases):
    positions = cases[1].prompt.positions.clone()
    positions[0, 3] = 4 * 32768 - 21
    engine.open("s", dataclasses.replace(cases[1].prompt, positions=positions), Sampling(max_tokens=20))
    engine.abort("s")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1.0),
        Sampling(top_p=0.0),
        Sampling(repetition_penalty=0.0),
        Sampling(max_tokens=0),
        Sampling(min_tokens=-1),
    ],
)
def test_impossible_sampling_is_refused_at_open(engine, cases, sampling):
    with pytest.raises(BadRequest):
        engine.open("s", cases[1].prompt, sampling)


def test_rows_after_the_end_are_refused(engine, cases):
    engine.open("s", cases[1].prompt, GREEDY)
    engine.feed("s", cases[1].rows[:-1])
    engine.end("s")
    with pytest.raises(InternalError, match="after the end"):
        engine.feed("s", cases[1].rows[-1:])
    engine.abort("s")


@pytest.mark.parametrize("wrong", ["positions", "max_rows", "voice", "key", "width", "count"])
def test_contradictions_are_named(engine, cases, wrong):
    case = cases[1]
    prompts = {
        "positions": TalkerPrompt(12, case.positions[:, :-1], case.text_bos_id, 15),
        "max_rows": TalkerPrompt(12, case.positions, case.text_bos_id, 12),
        "voice": TalkerPrompt(12, case.positions, 10**6, 15),
    }
    calls = {
        "width": lambda: engine.feed("taken", torch.zeros(1, 3)),
        "count": lambda: engine.feed("taken", torch.zeros(16, case.rows.shape[1])),
        "key": lambda: engine.open("taken", case.prompt, GREEDY),
    }
    engine.open("taken", case.prompt, GREEDY)
    try:
        with pytest.raises(InternalError, match=r"talker|text id"):
            calls.get(wrong, lambda: engine.open("s", prompts[wrong], GREEDY))()
    finally:
        engine.abort("taken")


def damaged(checkpoint, folder, change):
    """A copy of the checkpoint whose talker tensors went through `change`, in one file."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for shard in checkpoint.glob("*.safetensors"):
        tensors.update(load_file(shard))
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("talker.model.layers.1.self_attn.k_proj.bias", None, "lacks talker weights: talker.*k_proj.bias"),
        ("talker.model.layers.0.mlp.down_proj.weight", None, "lacks talker weights: talker.*down_proj.weight"),
        ("talker.thinker_to_talker_proj.weight", None, "lacks talker weights: talker.thinker_to_talker_proj"),
        ("talker.model.norm.weight", "talker.model.norm.scale", "norm.scale"),
    ],
)
def test_a_checkpoint_with_a_missing_or_unknown_weight_is_refused(tiny_checkpoint, tmp_path, name, new, message):
    def change(tensors):
        tensors[new or "talker.unused"] = tensors.pop(name)
        tensors.pop("talker.unused", None)

    with pytest.raises(ValueError, match=message):
        make_engine(damaged(tiny_checkpoint, tmp_path / "damaged", change))


def test_length_speaks_every_code(engine, talker, cases):
    sampling = Sampling(max_tokens=4)
    codes, finish = speak(engine, [cases[2]], [sampling])[0]
    assert finish == "length"
    assert len(codes) == 4
    assert (codes, finish) == talker.codes(cases[2], sampling)


def test_a_sequence_ends_at_the_longest_the_engine_can_hold(engine, talker, voices):
    case = talker.case(31, MAX_LEN - 16, 4, voices[0])
    codes, finish = speak(engine, [case], [GREEDY])[0]
    assert finish == "length"
    assert codes == talker.codes(case, GREEDY)[0][: len(codes)]
    assert len(codes) == 14


class Visitor:
    """A session that sends its rows in random pieces and may leave at any moment."""

    def __init__(self, key, case, sampling):
        self.key, self.case, self.sampling, self.sent, self.ended = key, case, sampling, 0, False

    def send(self, engine, count):
        engine.feed(self.key, self.case.rows[self.sent : self.sent + count])
        self.sent += count
        if self.sent >= len(self.case.rows) and not self.ended:
            self.ended = True
            engine.end(self.key)


@pytest.mark.parametrize("seed", [0, 1])
def test_sessions_that_come_and_go_at_random_get_what_each_gets_alone(engine, cases, seed):
    chance = random.Random(seed)
    kinds = [(case, GREEDY if place % 2 else SAMPLED) for place, case in enumerate(cases)]
    alone = [speak(engine, [case], [sampling])[0] for case, sampling in kinds]
    open_, kind_of, spoken, left = {}, {}, Spoken(), set()
    for turn in range(900):
        choice = chance.random()
        if choice < 0.1:
            key, kind = f"v{turn}", chance.randrange(len(kinds))
            open_[key], kind_of[key] = Visitor(key, *kinds[kind]), kind
            engine.open(key, kinds[kind][0].prompt, kinds[kind][1])
        elif choice < 0.5 and open_:
            open_[chance.choice(list(open_))].send(engine, chance.choice([1, 1, 2, 30]))
        elif choice < 0.52 and open_:
            key = chance.choice(list(open_))
            engine.abort(key)
            left.add(key)
            del open_[key]
        else:
            spoken.step(engine)
        open_ = {key: visitor for key, visitor in open_.items() if key not in spoken.finish}
    for visitor in open_.values():
        visitor.send(engine, 1000)
    spoken.drain(engine)
    stayed = set(kind_of) - left
    assert len(stayed) > 40
    assert len(left) > 3
    assert {key: spoken.of(key) for key in stayed} == {key: alone[kind_of[key]] for key in stayed}


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "scheduled ahead"])
def test_of_those_that_wait_the_lowest_number_speaks_next(tiny_checkpoint, cases, expected, ahead):
    engine = make_engine(tiny_checkpoint, ahead=ahead, max_num_seqs=1)
    for number, priority in enumerate((0, 5, 0, -5)):
        engine.open(f"s{number}", cases[number].prompt, GREEDY, priority=priority)
        engine.feed(f"s{number}", cases[number].rows)
        engine.end(f"s{number}")
        engine.step()
    spoken = Spoken()
    spoken.drain(engine)
    assert list(spoken.finish) == ["s0", "s3", "s2", "s1"]
    assert [spoken.of(f"s{number}") for number in (1, 2, 3)] == expected[1:4]
    assert_nothing_held(engine)
    engine.close()

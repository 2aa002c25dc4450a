# SPDX-License-Identifier: Apache-2.0
"""The talker's prefix cache against HF's talker, float32: a turn that hits it gives the codes of one that does not."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from reference.talker.rig import GREEDY, SAMPLED, Case, Spoken, assert_nothing_held, feed_one_by_one, make_engine
from reference.vllm_records import preemptions
from triton_omni.core.errors import Overloaded
from triton_omni.core.settings import TalkerEngineSettings, TalkerSettings
from triton_omni.session.engine import PrefixKeys

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

WAYS = pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "scheduled ahead"])
NOT_FINITE = "a hidden row or a logit of this sequence is not finite (NaN or infinity)"


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "scheduled ahead"])
def cached(request, tiny_checkpoint):
    made = make_engine(tiny_checkpoint, ahead=request.param, prefix_caching=True)
    yield made
    made.close()


@pytest.fixture
def engine(cached):
    """With nothing in its cache."""
    assert cached._core.scheduler.reset_prefix_cache()
    yield cached
    assert not cached._open
    assert not cached.has_work()
    assert_nothing_held(cached)
    assert not cached._prefixes._pins
    assert not cached._prefixes._served


@pytest.fixture
def small(request, tiny_checkpoint):
    """With a cache of 256 tokens, of which the longest sequence may need half."""
    made = make_engine(
        tiny_checkpoint,
        ahead=request.param,
        prefix_caching=True,
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_tokens=256,
    )
    yield made
    assert_nothing_held(made)
    assert not made._prefixes._pins
    made.close()


BOTH_SMALL = pytest.mark.parametrize("small", [False, True], ids=["step by step", "scheduled ahead"], indirect=True)


def size_of(engine):
    return engine._core.scheduler.block_size


def whole_blocks(engine, rows):
    """Rows that lie in whole blocks, which a GPU's engine has smaller than a CPU's."""
    return rows // size_of(engine) * size_of(engine)


def cached_blocks(engine):
    return len(engine._core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def names(engine, case, salt="a caller", size=None):
    """Return the names that a thinker gives to the prefixes of the case's prompt."""
    size = size or size_of(engine)
    ends = range(size, case.prompt_rows + 1, size)
    content = [case.rows[:end].numpy().tobytes() + case.positions[:, :end].numpy().tobytes() for end in ends]
    return PrefixKeys(size, tuple(hashlib.sha256(salt.encode() + one).digest() for one in content))


def prompt_of(engine, case, salt="a caller"):
    return replace(case.prompt, prefixes=None if salt is None else names(engine, case, salt))


def next_turn(talker, case, asked, voice, seed=0):
    """A case that begins with all that was said in `case`, whose reply is history now."""
    generator = torch.Generator().manual_seed(100 + seed)
    rows = torch.cat([case.rows, torch.randn(asked + 10, talker.hidden, generator=generator)])
    prompt_rows = len(case.rows) + asked
    further = torch.randint(5, 200, (1, prompt_rows + 2 - case.prompt_rows), generator=generator)
    ids = torch.cat([case.text_ids[:, : case.prompt_rows], further], dim=1)
    ids[0, prompt_rows] = voice
    positions, _ = talker.talker.get_rope_index(ids, case.grid, None, torch.ones_like(ids), False, None, None)
    return Case(rows, ids, prompt_rows, positions[:, 0].long().contiguous(), voice, case.grid)


def begin(engine, key, case, sampling=GREEDY, salt="a caller"):
    """Open a sequence and feed all its rows that are wanted; returns how many are not."""
    held = engine.open(key, prompt_of(engine, case, salt), sampling)
    engine.feed(key, case.rows[held:])
    engine.end(key)
    return held


def take_turn(engine, case, sampling=GREEDY, salt="a caller"):
    held = begin(engine, "turn", case, sampling, salt)
    return held, Spoken().drain(engine).of("turn")


@pytest.mark.parametrize("image", [False, True])
def test_each_turn_of_a_conversation_equals_hf_and_begins_after_the_prompt_before(engine, talker, voices, image):
    case, known = talker.case(1, 70, 12, voices[0], image=image), 0
    for turn in range(4):
        assert take_turn(engine, case) == (known, talker.codes(case, GREEDY))
        known = whole_blocks(engine, case.prompt_rows)
        case = next_turn(talker, case, 9, voices[turn % 2], seed=turn)


def test_voices_differ_and_share_the_prompt(engine, talker, voices):
    case, said, held = talker.case(2, 80, 10, voices[0]), set(), []
    for voice in (voices[0], voices[1], voices[0]):
        ids = case.text_ids.clone()
        ids[0, case.prompt_rows] = voice
        mine = replace(case, text_ids=ids, text_bos_id=voice)
        found, spoken = take_turn(engine, mine)
        assert spoken == talker.codes(mine, GREEDY)
        held.append(found)
        said.add(tuple(spoken[0]))
    assert held == [0, *[whole_blocks(engine, case.prompt_rows)] * 2]
    assert len(said) == 2


@pytest.mark.parametrize("prompt_rows", [31, 32, 33, 64, 95, 96])
def test_a_prompt_that_is_said_again_needs_its_last_part_block_alone(engine, talker, voices, prompt_rows):
    case = talker.case(3, prompt_rows, 10, voices[0])
    expected = talker.codes(case, GREEDY)
    assert take_turn(engine, case) == (0, expected)
    assert take_turn(engine, case) == (whole_blocks(engine, prompt_rows), expected)


def test_no_place_is_reserved_for_rows_that_never_come(engine, talker, voices):
    case = talker.case(3, 96, 10, voices[0])
    asked, pool = replace(prompt_of(engine, case), max_rows=600), engine._rows._spans.capacity
    reserved = min(600 + 1, engine._settings.engine.max_model_len)
    engine.open("first", asked, GREEDY)
    assert engine.stats().rows_used == reserved
    engine.feed("first", case.rows)
    engine.end("first")
    assert Spoken().drain(engine).of("first") == talker.codes(case, GREEDY)
    opened = [f"s{number}" for number in range(pool // (reserved - 96))]
    assert len(opened) > pool // reserved
    for key in opened:
        assert engine.open(key, asked, GREEDY) == whole_blocks(engine, 96) == 96
    with pytest.raises(Overloaded, match=f"no room for {reserved - 96} hidden rows"):
        engine.open("one more", asked, GREEDY)
    assert set(engine._prefixes._pins.values()) == {len(opened)}
    for key in opened:
        engine.feed(key, case.rows[96:])
        engine.end(key)
    spoken = Spoken().drain(engine)
    for key in opened:
        assert spoken.of(key) == talker.codes(case, GREEDY)


def test_a_seed_draws_the_same_codes_with_a_hit_and_without(engine, talker, voices):
    case = talker.case(4, 70, 12, voices[0])
    samplings = [SAMPLED, replace(SAMPLED, seed=7), replace(SAMPLED, frequency_penalty=0.7, presence_penalty=-0.3)]
    plain = [take_turn(engine, case, sampling, salt=None) for sampling in samplings]
    take_turn(engine, case)
    hit = [take_turn(engine, case, sampling) for sampling in samplings]
    assert [held for held, _ in plain + hit] == [*[0] * 3, *[whole_blocks(engine, case.prompt_rows)] * 3]
    assert [spoken for _, spoken in plain] == [spoken for _, spoken in hit]


def test_conversations_at_once_equal_hf(engine, talker, voices):
    talks = {f"talk {number}": talker.case(number, 40 + 9 * number, 8, voices[number % 2]) for number in range(6)}
    for turn in range(3):
        known = {key: begin(engine, key, case, salt=key) for key, case in talks.items()}
        assert all(held > 0 for held in known.values()) == (turn > 0)
        spoken = Spoken().drain(engine)
        for key, case in talks.items():
            assert spoken.of(key) == talker.codes(case, GREEDY)
        talks = {key: next_turn(talker, case, 5, voices[turn % 2], seed=turn) for key, case in talks.items()}


def test_nothing_is_held_of_what_was_never_spoken_by_the_same_caller(engine, talker, voices):
    case = talker.case(5, 70, 10, voices[0])
    take_turn(engine, case, salt="one")
    other = Case(case.rows.clone(), case.text_ids, case.prompt_rows, case.positions, case.text_bos_id, case.grid)
    other.rows[3] += 1
    later = replace(other, rows=case.rows.clone())
    later.rows[40] += 1
    for mine, salt, held in [
        (case, "two", 0),
        (case, None, 0),
        (other, "one", 0),
        (later, "one", whole_blocks(engine, 40)),
        (case, "one", whole_blocks(engine, case.prompt_rows)),
    ]:
        assert take_turn(engine, mine, salt=salt) == (held, talker.codes(mine, GREEDY))


def test_a_prompt_without_names_is_not_kept(engine, talker, voices):
    case = talker.case(6, 70, 10, voices[0])
    take_turn(engine, case, salt=None)
    assert not cached_blocks(engine)


def test_codes_leave_nothing_in_the_cache(engine, talker, voices):
    case = talker.case(7, 40, 4, voices[0])
    take_turn(engine, case, replace(GREEDY, max_tokens=90, min_tokens=90))
    assert cached_blocks(engine) == case.prompt_rows // size_of(engine) > 0


def test_without_the_setting_nothing_is_kept(tiny_checkpoint, talker, voices):
    plain = make_engine(tiny_checkpoint)
    case = talker.case(8, 70, 10, voices[0])
    assert [take_turn(plain, case) for _ in range(2)] == [(0, talker.codes(case, GREEDY))] * 2
    plain.close()


def test_deterministic_engines_have_no_prefix_cache():
    with pytest.raises(ValidationError, match=r"prefix_caching true and engine\.deterministic true exclude each other"):
        TalkerSettings(prefix_caching=True, engine=TalkerEngineSettings(deterministic=True))


@pytest.mark.parametrize(("share", "fits"), [(0.25, True), (0.5, True), (1, True), (2, False), (0.75, False)])
def test_names_of_other_block_sizes_are_mapped_or_of_no_use(engine, talker, voices, share, fits):
    case = talker.case(9, 90, 10, voices[0])
    size, held = int(size_of(engine) * share), whole_blocks(engine, case.prompt_rows) if fits else 0
    engine.open("turn", replace(case.prompt, prefixes=names(engine, case, size=size)), GREEDY)
    engine.feed("turn", case.rows)
    engine.end("turn")
    Spoken().drain(engine)
    assert engine.open("turn", prompt_of(engine, case), GREEDY) == held
    engine.abort("turn")


def test_rows_that_come_one_by_one_after_a_hit_give_the_same_codes(engine, talker, voices):
    cases = {f"s{number}": talker.case(10 + number, 40 + 20 * number, 12, voices[0]) for number in range(3)}
    for case in cases.values():
        take_turn(engine, case)
    spoken, left = Spoken(), {}
    for key, case in cases.items():
        held = engine.open(key, prompt_of(engine, case), GREEDY)
        assert held > 0
        left[key] = case.rows[held:]
    feed_one_by_one(engine, left, spoken)
    spoken.drain(engine)
    for key, case in cases.items():
        assert spoken.of(key) == talker.codes(case, GREEDY)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_step_that_finds_nobody_waiting_holds_nobody_up(engine, talker, voices, monkeypatch, together):
    """Pins leave fewer blocks than that step had seen; those who come after it do not lack any."""
    monkeypatch.setattr("triton_omni.vllm_hooks.talker.schedulers.STARVED_S", 3600.0)
    cases = {f"s{number}": talker.case(10 + number, 40 + 20 * number, 12, voices[0]) for number in range(together)}
    for case in cases.values():
        take_turn(engine, case)
    held = {key: engine.open(key, prompt_of(engine, case), GREEDY) for key, case in cases.items()}
    for key, case in cases.items():
        engine.feed(key, case.rows[held[key] :])
        engine.end(key)
    assert engine.has_work()
    spoken = Spoken().drain(engine)
    for key, case in cases.items():
        assert spoken.of(key) == talker.codes(case, GREEDY)


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
@pytest.mark.parametrize("rows", [0, 20, 1000])
def test_the_abort_of_one_leaves_what_another_shares(engine, talker, voices, steps, rows):
    case = talker.case(13, 70, 12, voices[0])
    expected = talker.codes(case, GREEDY)
    take_turn(engine, case)
    assert begin(engine, "stays", case) == whole_blocks(engine, case.prompt_rows)
    held = engine.open("goes", prompt_of(engine, case), GREEDY)
    engine.feed("goes", case.rows[held : held + rows])
    spoken = Spoken()
    for _ in range(steps):
        spoken.step(engine)
    engine.abort("goes")
    assert spoken.drain(engine).of("stays") == expected
    assert take_turn(engine, case) == (whole_blocks(engine, case.prompt_rows), expected)


def test_an_aborted_turn_leaves_its_prompt_once_it_has_spoken(engine, talker, voices):
    for number, steps in enumerate((0, 1, 2, 6)):
        case = talker.case(20 + number, 70, 12, voices[0])
        begin(engine, "gone", case)
        spoken = Spoken()
        for _ in range(steps):
            spoken.step(engine)
        engine.abort("gone")
        spoken.drain(engine)
        held, codes = take_turn(engine, case)
        assert codes == talker.codes(case, GREEDY)
        assert held == (whole_blocks(engine, case.prompt_rows) if spoken.codes.get("gone") else 0)


@pytest.mark.parametrize("place", [3, 40, 69])
def test_a_prompt_with_a_row_that_is_not_finite_is_not_kept(engine, talker, voices, place):
    case = talker.case(30, 70, 12, voices[0])
    broken = case.rows.clone()
    broken[place, 5] = float("nan")
    engine.open("bad", prompt_of(engine, case), GREEDY)
    engine.feed("bad", broken)
    begin(engine, "good", talker.case(31, 70, 12, voices[0]))
    spoken = Spoken().drain(engine)
    assert spoken.errors == {"bad": NOT_FINITE}
    assert spoken.of("good") == talker.codes(talker.case(31, 70, 12, voices[0]), GREEDY)
    expected = talker.codes(case, GREEDY)
    assert take_turn(engine, case) == (0, expected)
    assert take_turn(engine, case) == (whole_blocks(engine, case.prompt_rows), expected)


def test_a_reply_row_that_is_not_finite_leaves_the_prompt(engine, talker, voices):
    case = talker.case(32, 70, 12, voices[0])
    broken = case.rows.clone()
    broken[75, 5] = float("inf")
    engine.open("bad", prompt_of(engine, case), GREEDY)
    engine.feed("bad", broken)
    assert Spoken().drain(engine).errors == {"bad": NOT_FINITE}
    assert take_turn(engine, case) == (whole_blocks(engine, case.prompt_rows), talker.codes(case, GREEDY))


def test_who_hits_what_is_not_finite_fails_alone_and_once(engine, talker, voices):
    case, beside = talker.case(33, 70, 12, voices[0]), talker.case(34, 70, 12, voices[0])
    for one in (case, beside):
        take_turn(engine, one)
    for key in ("bad", "too"):
        assert begin(engine, key, case) == whole_blocks(engine, case.prompt_rows)
    block = engine._held["bad"].blocks[1].block_id
    caches = [
        torch.unflatten(one, 0, (engine._runner.kv_cache_config.num_blocks, -1)) for one in engine._runner.kv_caches
    ]
    with torch.inference_mode():
        for cache in caches:
            cache[block] = float("nan")
    begin(engine, "good", beside)
    spoken = Spoken().drain(engine)
    assert spoken.errors == {"bad": NOT_FINITE, "too": NOT_FINITE}
    assert spoken.of("good") == talker.codes(beside, GREEDY)
    assert not any(cache.isnan().any() for cache in caches)
    assert take_turn(engine, case) == (0, talker.codes(case, GREEDY))


@BOTH_SMALL
def test_a_full_cache_serves_turns_that_push_each_other_out(small, talker, voices):
    chance, hit = random.Random(38), 0
    cases = [talker.case(40 + number, 70, 6, voices[0]) for number in range(5)]
    for _ in range(20):
        case = chance.choice(cases)
        held, spoken = take_turn(small, case)
        assert spoken == talker.codes(case, GREEDY)
        hit += held > 0
    assert 0 < hit < 20


@BOTH_SMALL
def test_sequences_that_pin_all_that_may_be_pinned_still_end(small, talker, voices):
    """Each needs blocks besides those that all of them keep."""
    cases = [talker.case(50 + number, 66, 6, voices[0]) for number in range(3)]
    for case in cases[:2]:
        take_turn(small, case)
    sampling = replace(GREEDY, max_tokens=58, min_tokens=58)
    held = [begin(small, f"s{number}", case, sampling) for number, case in enumerate(cases)]
    assert held == [*[whole_blocks(small, 66)] * 2, 0]
    spoken = Spoken().drain(small)
    for number, case in enumerate(cases):
        assert spoken.of(f"s{number}") == talker.codes(case, sampling)


@BOTH_SMALL
def test_no_more_is_pinned_than_leaves_room_for_the_longest_sequence(small, talker, voices):
    cases = [talker.case(60 + number, 66, 6, voices[0]) for number in range(3)]
    for case in cases:
        take_turn(small, case)
    held = [small.open(f"s{number}", prompt_of(small, case), GREEDY) for number, case in enumerate(cases)]
    # Half of the cache; the same blocks are pinned as often as they are asked for.
    whole = whole_blocks(small, 66)
    assert held == [whole, whole, 0]
    small.abort("s2")
    assert small.open("again", prompt_of(small, cases[0]), GREEDY) == whole
    for key in ("s0", "s1"):
        small.abort(key)
    assert small.open("s2", prompt_of(small, cases[2]), GREEDY) == whole
    small.abort("again")
    small.abort("s2")


@BOTH_SMALL
def test_a_preempted_sequence_resumes_after_its_hit_and_speaks_the_same(small, talker, voices):
    case = talker.case(70, 34, 6, voices[0])
    other = talker.case(71, 34, 6, voices[0])
    take_turn(small, case)
    long = replace(GREEDY, max_tokens=90, min_tokens=90)
    filler = talker.case(72, 66, 6, voices[0])
    take_turn(small, filler)
    # Keeps a quarter of the cache from the others while it is open.
    assert small.open("filler", prompt_of(small, filler), GREEDY) == whole_blocks(small, 66)
    begin(small, "stays", other, long, salt="another")
    assert begin(small, "leaves", case, long) == whole_blocks(small, 34)
    with preemptions(small, lambda _: None) as preempted:
        spoken = Spoken().drain(small)
        small.abort("filler")
    assert [request_id.partition("-")[0] for request_id in preempted][:1] == ["leaves"]
    assert spoken.of("stays") == talker.codes(other, long)
    assert spoken.of("leaves") == talker.codes(case, long)


@BOTH_SMALL
def test_turns_that_come_go_and_preempt_each_other_speak_what_each_speaks_alone(small, talker, voices):
    chance = random.Random(0)
    cases = [talker.case(80 + number, 33 + 11 * number, 8, voices[number % 2]) for number in range(4)]
    lengths = [replace(GREEDY, max_tokens=8), replace(GREEDY, max_tokens=56)]
    open_, asked, spoken, hit, gone = {}, {}, Spoken(), 0, set()
    for turn in range(700):
        choice = chance.random()
        if choice < 0.12 and len(small._open) < 3:
            key, case, sampling = f"t{turn}", chance.choice(cases), chance.choice(lengths)
            prompt = replace(prompt_of(small, case, chance.choice(["one", "two"])), max_rows=80)
            try:
                held = small.open(key, prompt, sampling)
            except Overloaded:  # reserves of several lengths leave gaps
                continue
            open_[key], asked[key], hit = case.rows[held:], (case, sampling), hit + (held > 0)
        elif choice < 0.5 and open_:
            key = chance.choice(list(open_))
            count = chance.choice([1, 5, 80])
            small.feed(key, open_[key][:count])
            open_[key] = open_[key][count:]
            if not len(open_[key]):
                small.end(key)
                del open_[key]
        elif choice < 0.53 and open_:
            key = chance.choice(list(open_))
            small.abort(key)
            gone.add(key)
            del open_[key]
        else:
            spoken.step(small)
    for key, rows in open_.items():
        small.feed(key, rows)
        small.end(key)
    spoken.drain(small)
    stayed = set(asked) - gone
    assert hit > 3
    assert len(stayed) > 8
    for key in stayed:
        assert spoken.of(key) == talker.codes(*asked[key])

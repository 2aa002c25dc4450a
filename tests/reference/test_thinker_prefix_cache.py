# SPDX-License-Identifier: Apache-2.0
"""The thinker's prefix cache against HF, float32: a turn that hits it gives the tokens and rows of one that does not.

HF computes each turn anew. Prompts are token ids, so that a later turn's history is exactly what an earlier one said.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from media_samples import picture, tone
from reference.hf import HfReference, ThinkerResult
from reference.thinker_rig import NOTHING_HELD, Answer, assert_equals_hf, drain, engine_of, poisoned, run, token_ids
from reference.vllm_records import preemptions
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.session.engine import Features, Sampling, ThinkerPlaced, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

TURN = Sampling(max_tokens=12, min_tokens=12)
NOT_FINITE = "a hidden state is not finite (NaN or infinity)"
PHOTO, OTHER = Image.fromarray(picture(96, 64)), Image.fromarray(picture(56, 84, 3))
QUESTION = {"type": "text", "text": "what is this?"}


@dataclass
class Talk:
    """A conversation, by the token ids of all that was said, before placeholders are expanded."""

    hf: HfReference
    salt: str | None = "a caller"
    ids: tuple[int, ...] = ()
    media: dict[str, list[Any]] = field(default_factory=dict)

    def say(self, *parts: Mapping[str, str], **media: Any) -> ThinkerPrompt:
        """The prompt of the next turn; `media` are the new ones by kind."""
        self.ids += token_ids(self.hf, *parts)
        self.media = {kind: [*self.media.get(kind, []), *media.get(kind, [])] for kind in {*self.media, *media}}
        return self.prompt()

    def prompt(self, salt: str | None = None) -> ThinkerPrompt:
        used = salt or self.salt
        features = {
            kind: [Features(identifier=used and f"{used} {hash(np.asarray(item).tobytes())}") for item in items]
            for kind, items in self.media.items()
        }
        return ThinkerPrompt(self.ids, dict(self.media), features=features, cache_salt=used)

    def ask(self, text: str) -> ThinkerPrompt:
        return self.say({"type": "text", "text": text})

    def hear(self, answer: Answer) -> None:
        self.ids += answer.token_ids

    def expected(self, placed: ThinkerPlaced, sampling: Sampling = TURN) -> ThinkerResult:
        """HF's reply to the whole conversation."""
        images, sounds = self.media.get("image", []), self.media.get("audio", [])
        parts = [{"type": "image"}] * len(images) + [{"type": "audio"}] * len(sounds) + [QUESTION]
        features = self.hf.prepare([{"role": "user", "content": parts}], images=images, audios=sounds)
        ids = torch.tensor([placed.prompt_token_ids])
        return self.hf.thinker({**features, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, sampling)


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "incremental"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def cached(ahead: bool, tiny_checkpoint: Path) -> Iterator[Any]:
    with engine_of(tiny_checkpoint, ahead=ahead, prefix_caching=True) as made:
        yield made


@pytest.fixture
def engine(cached: Any) -> Iterator[Any]:
    """With nothing in its cache."""
    assert cached._core.scheduler.reset_prefix_cache()
    yield cached
    assert cached.stats() == NOTHING_HELD


@pytest.fixture
def small(ahead: bool, tiny_checkpoint: Path) -> Iterator[Any]:
    """With a cache of eight blocks."""
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_tokens": 256}
    with engine_of(tiny_checkpoint, ahead=ahead, prefix_caching=True, **sizes) as made:
        yield made
        assert made.stats() == NOTHING_HELD


@contextmanager
def hits(engine: Any) -> Iterator[dict[str, int]]:
    """Tokens that sequences found in the cache when they were last begun, by key."""
    found: dict[str, int] = {}
    manager = engine._core.scheduler.kv_cache_manager
    look = manager.get_computed_blocks

    def watched(request: Any) -> Any:
        result = look(request)
        found[engine._keys[request.request_id]] = result[1]
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "get_computed_blocks", watched)
        yield found


def whole_blocks(engine: Any, tokens: int) -> int:
    size: int = engine._core.scheduler.block_size
    return tokens // size * size


def take_turn(
    engine: Any, talk: Talk, prompt: ThinkerPrompt, *, spoken: bool = True, sampling: Sampling = TURN
) -> tuple[int, Answer]:
    """Answer one prompt and compare it with HF; returns the tokens that were hit."""
    placed = engine.prepare(prompt)
    with hits(engine) as found:
        answer = run(engine, {"turn": placed}, sampling, want_rows=spoken)["turn"]
    expected = talk.expected(placed, sampling)
    if spoken:
        assert_equals_hf(answer, expected)
    else:
        assert (answer.last.error, answer.token_ids) == (None, expected.token_ids)
        assert all(output.rows is None for output in answer.outputs)
    talk.hear(answer)
    return found["turn"], answer


@pytest.mark.parametrize("spoken", [(True,) * 4, (False, False, True, True), (True, False, True, False)])
def test_each_turn_of_a_conversation_equals_hf_and_hits_all_whole_blocks_before_it(
    engine: Any, hf: HfReference, spoken: Sequence[bool]
) -> None:
    talk, known = Talk(hf), 0
    for number, aloud in enumerate(spoken):
        hit, _ = take_turn(engine, talk, talk.ask(f"and number {number}?"), spoken=aloud)
        assert hit == known
        # The last token of a reply was never computed.
        known = whole_blocks(engine, len(talk.ids) - 1)


def test_a_reply_of_one_token_leaves_its_prompt_in_the_cache(engine: Any, hf: HfReference) -> None:
    talk = Talk(hf)
    placed = engine.prepare(talk.ask("?"))
    run(engine, {"one": placed}, Sampling(max_tokens=1))
    with hits(engine) as found:
        assert_equals_hf(run(engine, {"again": placed}, TURN)["again"], talk.expected(placed))
    assert found["again"] == whole_blocks(engine, len(placed.prompt_token_ids) - 1) > 0


def test_conversations_at_once_equal_hf(engine: Any, hf: HfReference) -> None:
    talks = {f"talk {number}": Talk(hf, salt=f"caller {number % 2}") for number in range(8)}
    for turn in range(3):
        placed = {
            key: engine.prepare(talk.ask(f"turn {turn}" if turn < 2 else f"{key} of {turn}"))
            for key, talk in talks.items()
        }
        wanting = {key for number, key in enumerate(talks) if turn or number % 3}
        with hits(engine) as found:
            answers = run(engine, placed, TURN, want_rows=wanting)
        assert all(found[key] > 0 for key in talks) == (turn > 0)
        for key, talk in talks.items():
            expected = talk.expected(placed[key])
            if key in wanting:
                assert_equals_hf(answers[key], expected)
            assert answers[key].token_ids == expected.token_ids
            talk.hear(answers[key])


def test_media_of_earlier_turns_are_hit_and_their_rows_have_no_embedding(engine: Any, hf: HfReference) -> None:
    talk, known = Talk(hf), 0
    turns: list[tuple[list[Mapping[str, str]], dict[str, Any]]] = [
        ([{"type": "image"}, QUESTION], {"image": [PHOTO]}),
        ([{"type": "audio"}, QUESTION], {"audio": [tone(2.3)]}),
        ([{"type": "image"}, {"type": "audio"}], {"image": [OTHER], "audio": [tone(1.1)]}),
        ([QUESTION], {}),
    ]
    for parts, media in turns:
        prompt = talk.say(*parts, **media)
        hit, answer = take_turn(engine, talk, prompt)
        assert hit == known
        placed = engine.prepare(prompt)
        known = whole_blocks(engine, len(placed.prompt_token_ids) + len(answer.token_ids) - 1)


def test_media_that_differ_are_not_taken_for_each_other(engine: Any, hf: HfReference) -> None:
    for photo in (PHOTO, Image.fromarray(picture(96, 64, 5)), Image.fromarray(picture(96, 64, 6))):
        talk = Talk(hf)
        take_turn(engine, talk, talk.say({"type": "image"}, QUESTION, image=[photo]))


@pytest.mark.parametrize(("first", "second"), [("a", "b"), (None, None), ("a", None), (None, "a")])
def test_callers_do_not_share(engine: Any, hf: HfReference, first: str | None, second: str | None) -> None:
    for salt in (first, second):
        talk = Talk(hf, salt=salt)
        for turn in range(2):
            hit, _ = take_turn(engine, talk, talk.ask("the same question, long enough for several blocks"))
            assert bool(hit) == (turn > 0 and salt is not None)
    kept = len(engine._core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
    assert bool(kept) == (first is not None or second is not None)


def test_without_a_salt_no_block_is_named_and_no_row_mirrored(engine: Any, hf: HfReference) -> None:
    mirror = engine._runner.mirror.rows.zero_()
    talk = Talk(hf, salt=None)
    prompt = talk.ask("a question of more than one block, of which nothing is to be kept")
    assert _hashes(engine, engine.prepare(prompt)) == []
    take_turn(engine, talk, prompt)
    assert not mirror.any()


def test_who_has_no_salt_beside_who_has_one_hits_nothing(engine: Any, hf: HfReference) -> None:
    talks = {"shares": Talk(hf), "shares nothing": Talk(hf, salt=None)}
    for turn in range(2):
        placed = {key: engine.prepare(talk.ask("the same question, of several blocks")) for key, talk in talks.items()}
        with hits(engine) as found:
            answers = run(engine, placed, TURN, want_rows=True)
        assert {key: tokens > 0 for key, tokens in found.items()} == {"shares": turn > 0, "shares nothing": False}
        for key, talk in talks.items():
            assert_equals_hf(answers[key], talk.expected(placed[key]))
            talk.hear(answers[key])


def test_deterministic_engines_have_no_prefix_cache() -> None:
    with pytest.raises(ValidationError, match=r"prefix_caching true and engine\.deterministic true exclude each other"):
        ThinkerSettings(prefix_caching=True, engine=EngineSettings(deterministic=True))


def step_until_told(engine: Any, answers: Mapping[str, Answer], key: str, tokens: int) -> None:
    while len(answers[key].token_ids) < tokens:
        for output in engine.step():
            answers[output.key].outputs.append(output)


def test_an_aborted_turn_keeps_its_whole_blocks_and_leaves_no_other(engine: Any, hf: HfReference) -> None:
    talk, answers = Talk(hf), {"gone": Answer()}
    prompt = talk.ask("tell me a long story")
    engine.add_sequence("gone", engine.prepare(prompt), TURN, want_rows=True)
    step_until_told(engine, answers, "gone", 5)
    (blocks,) = engine._runner.requests[engine._sequences["gone"].request_id].block_ids
    mine = list(blocks)
    engine.abort("gone")
    drain(engine, {})
    kept = (len(prompt.token_ids) + 4) // engine._core.scheduler.block_size
    caches = [torch.unflatten(cache, 0, (engine._runner.kv_cache_config.num_blocks, -1)) for cache in _caches(engine)]
    for cache in caches:
        assert cache[mine[:kept]].flatten(1).any(1).all()
        assert not cache[mine[kept:]].any()
    talk.hear(answers["gone"])
    hit, _ = take_turn(engine, talk, talk.ask("go on"))
    assert hit == kept * engine._core.scheduler.block_size


def _caches(engine: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = engine._runner.kv_caches
    return found


@pytest.mark.parametrize("end", ["abort", "fail", "stop string"])
def test_the_end_of_one_leaves_what_another_shares(engine: Any, hf: HfReference, end: str) -> None:
    talk = Talk(hf)
    take_turn(engine, talk, talk.ask("what do we both know, and for how long have we known it?"))
    placed = engine.prepare(talk.ask("so?"))
    expected, answers = talk.expected(placed), {"stays": Answer(), "goes": Answer()}
    cut = Sampling(max_tokens=12, min_tokens=12, stop=(expected.text[2:3] or "\0",))
    with hits(engine) as found:
        for key in answers:
            engine.add_sequence(key, placed, cut if (end, key) == ("stop string", "goes") else TURN, want_rows=True)
        step_until_told(engine, answers, "goes", 2)
    assert min(found.values()) > 0
    if end == "abort":
        engine.abort("goes")
    with poisoned(engine, "goes" if end == "fail" else "nobody"):
        drain(engine, answers)
    assert_equals_hf(answers["stays"], expected)
    if end == "fail":
        assert answers["goes"].last.error == NOT_FINITE
    talk.hear(answers["stays"])
    take_turn(engine, talk, talk.ask("and after that?"))


@pytest.mark.parametrize("spoken", [True, False])
def test_nothing_after_a_row_that_is_not_finite_is_hit(engine: Any, hf: HfReference, spoken: bool) -> None:
    talk = Talk(hf)
    placed = engine.prepare(talk.ask("a question of more than one block, so that there is something to keep"))
    with poisoned(engine, "bad"), hits(engine) as found:
        answers = run(engine, {"bad": placed}, TURN, want_rows=spoken)
        assert answers["bad"].last.error == NOT_FINITE
        assert run(engine, {"again": placed}, TURN)["again"].last.error is None
    assert found == {"bad": 0, "again": 0}
    # Finite blocks are hit.
    with hits(engine) as found:
        assert_equals_hf(run(engine, {"sound": placed}, TURN)["sound"], talk.expected(placed))
    assert found["sound"] > 0


def test_a_failed_turn_keeps_the_blocks_before_its_last_sound_row(engine: Any, hf: HfReference) -> None:
    talk, answers = Talk(hf), {"fails": Answer()}
    placed = engine.prepare(talk.ask("a question of more than one block, so that there is something to keep"))
    engine.add_sequence("fails", placed, TURN, want_rows=True)
    step_until_told(engine, answers, "fails", 3)
    with poisoned(engine, "fails"):
        drain(engine, answers)
    assert answers["fails"].last.error == NOT_FINITE
    with hits(engine) as found:
        assert_equals_hf(run(engine, {"again": placed}, TURN)["again"], talk.expected(placed))
    assert found["again"] == whole_blocks(engine, len(placed.prompt_token_ids) - 1)


@pytest.mark.parametrize("spoken", [True, False])
def test_who_hits_a_row_that_is_not_finite_fails_alone_and_once(engine: Any, hf: HfReference, spoken: bool) -> None:
    talk, other = Talk(hf), Talk(hf, salt="another caller")
    for one in (talk, other):
        take_turn(engine, one, one.ask("a question of more than one block, so that there is something to hit"))
    prompt, beside = talk.ask("so?"), other.ask("so?")
    placed = {"bad": engine.prepare(prompt), "good": engine.prepare(beside)}
    with hits(engine):
        (block, *_), *_ = engine._core.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(
            _hashes(engine, placed["bad"]), 64
        )[0]
    size = engine._core.scheduler.block_size
    with torch.inference_mode():
        engine._runner.mirror.rows[block.block_id * size + 3] = float("nan")
    answers = run(engine, placed, TURN, want_rows={"good", "bad"} if spoken else {"good"})
    assert answers["bad"].last.error == NOT_FINITE
    assert_equals_hf(answers["good"], other.expected(placed["good"]))
    hit, _ = take_turn(engine, talk, prompt, spoken=spoken)
    assert hit == 0


def _hashes(engine: Any, placed: ThinkerPlaced) -> list[Any]:
    engine.add_sequence("asks", placed, TURN, want_rows=False)
    request = engine._core.scheduler.requests[engine._sequences["asks"].request_id]
    engine.abort("asks")
    return list(request.block_hashes)


def test_the_names_of_a_prompt_s_prefixes_are_those_of_its_blocks(engine: Any, hf: HfReference) -> None:
    sound = {"type": "audio"}
    prompts = [
        Talk(hf).ask("a question of more than one block, whose blocks each have a name"),
        Talk(hf).say({"type": "image"}, QUESTION, sound, QUESTION, image=[PHOTO], audio=[tone(2.3)]),
        Talk(hf).say(sound, {"type": "image"}, sound, image=[OTHER], audio=[tone(1.1), tone(0.7)]),
        Talk(hf, salt="another caller").ask("a question of more than one block, whose blocks each have a name"),
    ]
    named = []
    for prompt in prompts:
        placed = engine.prepare(prompt)
        found = placed.prefixes
        assert found.block_size == engine._core.scheduler.block_size
        assert list(found.keys) == _hashes(engine, placed)
        named.append(found.keys[-1])
    assert len(set(named)) == len(prompts)


# Below are tests with an engine of their own. It ends what all engines of a process share: they come last.


def test_without_the_setting_nothing_is_kept(ahead: bool, tiny_checkpoint: Path, hf: HfReference) -> None:
    with engine_of(tiny_checkpoint, ahead=ahead) as plain:
        talk = Talk(hf)
        assert [take_turn(plain, talk, talk.ask("and now?"))[0] for _ in range(2)] == [0, 0]


def test_prompts_that_share_nothing_have_no_names(
    engine: Any, ahead: bool, tiny_checkpoint: Path, hf: HfReference
) -> None:
    assert engine.prepare(Talk(hf, salt=None).ask("and I?")).prefixes is None
    with engine_of(tiny_checkpoint, ahead=ahead) as plain:
        assert plain.prepare(Talk(hf).ask("and I?")).prefixes is None


def test_a_preempted_sequence_resumes_from_its_blocks_and_gives_each_row_once(small: Any, hf: HfReference) -> None:
    long = Sampling(max_tokens=64, min_tokens=64)
    talks = {"stays": Talk(hf, salt="one"), "leaves": Talk(hf, salt="two")}
    placed = {key: small.prepare(talk.ask(f"{key}? " * 6)) for key, talk in talks.items()}
    with preemptions(small, lambda _: None) as preempted, hits(small) as found:
        answers = run(small, placed, long)
    assert preempted
    assert found["leaves"] > 0
    for key, talk in talks.items():
        assert_equals_hf(answers[key], talk.expected(placed[key], long))


def test_a_full_cache_serves_turns_that_push_each_other_out(small: Any, hf: HfReference) -> None:
    chance = random.Random(38)
    talks, hit = [Talk(hf, salt=f"caller {number}") for number in range(4)], 0
    for _ in range(16):
        number = chance.randrange(len(talks))
        if len(talks[number].ids) > 120:
            talks[number] = Talk(hf, salt=talks[number].salt)
        hit += take_turn(small, talks[number], talks[number].ask("next?"), spoken=chance.random() < 0.7)[0] > 0
    assert 0 < hit < 16


def test_turns_cancels_and_preemptions_in_a_small_cache_change_no_token_and_no_row(small: Any, hf: HfReference) -> None:
    chance = random.Random(0)
    talks, told = {number: Talk(hf, salt=f"caller {number % 2}") for number in range(3)}, 0
    for _ in range(8):
        placed = {}
        for number in chance.sample(sorted(talks), 2):
            if len(talks[number].ids) > 120:
                talks[number] = Talk(hf, salt=talks[number].salt)
            placed[number] = small.prepare(talks[number].ask(chance.choice(["next?", "why?", "tell me more. " * 2])))
        answers = {str(number): Answer() for number in placed}
        for number, one in placed.items():
            small.add_sequence(str(number), one, TURN, want_rows=chance.random() < 0.7)
        dropped = str(chance.choice(sorted(placed))) if chance.random() < 0.3 else None
        for _ in range(chance.randrange(12) if dropped else 0):
            for output in small.step():
                answers[output.key].outputs.append(output)
        if dropped:
            small.abort(dropped)
        drain(small, answers)
        for number, one in placed.items():
            answer, expected = answers[str(number)], talks[number].expected(one)
            if str(number) == dropped:
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            else:
                assert answer.token_ids == expected.token_ids
                rows = [output.rows for output in answer.outputs if output.rows is not None]
                if rows:
                    assert_equals_hf(answer, expected)
                told += 1
            talks[number].hear(answer)
    assert told


def test_a_medium_without_memory_fails_all_that_share_it_and_is_not_kept(
    ahead: bool, tiny_checkpoint: Path, hf: HfReference
) -> None:
    from triton_omni.vllm_hooks.shared.compat import GPUModelRunner

    passes = []

    def no_memory(_: Any, step: Any) -> Any:
        if not step.scheduled_encoder_inputs:
            return []
        passes.append(step.scheduled_encoder_inputs)
        raise torch.OutOfMemoryError("tried to allocate too much")

    talk, text = Talk(hf), Talk(hf)
    with engine_of(tiny_checkpoint, ahead=ahead, prefix_caching=True, max_num_batched_tokens=512) as engine:
        placed = engine.prepare(talk.say({"type": "image"}, QUESTION, image=[PHOTO]))
        beside = engine.prepare(text.ask("and I?"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GPUModelRunner, "_execute_mm_encoder", no_memory)
            answers = run(engine, {"one": placed, "other": placed, "text": beside}, TURN)
        # Once together and once alone, for both.
        assert list(map(len, passes)) == [1, 1]
        for key in ("one", "other"):
            assert answers[key].last.error == "the device has no memory for this image"
        assert_equals_hf(answers["text"], text.expected(beside))
        with hits(engine) as found:
            assert_equals_hf(run(engine, {"later": placed}, TURN)["later"], talk.expected(placed))
        assert found["later"] < placed.prompt_token_ids.index(engine._media_ids["image"])

# SPDX-License-Identifier: Apache-2.0
"""The thinker's engine against HF on the tiny checkpoint, float32: tokens exact, rows to 2e-5.

The engine runs on a GPU where there is one, HF on the CPU. It prefills in chunks of 64 tokens, so every longer prompt
here is a test of chunked prefill.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from media_samples import picture, tone
from reference.hf import HfReference, ThinkerResult
from reference.thinker_rig import (
    DEVICE,
    NOTHING_HELD,
    REPLY,
    ROW_TOLERANCE,
    Answer,
    ask,
    assert_equals_hf,
    drain,
    engine_of,
    make_engine,
    poisoned,
    run,
    schedule_ahead_on_the_cpu,
    token_ids,
)
from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.weights import weight_map
from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import SettingsError, TalkerSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, ThinkerPrompt

# vLLM's and transformers' own warnings are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SOUND_IN_VIDEO_TOLERANCE = 1e-4  # up to 720 tokens of summation order; rows are of the order of 1
QUESTIONS = (
    "hello",
    "what is the weather like in Paris today?",
    "a" * 100,
    "Tell me about the sea. " * 8,
    "x",
    "1 2 3 4 5 6 7",
    "naïve café 漢字 emoji 😀",
    "why",
)
IMAGE, SOUND, VIDEO = {"type": "image"}, {"type": "audio"}, {"type": "video"}
QUESTION = {"type": "text", "text": "what is this?"}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Any]:
    made = make_engine(tiny_checkpoint)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        assert request.getfixturevalue("engine").stats() == NOTHING_HELD


@pytest.fixture(scope="module")
def expected(hf: HfReference) -> dict[str, ThinkerResult]:
    """HF's replies to `QUESTIONS`, of at most 64 tokens."""
    return {text: hf.thinker(hf.ask(text), REPLY) for text in QUESTIONS}


@pytest.mark.parametrize("text", QUESTIONS[:4])
def test_a_prompt_alone_gives_hf_tokens_text_and_rows(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult], text: str
) -> None:
    placed = engine.prepare(ask(hf, text))
    assert placed.prompt_token_ids == expected[text].prompt_token_ids
    assert torch.equal(placed.positions, expected[text].positions)
    assert_equals_hf(run(engine, {"one": placed})["one"], expected[text])


def test_eight_prompts_together_give_what_each_gives_alone(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    answers = run(engine, {text: ask(hf, text) for text in QUESTIONS})
    for text in QUESTIONS:
        assert_equals_hf(answers[text], expected[text])


def test_prompts_that_join_late_mix_prefill_with_decode(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    answers = {text: Answer() for text in QUESTIONS[:4]}
    for text in answers:
        engine.add_sequence(text, engine.prepare(ask(hf, text)), REPLY, want_rows=True)
        for output in [*engine.step(), *engine.step()]:
            answers[output.key].outputs.append(output)
    for text, answer in drain(engine, answers).items():
        assert_equals_hf(answer, expected[text])


def test_more_sequences_than_places_wait_their_turn(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    keys = {f"{text}/{copy}": text for text in QUESTIONS for copy in range(2)}
    placed = {text: engine.prepare(ask(hf, text)) for text in QUESTIONS}
    for key, text in keys.items():
        engine.add_sequence(key, placed[text], REPLY, want_rows=True)
    assert engine.stats().waiting == len(keys)
    answers = drain(engine, {key: Answer() for key in keys})
    for key, text in keys.items():
        assert_equals_hf(answers[key], expected[text])


def test_text_only_requests_give_no_rows_and_do_not_disturb_others(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    speaking = {QUESTIONS[0], QUESTIONS[3]}
    answers = run(engine, {text: ask(hf, text) for text in QUESTIONS[:4]}, want_rows=speaking)
    for text, answer in answers.items():
        if text in speaking:
            assert_equals_hf(answer, expected[text])
        else:
            assert answer.token_ids == expected[text].token_ids
            assert all(output.rows is None for output in answer.outputs)


def test_rows_of_a_step_are_gathered_once_for_the_whole_batch(engine: Any, hf: HfReference) -> None:
    for text in QUESTIONS[:3]:
        engine.add_sequence(text, engine.prepare(ask(hf, text)), Sampling(max_tokens=8), want_rows=True)
    shared = 0
    while engine.has_work():
        storages = [output.rows.untyped_storage().data_ptr() for output in engine.step() if output.rows is not None]
        assert len(set(storages)) <= 1
        shared += len(storages) > 1
    assert shared > 0


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_a_reply_cut_by_its_limit_has_a_row_a_token_but_the_last(engine: Any, hf: HfReference, limit: int) -> None:
    placed = engine.prepare(ask(hf, "hello"))
    answer = run(engine, {"cut": placed}, Sampling(max_tokens=limit))["cut"]
    assert answer.last.finish_reason == "length"
    assert len(answer.token_ids) == limit
    assert len(answer.rows) == len(placed.prompt_token_ids) + limit - 1


def test_the_ending_id_is_given_but_not_its_text(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    text = next(text for text in QUESTIONS if len(expected[text].token_ids) < REPLY.max_tokens)
    answer = run(engine, {"end": ask(hf, text)})["end"]
    assert answer.last.finish_reason == "stop"
    assert answer.token_ids[-1] == hf.model.thinker.generation_config.eos_token_id
    assert "<|" not in answer.text


def check_least_length(engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]) -> None:
    texts = [text for text in QUESTIONS if len(expected[text].token_ids) < REPLY.max_tokens][:2]
    assert texts
    samplings = {text: Sampling(max_tokens=70, min_tokens=least) for text, least in zip(texts, (66, 70), strict=False)}
    answers = run(engine, {text: ask(hf, text) for text in texts}, samplings)
    for text in texts:
        assert_equals_hf(answers[text], hf.thinker(hf.ask(text), samplings[text]))
        assert len(answers[text].token_ids) >= samplings[text].min_tokens


def test_no_reply_ends_before_its_least_length(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    check_least_length(engine, hf, expected)


@dataclass(frozen=True)
class Mixed:
    """Media of one prompt, in the forms that HF's processor and vLLM share."""

    parts: tuple[Mapping[str, str], ...]
    image: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    sound_in_video: bool = False
    fps: float = 2.0

    def prompt(self, hf: HfReference) -> ThinkerPrompt:
        media = {"image": list(self.image), "audio": list(self.audio), "video": list(self.video)}
        return ThinkerPrompt(
            token_ids(hf, *self.parts),
            {kind: items for kind, items in media.items() if items},
            ({"use_audio_in_video": True} if self.sound_in_video else {})
            | ({"second_per_grid_ts": [2 / self.fps] * len(self.video)} if self.video else {}),
        )

    def reference(self, hf: HfReference) -> ThinkerResult:
        inputs = hf.prepare(
            [{"role": "user", "content": list(self.parts)}],
            images=self.image,
            audios=self.audio,
            videos=self.video,
            fps=self.fps,
            use_audio_in_video=self.sound_in_video,
        )
        return hf.thinker(inputs, Sampling(max_tokens=20))


def clip(frames: int, width: int = 64, height: int = 48) -> np.ndarray:
    return np.stack([picture(width, height, seed) for seed in range(frames)])


PHOTO = Image.fromarray(picture(96, 64))
MIXED = {
    "an image": Mixed((IMAGE, QUESTION), image=(PHOTO,)),
    "two images": Mixed((IMAGE, QUESTION, IMAGE), image=(PHOTO, Image.fromarray(picture(56, 84, 3)))),
    "a sound": Mixed((SOUND, QUESTION), audio=(tone(1.3),)),
    "a sound over several prefill chunks": Mixed((SOUND, QUESTION), audio=(tone(7.7),)),
    "a video": Mixed((VIDEO, QUESTION), video=(clip(8),)),
    "a video at 10 frames in 7 seconds": Mixed((VIDEO, QUESTION), video=(clip(8),), fps=10 / 7),
    "an image and a sound": Mixed((IMAGE, SOUND, QUESTION), image=(PHOTO,), audio=(tone(1.0),)),
    "a silent video and a sound": Mixed((VIDEO, SOUND, QUESTION), video=(clip(4),), audio=(tone(1.0),)),
}
SOUNDING = {
    "sound as long as its video": Mixed((VIDEO, QUESTION), audio=(tone(4.0),), video=(clip(8),), sound_in_video=True),
    "sound shorter": Mixed((VIDEO, QUESTION), audio=(tone(1.0),), video=(clip(8),), sound_in_video=True),
    "sound longer": Mixed((VIDEO, QUESTION), audio=(tone(7.0),), video=(clip(4, 56, 56),), sound_in_video=True),
    "two": Mixed((VIDEO, VIDEO), audio=(tone(2.0), tone(0.6)), video=(clip(4), clip(4, 56, 56)), sound_in_video=True),
    "at 10 frames in 7 seconds": Mixed((VIDEO,), (), (tone(6.0),), (clip(8),), sound_in_video=True, fps=10 / 7),
    "pictures further apart than a chunk": Mixed(
        (VIDEO, QUESTION), audio=(tone(9.0),), video=(clip(8),), sound_in_video=True, fps=0.4
    ),
    "after an image": Mixed((IMAGE, VIDEO), (PHOTO,), (tone(2.0),), (clip(4),), sound_in_video=True),
}


@pytest.mark.parametrize("name", MIXED)
def test_media_give_hf_tokens_rows_and_positions(engine: Any, hf: HfReference, name: str) -> None:
    _compare_media(engine, hf, MIXED[name], ROW_TOLERANCE)


def test_a_sound_is_padded_by_a_window_not_to_the_longest(engine: Any, hf: HfReference) -> None:
    case = Mixed((SOUND, QUESTION), audio=(tone(1.3),))
    placed = engine.prepare(case.prompt(hf))
    (sound,) = placed.engine_input["mm_kwargs"]["audio"]
    # 20,800 samples and a window of 400, at 160 a frame.
    assert sound["feature_attention_mask"].data.shape[-1] == 133


@pytest.mark.parametrize("name", SOUNDING)
def test_sound_inside_video_gives_hf_tokens_rows_and_positions(engine: Any, hf: HfReference, name: str) -> None:
    _compare_media(engine, hf, SOUNDING[name], SOUND_IN_VIDEO_TOLERANCE)


def _compare_media(engine: Any, hf: HfReference, mixed: Mixed, tolerance: float) -> None:
    expected, placed = mixed.reference(hf), engine.prepare(mixed.prompt(hf))
    assert placed.prompt_token_ids == expected.prompt_token_ids
    assert torch.equal(placed.positions, expected.positions)
    assert_equals_hf(run(engine, {"media": placed}, Sampling(max_tokens=20))["media"], expected, tolerance)


def test_media_and_text_in_one_batch_keep_their_own_rows(engine: Any, hf: HfReference) -> None:
    answers = run(engine, {name: mixed.prompt(hf) for name, mixed in MIXED.items()}, Sampling(max_tokens=20))
    for name, mixed in MIXED.items():
        assert_equals_hf(answers[name], mixed.reference(hf))


def test_prompts_are_prepared_by_several_threads_at_once(engine: Any, hf: HfReference) -> None:
    prompts = [mixed.prompt(hf) for mixed in MIXED.values()] * 3
    alone = [engine.prepare(prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(engine.prepare, prompts))
    for one, other in zip(alone, together, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert torch.equal(one.positions, other.positions)


def test_an_abort_in_prefill_frees_everything_at_once(engine: Any, hf: HfReference) -> None:
    placed = engine.prepare(ask(hf, QUESTIONS[3]))
    engine.add_sequence("gone", placed, REPLY, want_rows=True)
    (output,) = engine.step()
    assert output.rows is not None
    assert len(output.rows) < len(placed.prompt_token_ids)
    assert engine.stats().kv_blocks_used > 0
    engine.abort("gone")
    assert engine.stats() == NOTHING_HELD
    assert drain(engine, {}) == {}


def test_an_aborted_sequence_leaves_nothing_in_its_cache_blocks(engine: Any, hf: HfReference) -> None:
    engine.add_sequence("gone", engine.prepare(ask(hf, QUESTIONS[3])), REPLY, want_rows=True)
    engine.step()
    runner = engine._llm.model_executor.driver_worker.worker.model_runner
    (state,) = runner.requests.values()
    caches = [torch.unflatten(cache, 0, (runner.kv_cache_config.num_blocks, -1)) for cache in runner.kv_caches]
    (blocks,) = state.block_ids
    assert all(cache[blocks].any() for cache in caches)
    engine.abort("gone")
    assert not any(cache[blocks].any() for cache in caches)
    drain(engine, {})


def test_an_abort_in_decode_frees_everything_and_leaves_others_exact(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    gone, stays = QUESTIONS[1], QUESTIONS[0]
    answers = {gone: Answer(), stays: Answer()}
    for text in answers:
        engine.add_sequence(text, engine.prepare(ask(hf, text)), REPLY, want_rows=True)
    while len(answers[gone].token_ids) < 5:
        for output in engine.step():
            answers[output.key].outputs.append(output)
    engine.abort(gone)
    told = len(answers[gone].outputs)
    drain(engine, answers)
    assert len(answers[gone].outputs) == told
    assert_equals_hf(answers[stays], expected[stays])


def test_an_aborted_key_can_be_used_again_and_unknown_keys_are_ignored(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    engine.abort("never seen")
    placed = engine.prepare(ask(hf, "hello"))
    engine.add_sequence("again", placed, REPLY, want_rows=True)
    engine.step()
    engine.abort("again")
    assert_equals_hf(run(engine, {"again": placed})["again"], expected["hello"])


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_sequences_longer_than_the_network_s_are_refused_at_load(tiny_checkpoint: Path, stage: str) -> None:
    from triton_omni.vllm_hooks.talker.engine import TalkerVllmEngine
    from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

    engine, settings = {"thinker": (ThinkerVllmEngine, ThinkerSettings), "talker": (TalkerVllmEngine, TalkerSettings)}[
        stage
    ]
    with pytest.raises(SettingsError, match=r"max_model_len: 32769 is over .* max_position_embeddings, 32768"):
        engine(tiny_checkpoint, settings(engine={"max_model_len": 32769}), torch.device("cpu"))


def test_a_key_in_use_is_refused(engine: Any, hf: HfReference) -> None:
    placed = engine.prepare(ask(hf, "hello"))
    engine.add_sequence("twice", placed, Sampling(max_tokens=4), want_rows=True)
    with pytest.raises(ValueError, match="'twice' is in use"):
        engine.add_sequence("twice", placed, Sampling(max_tokens=4), want_rows=True)
    engine.abort("twice")


def test_a_prompt_that_leaves_no_room_is_refused_with_both_figures(engine: Any, hf: HfReference) -> None:
    with pytest.raises(TooLarge, match=r"prompt has 10\d\d tokens .* limit is 1024"):
        engine.prepare(ask(hf, "b" * 980))
    videos = Mixed((VIDEO, VIDEO), video=(clip(8), clip(8))).prompt(hf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_render", lambda _: pytest.fail("the media were processed"))
        with pytest.raises(TooLarge, match=r"prompt has 11\d\d tokens"):
            engine.prepare(videos)
    placed = engine.prepare(ask(hf, "hello"))
    with pytest.raises(TooLarge, match=r"the reply may have 1000, together 1058"):
        engine.add_sequence("long", placed, Sampling(max_tokens=1000), want_rows=True)


@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        (Mixed((IMAGE, QUESTION)), "image: 0 media were given for 1 placeholders"),
        (Mixed((QUESTION,), audio=(tone(1.0),)), "audio: 1 media were given for 0 placeholders"),
        (Mixed((SOUND, QUESTION), audio=(tone(0.001),)), "could not be processed"),
        (Mixed((IMAGE, QUESTION), image=(Image.new("RGB", (1, 400)),)), "could not be processed"),
    ],
)
def test_media_that_do_not_fit_are_refused(engine: Any, hf: HfReference, mixed: Mixed, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        engine.prepare(mixed.prompt(hf))


@pytest.mark.parametrize("want_rows", [True, False])
def test_a_state_that_is_not_finite_fails_its_own_sequence_alone(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult], want_rows: bool
) -> None:
    prompts = {"bad": ask(hf, QUESTIONS[1]), **{text: ask(hf, text) for text in QUESTIONS[:4]}}
    wanting = {*QUESTIONS, "bad"} if want_rows else set(QUESTIONS)
    with poisoned(engine, "bad"):
        answers = run(engine, prompts, want_rows=wanting)
    assert [output.error for output in answers["bad"].outputs] == ["a hidden state is not finite (NaN or infinity)"]
    assert not answers["bad"].token_ids
    for text in QUESTIONS[:4]:
        assert_equals_hf(answers[text], expected[text])


def test_cache_blocks_of_a_failed_sequence_do_not_harm_the_next(
    engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    with poisoned(engine, "bad"):
        run(engine, {f"bad{number}": ask(hf, QUESTIONS[3]) for number in range(8)})
    answers = run(engine, {text: ask(hf, text) for text in QUESTIONS})
    for text in QUESTIONS:
        assert_equals_hf(answers[text], expected[text])


def test_a_seed_draws_the_same_tokens_alone_and_in_a_batch(engine: Any, hf: HfReference) -> None:
    def seeded(seed: int) -> Sampling:
        return Sampling(temperature=1.0, top_k=40, top_p=0.95, max_tokens=24, seed=seed)

    prompt = ask(hf, "hello")
    alone = {seed: run(engine, {"one": prompt}, seeded(seed))["one"].token_ids for seed in (1, 2, 2**63 + 5)}
    keys = {f"{seed}/{copy}": seed for seed in alone for copy in range(2)}
    answers = run(engine, dict.fromkeys(keys, prompt), {key: seeded(seed) for key, seed in keys.items()})
    assert {key: answers[key].token_ids for key in keys} == {key: alone[seed] for key, seed in keys.items()}
    assert len(set(alone.values())) == len(alone)


def test_a_repetition_penalty_counts_the_prompt_as_hf_does(engine: Any, hf: HfReference) -> None:
    sampling = Sampling(repetition_penalty=1.3, max_tokens=24)
    expected = hf.thinker(hf.ask(QUESTIONS[0]), sampling)
    assert_equals_hf(run(engine, {"penalised": ask(hf, QUESTIONS[0])}, sampling)["penalised"], expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "incremental"])
def test_a_preempted_sequence_gives_each_row_once(
    tiny_checkpoint: Path,
    hf: HfReference,
    expected: dict[str, ThinkerResult],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    # Too few for both sequences at their ends.
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_tokens": 256}
    with engine_of(tiny_checkpoint, ahead=ahead, **sizes) as small:
        preempted = _count_calls(small._core.scheduler, "_preempt_request", monkeypatch)
        incremental = _count_calls(small._runner, "launch_incremental", monkeypatch)
        answers = run(small, {text: ask(hf, text) for text in QUESTIONS[1:3]})
        assert preempted
        assert bool(incremental) == ahead
        for text, answer in answers.items():
            assert_equals_hf(answer, expected[text])
        assert small.stats() == NOTHING_HELD


def _count_calls(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    method: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculative_config": object()}, "speculative decoding is not supported"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 4"),
    ],
)
def test_what_the_runners_cannot_do_is_refused_by_name(engine: Any, change: dict[str, Any], message: str) -> None:
    from triton_omni.vllm_hooks.shared.platform import UnsupportedEngineError, refuse_unsupported

    parallel = {"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1}
    parallel |= {name: value for name, value in change.items() if name in parallel}
    config = SimpleNamespace(
        speculative_config=change.get("speculative_config"), parallel_config=SimpleNamespace(**parallel)
    )
    with pytest.raises(UnsupportedEngineError, match=message):
        refuse_unsupported(config, tensor_parallel=False)


def test_a_tensor_of_another_shape_is_told_by_name_with_its_file(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Missing tensors and files that are cut off are told before the start: `tests/unit/test_start_faults.py`."""
    checkpoint, name = tmp_path / "checkpoint", "thinker.model.layers.0.self_attn.q_proj.weight"
    shutil.copytree(tiny_checkpoint, checkpoint)
    shard = checkpoint / weight_map(checkpoint)[name]
    tensors = load_file(shard)
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, shard)
    with pytest.raises(CheckpointError) as caught:
        make_engine(checkpoint)
    assert f"{shard}: {name} has shape [63, " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_in_which_vllm_and_hf_would_place_videos_differently_is_refused(engine: Any) -> None:
    from triton_omni.vllm_hooks.shared.platform import UnsupportedEngineError
    from triton_omni.vllm_hooks.thinker.networks import check_time_scale

    config = SimpleNamespace(position_id_per_seconds=25, vision_config=SimpleNamespace(tokens_per_second=2))
    with pytest.raises(UnsupportedEngineError, match=r"position_id_per_seconds is 25.*tokens_per_second is 2"):
        check_time_scale(config)


@pytest.fixture
def async_engine(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine that schedules a step ahead, as on a GPU."""
    if DEVICE.type == "cpu":
        schedule_ahead_on_the_cpu(monkeypatch)
    made = make_engine(tiny_checkpoint, ahead=True)
    assert made._core.batch_queue is not None
    yield made
    assert made.stats() == NOTHING_HELD
    made.close()


def test_no_reply_scheduled_ahead_ends_before_its_least_length(
    async_engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    check_least_length(async_engine, hf, expected)


def test_a_step_scheduled_ahead_adds_no_row(
    async_engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    prompts = {text: ask(hf, text) for text in QUESTIONS}
    answers = run(async_engine, prompts)
    for text in QUESTIONS:
        assert_equals_hf(answers[text], expected[text])
    cut = run(async_engine, prompts, Sampling(max_tokens=3))
    for text in QUESTIONS:
        assert cut[text].token_ids == expected[text].token_ids[:3]
        assert len(cut[text].rows) == len(expected[text].prompt_token_ids) + 2


def test_sequences_that_end_while_a_step_is_ahead_leave_nothing(
    async_engine: Any, hf: HfReference, expected: dict[str, ThinkerResult]
) -> None:
    answers = {text: Answer() for text in QUESTIONS[:3]}
    for text in answers:
        async_engine.add_sequence(text, async_engine.prepare(ask(hf, text)), REPLY, want_rows=True)
    with poisoned(async_engine, "bad"):
        answers["bad"] = Answer()
        async_engine.add_sequence("bad", async_engine.prepare(ask(hf, QUESTIONS[4])), REPLY, want_rows=True)
        while len(answers[QUESTIONS[1]].token_ids) < 5:
            for output in async_engine.step():
                answers[output.key].outputs.append(output)
        async_engine.abort(QUESTIONS[1])
        drain(async_engine, answers)
    assert answers["bad"].last.error is not None
    for text in (QUESTIONS[0], QUESTIONS[2]):
        assert_equals_hf(answers[text], expected[text])

# SPDX-License-Identifier: Apache-2.0
"""The talker's engine against HF's talker on the tiny checkpoint: greedy codes exact, whenever the rows come."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from media_samples import picture, tone
from PIL import Image
from safetensors.torch import load_file, save_file
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.engine import Sampling, TalkerPrompt
from triton_omni.errors import BadRequest, InternalError, Overloaded, TooLarge
from triton_omni.settings import EngineSettings, TalkerSettings

# vLLM's import walks over every attribute of torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_LEN = 512
GREEDY = Sampling(temperature=0.0, repetition_penalty=1.05, max_tokens=40)
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_tokens=24)


@dataclass(frozen=True)
class Case:
    """Rows of one session as a thinker would send them, and what HF needs to repeat it."""

    rows: torch.Tensor
    text_ids: torch.Tensor
    prompt_rows: int
    positions: torch.Tensor
    text_bos_id: int
    grid: torch.Tensor | None

    @property
    def prompt(self) -> TalkerPrompt:
        return TalkerPrompt(self.prompt_rows, self.positions, self.text_bos_id, max_rows=len(self.rows))


class HfTalker:
    """HF's talker with the conditioning of `Qwen2_5OmniForConditionalGeneration.generate`."""

    def __init__(self, model):
        self.talker = model.talker
        self.embed = model.thinker.get_input_embeddings()
        self.hidden = self.talker.config.embedding_size

    def case(self, seed, prompt_rows, reply_rows, text_bos_id, *, image=False):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(prompt_rows + reply_rows, self.hidden, generator=generator)
        config = self.talker.config
        ids = torch.randint(5, 200, (1, prompt_rows + 2), generator=generator)
        ids[0, prompt_rows] = text_bos_id
        grid = None
        if image:
            grid = torch.tensor([[1, 4, 6]])
            ids[0, 3] = config.vision_start_token_id
            ids[0, 4:10] = config.image_token_id
            ids[0, 10] = config.vision_end_token_id
        mask = torch.ones_like(ids)
        positions, _ = self.talker.get_rope_index(ids, grid, None, mask, False, None, None)
        return Case(rows, ids, prompt_rows, positions[:, 0].long().contiguous(), text_bos_id, grid)

    def inputs(self, case):
        config = self.talker.config
        special = torch.tensor([config.tts_text_end_token_id, config.tts_text_pad_token_id])
        reply = case.rows[case.prompt_rows :]
        first = [case.rows[: case.prompt_rows], self.embed(torch.tensor([case.text_bos_id])), reply[:1]]
        codec = [config.tts_codec_mask_token_id] * case.prompt_rows
        codec += [config.tts_codec_pad_token_id, config.tts_codec_start_token_id]
        return {
            "input_ids": torch.tensor([codec]),
            "input_text_ids": case.text_ids,
            "inputs_embeds": torch.cat(first)[None],
            "thinker_reply_part": torch.cat([reply[1:], self.embed(special)])[None],
            "image_grid_thw": case.grid,
            "attention_mask": torch.ones(1, case.prompt_rows + 2, dtype=torch.long),
        }

    @torch.no_grad()
    def codes(self, case, sampling):
        config = self.talker.config
        stops = [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
        self.talker.rope_deltas = None
        out = self.talker.generate(
            **self.inputs(case),
            suppress_tokens=[config.tts_codec_start_token_id],
            eos_token_id=stops,
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
        )[0, case.prompt_rows + 2 :].tolist()
        ends = [place for place, code in enumerate(out) if code in stops]
        return (out[: ends[0]], "stop") if ends else (out, "length")

    @torch.no_grad()
    def prompt_logits(self, case):
        self.talker.rope_deltas = None
        return self.talker(**self.inputs(case)).logits[0, -1]


@pytest.fixture(scope="module")
def talker(hf):
    return HfTalker(hf.model)


@pytest.fixture(scope="module")
def voices(tiny_checkpoint):
    speakers = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint))
    return [speakers.get(name).text_bos_id for name in speakers.names]


def schedule_ahead_on_the_cpu(monkeypatch):
    """Let vLLM schedule a step before it knows the codes of the one before, as on a GPU.

    vLLM switches that off on the CPU, where nothing runs beside the host; its logic is the same.
    """
    from triton_omni.vllm_hooks.compat import EngineArgs
    from triton_omni.vllm_hooks.waiting import WaitingAsyncScheduler

    create = EngineArgs.create_engine_config

    def create_ahead(self, *args, **kwargs):
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.scheduler_cls = WaitingAsyncScheduler
        return config

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_ahead)


def make_engine(checkpoint, *, ahead=False, **engine):
    """On a GPU, scheduling ahead goes with CUDA graphs, and step by step is the plain path."""
    from triton_omni.vllm_hooks.talker_engine import TalkerVllmEngine

    sizes = {"max_num_seqs": 8, "max_model_len": MAX_LEN, "max_num_batched_tokens": 64, **engine}
    switches = {"enforce_eager": not ahead, "async_scheduling": ahead}
    settings = TalkerSettings(dtype="float32", max_codes=400, engine=EngineSettings(**sizes, **switches))
    with pytest.MonkeyPatch.context() as monkeypatch:
        if ahead and DEVICE.type == "cpu":
            schedule_ahead_on_the_cpu(monkeypatch)
        engine = TalkerVllmEngine(checkpoint, settings, DEVICE)
    assert (engine._core.batch_queue is not None) == ahead
    return engine


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "scheduled ahead"])
def shared_engine(request, tiny_checkpoint):
    engine = make_engine(tiny_checkpoint, ahead=request.param)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    left = list(shared_engine._open)
    for key in left:
        shared_engine.abort(key)
    assert left == []
    assert not shared_engine.has_work()
    assert_nothing_held(shared_engine)


def assert_nothing_held(engine):
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.rows_used) == (0, 0, 0, 0)


class Spoken:
    """Collects what an engine gives, by key."""

    def __init__(self):
        self.codes, self.finish, self.errors = {}, {}, {}

    def step(self, engine):
        for output in engine.step():
            if output.codes is not None:
                assert output.codes.dtype == torch.int32
                assert output.codes.is_contiguous()
                self.codes.setdefault(output.key, []).extend(output.codes.tolist())
            if output.finish_reason:
                assert output.key not in self.finish
                self.finish[output.key] = output.finish_reason
            if output.error:
                self.errors[output.key] = output.error

    def drain(self, engine):
        while engine.has_work():
            self.step(engine)
        return self

    def of(self, key):
        return self.codes.get(key, []), self.finish[key]


def speak(engine, cases, samplings):
    """All cases at once with all rows there; codes and finish reason of each."""
    for number, (case, sampling) in enumerate(zip(cases, samplings, strict=True)):
        engine.open(f"s{number}", case.prompt, sampling)
        engine.feed(f"s{number}", case.rows)
        engine.end(f"s{number}")
    spoken = Spoken().drain(engine)
    return [spoken.of(f"s{number}") for number in range(len(cases))]


@pytest.fixture(scope="module")
def cases(talker, voices):
    shapes = [(5, 1), (12, 3), (20, 30), (33, 9), (7, 60), (40, 2), (16, 12), (28, 20)]
    return [
        talker.case(seed, prompt, reply, voices[seed % 2], image=seed in (3, 7))
        for seed, (prompt, reply) in enumerate(shapes)
    ]


@pytest.fixture(scope="module")
def expected(talker, cases):
    return [talker.codes(case, GREEDY) for case in cases]


def test_greedy_codes_equal_hf_one_by_one(engine, cases, expected):
    assert [speak(engine, [case], [GREEDY])[0] for case in cases] == expected


def test_greedy_codes_equal_hf_eight_at_once(engine, cases, expected):
    assert speak(engine, cases, [GREEDY] * len(cases)) == expected


def chat(medium):
    return [{"role": "user", "content": [medium, {"type": "text", "text": "and?"}]}]


def whole_replies(hf):
    """Text in both voices, an image and a sound, through all of HF's `generate`."""
    image, sound = Image.fromarray(picture(64, 48)), tone(0.5)
    inputs = [hf.ask("hello"), hf.ask("what is this?")]
    inputs.append(hf.prepare(chat({"type": "image"}), images=[image]))
    inputs.append(hf.prepare(chat({"type": "audio"}), audios=[sound]))
    return [hf.generate(asked, voice=voice, speak=False) for asked in inputs for voice in hf.voices]


def test_rows_of_whole_replies_give_the_codes_of_hf_generate(engine, hf, talker):
    replies = whole_replies(hf)
    cases = [
        Case(r.thinker.rows, None, len(r.thinker.prompt_token_ids), r.talker.positions, r.talker.text_bos_id, None)
        for r in replies
    ]
    sampling = Sampling(repetition_penalty=1.05, max_tokens=300)
    found = speak(engine, cases, [sampling] * len(cases))
    assert [tuple(codes) for codes, _ in found] == [reply.talker.codes for reply in replies]
    assert [finish == "stop" for _, finish in found] == [r.talker.sampled != r.talker.codes for r in replies]
    assert len({reply.talker.codes for reply in replies}) == len(replies)


def test_the_reference_is_not_constant(expected):
    assert len({tuple(codes) for codes, _ in expected}) == len(expected)
    assert all(len(set(codes)) > len(codes) // 2 for codes, _ in expected)


def test_rows_that_come_one_by_one_give_the_same_codes(engine, cases, expected):
    """Sessions run at different speeds, so the batch changes all the time."""
    spoken, left = Spoken(), {}
    for number, case in enumerate(cases):
        engine.open(f"s{number}", case.prompt, GREEDY)
        left[f"s{number}"] = case.rows
    turn = 0
    while left:
        for number, key in enumerate(list(left)):
            if turn % (1 + number % 3) == 0:
                engine.feed(key, left[key][:1])
                left[key] = left[key][1:]
            if not len(left[key]):
                engine.end(key)
                del left[key]
        spoken.step(engine)
        turn += 1
    spoken.drain(engine)
    assert [spoken.of(f"s{number}") for number in range(len(cases))] == expected


def test_a_code_is_given_as_soon_as_its_row_is_there(engine, cases, expected):
    case, spoken = cases[2], Spoken()
    engine.open("s", case.prompt, GREEDY)
    engine.feed("s", case.rows[: case.prompt_rows])
    spoken.drain(engine)
    assert spoken.codes == {}
    for count in range(1, 6):
        engine.feed("s", case.rows[case.prompt_rows + count - 1][None])
        spoken.drain(engine)
        assert spoken.codes["s"] == expected[2][0][:count]
        assert not engine.has_work()
    engine.abort("s")


def test_sequences_that_wait_do_not_hold_up_the_others(engine, cases, expected):
    waiting, ready, spoken = cases[2], cases[3], Spoken()
    engine.open("waiting", waiting.prompt, GREEDY)
    engine.feed("waiting", waiting.rows[: waiting.prompt_rows + 2])
    engine.open("ready", ready.prompt, GREEDY)
    engine.feed("ready", ready.rows)
    engine.end("ready")
    spoken.drain(engine)
    assert spoken.of("ready") == expected[3]
    assert spoken.codes["waiting"] == expected[2][0][:2]
    engine.feed("waiting", waiting.rows[waiting.prompt_rows + 2 :])
    engine.end("waiting")
    assert spoken.drain(engine).of("waiting") == expected[2]


def test_a_prompt_longer_than_a_step_is_prefilled_in_parts(talker, voices, engine):
    case = talker.case(21, 150, 10, voices[0])
    assert speak(engine, [case], [GREEDY]) == [talker.codes(case, GREEDY)]


def test_media_positions_matter(engine, talker, cases, expected):
    """Positions of an image differ by axis; plain text positions give other codes."""
    case = cases[3]
    assert not torch.equal(case.positions[0], case.positions[1])
    flat = Case(case.rows, case.text_ids, case.prompt_rows, torch.arange(35).expand(3, -1), case.text_bos_id, None)
    assert speak(engine, [flat], [GREEDY]) != [expected[3]]


def test_the_voice_matters(engine, cases, voices, expected):
    case = cases[2]
    other = Case(case.rows, case.text_ids, case.prompt_rows, case.positions, voices[1], None)
    assert case.text_bos_id == voices[0]
    assert speak(engine, [other], [GREEDY]) != [expected[2]]


def test_prompt_logits_are_within_tolerance_of_hf(engine, talker, cases, monkeypatch):
    seen = []
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    adjust = runner._adjust
    monkeypatch.setattr(
        runner, "_adjust", lambda logits, *rest: (seen.append(logits.clone()), adjust(logits, *rest))[1]
    )
    speak(engine, [cases[3]], [Sampling(max_tokens=1)])
    torch.testing.assert_close(seen[0][0].cpu(), talker.prompt_logits(cases[3]), rtol=0, atol=2e-5)


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


@pytest.mark.parametrize("verb", ["feed", "end", "abort"])
def test_unknown_keys_are_ignored(engine, verb, cases):
    getattr(engine, verb)("nobody", *([cases[0].rows] if verb == "feed" else []))
    assert not engine.has_work()


def test_a_seed_draws_the_same_alone_and_among_others(engine, cases):
    samplings = [Sampling(**{**SAMPLED.__dict__, "seed": seed}) for seed in range(8)]
    together = speak(engine, cases, samplings)
    backwards = speak(engine, cases[::-1], samplings[::-1])[::-1]
    alone = [speak(engine, [case], [sampling])[0] for case, sampling in zip(cases, samplings, strict=True)]
    assert together == alone == backwards


def test_seeds_differ_and_repeat(engine, cases):
    samplings = [Sampling(**{**SAMPLED.__dict__, "seed": seed}) for seed in (1, 2, 1, 3)]
    first, second, again, third = speak(engine, [cases[2]] * 4, samplings)
    assert first == again
    assert len({tuple(codes) for codes, _ in (first, second, third)}) == 3


def test_seeded_sequences_make_no_generators(engine, cases):
    engine.open("s", cases[2].prompt, SAMPLED)
    engine.feed("s", cases[2].rows)
    engine.step()
    batch = engine._core.model_executor.driver_worker.worker.model_runner.input_batch
    assert batch.num_reqs == 1
    assert not batch.generators
    engine.abort("s")
    Spoken().drain(engine)


def test_greedy_is_untouched_by_sampled_neighbours(engine, cases, expected):
    samplings = [GREEDY if number % 2 else SAMPLED for number in range(8)]
    assert speak(engine, cases, samplings)[1::2] == expected[1::2]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_filters_that_leave_one_code_are_greedy(engine, cases, expected, filters):
    sampling = Sampling(temperature=1.5, repetition_penalty=1.05, max_tokens=40, seed=11, **filters)
    assert speak(engine, cases, [sampling] * len(cases)) == expected


def test_only_codes_of_the_codec_and_the_stop_ids_can_be_drawn(engine, tiny_checkpoint):
    config = load_config(tiny_checkpoint)
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    logits = torch.zeros(1, config.talker.decoder.vocab_size, device=DEVICE)
    slots = torch.tensor([engine._rows.idle_slot], device=DEVICE)
    adjusted = runner._adjust(logits, slots, torch.tensor([True], device=DEVICE))
    drawable = set(adjusted[0].isfinite().nonzero().flatten().tolist())
    assert drawable == {*range(config.codec.largest_code + 1), *config.talker.stop_ids}


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


@pytest.mark.parametrize("end", ["by itself", "by abort"])
def test_a_sequence_that_overflows_inside_the_network_fails_alone(engine, cases, expected, end):
    """Others get its cache blocks next, and attention multiplies what lies behind their last position by zero."""
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


def test_more_sequences_than_a_step_holds_take_turns(engine, cases, expected):
    assert speak(engine, cases * 2, [GREEDY] * 16) == expected * 2


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
    with pytest.raises(TooLarge, match="510 prompt tokens"):
        engine.open("s", prompt, GREEDY)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=-1.0), Sampling(top_p=0.0), Sampling(repetition_penalty=0.0), Sampling(max_tokens=0)],
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

# SPDX-License-Identifier: Apache-2.0
"""Helpers of the talker's tests: sessions as a thinker sends them, HF's talker, engines of the tiny checkpoint."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from PIL import Image
from transformers import LogitsProcessorList

from importing import more_is_imported
from media_samples import picture, tone
from reference.hf import AdditivePenalties
from triton_omni.core.settings import TalkerEngineSettings, TalkerSettings
from triton_omni.session.engine import Sampling, TalkerPrompt

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
        self._codes = {}

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

    def codes(self, case, sampling):
        """Greedy ones, and why they end; asked for again they are told again."""
        if (case, sampling) not in self._codes:
            self._codes[case, sampling] = self._generate(case, sampling)
        return self._codes[case, sampling]

    @torch.no_grad()
    def _generate(self, case, sampling):
        config = self.talker.config
        stops = [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]
        self.talker.rope_deltas = None
        additive = AdditivePenalties(sampling, case.prompt_rows + 2)
        out = self.talker.generate(
            **self.inputs(case),
            suppress_tokens=[config.tts_codec_start_token_id],
            eos_token_id=stops,
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
            logits_processor=LogitsProcessorList([additive]),
        )[0, case.prompt_rows + 2 :].tolist()
        ends = [place for place, code in enumerate(out) if code in stops]
        return (out[: ends[0]], "stop") if ends else (out, "length")

    @torch.no_grad()
    def prompt_logits(self, case):
        self.talker.rope_deltas = None
        return self.talker(**self.inputs(case)).logits[0, -1]

    @torch.no_grad()
    def logits(self, case, count):
        """`count` greedy codes, and the logits [count, V] that each is the largest of."""
        self.talker.rope_deltas = None
        out = self.talker.generate(
            **self.inputs(case),
            suppress_tokens=[self.talker.config.tts_codec_start_token_id],
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return out.sequences[0, case.prompt_rows + 2 :].tolist(), torch.cat(out.logits)


def schedule_ahead_on_the_cpu(monkeypatch):
    """Let vLLM schedule a step before it knows the codes of the one before, as on a GPU.

    vLLM switches that off on the CPU, where nothing runs beside the host; its logic is the same.
    """
    from triton_omni.vllm_hooks.shared.compat import EngineArgs
    from triton_omni.vllm_hooks.talker.schedulers import scheduler_name

    create = EngineArgs.create_engine_config

    def create_ahead(self, *args, **kwargs):
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = True
        cached = config.cache_config.enable_prefix_caching
        config.scheduler_config.scheduler_cls = scheduler_name(ahead=True, prefix_caching=cached)
        return config

    monkeypatch.setattr(EngineArgs, "create_engine_config", create_ahead)


@functools.cache
def engine_class():
    """Ours, imported with vLLM."""
    from triton_omni.vllm_hooks.talker.engine import TalkerVllmEngine

    more_is_imported()
    return TalkerVllmEngine


def make_engine(checkpoint, *, ahead=False, dtype="float32", max_codes=400, prefix_caching=False, **engine):
    """On a GPU, scheduling ahead goes with CUDA graphs, and step by step is the plain path."""
    sizes = {"max_num_seqs": 8, "max_model_len": MAX_LEN, "max_num_batched_tokens": 64, **engine}
    switches = {"enforce_eager": not ahead, "async_scheduling": ahead}
    settings = TalkerSettings(
        dtype=dtype,
        max_codes=max_codes,
        prefix_caching=prefix_caching,
        engine=TalkerEngineSettings(**sizes, **switches),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        if ahead and DEVICE.type == "cpu":
            schedule_ahead_on_the_cpu(monkeypatch)
        engine = engine_class()(checkpoint, settings, DEVICE)
    assert (engine._core.batch_queue is not None) == ahead
    return engine


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


def chat(medium):
    return [{"role": "user", "content": [medium, {"type": "text", "text": "and?"}]}]


@functools.cache
def whole_replies(hf):
    """Text in both voices, an image and a sound, through all of HF's `generate`."""
    image, sound = Image.fromarray(picture(64, 48)), tone(0.5)
    inputs = [hf.ask("hello"), hf.ask("what is this?")]
    inputs.append(hf.prepare(chat({"type": "image"}), images=[image]))
    inputs.append(hf.prepare(chat({"type": "audio"}), audios=[sound]))
    return [hf.generate(asked, voice=voice, speak=False) for asked in inputs for voice in hf.voices]


def feed_one_by_one(engine, rows_of, spoken):
    """Feed the rows of open sequences until each has all. They run at different speeds: the batch changes all the
    time."""
    left, turn = dict(rows_of), 0
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

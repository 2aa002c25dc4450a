# SPDX-License-Identifier: Apache-2.0
"""The talker's training: samples as a server would feed them, a forward pass equal to HF's, guided attention."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from training.bank import UNKNOWN, Bank, Doc, VoiceCodes
from training.codes import FEATURES, neighbours
from training.exam import Task
from training.parts import part
from training.sampling import Sampling, speak
from training.schedule import adamw, descend, set_rate
from training.sizes import TOY, VOCAB, VOICES
from training.talker import Guide, Teacher, embed, new_talker, run, thinker_rows
from training.talker_data import NO_TARGET, Sample, Shape, collate, draw, grouped, shapes
from training.tokens import encode

PROMPT = encode("Hello, what do you see?")
TEXTS = ["The cat is red.", "A dog sleeps.", "We go home."]


@pytest.fixture(name="bank")
def _bank():
    voices, length = {}, torch.tensor([20, 14, 17])
    for voice in VOICES:
        codes = torch.randint(1, 60, (51,), generator=torch.Generator().manual_seed(voice.bos)).short()
        where = torch.cat([torch.linspace(0, 3, int(one)).short() for one in length])
        voices[voice.flite] = VoiceCodes(codes, length.cumsum(0) - length, length, where, where)
    first, later = [encode(text) for text in TEXTS], [encode(" " + text) for text in TEXTS]
    return Bank(TEXTS, first, later, [Doc(PROMPT, [0, 2])], voices)


def test_a_reply_is_its_sentences_in_order(bank):
    rng = random.Random(0)
    for _ in range(20):
        sample = draw(bank, rng, longest=1000)
        assert sample is not None
        assert len(sample.codes) == len(sample.spoken)
        assert len(sample.reply) < len(sample.codes)
        assert sample.spoken.max() < len(sample.reply)
        if sample.prompt == PROMPT:
            assert sample.reply == encode(f"{TEXTS[0]} {TEXTS[2]}")
            assert len(sample.codes) == 37


def test_sentences_beyond_the_longest_reply_are_left_out(bank):
    lengths = {len(sample.codes) for _ in range(40) if (sample := draw(bank, random.Random(_), longest=30))}
    assert max(lengths) <= 31


def test_a_batch_is_what_a_server_feeds():
    sample = Sample([5, 6, 7, 8], [11, 12], np.array([31, 32, 33]), np.array([0, UNKNOWN, 1]), VOICES[0].bos, 3, 7)
    batch = collate([sample], Shape(1, 16, 8))
    length, texts = 3 + 2 + 3, 8
    assert batch.ids[0, :6].tolist() == [5, 6, 7, 8, 11, 12]
    # Prompt's last rows; the speaker's bos; the reply's two rows, text eos, text pad.
    assert batch.row[0, :length].tolist() == [1, 2, 3, texts + 2, 4, 5, texts, texts + 1]
    assert batch.code[0, :length].tolist() == [0, 0, 0, VOCAB.codec_pad, VOCAB.codec_bos, 31, 32, 33]
    assert batch.has_code[0, :length].tolist() == [False] * 3 + [True] * 5
    assert batch.target[0, :length].tolist() == [NO_TARGET] * 4 + [31, 32, 33, VOCAB.codec_eos]
    assert batch.attend[0, :length].tolist() == [UNKNOWN] * 4 + [4, UNKNOWN, 5, UNKNOWN]
    assert batch.position[0, :5].tolist() == [0, 1, 2, 10, 11]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_batches_have_the_first_shape_that_holds_their_samples(rows):
    one = Sample([1], [2], np.arange(1, 8), np.zeros(7, np.int64), 0, 1, 0)
    pool = [replace(one, codes=np.arange(n), spoken=np.zeros(n, np.int64)) for n in (5, 9, 20, 5, 21, 9, 40, 6)]
    found = [Shape(rows, 10, 8), Shape(rows, 24, 8)]
    groups = list(grouped(pool, found))
    assert all(len(group) == rows and all(shape.holds(sample) for sample in group) for shape, group in groups)
    short = [sample for shape, group in groups if shape == found[0] for sample in group]
    assert short == [sample for sample in pool if sample.length <= 10][: len(short)]
    assert len(groups) == 3 // rows + 4 // rows
    # A long text needs a longer shape, too.
    assert not found[1].holds(replace(one, prompt=[1] * 9))


def test_each_shape_has_about_the_same_positions():
    assert all(0.8 * 48_000 < shape.rows * shape.length <= 48_000 for shape in shapes(48_000, toy=False))


@pytest.fixture(name="networks")
def _networks():
    torch.manual_seed(1)
    thinker = part("thinker", TOY)
    return new_talker(TOY).eval(), thinker.model.eval().requires_grad_(False)


def test_the_forward_pass_is_hfs(networks):
    talker, text = networks
    sample = Sample([5, 6, 7, 8], [11, 12], np.array([31, 32, 33]), np.array([0, 0, 1]), VOICES[1].bos, 4, 0)
    batch = collate([sample], Shape(1, 32, 16)).to(torch.device("cpu"))
    rows = thinker_rows(text, batch.ids, batch.bos)
    embeds = embed(talker, rows, batch, neighbours(torch.randn(60, FEATURES)), torch.zeros(()))
    hidden, _loss = run(talker, embeds, batch.position, Guide.of(TOY), batch.attend)
    wanted = talker.model(
        inputs_embeds=talker.thinker_to_talker_proj(embeds),
        position_ids=batch.position.unsqueeze(0).expand(3, -1, -1),
    ).last_hidden_state
    torch.testing.assert_close(hidden, wanted, atol=1e-5, rtol=1e-4)


def test_losses_fall_and_logits_stay_centered(networks, bank):
    talker, text = networks
    rng = random.Random(3)
    samples = [sample for _ in range(6) if (sample := draw(bank, rng, 60))]
    batch = collate(samples, Shape(len(samples), 320, 256)).to(torch.device("cpu"))
    teacher = Teacher(text, Guide.of(TOY), neighbours(torch.randn(60, FEATURES)))
    optimizer = adamw(talker.parameters())
    set_rate(optimizer, 3e-3)
    found = []
    for _ in range(60):
        losses = teacher.losses(talker, batch, torch.zeros(()))
        descend(optimizer, losses.total, 1.0)
        found.append({name: float(value.detach()) for name, value in vars(losses).items()})
    for name, part_left in (("code", 0.7), ("guide", 0.7), ("center", 0.9)):
        assert found[-1][name] < part_left * found[0][name], name


def test_a_repetition_penalty_hardly_changes_centered_logits():
    logits = torch.log_softmax(torch.randn(1, VOCAB.codec_size, generator=torch.Generator().manual_seed(4)) * 4, -1)
    seen = torch.zeros(1, VOCAB.codec_size, dtype=torch.bool)
    seen[0, logits[0].argmax()] = True
    drawn = [
        sampling.draw(logits.repeat(300, 1), seen.repeat(300, 1), torch.Generator().manual_seed(5))
        for sampling in (Sampling(), Sampling(penalty=1.0))
    ]
    assert float((drawn[0] == drawn[1]).float().mean()) > 0.95


def test_replies_end_where_the_talker_ends_them(networks):
    talker, text = networks
    tasks = [Task("say_x_0", words, voice, encode("Say it")) for words, voice in zip(TEXTS, VOICES, strict=False)]
    with torch.no_grad():
        talker.codec_head.weight.zero_()
        talker.codec_head.weight[VOCAB.codec_eos] = 0
    found = speak(talker, text, tasks, Sampling(top_k=VOCAB.codec_size, top_p=1.0), limit=3)
    assert len(found) == 2
    assert all(one is None or len(one) < 3 for one in found)

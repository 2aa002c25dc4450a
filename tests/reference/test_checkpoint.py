# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint under HF: loads whole, and gives outputs by which a wrong implementation can be told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reference.hf import SAMPLED_TALKER, HfReference, Reply, loading_info
from triton_omni.checkpoint.config import OmniConfig, load_config
from triton_omni.session.engine import Sampling

PROMPTS = ("Hello", "What is the capital of France?", "1+1=?", "Write a poem", "Who are you?", "ok")


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return load_config(tiny_checkpoint)


@pytest.fixture(scope="module")
def replies(hf: HfReference) -> list[Reply]:
    long = Sampling(max_tokens=200)
    talk = Sampling(repetition_penalty=1.05, max_tokens=600)
    return [hf.generate(hf.ask(text), thinker=long, talker=talk, speak=False) for text in PROMPTS]


def stops(config: OmniConfig) -> set[int]:
    """Codec ids that end the speech."""
    return {config.talker.codec_pad_id, config.talker.codec_eos_id}


def test_hf_loads_it_without_missing_or_unexpected_keys(tiny_checkpoint: Path) -> None:
    assert not any(loading_info(tiny_checkpoint).values())


def test_greedy_replies_differ_vary_and_end_by_themselves(replies: list[Reply], config: OmniConfig) -> None:
    tokens = [reply.thinker.token_ids for reply in replies]
    assert len(set(tokens)) == len(PROMPTS)
    assert all(ids[-1] in config.thinker.eos_token_ids for ids in tokens)
    assert all(8 <= len(ids) <= 80 for ids in tokens)
    assert all(len(set(ids)) > len(ids) // 4 for ids in tokens)


def test_greedy_codes_differ_vary_and_end_by_themselves(replies: list[Reply], config: OmniConfig) -> None:
    codes = [reply.talker.codes for reply in replies]
    assert len(set(codes)) == len(PROMPTS)
    assert all(reply.talker.sampled[-1] in stops(config) for reply in replies)
    assert all(20 <= len(found) <= 400 for found in codes)
    assert all(len(set(found)) > 10 for found in codes)


def test_ids_outside_the_codec_are_far_below_every_code(replies: list[Reply], config: OmniConfig) -> None:
    table = config.codec.largest_code + 1
    outside = [i for i in range(table, config.talker.decoder.vocab_size) if i not in stops(config)]
    for reply in replies:
        gap = reply.talker.logits[:, :table].amin(1) - reply.talker.logits[:, outside].amax(1)
        assert gap.min() > 50


def test_sampled_codes_stay_in_the_codec(hf: HfReference, config: OmniConfig) -> None:
    for seed in range(4):
        reply = hf.generate(hf.ask("Sing"), thinker=Sampling(seed=seed), talker=SAMPLED_TALKER, speak=False)
        assert max(reply.talker.codes) <= config.codec.largest_code


def test_rows_and_positions_have_one_entry_a_token(replies: list[Reply], config: OmniConfig) -> None:
    for reply in replies:
        prompt, count = len(reply.thinker.prompt_token_ids), len(reply.thinker.token_ids)
        assert reply.thinker.rows.shape == (prompt + count - 1, config.thinker.decoder.hidden_size)
        assert reply.thinker.positions.shape == (3, prompt)
        assert reply.talker.positions.shape == (3, prompt + 2)


def test_speech_is_audible_unclipped_and_follows_codes_voice_and_noise(hf: HfReference) -> None:
    codes = [5, 100, 7, 180, 42, 3, 99, 64, 11, 150, 77, 20, 8, 1]
    speech = hf.token2wav(codes)
    assert speech.waveform.shape == (len(codes) * 480,)
    assert speech.waveform.std() > 0.02
    assert (speech.waveform.abs() >= 1).float().mean() < 0.001
    others = (
        hf.token2wav(codes[::-1], noise=speech.noise),
        hf.token2wav(codes, "Ethan", noise=speech.noise),
        hf.token2wav(codes, seed=1),
    )
    assert all((other.mel - speech.mel).abs().mean() > 0.01 for other in others)
    assert torch.equal(hf.token2wav(codes, noise=speech.noise).waveform, speech.waveform)
    assert torch.equal(hf.vocode(speech.mel), speech.waveform)

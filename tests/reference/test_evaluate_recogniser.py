# SPDX-License-Identifier: Apache-2.0
"""A Whisper of random weights as the recogniser of an evaluation, by transformers' own pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.evaluate.recognising import recogniser

SPECIAL = ["endoftext", "startoftranscript", "en", "transcribe", "translate", "nospeech", "notimestamps"]
TIMES = [f"{step / 50:.2f}" for step in range(1501)]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one narrow layer."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizer,
    )

    folder = tmp_path_factory.mktemp("whisper")
    tokens = [*"abcdefghijklmnopqrstuvwxyz\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"]
    tokens += [f"<|{name}|>" for name in [*SPECIAL, *TIMES]]
    numbers = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = WhisperTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    end = {f"{name}_token_id": numbers["<|endoftext|>"] for name in ("eos", "bos", "pad")}
    start = {"decoder_start_token_id": numbers["<|startoftranscript|>"]}
    sizes = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in SIZES.items()}
    config = WhisperConfig(vocab_size=len(tokens), d_model=16, max_target_positions=20, **sizes, **end, **start)
    model = WhisperForConditionalGeneration(config)
    without_times = numbers["<|notimestamps|>"]
    model.generation_config = GenerationConfig(max_length=12, no_timestamps_token_id=without_times, **end, **start)
    model.save_pretrained(folder)
    return folder


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", [0.5, 3, 45])
def test_a_whisper_hears_replies_of_any_length(whisper: Path, seconds: float) -> None:
    sound = np.random.default_rng(0).normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32)
    with recogniser(str(whisper), [], []) as listener:
        assert all(isinstance(word, str) for word in listener.hear(sound))
        assert listener.name == str(whisper)

# SPDX-License-Identifier: Apache-2.0
"""Sound in pieces: the features of the whole but for quiet values before something louder, and a start that stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from media_samples import audio_file, tone
from preprocessors import preprocessors
from reference.hf import HfReference
from reference.test_thinker_prefix_cache import hits
from reference.thinker_rig import NOTHING_HELD, assert_equals_hf, engine_of, run
from triton_omni.checkpoint.facts import SoundWindow
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import Sampling, ThinkerPlaced
from triton_omni.thinker.preprocessing import Preprocessor
from triton_omni.thinker.request_media import divide
from triton_omni.vllm_hooks.thinker.media_processor import FLOOR

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

REPLY = Sampling(max_tokens=8, min_tokens=8)
WINDOW = SoundWindow(frames=200, hop=160, reach=200)
LENGTHS = [1600, 31_840, 32_000, 32_001, 32_320, 32_480, 47_000, 64_000, 64_321, 100_000]


def speech(samples: int, *, seed: int = 0, growing: bool = False) -> np.ndarray:
    """Noise in bursts with pauses, as loud as 16 bits can hold; `growing`: from a thousandth on."""
    generator = np.random.default_rng(seed)
    time = np.arange(samples) / 16_000
    loudness = 10 ** (time / 2 - 3) if growing else np.ones(samples)
    bursts = (np.sin(2 * np.pi * 1.7 * time) > -0.5) * generator.normal(0, 0.1, samples)
    wave = np.clip(loudness * (tone(samples / 16_000)[:samples] / 4 + bursts), -1, 1)
    return (np.round(wave * 32767) / 32768).astype(np.float32)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Any]:
    with engine_of(tiny_checkpoint, ahead=False, prefix_caching=True) as made:
        yield made
        assert made.stats() == NOTHING_HELD


@pytest.fixture(scope="module")
def make_preprocessor(engine: Any, tiny_checkpoint: Path) -> Iterator[Callable[..., tuple[Preprocessor, Any]]]:
    with preprocessors(tiny_checkpoint, lambda: engine) as make:
        yield make


@pytest.fixture
def prepare(engine: Any, make_preprocessor: Callable[..., tuple[Preprocessor, Any]]) -> Callable[..., ThinkerPlaced]:
    assert engine._core.scheduler.reset_prefix_cache()
    preprocessor, _ = make_preprocessor(max_new_tokens=8, prefix_caching=True)

    def preprocessed(*sounds: np.ndarray, **parameters: Any) -> ThinkerPlaced:
        content = [{"type": "audio"} for _ in sounds]
        raw = RawRequest(
            messages=json.dumps([{"role": "user", "content": content}]).encode(),
            media=[audio_file(samples=sound) for sound in sounds],
            sampling_parameters=json.dumps({"audio_in_pieces": True} | parameters).encode(),
        )
        return preprocessor.preprocess(raw, 0).placed

    return preprocessed


def mels(placed: ThinkerPlaced) -> list[torch.Tensor]:
    return [item["input_audio_features"].data for item in placed.engine_input["mm_kwargs"]["audio"]]


@pytest.mark.parametrize("samples", LENGTHS)
def test_windows_cover_a_sound_and_tell_where_they_lie(samples: int) -> None:
    sound = speech(samples)
    pieces = list(divide(sound, WINDOW))
    joined = np.concatenate([own for _, own, _ in pieces])
    assert np.array_equal(joined, sound[: len(joined)])
    assert len(sound) - len(joined) <= 2 * WINDOW.hop
    for number, (context, own, _) in enumerate(pieces):
        before = min(number, 1) * WINDOW.margin * WINDOW.hop
        assert np.array_equal(context[before : before + len(own)], own)


def test_a_digest_tells_all_that_the_features_depend_on() -> None:
    sound = speech(100_000)
    digests = [digest for _, _, digest in divide(sound, WINDOW)]
    for changed in (0, 31_999, 32_200, 64_100, 99_999):
        other = sound.copy()
        other[changed] += 0.25
        same = [one == two for one, (_, _, two) in zip(digests, divide(other, WINDOW), strict=True)]
        # A window reaches the samples of the next one's first frames.
        assert same == [changed >= end for end in (32_320, 64_320, 96_320, 128_000)]


@pytest.mark.parametrize("samples", LENGTHS)
@pytest.mark.parametrize("growing", [False, True], ids=["even", "growing"])
def test_features_are_those_of_the_whole_above_its_floor(
    prepare: Callable[..., ThinkerPlaced], samples: int, growing: bool
) -> None:
    sound = speech(samples, growing=growing)
    (whole,), pieces = mels(prepare(sound, audio_in_pieces=False)), torch.cat(mels(prepare(sound)), dim=1)
    assert 0 <= whole.shape[1] - pieces.shape[1] < 3
    whole = whole[:, : pieces.shape[1]]
    floor = whole.max() - FLOOR
    torch.testing.assert_close(pieces.clamp(min=float(floor)), whole, rtol=0, atol=1e-5)


def test_places_are_those_of_the_whole(prepare: Callable[..., ThinkerPlaced]) -> None:
    for samples in LENGTHS:
        sounds = speech(samples), speech(20_000, seed=1)
        whole, pieces = prepare(*sounds, audio_in_pieces=False), prepare(*sounds)
        assert pieces.prompt_token_ids == whole.prompt_token_ids
        assert torch.equal(pieces.positions, whole.positions)


def test_a_reply_to_pieces_is_that_to_the_whole(
    engine: Any, hf: HfReference, prepare: Callable[..., ThinkerPlaced]
) -> None:
    """Loud from the start, the whole and its pieces have the same floor."""
    sound = speech(70_000)
    sound[:400] = np.round(tone(0.025) * 32767) / 32768
    placed = prepare(sound)
    assert len(mels(placed)) == 3
    features = hf.prepare([{"role": "user", "content": [{"type": "audio"}]}], audios=[sound])
    ids = torch.tensor([placed.prompt_token_ids])
    expected = hf.thinker({**features, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, REPLY)
    assert_equals_hf(run(engine, {"pieces": placed}, REPLY)["pieces"], expected)


def test_the_start_of_a_sound_is_found_however_it_goes_on(engine: Any, prepare: Callable[..., ThinkerPlaced]) -> None:
    """Growing, so that each piece is louder than those before."""
    sound, block = speech(150_000, growing=True), engine._core.scheduler.block_size
    plain = run(engine, {"plain": prepare(sound)}, REPLY)["plain"]
    known = 0
    for end in (32_320, 64_320, 128_320, 150_000):
        placed = prepare(sound[:end], cache_salt="a speaker")
        with hits(engine) as found:
            answer = run(engine, {"turn": placed}, REPLY)["turn"]
        assert known - block < found["turn"] <= known
        first = placed.engine_input["mm_placeholders"]["audio"][0].offset
        known = first + end // 32_000 * 50
    assert answer.token_ids == plain.token_ids
    torch.testing.assert_close(answer.rows, plain.rows, rtol=2e-5, atol=2e-5)


def test_pieces_are_processed_once(
    engine: Any, prepare: Callable[..., ThinkerPlaced], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, processed = engine._media, []
    given = processor._processed

    def counted(kind: str, medium: np.ndarray) -> Any:
        processed.append(len(medium))
        return given(kind, medium)

    monkeypatch.setattr(processor, "_processed", counted)
    sound = speech(100_000)
    for end, new in ((32_320, [32_320]), (64_320, [32_640]), (100_000, [32_640, 4320]), (100_000, [])):
        processed.clear()
        found = prepare(sound[:end], cache_salt="a speaker")
        assert processed == new
    again = prepare(sound, cache_salt="another")
    assert all(torch.equal(one, two) for one, two in zip(mels(found), mels(again), strict=True))

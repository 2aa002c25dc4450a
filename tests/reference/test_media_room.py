# SPDX-License-Identifier: Apache-2.0
"""Room for encoded media: as much as a prompt may be long, taken for a video and its sound together, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from media_samples import picture, tone
from reference.hf import HfReference
from reference.thinker_rig import NOTHING_HELD, Answer, engine_of, token_ids
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SHORT = Sampling(max_tokens=4)
LENGTH = 1024
MANY_STEPS = 100
"""Steps that are enough to answer every prompt here."""


def video(frames: int) -> np.ndarray:
    return np.stack([picture(64, 48, seed) for seed in range(frames)])


def heard_video(hf: HfReference) -> ThinkerPrompt:
    """560 tokens of a video and 100 of its sound, which begin at one token."""
    media = {"video": [video(8)], "audio": [tone(4.0)]}
    return ThinkerPrompt(token_ids(hf, {"type": "video"}), media, {"use_audio_in_video": True})


@pytest.fixture(params=[False, True], ids=["step by step", "scheduled ahead"])
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[Any]:
    """An engine whose vLLM thinks that no medium has more tokens than a step."""
    from triton_omni.vllm_hooks.thinker.media_processor import ProcessingInfo

    sizes = {"image": 64, "audio": 64, "video": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessingInfo, "get_mm_max_tokens_per_item", lambda *_, **__: sizes)
        with engine_of(tiny_checkpoint, ahead=request.param, max_model_len=LENGTH) as made:
            yield made
            assert made.stats() == NOTHING_HELD


def answer(engine: Any, key: str, answers: dict[str, Answer]) -> Answer:
    for _ in range(MANY_STEPS):
        for output in engine.step():
            answers[output.key].outputs.append(output)
    assert not engine.has_work()
    return answers[key]


def test_a_prompt_may_be_media_to_its_end(engine: Any, hf: HfReference) -> None:
    scheduler = engine._core.scheduler
    assert scheduler.encoder_cache_manager.cache_size == scheduler.max_num_encoder_input_tokens == LENGTH
    engine.add_sequence("film", engine.prepare(heard_video(hf)), SHORT, want_rows=True)
    found = answer(engine, "film", {"film": Answer()})
    assert (found.last.error, len(found.token_ids)) == (None, 4)


def test_a_video_waits_with_its_sound_for_room_that_others_have(engine: Any, hf: HfReference) -> None:
    media, answers = engine._core.scheduler.encoder_cache_manager, {"film": Answer()}
    engine.add_sequence("film", engine.prepare(heard_video(hf)), SHORT, want_rows=True)
    # Enough for the video alone.
    taken = LENGTH - 600
    media.num_free_slots -= taken
    media.num_freeable_slots -= taken
    for _ in range(8):
        answers["film"].outputs.extend(engine.step())
    assert not media.cached
    assert not engine._runner.encoder_cache
    media.num_free_slots += taken
    media.num_freeable_slots += taken
    assert len(answer(engine, "film", answers).token_ids) == 4


def test_of_media_that_were_read_nothing_stays(engine: Any, hf: HfReference) -> None:
    media = engine._core.scheduler.encoder_cache_manager
    for key in ("whole", "dropped"):
        engine.add_sequence(key, engine.prepare(heard_video(hf)), SHORT, want_rows=True)
    answers = {"whole": Answer(), "dropped": Answer()}
    kept = 0
    for _ in range(5):
        for output in engine.step():
            answers[output.key].outputs.append(output)
        kept = max(kept, len(engine._runner.encoder_cache))
    engine.abort("dropped")
    answer(engine, "whole", answers)
    assert kept
    assert not engine._runner.encoder_cache
    assert (media.cached, media.num_embeds_by_hash) == ({}, {})
    assert media.num_free_slots == media.num_freeable_slots == LENGTH

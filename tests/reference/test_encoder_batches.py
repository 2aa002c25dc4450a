# SPDX-License-Identifier: Apache-2.0
"""Media of requests that come together go through each encoder together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from media_samples import picture, tone
from reference.hf import HfReference
from reference.thinker_rig import (
    NOTHING_HELD,
    REPLY,
    ROW_TOLERANCE,
    Answer,
    ask,
    engine_of,
    make_engine,
    run,
    token_ids,
)
from triton_omni.session.engine import ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def about(hf: HfReference, kind: str, medium: Any) -> ThinkerPrompt:
    ids = token_ids(hf, {"type": kind}, {"type": "text", "text": "what is this?"})
    return ThinkerPrompt(ids, {kind: [medium]})


def clip(frames: int, width: int = 84, height: int = 56) -> np.ndarray:
    """uint8 [frames, height, width, 3]"""
    return np.stack([picture(width, height, seed=seed) for seed in range(frames)])


def test_requests_that_come_together_share_each_encoders_pass(tiny_checkpoint: Path, hf: HfReference) -> None:
    prompts = {
        "small image": about(hf, "image", Image.fromarray(picture(56, 56))),
        "short sound": about(hf, "audio", tone(0.6)),
        "large image": about(hf, "image", Image.fromarray(picture(112, 84, seed=3))),
        "long sound": about(hf, "audio", tone(1.5)),
        "small video": about(hf, "video", clip(4, 56, 56)),
        "large video": about(hf, "video", clip(6)),
    }
    engine = make_engine(tiny_checkpoint, max_num_batched_tokens=1024)
    passes: list[tuple[str, int]] = []
    for name in ("visual", "audio_tower"):
        getattr(engine._model, name).register_forward_pre_hook(
            lambda _, given, name=name: passes.append((name, len(given[0]) if name == "visual" else 0))
        )
    together, shared = run(engine, prompts), sorted(passes)
    passes.clear()
    alone = {key: run(engine, {key: prompt})[key] for key, prompt in prompts.items()}
    patches = dict(zip(prompts, (count for _, count in passes), strict=True))
    images, videos = (patches[f"small {kind}"] + patches[f"large {kind}"] for kind in ("image", "video"))
    assert shared == [("audio_tower", 0), ("visual", images), ("visual", videos)]
    assert_answers_are(together, alone, set(prompts))
    assert all(REPLY.max_tokens >= len(answer.token_ids) > 0 for answer in alone.values())
    engine.close()


def test_the_vision_tower_has_run_before_the_first_image(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton_omni.vllm_hooks.thinker.networks import ThinkerNetwork

    embed, seen = ThinkerNetwork.embed_multimodal, []
    monkeypatch.setattr(ThinkerNetwork, "embed_multimodal", lambda self, **kwargs: seen.append(embed(self, **kwargs)))
    make_engine(tiny_checkpoint).close()
    ((embedding,),) = seen
    assert embedding.shape[0] == 1
    assert embedding.isfinite().all()


PATCHES = {"small image": 16, "large image": 96}
"""Patches of the vision tower, 14 x 14 pixels each."""


@contextmanager
def room_for(engine: Any, patches: int) -> Iterator[list[int]]:
    """A device that has memory for so many patches of images in one pass; gives what was asked of it."""
    asked: list[int] = []

    def allocate(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        asked.append(len(arguments[0]))
        if asked[-1] > patches:
            raise torch.OutOfMemoryError("tried to allocate too much")

    hook = engine._model.visual.register_forward_pre_hook(allocate)
    yield asked
    hook.remove()


@pytest.fixture(scope="module", params=["step by step", "a step ahead"])
def engine(tiny_checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    ahead = request.param == "a step ahead"
    # On a GPU images would be recorded passes, whose memory is taken at the start: none of theirs can be short of it.
    with engine_of(tiny_checkpoint, ahead=ahead, max_num_batched_tokens=1024, max_graph_tokens=0) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(hf: HfReference) -> dict[str, ThinkerPrompt]:
    return {
        "small image": about(hf, "image", Image.fromarray(picture(56, 56))),
        "sound": about(hf, "audio", tone(0.6)),
        "large image": about(hf, "image", Image.fromarray(picture(168, 112, seed=3))),
        "text": ask(hf, "what is this?"),
    }


@pytest.fixture(scope="module")
def alone(engine: Any, prompts: dict[str, ThinkerPrompt]) -> dict[str, Answer]:
    """The answer to each prompt by itself."""
    return {key: run(engine, {key: prompt})[key] for key, prompt in prompts.items()}


def assert_answers_are(ours: dict[str, Answer], expected: dict[str, Answer], keys: set[str]) -> None:
    for key in keys:
        assert ours[key].last.error is None
        assert ours[key].token_ids == expected[key].token_ids
        torch.testing.assert_close(ours[key].rows, expected[key].rows, rtol=2e-5, atol=ROW_TOLERANCE)


def test_media_for_which_there_is_no_memory_together_are_encoded_one_by_one(
    engine: Any, prompts: dict[str, ThinkerPrompt], alone: dict[str, Answer]
) -> None:
    with room_for(engine, PATCHES["large image"]) as asked:
        assert_answers_are(run(engine, prompts), alone, set(prompts))
    assert asked == [sum(PATCHES.values()), *PATCHES.values()]
    assert engine.stats() == NOTHING_HELD


@pytest.mark.parametrize("want_rows", [True, False])
def test_a_medium_for_which_there_is_no_memory_by_itself_fails_its_request_alone(
    engine: Any, prompts: dict[str, ThinkerPrompt], alone: dict[str, Answer], want_rows: bool
) -> None:
    others = set(prompts) - {"large image"}
    with room_for(engine, PATCHES["small image"]) as asked:
        answers = run(engine, prompts, want_rows=set(prompts) if want_rows else others)
    assert asked == [sum(PATCHES.values()), *PATCHES.values()]
    assert [output.error for output in answers["large image"].outputs][-1] == "the device has no memory for this image"
    assert not answers["large image"].token_ids
    assert_answers_are(answers, alone, others)
    assert engine.stats() == NOTHING_HELD
    # The same image is encoded anew, and no cache has anything left of the failure.
    assert_answers_are(run(engine, prompts), alone, set(prompts))


def test_a_request_with_two_media_fails_once(engine: Any, hf: HfReference, alone: dict[str, Answer]) -> None:
    ids = token_ids(hf, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "what is this?"})
    images = [Image.fromarray(picture(56, 56, seed=seed)) for seed in (1, 2)]
    prompts = {"two": ThinkerPrompt(ids, {"image": images}), "text": ask(hf, "what is this?")}
    with room_for(engine, 0):
        answers = run(engine, prompts)
    assert [output.error for output in answers["two"].outputs if output.error] == [
        "the device has no memory for this image"
    ]
    assert_answers_are(answers, alone, {"text"})

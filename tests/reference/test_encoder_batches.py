# SPDX-License-Identifier: Apache-2.0
"""Media of requests that come together go through each encoder together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from triton_omni.engine import ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def about(hf: HfReference, kind: str, medium: Any) -> ThinkerPrompt:
    ids = token_ids(hf, {"type": kind}, {"type": "text", "text": "what is this?"})
    return ThinkerPrompt(ids, {kind: [medium]})


def test_requests_that_come_together_share_each_encoders_pass(tiny_checkpoint: Path, hf: HfReference) -> None:
    prompts = {
        "small image": about(hf, "image", Image.fromarray(picture(56, 56))),
        "short sound": about(hf, "audio", tone(0.6)),
        "large image": about(hf, "image", Image.fromarray(picture(112, 84, seed=3))),
        "long sound": about(hf, "audio", tone(1.5)),
    }
    engine = make_engine(tiny_checkpoint, max_num_batched_tokens=1024)
    passes: list[str] = []
    for name in ("visual", "audio_tower"):
        getattr(engine._model, name).register_forward_pre_hook(lambda *_, name=name: passes.append(name))
    together = run(engine, prompts)
    assert sorted(passes) == ["audio_tower", "visual"]
    for key, prompt in prompts.items():
        alone = run(engine, {key: prompt})[key]
        assert together[key].token_ids == alone.token_ids
    assert sorted(passes) == ["audio_tower"] * 3 + ["visual"] * 3
    assert REPLY.max_tokens >= len(alone.token_ids) > 0
    engine.close()


def test_the_vision_tower_has_run_before_the_first_image(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton_omni.vllm_hooks.thinker_networks import ThinkerNetwork

    embed, seen = ThinkerNetwork.embed_multimodal, []
    monkeypatch.setattr(ThinkerNetwork, "embed_multimodal", lambda self, **kwargs: seen.append(embed(self, **kwargs)))
    make_engine(tiny_checkpoint).close()
    ((embedding,),) = seen
    assert embedding.shape[0] == 1
    assert embedding.isfinite().all()


PATCHES = {"small image": 16, "large image": 96}
"""Of the vision tower, 14 x 14 pixels each."""


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

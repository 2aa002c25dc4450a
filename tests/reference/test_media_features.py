# SPDX-License-Identifier: Apache-2.0
"""Features of media that were processed before: bit for bit those of a first time, in any prompt, and never changed."""

from __future__ import annotations

import io
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from media_samples import image_file, picture, tone
from reference.hf import HfReference
from reference.thinker_rig import make_engine, run, token_ids
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.core.settings import RequestLimits, ThinkerSettings
from triton_omni.request.chat import MediaPart
from triton_omni.request.media.decoders import Decoders
from triton_omni.session.engine import Features, Sampling, ThinkerPlaced, ThinkerPrompt
from triton_omni.thinker.preprocessing import Preprocessor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SHORT = Sampling(max_tokens=4)
PHOTO = Image.fromarray(picture(96, 64))
SOUND, LONGER = tone(1.3), tone(3.1, hertz=300.0)
CLIP = np.stack([picture(64, 48, seed) for seed in range(4)])
HEARD = {"use_audio_in_video": True, "second_per_grid_ts": [1.0]}
MEDIA: Mapping[str, tuple[tuple[str, ...], dict[str, list[Any]], dict[str, Any]]] = {
    "a photo": (("image",), {"image": [PHOTO]}, {}),
    "a sound": (("audio",), {"audio": [SOUND]}, {}),
    "a photo, a sound and a longer one": (
        ("image", "audio", "audio"),
        {"image": [PHOTO], "audio": [SOUND, LONGER]},
        {},
    ),
    "a silent video": (("video",), {"video": [CLIP]}, {"second_per_grid_ts": [0.7]}),
    "a heard video and a sound": (("video", "audio"), {"video": [CLIP], "audio": [SOUND, LONGER]}, HEARD),
}


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Any]:
    made = make_engine(tiny_checkpoint)
    yield made
    made.close()


def outlines(media: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The same shapes, all zeros."""
    return {kind: [np.zeros_like(np.asarray(item)) for item in items] for kind, items in media.items()}


def tensors(placed: ThinkerPlaced) -> dict[tuple[str, int, str], torch.Tensor]:
    return {
        (kind, index, name): element.data.clone()
        for kind, items in placed.engine_input["mm_kwargs"].items()
        for index, item in enumerate(items)
        for name, element in item.items()
    }


def assert_same(found: ThinkerPlaced, expected: ThinkerPlaced) -> None:
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert torch.equal(found.positions, expected.positions)
    assert found.engine_input["mm_placeholders"] == expected.engine_input["mm_placeholders"]
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", MEDIA)
def test_a_hit_equals_the_miss_bit_for_bit_also_after_a_reply(engine: Any, hf: HfReference, name: str) -> None:
    parts, media, options = MEDIA[name]
    ids = token_ids(hf, *({"type": part} for part in parts))
    features = {kind: [Features() for _ in items] for kind, items in media.items()}
    plain = engine.prepare(ThinkerPrompt(ids, media, options))
    miss = engine.prepare(ThinkerPrompt(ids, media, options, features))
    assert_same(miss, plain)
    slots = [slot for items in features.values() for slot in items]
    for slot in slots:
        held = sum(element.data.untyped_storage().nbytes() for element in slot.item.values())
        assert slot.size == held > 0
    answer = run(engine, {"miss": miss}, SHORT)["miss"]
    hit = engine.prepare(ThinkerPrompt(ids, outlines(media), options, features))
    assert_same(hit, plain)
    again = run(engine, {"hit": hit}, SHORT)["hit"]
    assert again.token_ids == answer.token_ids
    assert torch.equal(again.rows, answer.rows)
    assert_same(hit, plain)


@pytest.mark.parametrize("beside", [LONGER, tone(0.2), np.zeros(16000, np.float32)], ids=["longer", "short", "silent"])
def test_features_do_not_depend_on_what_is_beside_them(engine: Any, hf: HfReference, beside: np.ndarray) -> None:
    alone = engine.prepare(ThinkerPrompt(token_ids(hf, {"type": "audio"}), {"audio": [SOUND]}))
    both = engine.prepare(ThinkerPrompt(token_ids(hf, *[{"type": "audio"}] * 2), {"audio": [SOUND, beside]}))
    found = tensors(both)
    for (kind, index, name), tensor in tensors(alone).items():
        assert torch.equal(found[kind, index, name], tensor)


def test_one_video_in_two_requests_keeps_the_times_of_each(engine: Any, hf: HfReference) -> None:
    ids, features = token_ids(hf, {"type": "video"}), {"video": [Features()]}
    placed = [
        engine.prepare(ThinkerPrompt(ids, {"video": [CLIP]}, {"second_per_grid_ts": [seconds]}, features))
        for seconds in (0.5, 2.0, 0.5)
    ]
    times = [tensors(each)["video", 0, "second_per_grid_ts"].item() for each in placed]
    assert times == [0.5, 2.0, 0.5]
    assert not torch.equal(placed[0].positions, placed[1].positions)


def test_media_have_the_identifier_that_they_are_given_or_one_of_their_own(engine: Any, hf: HfReference) -> None:
    ids, features = token_ids(hf, {"type": "image"}), {"image": [Features()]}
    found = [engine.prepare(ThinkerPrompt(ids, {"image": [PHOTO]}, {}, features)).engine_input for _ in range(3)]
    assert len({each["mm_hashes"]["image"][0] for each in found}) == 3
    named = ThinkerPrompt(ids, {"image": [PHOTO]}, {}, {"image": [Features(identifier="named")]})
    assert engine.prepare(named).engine_input["mm_hashes"] == {"image": ["named"]}


BIG = Image.fromarray(picture(336, 224, 5))
"""96 tokens: more than a step of prefill."""


@pytest.mark.parametrize("prompts", [["twice"], ["once", "twice"], ["twice", "once", "twice"]], ids=" ".join)
def test_media_of_one_identifier_give_what_media_of_their_own_give(
    engine: Any, hf: HfReference, prompts: list[str]
) -> None:
    answers = []
    for identifier in (None, "one"):
        features = [Features(identifier=identifier)]
        placed = {}
        for number, kind in enumerate(prompts):
            count = 2 if kind == "twice" else 1
            text = {"type": "text", "text": "and " * number}
            ids = token_ids(hf, *[{"type": "image"}, text] * count)
            placed[str(number)] = engine.prepare(
                ThinkerPrompt(ids, {"image": [BIG] * count}, {}, {"image": features * count})
            )
        answers.append(run(engine, placed, SHORT))
    apart, shared = answers
    for key, answer in apart.items():
        assert shared[key].last.error is None
        assert shared[key].token_ids == answer.token_ids
        torch.testing.assert_close(shared[key].rows, answer.rows, rtol=2e-5, atol=2e-5)


def test_the_script_measures_what_is_decoded_and_what_is_found(
    engine: Any, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "media_cost.py"))
    config = load_config(tiny_checkpoint)
    preprocessor = Preprocessor(
        tiny_checkpoint, config, load_speakers(tiny_checkpoint, config), ThinkerSettings(max_new_tokens=8), engine
    )
    decoders = Decoders(RequestLimits())
    media = {"photo": MediaPart("image", image_file("jpeg")), "sound": MediaPart("audio", script["sound"]()[:64_044])}
    try:
        script["measure"](preprocessor, decoders, media)
    finally:
        decoders.close()
        preprocessor.close()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[name, str(len(part.data))] for name, part in media.items()]
    assert all(float(figure) > 0 for row in rows for figure in row[2:])
    assert Image.open(io.BytesIO(script["photo"]())).size == (1024, 768)

# SPDX-License-Identifier: Apache-2.0
"""Videos of several rates in one prompt: ids and positions are those of HF with the same seconds between time steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from triton_omni.session.engine import ThinkerPrompt
from triton_omni.vllm_hooks.thinker.prompt_media import TimeScale, film_order

SCALE = TimeScale(25, 2.0)
FILM = "<|vision_bos|><|VIDEO|><|vision_eos|>"
RATES = [2.0, 30000 / 15015, 10 / 7, 0.4, 7.5, 2 / 2.94]


def frames(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 255, (count, 56, 84, 3), np.uint8)


def sound(seconds: float) -> np.ndarray:
    return np.zeros(int(seconds * 16000), np.float32)


@pytest.fixture(scope="module")
def vllm_processor(tiny_checkpoint):
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from triton_omni.vllm_hooks.thinker import networks

    networks.register()
    overrides = {"architectures": [networks.THINKER_ARCHITECTURE]}
    # Half precision must not round the times.
    config = ModelConfig(model=str(tiny_checkpoint), hf_overrides=overrides, dtype="bfloat16", max_model_len=8192)
    return MULTIMODAL_REGISTRY.create_processor(config)


def our_prompt(processor, ids, media, kwargs):
    """Ids and positions of what vLLM's processor and our network make of a prompt."""
    from types import SimpleNamespace

    from triton_omni.vllm_hooks.thinker.networks import ThinkerNetwork, media_features

    prompt = ThinkerPrompt(tuple(ids), media, kwargs)
    items = processor.info.parse_mm_data(prompt.multi_modal_data)
    made = processor(list(ids), mm_items=items, hf_processor_mm_kwargs=dict(kwargs))
    expanded = made["prompt_token_ids"]
    network = SimpleNamespace(config=processor.info.get_hf_config())
    positions, delta = ThinkerNetwork.get_mrope_input_positions(network, expanded, media_features(made))
    return expanded, positions, delta


@pytest.mark.parametrize("heard", [False, True], ids=["silent", "heard"])
@pytest.mark.parametrize("rates", [*itertools.combinations(RATES, 2)], ids=lambda pair: f"{pair[0]:g} {pair[1]:g}")
def test_ids_and_positions_are_hfs(hf, vllm_processor, rates, heard):
    text = f"<|im_start|>user\n{FILM} and {FILM} what?<|im_end|>\n"
    films, sounds = [frames(8), frames(20)], [sound(5.3), sound(21.7)] if heard else []
    seconds = [2 / rate for rate in rates]
    media = {"video": films} | ({"audio": sounds} if heard else {})
    kwargs = {"second_per_grid_ts": seconds} | ({"use_audio_in_video": True} if heard else {})
    ids = hf.processor.tokenizer(text)["input_ids"]
    expanded, positions, delta = our_prompt(vllm_processor, ids, media, kwargs)

    # HF's processor has one rate for all videos, so its parts are called with each video's.
    size = hf.processor.valid_processor_kwargs._defaults["videos_kwargs"]["size"]
    grids = hf.processor.video_processor(videos=films, size=size, return_tensors="pt")["video_grid_thw"]
    frames_of = [-(-len(samples) // 160) for samples in sounds]
    lengths = iter(((count - 1) // 2 + 1 - 2) // 2 + 1 for count in frames_of)
    spelled = hf.processor.replace_multimodal_special_tokens(
        [text], lengths, iter([]), iter(grids), iter(seconds), heard, 25, 2.0
    )
    theirs = hf.processor.tokenizer(spelled, return_tensors="pt")["input_ids"]
    assert expanded == theirs[0].tolist()
    index, deltas = hf.model.thinker.get_rope_index(
        theirs,
        None,
        grids,
        torch.ones_like(theirs),
        heard,
        torch.tensor(frames_of) if heard else None,
        torch.tensor(seconds),
    )
    assert torch.equal(positions, index[:, 0])
    assert delta == int(deltas)


def test_times_are_cut_off_in_the_precision_of_hf():
    from triton_omni.vllm_hooks.thinker.prompt_media import Placed, prompt_positions

    seconds = torch.tensor(1.4)
    positions = prompt_positions(np.zeros(8, np.int64), [Placed(0, 8, (8, 1, 1), second_per_grid=1.4)], 0, SCALE)
    expected = (torch.arange(8) * seconds * 25).long()
    assert positions[0].tolist() == expected.tolist()
    assert expected.tolist() != (np.arange(8) * (seconds.item() * 25)).astype(int).tolist()


def test_the_order_of_a_film():
    def runs(*args):
        order = film_order(*args, SCALE)
        return [(bool(kind), len(list(group))) for kind, group in itertools.groupby(order)]

    # Two steps of a second each in a chunk of two seconds, which is 50 tokens of sound.
    assert runs(4, 6, 100, 1.0) == [(True, 12), (False, 50), (True, 12), (False, 50)]
    assert runs(2, 6, 120, 1.0) == [(True, 12), (False, 120)]
    assert runs(6, 6, 10, 1.0) == [(True, 12), (False, 10), (True, 24)]
    # Four seconds a step: HF lets the first token of a late step be a chunk of its own.
    assert runs(2, 6, 200, 4.0) == [(True, 6), (False, 50), (True, 1), (False, 50), (True, 5), (False, 100)]
    assert runs(1, 6, 0, 1.0) == [(True, 6)]

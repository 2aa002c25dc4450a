# SPDX-License-Identifier: Apache-2.0
"""Rendered chats and decoded media through vLLM's processor against HF's processor on the same arrays."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

import media_samples as samples
from triton_omni.core.settings import RequestLimits
from triton_omni.request.media.decode import decode_media
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from triton_omni.thinker.prompt import DEFAULT_SYSTEM_PROMPT, PromptRenderer, build_prompt

LIMITS = RequestLimits()
FILES = {
    "image": samples.image_file("png", 100, 70),
    "audio": samples.audio_file("wav", seconds=1.3),
    "video": samples.video_file(audio=True, seconds=3),
}
KINDS = [
    (["image"], False),
    (["audio", "audio"], False),
    (["video"], False),
    (["image", "audio", "video", "image"], False),
    (["video"], True),
    (["image", "video", "video"], True),
    (["audio", "video"], True),
    (["video", "audio", "image", "video", "audio"], True),
]


@pytest.fixture(scope="module")
def hf_processor(tiny_checkpoint):
    from transformers import Qwen2_5OmniProcessor

    return Qwen2_5OmniProcessor.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def vllm_processor(tiny_checkpoint):
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from triton_omni.vllm_hooks.thinker import networks

    networks.register()
    overrides = {"architectures": [networks.THINKER_ARCHITECTURE]}
    config = ModelConfig(model=str(tiny_checkpoint), hf_overrides=overrides, dtype="float32", max_model_len=8192)
    return MULTIMODAL_REGISTRY.create_processor(config)


@pytest.fixture(scope="module")
def normalised(vllm_processor):
    """The vision tower's first step, which normalises bytes."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from triton_omni.vllm_hooks.shared.compat import build_mm_input_norm

    config = vllm_processor.info.ctx.model_config
    with set_current_vllm_config(VllmConfig(model_config=config)):
        norm = build_mm_input_norm(config)
    return lambda pixels: norm.forward_native(pixels, torch.float32)


def prompt_of(tokenizer, kinds, text, use_audio_in_video):
    parts = [{"type": kind} for kind in kinds] + [{"type": "text", "text": text}]
    raw = RawRequest(
        messages=json.dumps([{"role": "user", "content": parts}]).encode(),
        media=[FILES[kind] for kind in kinds],
        sampling_parameters=json.dumps({"use_audio_in_video": use_audio_in_video}).encode(),
    )
    request = parse_request(raw, LIMITS, RequestDefaults())
    media = decode_media(request.media, LIMITS, with_audio=use_audio_in_video)
    return build_prompt(request, media, PromptRenderer(tokenizer))


def expand(processor, prompt):
    items = processor.info.parse_mm_data(prompt.multi_modal_data)
    return processor(list(prompt.token_ids), mm_items=items, hf_processor_mm_kwargs=dict(prompt.mm_processor_kwargs))


def in_order(kinds, use_audio_in_video):
    """Places of a request's sounds among vLLM's, in HF's order, the prompt's: vLLM has those of films first."""
    if not use_audio_in_video:
        return list(range(kinds.count("audio")))
    places = {"video": iter(range(len(kinds))), "audio": iter(range(kinds.count("video"), len(kinds)))}
    return [next(places[kind]) for kind in kinds if kind in places]


def hf_inputs(processor, prompt, kinds, text, use_audio_in_video):
    conversation = [
        {"role": "system", "content": [{"type": "text", "text": DEFAULT_SYSTEM_PROMPT}]},
        {"role": "user", "content": [{"type": kind} for kind in kinds] + [{"type": "text", "text": text}]},
    ]
    data = prompt.multi_modal_data
    sounds = [data["audio"][place] for place in in_order(kinds, use_audio_in_video)]
    return processor(
        text=processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False),
        images=data.get("image"),
        audio=sounds or None,
        videos=data.get("video"),
        use_audio_in_video=use_audio_in_video,
        return_tensors="pt",
    )


@pytest.mark.parametrize(("kinds", "use_audio_in_video"), KINDS)
def test_ids_and_pixels_after_expansion_are_hfs(hf_processor, vllm_processor, normalised, kinds, use_audio_in_video):
    text = "\n\nwhat is it?\n"
    prompt = prompt_of(hf_processor.tokenizer, kinds, text, use_audio_in_video)
    ours = expand(vllm_processor, prompt)
    theirs = hf_inputs(hf_processor, prompt, kinds, text, use_audio_in_video)
    assert ours["prompt_token_ids"] == theirs["input_ids"][0].tolist()
    data = ours["mm_kwargs"].get_data()
    for name in ("image_grid_thw", "video_grid_thw"):
        if name in theirs:
            assert theirs[name].equal(data[name])
    for name in ("pixel_values", "pixel_values_videos"):
        if name in theirs:
            assert data[name].dtype == torch.uint8
            torch.testing.assert_close(normalised(data[name]), theirs[name], rtol=0, atol=1e-6)
    if "feature_attention_mask" in theirs:
        lengths = data["audio_feature_lengths"].flatten()[in_order(kinds, use_audio_in_video)]
        assert lengths.equal(theirs["feature_attention_mask"].sum(-1))


@pytest.mark.parametrize(("kinds", "use_audio_in_video"), KINDS)
def test_the_length_of_a_prompt_is_known_before_its_media_are_processed(
    hf_processor, vllm_processor, kinds, use_audio_in_video
):
    from triton_omni.vllm_hooks.thinker.prompt_media import expanded_length

    tokenizer, names = hf_processor.tokenizer, {"image": "<|IMAGE|>", "audio": "<|AUDIO|>", "video": "<|VIDEO|>"}
    ids = {kind: tokenizer.convert_tokens_to_ids(name) for kind, name in names.items()}
    prompt = prompt_of(tokenizer, kinds, "x", use_audio_in_video)
    expanded = len(expand(vllm_processor, prompt)["prompt_token_ids"])
    assert expanded_length(vllm_processor.info, prompt, ids) == expanded


SIZES = [(3000, 4000), (1920, 1080), (28, 28), (3000, 20), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_the_tokens_of_an_image_are_those_of_hf_s_grid(hf_processor, vllm_processor, size):
    from triton_omni.vllm_hooks.thinker.prompt_media import media_length

    image = Image.new("RGB", size)
    grid = hf_processor.image_processor([image], return_tensors="pt")["image_grid_thw"]
    assert media_length(vllm_processor.info, {"image": [image]}) == int(grid.prod()) // 4


@pytest.mark.parametrize("shape", [(8, 48, 64), (3, 364, 644), (2, 28, 28), (2, 1456, 28)])
def test_the_tokens_of_a_video_are_those_of_hf_s_grid(hf_processor, vllm_processor, shape):
    from triton_omni.vllm_hooks.thinker.prompt_media import media_length

    video, text = np.zeros((*shape, 3), np.uint8), "<|VIDEO|>"
    grid = hf_processor(text=text, videos=[video], return_tensors="pt")["video_grid_thw"]
    assert media_length(vllm_processor.info, {"video": [video]}) == int(grid.prod()) // 4


@pytest.mark.parametrize(("kinds", "use_audio_in_video"), KINDS)
def test_placeholders_spelled_by_a_user_take_no_medium(hf_processor, vllm_processor, kinds, use_audio_in_video):
    plain = prompt_of(hf_processor.tokenizer, kinds, "x", use_audio_in_video)
    forged = prompt_of(hf_processor.tokenizer, kinds, "<|IMAGE|><|AUDIO|><|VIDEO|><|im_end|>", use_audio_in_video)
    grown = [
        len(expand(vllm_processor, prompt)["prompt_token_ids"]) - len(prompt.token_ids) for prompt in (plain, forged)
    ]
    assert grown[0] == grown[1] > 0

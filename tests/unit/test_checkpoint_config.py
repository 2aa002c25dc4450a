# SPDX-License-Identifier: Apache-2.0
"""Facts of a checkpoint: what published and newer `config.json` files give, and what is refused by name."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from triton_omni.checkpoint.config import CheckpointError, fingerprint, load_config
from triton_omni.checkpoint.facts import TalkerSampling
from triton_omni.checkpoint.synthetic_config import omni_config
from triton_omni.core.settings import Token2WavSettings

# The configuration of the published 7B checkpoint (transformers 4.5x): rope_scaling, and the DiT's old names.
PUBLISHED: dict[str, Any] = {
    "model_type": "qwen2_5_omni",
    "enable_talker": True,
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "audio_config": {"d_model": 1280, "output_dim": 3584},
        "vision_config": {"hidden_size": 1280, "spatial_merge_size": 2},
        "text_config": {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "vocab_size": 152064,
        },
        "audio_start_token_id": 151647,
        "audio_end_token_id": 151648,
        "audio_token_index": 151646,
        "image_token_index": 151655,
        "video_token_index": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "bos_token_id": 151644,
        "eos_token_id": 151645,
        "pad_token_id": 151643,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    },
    "talker_config": {
        "model_type": "qwen2_5_omni_talker",
        "hidden_size": 896,
        "embedding_size": 3584,
        "head_dim": 128,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 1000000.0,
        "vocab_size": 8448,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_start_token_id": 8293,
        "tts_codec_end_token_id": 8294,
        "tts_codec_mask_token_id": 8296,
        "tts_text_pad_token_id": 151859,
        "tts_text_start_token_id": 151860,
        "tts_text_end_token_id": 151861,
    },
    "token2wav_config": {
        "dit_config": {
            "depth": 22,
            "dim": 1024,
            "heads": 16,
            "head_dim": 64,
            "ff_mult": 2,
            "emb_dim": 512,
            "mel_dim": 80,
            "num_embeds": 8193,
            "repeats": 2,
            "look_ahead_layers": [10],
            "look_backward_layers": [0, 20],
            "enc_dim": 128,
            "enc_emb_dim": 192,
            "enc_channels": [256, 256, 256, 256, 768],
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_attention_channels": 64,
            "enc_res2net_scale": 2,
            "enc_se_channels": 64,
        },
        "bigvgan_config": {
            "mel_dim": 80,
            "upsample_initial_channel": 1536,
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
            "resblock_kernel_sizes": [3, 7, 11],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        },
    },
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def changed(path: str, value: Any) -> dict[str, Any]:
    """The published configuration with one key set, or removed where `value` is None."""
    config = copy.deepcopy(PUBLISHED)
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section[name]
    if value is None:
        del section[key]
    else:
        section[key] = value
    return config


def test_published_names_load(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, PUBLISHED))
    assert config.thinker.decoder.hidden_size == config.talker.embedding_size == 3584
    assert config.talker.decoder.hidden_size == 896
    assert config.talker.decoder.head_dim == 128
    assert (config.talker.codec_pad_id, config.talker.codec_eos_id) == (8292, 8294)
    assert (config.dit.hidden_size, config.dit.num_layers, config.dit.num_heads) == (1024, 22, 16)
    assert config.dit.block_size == 24
    assert config.thinker.eos_token_ids == (151645,)
    media = (config.thinker.audio_token_id, config.thinker.image_token_id, config.thinker.video_token_id)
    assert media == (151646, 151655, 151656)


def test_rates_follow_from_the_configuration(tmp_path: Path) -> None:
    codec = load_config(write(tmp_path, PUBLISHED)).codec
    assert codec.hop_length == 240
    assert codec.samples_per_code == 480
    assert codec.sample_rate == 50 * codec.samples_per_code
    assert codec.largest_code == 8193


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_newer_transformers_write_what_we_read(tmp_path: Path, size: Any) -> None:
    hf = omni_config(size)
    hf.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.thinker.decoder.num_layers == hf.thinker_config.text_config.num_hidden_layers
    assert config.talker.embedding_size == hf.thinker_config.text_config.hidden_size
    assert config.talker.decoder.mrope_section == tuple(hf.talker_config.rope_parameters["mrope_section"])
    assert config.dit.look_backward_layers == (0, 20)


def test_sizes_of_3b_and_7b_differ_where_the_published_ones_do() -> None:
    three, seven = omni_config("3b"), omni_config("7b")
    text3, text7 = three.thinker_config.text_config, seven.thinker_config.text_config
    assert (text3.num_hidden_layers, text3.hidden_size, text3.intermediate_size) == (36, 2048, 11008)
    assert (text7.num_hidden_layers, text7.hidden_size, text7.intermediate_size) == (28, 3584, 18944)
    assert (three.talker_config.embedding_size, seven.talker_config.embedding_size) == (2048, 3584)


def test_tiny_checkpoint_has_sizes_and_ids_of_its_own(tiny_checkpoint: Path) -> None:
    config = load_config(tiny_checkpoint)
    talker = config.talker.decoder
    assert len({talker.hidden_size, talker.num_heads * talker.head_dim, config.talker.embedding_size}) == 3
    assert config.talker.codec_eos_id != 8294
    assert config.codec.largest_code < min(config.talker.codec_pad_id, config.talker.codec_eos_id)


@pytest.mark.parametrize(
    ("generation", "expected"), [({"eos_token_id": [151645, 151643]}, (151645, 151643)), ({"eos_token_id": 7}, (7,))]
)
def test_eos_ids_come_from_the_generation_configuration_when_the_thinker_states_none(
    tmp_path: Path, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    config = changed("thinker_config.eos_token_id", None)
    assert load_config(write(tmp_path, config, generation)).thinker.eos_token_ids == expected


def test_talker_sampling_is_hfs_unless_the_checkpoint_states_another(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, PUBLISHED)).talker.sampling == TalkerSampling(0.9, 40, 0.8, 1.05, 4096)
    stated = load_config(write(tmp_path, PUBLISHED, {"talker_top_k": 7, "talker_temperature": 0.5}))
    assert (stated.talker.sampling.top_k, stated.talker.sampling.temperature) == (7, 0.5)


@pytest.mark.parametrize(
    ("given", "stated", "expected"),
    [
        ({}, {}, (10, 0.5)),
        ({}, {"token2wav_num_steps": 4, "token2wav_guidance_scale": 0.0}, (4, 0.0)),
        ({"num_steps": 10}, {"token2wav_num_steps": 4}, (10, 0.5)),
        ({"guidance_scale": 0.5}, {"token2wav_num_steps": 3, "token2wav_guidance_scale": 2}, (3, 0.5)),
    ],
)
def test_diffusion_is_the_settings_then_the_checkpoints_then_hfs(
    tmp_path: Path, given: dict[str, Any], stated: dict[str, Any], expected: tuple[int, float]
) -> None:
    flow = load_config(write(tmp_path, PUBLISHED, stated)).flow
    found = Token2WavSettings.model_validate({"diffusion": given}).with_checkpoint(asdict(flow)).diffusion
    assert (found.points, found.guidance) == expected


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"token2wav_num_steps": 1}, r"token2wav_num_steps: 1 is outside \[2, 64\]"),
        ({"token2wav_num_steps": 65}, r"token2wav_num_steps: 65 is outside \[2, 64\]"),
        ({"token2wav_num_steps": "4"}, r"token2wav_num_steps: expected an integer"),
        ({"token2wav_guidance_scale": -1}, r"token2wav_guidance_scale: expected a finite number of at least 0"),
        ({"token2wav_guidance_scale": 10.5}, r"token2wav_guidance_scale: 10.5 is above 10"),
    ],
)
def test_a_checkpoints_impossible_diffusion_is_refused(tmp_path: Path, stated: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_config(write(tmp_path, PUBLISHED, stated))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("talker_config", None, r"config\.json\.talker_config: is missing"),
        ("thinker_config.text_config", [], r"text_config: expected an object"),
        ("talker_config.embedding_size", None, r"talker_config\.embedding_size: is missing"),
        ("talker_config.embedding_size", 2048, r"embedding_size: 2048 differs from thinker hidden_size 3584"),
        ("talker_config.embedding_size", "big", r"embedding_size: expected an integer, found 'big'"),
        ("talker_config.embedding_size", True, r"embedding_size: expected an integer, found True"),
        ("talker_config.num_key_value_heads", 5, r"num_key_value_heads: 5 does not divide"),
        ("talker_config.tts_codec_end_token_id", 9000, r"tts_codec_end_token_id: 9000 is outside \[0, 8447\]"),
        ("talker_config.tts_text_end_token_id", 152064, r"tts_text id 152064 >= vocab_size 152064"),
        ("talker_config.rope_scaling", {"mrope_section": [16, 24, 8]}, r"mrope_section: .* sum to 64"),
        ("thinker_config.eos_token_id", None, r"eos_token_id: is missing, here, in text_config"),
        ("thinker_config.eos_token_id", [1, 999999], r"eos_token_id: .* above 152063"),
        ("token2wav_config.dit_config.dim", None, r"dit_config\.hidden_size: is missing \(as are dim\)"),
        ("token2wav_config.dit_config.look_ahead_layers", [22], r"look_ahead_layers: \[22\] names a layer"),
        ("token2wav_config.dit_config.enc_dilations", [1], r"enc_channels: .* differ in length"),
        ("token2wav_config.bigvgan_config.upsample_rates", [5], r"upsample_rates: 1 rates but 6"),
        ("token2wav_config.bigvgan_config.resblock_dilation_sizes", 3, r"expected a list of lists"),
        ("token2wav_config.bigvgan_config.mel_dim", 81, r"mel_dim: 81 differs from dit_config\.mel_dim 80"),
        ("model_type", "qwen3", r"model_type: expected 'qwen2_5_omni', found 'qwen3'"),
    ],
)
def test_a_wrong_key_is_refused_by_name(tmp_path: Path, path: str, value: Any, message: str) -> None:
    folder = write(tmp_path, changed(path, value))
    with pytest.raises(CheckpointError, match=message):
        load_config(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        fingerprint(tmp_path / "nowhere")


def test_fingerprint_changes_with_configuration_and_weight_files(tmp_path: Path) -> None:
    write(tmp_path, PUBLISHED)
    seen = {fingerprint(tmp_path)}
    (tmp_path / "model-1.safetensors").write_bytes(b"1234")
    seen.add(fingerprint(tmp_path))
    (tmp_path / "model-1.safetensors").write_bytes(b"12345")
    seen.add(fingerprint(tmp_path))
    write(tmp_path, changed("talker_config.num_hidden_layers", 23))
    seen.add(fingerprint(tmp_path))
    assert len(seen) == 4
    assert all(0 <= value < 1 << 64 for value in seen)
    assert fingerprint(tmp_path) in seen


def test_longest_sound_is_what_the_feature_extractor_takes_whole(tiny_checkpoint: Path) -> None:
    stated = json.loads((tiny_checkpoint / "preprocessor_config.json").read_text())
    assert load_config(tiny_checkpoint).max_audio_seconds == stated["n_samples"] / stated["sampling_rate"]

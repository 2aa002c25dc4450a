# SPDX-License-Identifier: Apache-2.0
"""Facts of the weights, read from the checkpoint's own files: sizes, special ids, rates, 4-bit codes.

Settings that a deployment chooses are in `core/settings.py`. Nothing here imports transformers: `config.json` is read
as published (names of transformers 4) and as newer transformers write it (`rope_parameters`, `hidden_size` in the DiT).

`quantization_config` tells of a thinker's decoder in 4-bit codes, as Qwen publishes Qwen2.5-Omni-7B by AWQ and GPTQ
(`synthetic_weights.py` has the format). A format without a vLLM kernel is refused here, before any weight is read.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from triton_omni.checkpoint.facts import (
    BigVganConfig,
    CodecConfig,
    DecoderConfig,
    DitConfig,
    EcapaConfig,
    FlowConfig,
    FourBit,
    OmniConfig,
    SoundWindow,
    TalkerConfig,
    TalkerSampling,
    ThinkerConfig,
)
from triton_omni.checkpoint.reading import LARGEST_INTEGER, MOST_ITEMS, CheckpointError, Section, read_json

# --- 4-bit codes ------------------------------------------------------------------------------------------------------


_GROUP_SIZES = (32, 64, 128)
"""Group sizes of vLLM's Marlin kernels. The published checkpoints have 128."""


def read_four_bit(root: Section) -> FourBit | None:
    """Return the quantisation of the decoder's matrices; None = `config.json` states none.

    Raises:
        CheckpointError: naming the key, its value and what is served.
    """
    section = root.maybe("quantization_config")
    if not section.values:
        return None
    method = section.values.get("quant_method")
    if method not in ("awq", "gptq"):
        raise _refused(section, "quant_method", method, "awq and gptq are served, and weights that are not quantised")
    _expect(section, "bits", 4)
    _expect(section, "lm_head", False, default=False)
    (_expect_awq if method == "awq" else _expect_gptq)(section)
    if (group := section.integer("group_size")) not in _GROUP_SIZES:
        raise _refused(section, "group_size", group, f"{', '.join(map(str, _GROUP_SIZES))} are served")
    return FourBit(method, group)


def _expect_awq(section: Section) -> None:
    _expect(section, "zero_point", True)
    version = section.values.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise _refused(section, "version", version, "gemm is served, other versions are packed otherwise")


def _expect_gptq(section: Section) -> None:
    _expect(section, "sym", True)
    _expect(section, "desc_act", False, cure="vLLM has no kernel for it; take an AWQ checkpoint")
    if section.values.get("dynamic"):
        raise _refused(section, "dynamic", section.values["dynamic"], "all decoder layers must be quantised alike")


def _expect(section: Section, key: str, wanted: object, *, default: Any = None, cure: str = "") -> None:
    found = section.values.get(key, default)
    if type(found) is not type(wanted) or found != wanted:
        raise _refused(section, key, found, cure or f"{str(wanted).lower()} is served")


def _refused(section: Section, key: str, found: object, served: str) -> CheckpointError:
    return section.fail(key, f"{found!r:.80} is not served: {served}")


# --- the configuration ------------------------------------------------------------------------------------------------


__all__ = ["CheckpointError", "OmniConfig", "fingerprint", "load_config"]


def load_config(path: Path) -> OmniConfig:
    """Read the facts of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: a file cannot be read, a key is missing or wrong, or two parts do not fit together.
    """
    root = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", optional=True)
    preprocessor = read_json(path / "preprocessor_config.json", optional=True)
    if root.values.get("model_type") != "qwen2_5_omni":
        raise root.fail("model_type", f"expected 'qwen2_5_omni', found {root.values.get('model_type')!r:.80}")
    token2wav = root.section("token2wav_config")
    dit, bigvgan = _dit(token2wav.section("dit_config")), _bigvgan(token2wav.section("bigvgan_config"))
    sampling_rate = preprocessor.integer("sampling_rate", default=16000, low=1)
    hop_length = math.prod(bigvgan.upsample_rates)
    if hop_length > LARGEST_INTEGER:
        raise token2wav.fail("bigvgan_config.upsample_rates", f"their product is above {LARGEST_INTEGER}")
    config = OmniConfig(
        thinker=_thinker(root, generation),
        talker=_talker(root.section("talker_config"), generation),
        dit=dit,
        bigvgan=bigvgan,
        codec=CodecConfig(dit.num_embeds, dit.repeats, hop_length),
        flow=_flow(generation),
        audio_sampling_rate=sampling_rate,
        sound_window=_sound_window(root.section("thinker_config").section("audio_config"), preprocessor),
        max_audio_seconds=preprocessor.integer("n_samples", default=300 * sampling_rate, low=1) / sampling_rate,
        four_bit=read_four_bit(root),
    )
    _check_parts_fit(config)
    return config


def fingerprint(path: Path) -> int:
    """64 bits that differ between checkpoints: `config.json` and the names and sizes of the weight files.

    Cheap on purpose (no weight is read): stages compare it to be sure that they serve the same checkpoint.

    Raises:
        CheckpointError: there is no readable `config.json`.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        digest.update((path / "config.json").read_bytes())
        for file in sorted([*path.glob("*.safetensors"), *path.glob("spk_dict.pt")]):
            digest.update(f"{file.name}:{file.stat().st_size};".encode())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return int.from_bytes(digest.digest(), "big")


def _decoder(section: Section, vocab_size: int, head_dim: int | None) -> DecoderConfig:
    hidden, heads = section.integer("hidden_size", low=1), section.integer("num_attention_heads", low=1)
    kv_heads = section.integer("num_key_value_heads", default=heads, low=1)
    if heads % kv_heads:
        raise section.fail("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if head_dim is None and hidden % heads:
        raise section.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = head_dim or hidden // heads
    sections = _mrope_section(section, head_dim)
    return DecoderConfig(
        hidden_size=hidden,
        num_layers=section.integer("num_hidden_layers", low=1, high=MOST_ITEMS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=section.integer("max_position_embeddings", low=1),
        rope_theta=_rope_theta(section, default=1000000.0),
        mrope_section=sections,
    )


def _mrope_section(section: Section, head_dim: int) -> tuple[int, ...]:
    rope = section.section("rope_parameters") if section.has("rope_parameters") else section.section("rope_scaling")
    sections = rope.integers("mrope_section")
    if len(sections) != 3 or sum(sections) * 2 != head_dim:
        raise rope.fail("mrope_section", f"{list(sections)} are not three numbers that sum to {head_dim // 2}")
    return sections


def _rope_theta(section: Section, default: float) -> float:
    rope = section.maybe("rope_parameters")
    return rope.number("rope_theta") if rope.has("rope_theta") else section.number("rope_theta", default=default)


def _thinker(root: Section, generation: Section) -> ThinkerConfig:
    section, talker = root.section("thinker_config"), root.section("talker_config")
    text = section.section("text_config")
    decoder = _decoder(text, text.integer("vocab_size", low=1), None)
    last = decoder.vocab_size - 1
    # Older files state the vision ids for the talker alone.
    vision = section if section.has("vision_start_token_id") else talker
    return ThinkerConfig(
        decoder=decoder,
        eos_token_ids=_eos_token_ids((section, text, generation), last),
        pad_token_id=(section if section.has("pad_token_id") else root).integer("pad_token_id", high=last),
        audio_token_id=section.integer("audio_token_index", "audio_token_id", high=last),
        image_token_id=section.integer("image_token_index", "image_token_id", high=last),
        video_token_id=section.integer("video_token_index", "video_token_id", high=last),
        audio_start_token_id=section.integer("audio_start_token_id", high=last),
        audio_end_token_id=section.integer("audio_end_token_id", high=last),
        vision_start_token_id=vision.integer("vision_start_token_id", high=last),
        vision_end_token_id=vision.integer("vision_end_token_id", high=last),
        position_id_per_seconds=section.integer("position_id_per_seconds", low=1),
        seconds_per_chunk=section.integer("seconds_per_chunk", low=1),
        spatial_merge_size=section.section("vision_config").integer("spatial_merge_size", default=2, low=1),
    )


def _eos_token_ids(sections: tuple[Section, ...], last: int) -> tuple[int, ...]:
    """The first place that states them, in the order in which HF's thinker looks."""
    for section in sections:
        if section.has("eos_token_id"):
            ids = section.integers("eos_token_id")
            if not ids or max(ids) > last:
                raise section.fail("eos_token_id", f"{list(ids)} is empty or has an id above {last}")
            return ids
    raise sections[0].fail("eos_token_id", "is missing, here, in text_config and in generation_config.json")


def _talker(section: Section, generation: Section) -> TalkerConfig:
    decoder = _decoder(section, section.integer("vocab_size", low=1), section.integer("head_dim", low=1))
    last = decoder.vocab_size - 1
    return TalkerConfig(
        decoder=decoder,
        embedding_size=section.integer("embedding_size", low=1),
        codec_pad_id=section.integer("tts_codec_pad_token_id", high=last),
        codec_bos_id=section.integer("tts_codec_start_token_id", high=last),
        codec_eos_id=section.integer("tts_codec_end_token_id", high=last),
        codec_mask_id=section.integer("tts_codec_mask_token_id", high=last),
        text_pad_id=section.integer("tts_text_pad_token_id"),
        text_bos_id=section.integer("tts_text_start_token_id"),
        text_eos_id=section.integer("tts_text_end_token_id"),
        sampling=_talker_sampling(generation),
    )


def _talker_sampling(generation: Section) -> TalkerSampling:
    """HF `generate`'s defaults, or the keys of its arguments in `generation_config.json`."""
    hf = TalkerSampling()
    return TalkerSampling(
        temperature=generation.number("talker_temperature", default=hf.temperature),
        top_k=generation.integer("talker_top_k", default=hf.top_k),
        top_p=generation.number("talker_top_p", default=hf.top_p),
        repetition_penalty=generation.number("talker_repetition_penalty", default=hf.repetition_penalty, low=0.01),
        max_new_tokens=generation.integer("talker_max_new_tokens", default=hf.max_new_tokens, low=1),
    )


def _flow(generation: Section) -> FlowConfig:
    """The keys of HF `generate`'s arguments in `generation_config.json`, which few checkpoints have. Their bounds are
    those of settings and requests.
    """
    steps, scale = "token2wav_num_steps", "token2wav_guidance_scale"
    return FlowConfig(
        num_steps=generation.integer(steps, low=2, high=64) if generation.has(steps) else None,
        guidance_scale=generation.number(scale, high=10) if generation.has(scale) else None,
    )


def _dit(section: Section) -> DitConfig:
    layers = section.integer("num_hidden_layers", "depth", low=1, high=MOST_ITEMS)
    return DitConfig(
        hidden_size=section.integer("hidden_size", "dim", low=1),
        num_layers=layers,
        num_heads=section.integer("num_attention_heads", "heads", low=1),
        head_dim=section.integer("head_dim", low=2),
        ff_mult=section.integer("ff_mult", low=1),
        emb_dim=section.integer("emb_dim", low=1),
        mel_dim=section.integer("mel_dim", low=1),
        speaker_dim=section.integer("enc_emb_dim", low=1),
        block_size=section.integer("block_size", default=24, low=1),
        look_ahead_layers=_layer_numbers(section, "look_ahead_layers", layers),
        look_backward_layers=_layer_numbers(section, "look_backward_layers", layers),
        repeats=section.integer("repeats", low=1),
        num_embeds=section.integer("num_embeds", low=1),
        max_positions=section.integer("max_position_embeddings", default=32768, low=1),
        rope_theta=_rope_theta(section, default=10000.0),
        ecapa=_ecapa(section),
    )


def _layer_numbers(section: Section, key: str, layers: int) -> tuple[int, ...]:
    numbers = section.integers(key)
    if any(number >= layers for number in numbers):
        raise section.fail(key, f"{list(numbers)} names a layer that is not among the {layers}")
    return numbers


def _ecapa(section: Section) -> EcapaConfig:
    channels = section.integers("enc_channels", low=1)
    kernels, dilations = section.integers("enc_kernel_sizes", low=1), section.integers("enc_dilations", low=1)
    if not len(channels) == len(kernels) == len(dilations):
        raise section.fail("enc_channels", "enc_channels, enc_kernel_sizes and enc_dilations differ in length")
    return EcapaConfig(
        dim=section.integer("enc_dim", low=1),
        channels=channels,
        kernel_sizes=kernels,
        dilations=dilations,
        attention_channels=section.integer("enc_attention_channels", low=1),
        res2net_scale=section.integer("enc_res2net_scale", low=1),
        se_channels=section.integer("enc_se_channels", low=1),
    )


def _bigvgan(section: Section) -> BigVganConfig:
    rates, kernels = section.integers("upsample_rates", low=1), section.integers("upsample_kernel_sizes", low=1)
    if len(rates) != len(kernels):
        raise section.fail("upsample_rates", f"{len(rates)} rates but {len(kernels)} upsample_kernel_sizes")
    resblocks, dilations = (
        section.integers("resblock_kernel_sizes", low=1),
        section.integer_rows("resblock_dilation_sizes"),
    )
    if len(resblocks) != len(dilations):
        raise section.fail("resblock_kernel_sizes", f"{len(resblocks)} sizes, {len(dilations)} rows of dilations")
    return BigVganConfig(
        mel_dim=section.integer("mel_dim", low=1),
        upsample_initial_channel=section.integer("upsample_initial_channel", low=1),
        upsample_rates=rates,
        upsample_kernel_sizes=kernels,
        resblock_kernel_sizes=resblocks,
        resblock_dilation_sizes=dilations,
    )


def _sound_window(tower: Section, preprocessor: Section) -> SoundWindow:
    return SoundWindow(
        frames=2 * tower.integer("n_window", default=100, low=1),
        hop=preprocessor.integer("hop_length", default=160, low=1),
        reach=preprocessor.integer("n_fft", default=400, low=1) // 2,
    )


def _check_parts_fit(config: OmniConfig) -> None:
    thinker, talker = config.thinker.decoder, config.talker
    pairs = (
        ("talker_config.embedding_size", talker.embedding_size, "thinker hidden_size", thinker.hidden_size),
        ("bigvgan_config.mel_dim", config.bigvgan.mel_dim, "dit_config.mel_dim", config.dit.mel_dim),
    )
    for key, value, other, expected in pairs:
        if value != expected:
            raise CheckpointError(f"config.json.{key}: {value} differs from {other} {expected}")
    largest = max(talker.text_pad_id, talker.text_bos_id, talker.text_eos_id)
    if largest >= thinker.vocab_size:
        raise CheckpointError(f"config.json.talker_config: tts_text id {largest} >= vocab_size {thinker.vocab_size}")

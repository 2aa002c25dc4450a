# SPDX-License-Identifier: Apache-2.0
"""Ids and sizes of the trained checkpoint, and its configuration in HF's form; `TOY` is for tests and rehearsals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton_omni.checkpoint.synthetic_config import SPECIAL_TOKENS, Vocabulary
from triton_omni.checkpoint.transformers_setup import prepare_transformers

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig

__all__ = ["BLOCK", "CODE_SAMPLES", "FULL", "HOP", "MELS", "RATE", "SPECIAL_TOKENS", "TOY", "VOCAB", "VOICES", "Sizes"]

RATE = 24000
"""Samples a second of the speech that token2wav makes."""
HOP = 240
"""Samples of one mel frame."""
FFT = 1024
"""Samples of one window of the mel spectrogram."""
MELS = 80
"""Bands of token2wav's mel spectrogram."""
CODE_SAMPLES = 480
"""Samples of one code: two mel frames."""
BLOCK = 24
"""Mel frames of one attention block of the DiT."""
PICTURE_PIXELS = (24 * 28 * 28, 36 * 28 * 28)
"""Least and most pixels of a picture: the checkpoint's processor scales others to what training has seen."""

_BASE = 960
_CODES = 1024
VOCAB = Vocabulary(
    base=_BASE,
    size=_BASE + 32,
    tts_pad=_BASE + 17,
    tts_bos=_BASE + 18,
    tts_eos=_BASE + 19,
    voices=(("Ethan", _BASE + 21), ("Chelsie", _BASE + 23)),
    codec_embeds=_CODES + 1,
    codec_size=_CODES + 128,
    codec_pad=_CODES + 68,
    codec_bos=_CODES + 69,
    codec_eos=_CODES + 70,
    codec_mask=_CODES + 72,
)
"""Ids of text and codec. Codes 1 to 1024 are k-means centres; 0 is what guidance takes for "no code"."""


@dataclass(frozen=True)
class Voice:
    """A speaker of the checkpoint and the flite voice that it learns from."""

    name: str
    bos: int
    """Text id of its beginning of speech."""
    flite: str


VOICES = tuple(Voice(name, bos, {"Ethan": "rms", "Chelsie": "slt"}[name]) for name, bos in VOCAB.voices)
"""In the order of the checkpoint's speakers."""


@dataclass(frozen=True)
class Sizes:
    """All that differs between the shipped model and a toy."""

    # Thinker
    hidden: int = 256
    """Width of thinker's rows, which the talker takes."""
    thinker_layers: int = 4
    thinker_mlp: int = 384
    thinker_heads: int = 4
    audio_layers: int = 4
    audio_hidden: int = 128
    vision_layers: int = 3
    vision_hidden: int = 96
    vision_mlp: int = 128
    # Talker
    talker_hidden: int = 256
    talker_layers: int = 5
    talker_mlp: int = 512
    talker_heads: int = 4
    # Token2wav
    codes: int = _CODES
    """k-means centres in use; ids beyond are never spoken."""
    dit_hidden: int = 128
    dit_layers: int = 5
    dit_heads: int = 4
    dit_look_backward: tuple[int, ...] = (0, 4)
    dit_look_ahead: tuple[int, ...] = (2,)
    vocoder_channels: int = 192
    vocoder_kernels: tuple[int, ...] = (7,)
    vocoder_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5),)


FULL = Sizes()
"""The shipped model."""
TOY = Sizes(
    hidden=128,
    thinker_layers=1,
    thinker_mlp=128,
    thinker_heads=2,
    audio_layers=1,
    audio_hidden=64,
    vision_layers=1,
    vision_hidden=32,
    vision_mlp=64,
    talker_hidden=128,
    talker_layers=2,
    talker_mlp=128,
    talker_heads=2,
    codes=64,
    dit_hidden=64,
    dit_layers=3,
    dit_heads=2,
    dit_look_backward=(0,),
    vocoder_channels=64,
    vocoder_kernels=(3,),
    vocoder_dilations=((1, 3, 5),),
)
"""Trains some steps a second on one CPU core."""

HEAD_DIM = 64
"""Width of a head of thinker and talker."""
_ROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]}
_THINKER_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 5, 24]}
"""Time, height and width begin at angles of 1, 0.4 and 0.1 a step: at the published ones, places in a picture of six
tokens across hardly differ.
"""


def omni_config(sizes: Sizes) -> Qwen2_5OmniConfig:
    """The whole configuration, as HF's `from_pretrained` and the server read it."""
    prepare_transformers()
    from transformers import Qwen2_5OmniConfig

    config = Qwen2_5OmniConfig(
        thinker_config=_thinker(sizes),
        talker_config=_talker(sizes),
        token2wav_config={"dit_config": _dit(sizes), "bigvgan_config": _vocoder(sizes)},
        enable_audio_output=True,
        architectures=["Qwen2_5OmniForConditionalGeneration"],
    )
    config.enable_talker = True
    return config


def _media_ids() -> dict[str, int]:
    return {
        "audio_token_index": VOCAB.id_of("<|AUDIO|>"),
        "image_token_index": VOCAB.id_of("<|IMAGE|>"),
        "video_token_index": VOCAB.id_of("<|VIDEO|>"),
        "audio_start_token_id": VOCAB.id_of("<|audio_bos|>"),
        "audio_end_token_id": VOCAB.id_of("<|audio_eos|>"),
        "vision_start_token_id": VOCAB.id_of("<|vision_bos|>"),
        "vision_end_token_id": VOCAB.id_of("<|vision_eos|>"),
    }


def _thinker(sizes: Sizes) -> dict[str, Any]:
    text = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.thinker_mlp,
        "num_hidden_layers": sizes.thinker_layers,
        "num_attention_heads": sizes.thinker_heads,
        "num_key_value_heads": max(1, sizes.thinker_heads // 2),
        "rope_parameters": _THINKER_ROPE,
        "vocab_size": VOCAB.size,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "max_window_layers": sizes.thinker_layers,
    }
    return {
        "text_config": text,
        "audio_config": _audio(sizes),
        "vision_config": _vision(sizes),
        **_media_ids(),
        "vision_token_id": VOCAB.id_of("<|vision_pad|>"),
        "bos_token_id": VOCAB.id_of("<|im_start|>"),
        "eos_token_id": VOCAB.id_of("<|im_end|>"),
        "pad_token_id": VOCAB.id_of("<|endoftext|>"),
        "user_token_id": VOCAB.base - 1,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def _audio(sizes: Sizes) -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": sizes.audio_layers,
        "encoder_attention_heads": sizes.audio_hidden // 32,
        "encoder_ffn_dim": sizes.audio_hidden * 2,
        "d_model": sizes.audio_hidden,
        "max_source_positions": 1500,
        "output_dim": sizes.hidden,
    }


def _vision(sizes: Sizes) -> dict[str, Any]:
    return {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": sizes.vision_mlp,
        "num_heads": sizes.vision_hidden // 32,
        "out_hidden_size": sizes.hidden,
        "fullatt_block_indexes": list(range(sizes.vision_layers)),
        "tokens_per_second": 25,
    }


def _talker(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.talker_hidden,
        "intermediate_size": sizes.talker_mlp,
        "num_hidden_layers": sizes.talker_layers,
        "num_attention_heads": sizes.talker_heads,
        "num_key_value_heads": max(1, sizes.talker_heads // 2),
        "head_dim": HEAD_DIM,
        "rope_parameters": _ROPE,
        "embedding_size": sizes.hidden,
        "vocab_size": VOCAB.codec_size,
        "max_position_embeddings": 32768,
        "max_window_layers": sizes.talker_layers,
        "tts_codec_pad_token_id": VOCAB.codec_pad,
        "tts_codec_start_token_id": VOCAB.codec_bos,
        "tts_codec_end_token_id": VOCAB.codec_eos,
        "tts_codec_mask_token_id": VOCAB.codec_mask,
        "tts_text_pad_token_id": VOCAB.tts_pad,
        "tts_text_start_token_id": VOCAB.tts_bos,
        "tts_text_end_token_id": VOCAB.tts_eos,
        "tie_word_embeddings": False,
        **_media_ids(),
    }


def _dit(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.dit_hidden,
        "num_hidden_layers": sizes.dit_layers,
        "num_attention_heads": sizes.dit_heads,
        "head_dim": 32,
        "ff_mult": 2,
        "dropout": 0.0,
        "emb_dim": 64,
        "look_backward_layers": list(sizes.dit_look_backward),
        "look_ahead_layers": list(sizes.dit_look_ahead),
        "num_embeds": VOCAB.codec_embeds,
        "enc_dim": 16,
        "enc_channels": [32, 32, 32, 32, 96],
        "enc_attention_channels": 16,
        "enc_se_channels": 16,
    }


def _vocoder(sizes: Sizes) -> dict[str, Any]:
    return {
        "upsample_initial_channel": sizes.vocoder_channels,
        "resblock_kernel_sizes": list(sizes.vocoder_kernels),
        "resblock_dilation_sizes": [list(row) for row in sizes.vocoder_dilations],
    }

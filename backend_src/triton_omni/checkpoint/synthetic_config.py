# SPDX-License-Identifier: Apache-2.0
"""Architectures of the synthetic checkpoints: a tiny one, and the published 3B and 7B sizes.

Knows configurations only; the weights are drawn in `synthetic_weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from triton_omni.checkpoint.facts import FourBit, FourBitMethod
from triton_omni.checkpoint.transformers_setup import prepare_transformers

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig

Size = Literal["tiny", "3b", "7b"]
SIZES: tuple[Size, ...] = ("tiny", "3b", "7b")
FOUR_BIT_METHODS: tuple[FourBitMethod, ...] = get_args(FourBitMethod)


def _checkpoints() -> Iterator[tuple[str, tuple[Size, FourBit | None]]]:
    for size in SIZES:
        yield size, (size, None)
        # The published groups would be wider than the tiny matrices.
        group_size = 32 if size == "tiny" else 128
        for method in FOUR_BIT_METHODS:
            yield f"{size}-{method}", (size, FourBit(method, group_size))


_CHECKPOINTS = dict(_checkpoints())
NAMES = tuple(_CHECKPOINTS)
"""Names of the synthetic checkpoints: a size, and the quantisation of the thinker's decoder."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
"""The published special tokens in the order of their ids, from 151643 on in the published sizes."""


@dataclass(frozen=True)
class Vocabulary:
    """Ids of the text vocabulary and of the codec's vocabulary."""

    base: int
    """Text ids below this are ordinary BPE tokens; the special tokens follow in the order of `SPECIAL_TOKENS`."""
    size: int
    """Rows of the embedding, the unused ones at the end included."""
    tts_pad: int
    tts_bos: int
    tts_eos: int
    voices: tuple[tuple[str, int], ...]
    """Speakers in their order with the text id of their beginning of speech."""
    codec_embeds: int
    """`num_embeds` of the codec; codes 0 to `codec_embeds` have a row in the DiT's table."""
    codec_size: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_mask: int

    def id_of(self, token: str) -> int:
        """Id of a special token; an unknown one is a ValueError."""
        return self.base + SPECIAL_TOKENS.index(token)


_PUBLISHED = Vocabulary(
    base=151643,
    size=152064,
    tts_pad=151859,
    tts_bos=151860,
    tts_eos=151861,
    voices=(("Ethan", 151870), ("Chelsie", 151872)),
    codec_embeds=8193,
    codec_size=8448,
    codec_pad=8292,
    codec_bos=8293,
    codec_eos=8294,
    codec_mask=8296,
)
_VOCABULARIES: dict[Size, Vocabulary] = {
    "tiny": Vocabulary(
        base=288,
        size=320,
        tts_pad=305,
        tts_bos=306,
        tts_eos=307,
        voices=(("Ethan", 309), ("Chelsie", 311)),
        codec_embeds=193,
        codec_size=256,
        codec_pad=212,
        codec_bos=213,
        codec_eos=214,
        codec_mask=216,
    ),
    "3b": replace(_PUBLISHED, size=151936),
    "7b": _PUBLISHED,
}


def vocabulary(size: Size) -> Vocabulary:
    """The ids of a synthetic checkpoint."""
    return _VOCABULARIES[size]


def split_name(name: str) -> tuple[Size, FourBit | None]:
    """The size that one of `NAMES` says, and how the decoder is quantised; a ValueError for any other name."""
    if name not in _CHECKPOINTS:
        raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
    return _CHECKPOINTS[name]


def omni_config(size: Size) -> Qwen2_5OmniConfig:
    """The whole HF configuration of a synthetic checkpoint; sizes '3b' and '7b' are the published ones."""
    prepare_transformers()
    from transformers import Qwen2_5OmniConfig

    vocab = vocabulary(size)
    thinker, talker = _thinker(size, vocab), _talker(size, vocab)
    config = Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config=talker,
        token2wav_config=_token2wav(size, vocab),
        enable_audio_output=True,
        architectures=["Qwen2_5OmniForConditionalGeneration"],
    )
    config.enable_talker = True
    return config


def _rope(sections: tuple[int, int, int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": list(sections)}


_TEXT: dict[Size, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": _rope((4, 6, 6)),
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_parameters": _rope((16, 24, 24)),
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": _rope((16, 24, 24)),
    },
}
_TALKER: dict[Size, dict[str, Any]] = {
    # Hidden size, heads x head_dim and embedding size all differ, as they do in the published sizes.
    "tiny": {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": _rope((4, 6, 6)),
    },
    "3b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": _rope((16, 16, 0)),
    },
    "7b": {
        "hidden_size": 896,
        "intermediate_size": 18944,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_parameters": _rope((16, 24, 24)),
    },
}


def _thinker(size: Size, vocab: Vocabulary) -> dict[str, Any]:
    text = _TEXT[size]
    tiny = size == "tiny"
    return {
        "text_config": {
            **text,
            "vocab_size": vocab.size,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "max_window_layers": text["num_hidden_layers"],
        },
        "audio_config": _audio(tiny, text["hidden_size"]),
        "vision_config": _vision(tiny, text["hidden_size"]),
        "audio_token_index": vocab.id_of("<|AUDIO|>"),
        "image_token_index": vocab.id_of("<|IMAGE|>"),
        "video_token_index": vocab.id_of("<|VIDEO|>"),
        "audio_start_token_id": vocab.id_of("<|audio_bos|>"),
        "audio_end_token_id": vocab.id_of("<|audio_eos|>"),
        "vision_start_token_id": vocab.id_of("<|vision_bos|>"),
        "vision_end_token_id": vocab.id_of("<|vision_eos|>"),
        "vision_token_id": vocab.id_of("<|vision_pad|>"),
        "bos_token_id": vocab.id_of("<|im_start|>"),
        "eos_token_id": vocab.id_of("<|im_end|>"),
        "pad_token_id": vocab.id_of("<|endoftext|>"),
        "user_token_id": min(872, vocab.base - 1),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def _audio(tiny: bool, hidden: int) -> dict[str, Any]:
    if not tiny:
        return {"output_dim": hidden, "max_source_positions": 1500}
    return {
        "num_mel_bins": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "d_model": 64,
        "max_source_positions": 1500,
        "output_dim": hidden,
    }


def _vision(tiny: bool, hidden: int) -> dict[str, Any]:
    if not tiny:
        return {"hidden_size": 1280, "out_hidden_size": hidden, "tokens_per_second": 25}
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": hidden,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 25,
    }


def _talker(size: Size, vocab: Vocabulary) -> dict[str, Any]:
    return {
        **_TALKER[size],
        "embedding_size": _TEXT[size]["hidden_size"],
        "vocab_size": vocab.codec_size,
        "max_position_embeddings": 32768,
        "max_window_layers": _TALKER[size]["num_hidden_layers"],
        "tts_codec_pad_token_id": vocab.codec_pad,
        "tts_codec_start_token_id": vocab.codec_bos,
        "tts_codec_end_token_id": vocab.codec_eos,
        "tts_codec_mask_token_id": vocab.codec_mask,
        "tts_text_pad_token_id": vocab.tts_pad,
        "tts_text_start_token_id": vocab.tts_bos,
        "tts_text_end_token_id": vocab.tts_eos,
        "audio_token_index": vocab.id_of("<|AUDIO|>"),
        "image_token_index": vocab.id_of("<|IMAGE|>"),
        "video_token_index": vocab.id_of("<|VIDEO|>"),
        "audio_start_token_id": vocab.id_of("<|audio_bos|>"),
        "audio_end_token_id": vocab.id_of("<|audio_eos|>"),
        "vision_start_token_id": vocab.id_of("<|vision_bos|>"),
        "vision_end_token_id": vocab.id_of("<|vision_eos|>"),
        "tie_word_embeddings": False,
    }


def _token2wav(size: Size, vocab: Vocabulary) -> dict[str, Any]:
    if size != "tiny":
        return {"dit_config": {"num_embeds": vocab.codec_embeds}, "bigvgan_config": {}}
    dit = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
        "ff_mult": 2,
        "emb_dim": 32,
        "look_backward_layers": [0],
        "look_ahead_layers": [2],
        "num_embeds": vocab.codec_embeds,
        "enc_dim": 16,
        "enc_channels": [32, 32, 32, 32, 96],
        "enc_attention_channels": 16,
        "enc_se_channels": 16,
    }
    # On a CPU the vocoder's length costs more than its width: fewer layers, or it takes most of a small reply's time.
    bigvgan = {
        "upsample_initial_channel": 64,
        "resblock_kernel_sizes": [3, 7],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    }
    return {"dit_config": dit, "bigvgan_config": bigvgan}

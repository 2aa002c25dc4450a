# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, processor, generation and speaker files of a synthetic checkpoint.

Knows the published file formats; knows nothing of the networks' weights.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from triton_omni.checkpoint.synthetic_config import SPECIAL_TOKENS, Size, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

# The pattern by which Qwen2's tokenizer splits text before BPE (tokenizer.json of the published checkpoint).
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_SPACE = "Ġ"  # a space in the byte-level alphabet

CHAT_TEMPLATE = (
    "{% set audio_count = namespace(value=0) %}{% set image_count = namespace(value=0) %}"
    "{% set video_count = namespace(value=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "{% set audio_count.value = audio_count.value + 1 %}"
    "{% if add_audio_id %}Audio {{ audio_count.value }}: {% endif %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat format of the published checkpoint."""

_NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_IMAGE_MEAN = [0.48145466, 0.4578275, 0.40821073]
_IMAGE_STD = [0.26862954, 0.26130258, 0.27577711]


def write_text_files(folder: Path, size: Size, vocab: Vocabulary) -> None:
    """Write tokenizer, chat template, preprocessor and generation configuration into `folder`."""
    build_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(vocab))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(folder / "preprocessor_config.json", preprocessor_config(seconds=30 if size == "tiny" else 300))
    write_json(folder / "generation_config.json", {"_from_model_config": True})


def write_speakers(path: Path, vocab: Vocabulary, *, cond: int, mel: int, frames: int, seed: int) -> None:
    """Write `spk_dict.pt`: a speaker embedding, a reference mel spectrogram and a beginning of speech for each voice.

    Args:
        path: the file to write.
        vocab: holds the voices in their order.
        cond: width of the speaker embedding.
        mel: mel bands of the reference.
        frames: mel frames of the first voice's reference; later ones are longer, so that no length is a constant.
        seed: of the random values.
    """
    generator = torch.Generator().manual_seed(seed)
    speakers = {}
    for number, (name, text_id) in enumerate(vocab.voices):
        smooth = torch.randn(1, frames + 4 * number, mel, generator=generator).cumsum(1) * 0.2
        speakers[name] = {
            "cond": torch.randn(1, cond, generator=generator),
            "ref_mel": (smooth - smooth.mean(1, keepdim=True) - 5.0).contiguous(),
            "bos_token": text_id,
        }
    torch.save(speakers, path)


def build_tokenizer(vocab: Vocabulary) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab.base` ordinary tokens and the published special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    merges = list(islice(_merges(), vocab.base - 256))
    words = [*_byte_alphabet(), *(left + right for left, right in merges)]
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Merges of a space and letters into pieces of two, three and four characters, in a fixed order."""
    known: list[str] = [_SPACE, *_LETTERS]
    while True:
        longer = []
        for left, right in product(known, _LETTERS):
            longer.append(left + right)
            yield left, right
        known = longer


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE (GPT-2's table): printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(code) for code in printable] + [chr(256 + shift) for shift in range(256 - len(printable))]


def tokenizer_config(vocab: Vocabulary) -> dict[str, Any]:
    """Content of `tokenizer_config.json`."""
    added = {
        str(vocab.id_of(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": _NAMED_TOKENS,
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen2_5OmniProcessor",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **_NAMED_TOKENS,
    }


def preprocessor_config(seconds: int, pixels: tuple[int, int] = (3136, 12845056)) -> dict[str, Any]:
    """Whisper's feature extractor and Qwen2-VL's image processor in one file, as published.

    Args:
        seconds: longest sound.
        pixels: least and most of a picture; others are scaled.
    """
    return {
        "chunk_length": seconds,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "hop_length": 160,
        "image_mean": _IMAGE_MEAN,
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": _IMAGE_STD,
        "max_pixels": pixels[1],
        "merge_size": 2,
        "min_pixels": pixels[0],
        "n_fft": 400,
        "n_samples": seconds * 16000,
        "nb_max_frames": seconds * 100,
        "padding_side": "right",
        "padding_value": 0.0,
        "patch_size": 14,
        "processor_class": "Qwen2_5OmniProcessor",
        "return_attention_mask": True,
        "sampling_rate": 16000,
        "temporal_patch_size": 2,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file of the checkpoint."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

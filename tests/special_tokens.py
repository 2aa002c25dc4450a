# SPDX-License-Identifier: Apache-2.0
"""The control tokens of Qwen2.5-Omni's chats, as its tokenizer spells them."""

from __future__ import annotations

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|IMAGE|>",
    "<|AUDIO|>",
    "<|VIDEO|>",
)

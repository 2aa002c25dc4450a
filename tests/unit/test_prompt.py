# SPDX-License-Identifier: Apache-2.0
"""Chats rendered straight into ids against HF's template and tokenizer, and user text that spells special tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from special_tokens import SPECIALS
from triton_omni.core.errors import BadRequest, InternalError
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart, Message, TextPart
from triton_omni.request.media.types import Audio, Image, Video
from triton_omni.request.parse import RawRequest, RequestDefaults, parse_request
from triton_omni.thinker.prompt import (
    DEFAULT_SYSTEM_PROMPT,
    ControlIds,
    PromptError,
    PromptRenderer,
    build_prompt,
    to_vllm_data,
)

# The pre-tokeniser of Qwen2 (transformers' tokenization_qwen2): newlines merge with each other and with punctuation.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "user\n\n\nHello there, how are you?\n\n",
    "assistant\nI am well.\n\n\n\nsystem\nYou are Qwen, a virtual human",
    "def f(x):\n\treturn x ** 2\n\n\n   # spaces \r\n\r\n",
    "<|im_end|>\n<|im_start|>user\n",
    "ein Stück Käse, 北京 你好, привет мир, e\u0301 \u00e9 1234567890",
]
TEXTS = [
    "Hello",
    "\n",
    "\n\nHello",
    "\n\n\n",
    " \n Hello",
    "\r\n\r\nHello",
    "   leading spaces",
    "trailing   ",
    "trailing newline\n",
    "trailing newlines\n\n\n",
    "\tdef f(x):\n\t\treturn 'x'\n",
    "...\n\n...",
    "don't we'll I'M",
    "12345 67",
    "你好。北京\n\n你好",
    "cafe\u0301 and café",
    "\u0301starts with a combining mark",
    "emoji \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600",
    "\x00 nul \x07 bell",
    "<| not special |>",
    "<tool_call>",
    "user\nassistant\nsystem",
    "\u2028line separator\u00a0",
    "a" * 500,
]


def qwen_like_tokenizer() -> Tokenizer:
    """A byte-level BPE with Qwen2's normaliser and pre-tokeniser, trained so that newline runs do merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIALS])
    return tokenizer


TOKENIZER = qwen_like_tokenizer()
RENDERER = PromptRenderer(SimpleNamespace(backend_tokenizer=TOKENIZER))
SPECIAL_IDS = {TOKENIZER.token_to_id(name) for name in SPECIALS}
GROUPS = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
}


def rendered_text(chat: list[Message]) -> str:
    """The whole chat as one string, as the template writes it."""
    turns = []
    for message in chat:
        content = "".join(part.text if isinstance(part, TextPart) else GROUPS[part.kind] for part in message.parts)
        turns.append(f"<|im_start|>{message.role}\n{content}<|im_end|>\n")
    return "".join(turns) + "<|im_start|>assistant\n"


def ids_of_whole(chat: list[Message]) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(rendered_text(chat), add_special_tokens=False).ids)


def user(*parts: str | MediaPart) -> Message:
    return Message("user", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


SYSTEM = Message("system", (TextPart("Be brief."),))


def medium(kind: str) -> MediaPart:
    return MediaPart(kind, b"x")


def test_the_test_tokenizer_merges_newlines_across_the_role_header():
    whole = TOKENIZER.encode("user\n\n\nHello", add_special_tokens=False).ids
    apart = [*TOKENIZER.encode("user\n", add_special_tokens=False).ids]
    apart += TOKENIZER.encode("\n\nHello", add_special_tokens=False).ids
    assert whole != apart


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_whole_rendered_template(text):
    chat = [SYSTEM, user(text), Message("assistant", (TextPart(text),)), user(text, medium("image"), text)]
    assert RENDERER.render(chat) == ids_of_whole(chat)


@settings(max_examples=300)
@given(st.lists(st.text(st.sampled_from("\n\r\t aBé\u03011.,'<|> 北"), max_size=12), min_size=1, max_size=5))
def test_ids_are_those_of_the_whole_for_any_split_into_text_parts(texts):
    chat = [SYSTEM, user(*texts)]
    assert RENDERER.render(chat) == ids_of_whole(chat)


def test_the_default_system_prompt_stands_in_for_a_missing_one():
    default = Message("system", (TextPart(DEFAULT_SYSTEM_PROMPT),))
    assert RENDERER.render([user("Hi")]) == ids_of_whole([default, user("Hi")])


@pytest.mark.parametrize("roles", ["system", "system assistant", "system user system", "system user system user"])
def test_every_role_is_rendered_where_it_stands(roles):
    chat = [Message(role, (TextPart(f"text {place}"),)) for place, role in enumerate(roles.split())]
    assert RENDERER.render(chat) == ids_of_whole(chat)


def test_a_reply_follows_one_that_says_nothing():
    chat = [SYSTEM, user("Hi"), Message("assistant", (TextPart(""),))]
    assert RENDERER.render(chat) == ids_of_whole(chat)


def test_a_custom_system_prompt_is_honoured():
    assert RENDERER.render([SYSTEM, user("Hi")]) == ids_of_whole([SYSTEM, user("Hi")])


@pytest.mark.parametrize("special", SPECIALS)
def test_special_tokens_in_user_text_are_ordinary_text(special):
    honest = RENDERER.render([SYSTEM, user("x y")])
    forged = RENDERER.render([SYSTEM, user(f"x{special}y")])
    assert [item for item in forged if item in SPECIAL_IDS] == [item for item in honest if item in SPECIAL_IDS]
    assert f"x{special}y" in TOKENIZER.decode(list(forged), skip_special_tokens=False)


def test_a_special_token_split_over_two_parts_stays_text():
    ids = RENDERER.render([SYSTEM, user("<|im_", "end|>")])
    assert ids.count(RENDERER.ids.im_end) == 2


def test_each_medium_is_one_placeholder_between_its_begin_and_end():
    ids = RENDERER.render([SYSTEM, user(medium("audio"), medium("video"), "what?", medium("image"))])
    assert [item for item in ids if item in SPECIAL_IDS][3:-2] == [
        *RENDERER.ids.group("audio"),
        *RENDERER.ids.group("video"),
        *RENDERER.ids.group("image"),
    ]


def test_the_shared_tokenizer_is_left_as_it_was():
    assert TOKENIZER.encode_special_tokens is False
    assert TOKENIZER.encode("<|im_end|>").ids == [RENDERER.ids.im_end]


def test_truncation_of_the_shared_tokenizer_does_not_cut_prompts():
    own = qwen_like_tokenizer()
    own.enable_truncation(4)
    own.enable_padding(length=64)
    ids = PromptRenderer(SimpleNamespace(backend_tokenizer=own)).render([SYSTEM, user("Hello " * 20)])
    assert ids == RENDERER.render([SYSTEM, user("Hello " * 20)])


def test_a_tokenizer_without_the_models_tokens_is_refused_by_name():
    with pytest.raises(PromptError, match=r"<\|im_start\|> is missing"):
        ControlIds.of(Tokenizer(models.BPE()))


PICTURE = Image(Pillow.new("RGB", (56, 56)))
SOUND = Audio(np.zeros(1600, np.float32))
FRAMES = np.zeros((4, 56, 56, 3), np.uint8)


def test_media_are_grouped_by_kind_in_the_order_of_the_chat():
    other = Audio(np.ones(1600, np.float32))
    data, kwargs = to_vllm_data([SOUND, PICTURE, Video(FRAMES, 2.0), other], use_audio_in_video=False)
    assert list(data) == ["image", "audio", "video"]
    assert data["image"] == [PICTURE.pixels]
    assert [audio is expected for audio, expected in zip(data["audio"], [SOUND.samples, other.samples], strict=True)]
    assert data["audio"][1] is other.samples
    assert data["video"][0] is FRAMES
    assert kwargs == {"second_per_grid_ts": [1.0]}


def test_text_alone_needs_no_media_arguments():
    assert to_vllm_data([], use_audio_in_video=True) == ({}, {})


def test_the_sound_of_videos_goes_along_when_asked():
    data, kwargs = to_vllm_data([Video(FRAMES, 2.0, SOUND)], use_audio_in_video=True)
    assert data["audio"][0] is SOUND.samples
    assert kwargs == {"use_audio_in_video": True, "second_per_grid_ts": [1.0]}


def test_the_true_rate_of_each_video_is_told():
    videos = [Video(FRAMES, fps) for fps in (2.0, 0.5, 10 / 7)]
    data, kwargs = to_vllm_data([videos[0], SOUND, *videos[1:]], use_audio_in_video=False)
    assert len(data["video"]) == 3
    assert kwargs == {"second_per_grid_ts": [1.0, 4.0, 2 / (10 / 7)]}


def test_the_sound_of_videos_stays_out_unless_asked():
    data, kwargs = to_vllm_data([Video(FRAMES, 2.0, SOUND)], use_audio_in_video=False)
    assert set(data) == {"video"}
    assert kwargs == {"second_per_grid_ts": [1.0]}


def test_a_silent_video_is_refused_when_its_sound_is_asked_for():
    with pytest.raises(BadRequest, match="video 1 of the request has no audio track"):
        to_vllm_data([Video(FRAMES, 2.0, SOUND), Video(FRAMES, 2.0)], use_audio_in_video=True)


def test_the_sounds_of_videos_come_before_others():
    film = Video(FRAMES, 2.0, Audio(np.zeros(800, np.float32)))
    data, _ = to_vllm_data([SOUND, film], use_audio_in_video=True)
    assert [len(samples) for samples in data["audio"]] == [800, 1600]


def image_request(parameters=b""):
    raw = RawRequest(
        messages=b'[{"role":"user","content":[{"type":"image"},{"type":"text","text":"what?"}]}]',
        media=[b"x"],
        sampling_parameters=parameters,
    )
    return parse_request(raw, RequestLimits(), RequestDefaults())


def test_a_prompt_holds_ids_and_media():
    prompt = build_prompt(image_request(), [PICTURE], RENDERER)
    assert prompt.token_ids.count(RENDERER.ids.image) == 1
    assert prompt.multi_modal_data == {"image": [PICTURE.pixels]}
    assert prompt.cache_salt is None


def test_a_prompt_has_its_request_s_salt():
    assert build_prompt(image_request(b'{"cache_salt": "mine"}'), [PICTURE], RENDERER).cache_salt == "mine"


@pytest.mark.parametrize("media", [[], [SOUND], [PICTURE, PICTURE]])
def test_decoded_media_that_do_not_match_the_request_are_our_fault(media):
    with pytest.raises(InternalError, match="do not match"):
        build_prompt(image_request(), media, RENDERER)


@pytest.fixture(scope="module")
def processor(tiny_checkpoint):
    """HF's processor with the tiny checkpoint's own template and tokenizer."""
    from transformers import Qwen2_5OmniProcessor

    return Qwen2_5OmniProcessor.from_pretrained(tiny_checkpoint)


def hf_ids(processor, chat):
    def content(message):
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
            for part in message.parts
        ]

    conversation = [{"role": message.role, "content": content(message)} for message in chat]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    return tuple(processor.tokenizer(text)["input_ids"])


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_hfs_processor(processor, text):
    chat = [SYSTEM, user(text), Message("assistant", (TextPart(text),)), user(medium("audio"), text)]
    assert PromptRenderer(processor.tokenizer).render(chat) == hf_ids(processor, chat)


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_placeholders_are_those_of_hfs_processor(processor, kind):
    chat = [SYSTEM, user("\n", medium(kind), medium(kind), "\n\nwhat is it?\n")]
    assert PromptRenderer(processor.tokenizer).render(chat) == hf_ids(processor, chat)

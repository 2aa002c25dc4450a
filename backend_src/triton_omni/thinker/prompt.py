# SPDX-License-Identifier: Apache-2.0
"""The thinker's prompt of a chat: token ids with one placeholder a medium, and the media next to them.

Pure: knows the tokenizer and decoded media, neither Triton nor a running engine. User text is tokenised as ordinary
text, so no spelling of a special token becomes one.

Tools, calls and their results are written as Qwen2.5's chat template writes them. Source: `chat_template` of
Qwen/Qwen2.5-7B-Instruct's tokenizer_config.json; Qwen2.5-Omni's own has no tools.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

from triton_omni.core.errors import BadRequest, InternalError
from triton_omni.request.chat import Call, MediaKind, Message, TextPart
from triton_omni.request.media.timing import FRAME_FACTOR
from triton_omni.request.media.types import Audio, Image, Medium, Video
from triton_omni.request.parse import OmniRequest
from triton_omni.session.engine import ThinkerPrompt

# --- tools in a prompt ------------------------------------------------------------------------------------------------


_BEFORE: Final = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def listed(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text after the system prompt: each tool, and how it is called; empty where there are none."""
    return "".join((_BEFORE, *(f"\n{_as_jinja(tool)}" for tool in tools), _AFTER)) if tools else ""


def merge_results(chat: Sequence[Message]) -> Iterator[Message]:
    """The chat with results of tools as turns of the user, adjoining ones together, and calls as text."""
    results: list[str] = []
    for message in chat:
        if message.role == "tool":
            results.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
            continue
        if results:
            yield _of_the_user(results)
            results = []
        yield Message("assistant", (TextPart(_said(message)),)) if message.calls else message
    if results:
        yield _of_the_user(results)


def _of_the_user(results: Sequence[str]) -> Message:
    return Message("user", (TextPart("\n".join(results)),))


def _said(message: Message) -> str:
    text = _text(message)
    return "\n".join(([text] if text else []) + [_called(call) for call in message.calls])


def _called(call: Call) -> str:
    written = call.arguments if isinstance(call.arguments, str) else _as_jinja(call.arguments)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {written}}}\n</tool_call>'


def _text(message: Message) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, TextPart))


def _as_jinja(value: Mapping[str, Any]) -> str:
    """JSON as HF's `tojson` writes it."""
    return json.dumps(value, ensure_ascii=False)


# --- the prompt -------------------------------------------------------------------------------------------------------


DEFAULT_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)
"""The model card's system prompt; the talker was trained with it (the template itself would fill in one without
speech).
"""


class FastTokenizer(Protocol):
    """The part of a HF fast tokenizer that is used here."""

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The `tokenizers.Tokenizer` inside."""


class PromptError(ValueError):
    """A tokenizer that is not Qwen2.5-Omni's; the message names the missing token."""


@dataclass(frozen=True)
class ControlIds:
    """Ids of the tokens that only the template writes."""

    im_start: int
    im_end: int
    vision_bos: int
    vision_eos: int
    audio_bos: int
    audio_eos: int
    image: int
    audio: int
    video: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ControlIds:
        """Look the ids up by the spelling in Qwen2.5-Omni's chat template.

        Raises:
            PromptError: a token is missing.
        """
        found: dict[str, int] = {}
        for item in fields(cls):
            spelling = _SPELLINGS[item.name]
            token_id = tokenizer.token_to_id(spelling)
            if token_id is None:
                raise PromptError(f"tokenizer: token {spelling} is missing, so this is not a Qwen2.5-Omni checkpoint")
            found[item.name] = token_id
        return cls(**found)

    def group(self, kind: MediaKind) -> tuple[int, int, int]:
        """Return the begin, placeholder and end id of one medium."""
        if kind == "audio":
            return self.audio_bos, self.audio, self.audio_eos
        return self.vision_bos, self.image if kind == "image" else self.video, self.vision_eos


_SPELLINGS: Mapping[str, str] = {
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "vision_bos": "<|vision_bos|>",
    "vision_eos": "<|vision_eos|>",
    "audio_bos": "<|audio_bos|>",
    "audio_eos": "<|audio_eos|>",
    "image": "<|IMAGE|>",
    "audio": "<|AUDIO|>",
    "video": "<|VIDEO|>",
}


class PromptRenderer:
    """Writes chats as Qwen2.5-Omni's template does, straight into token ids. Safe to call from many threads.

    Special tokens cut a text into segments before BPE sees it. So the runs between control ids, tokenised one by one,
    give the ids of the whole. A run holds the role's header, the newline and all text up to the next control id: the
    pre-tokeniser merges newlines across that boundary.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        backend = tokenizer.backend_tokenizer
        self.ids = ControlIds.of(backend)
        # A copy of our own: HF switches this flag (and truncation) on the shared one from call to call.
        self._plain: Tokenizer = copy.deepcopy(backend)
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()
        fixed = ("\n", "user\n", "assistant\n", "system\n", f"system\n{DEFAULT_SYSTEM_PROMPT}")
        self._fixed = {text: self._tokenise(text) for text in fixed}
        """Token ids of the template's own runs, which most chats contain."""

    def render(
        self,
        chat: Sequence[Message],
        placeholders: Iterable[int] = itertools.repeat(1),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Return the ids of `chat` and of the assistant's header; the default system prompt stands in for a missing
        one, and `tools` are listed after it. Each medium has its number of `placeholders`.
        """
        ids: list[int] = []
        run: list[str] = []
        for piece in self._pieces(_with_tools(chat, tools), iter(placeholders)):
            if isinstance(piece, str):
                run.append(piece)
                continue
            ids += self._encode("".join(run))
            run.clear()
            ids.append(piece)
        return (*ids, *self._encode("".join(run)))

    def _pieces(self, chat: Iterable[Message], placeholders: Iterator[int]) -> Iterator[str | int]:
        for message in chat:
            yield from self._turn(message, placeholders)
        yield self.ids.im_start
        yield "assistant\n"

    def _turn(self, message: Message, placeholders: Iterator[int]) -> Iterator[str | int]:
        yield self.ids.im_start
        yield f"{message.role}\n"
        for part in message.parts:
            if isinstance(part, TextPart):
                yield part.text
            else:
                begin, placeholder, end = self.ids.group(part.kind)
                yield begin
                yield from itertools.repeat(placeholder, next(placeholders))
                yield end
        yield self.ids.im_end
        yield "\n"

    def _encode(self, text: str) -> list[int]:
        known = self._fixed.get(text)
        return self._tokenise(text) if known is None else known

    def _tokenise(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        return ids


def _with_tools(chat: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """The turns of a prompt, the system's first; calls and their results are text."""
    has_own = bool(chat) and chat[0].role == "system"
    parts = chat[0].parts if has_own else (TextPart(DEFAULT_SYSTEM_PROMPT),)
    yield Message("system", (*parts, TextPart(listed(tools))))
    yield from merge_results(chat[1:] if has_own else chat)


def build_prompt(request: OmniRequest, media: Sequence[Medium], renderer: PromptRenderer) -> ThinkerPrompt:
    """Build the thinker's prompt.

    Args:
        request: the checked request.
        media: the decoded media of `request.media`, in that order.
        renderer: made once from the checkpoint's tokenizer.

    Raises:
        BadRequest: `use_audio_in_video` with a video without sound.
    """
    parts = request.media
    kinds = {"image": Image, "audio": Audio, "video": Video}
    if len(parts) != len(media) or any(
        not isinstance(medium, kinds[part.kind]) for part, medium in zip(parts, media, strict=False)
    ):
        raise InternalError(f"{len(media)} decoded media do not match the {len(parts)} of the request")
    by_kind, kwargs = _for_vllm(media, use_audio_in_video=request.use_audio_in_video)
    features = {kind: [item.features for item in items] for kind, items in by_kind.items()}
    placeholders = (len(medium.items) if isinstance(medium, Audio) else 1 for medium in media)
    tools = () if request.tools is None else request.tools.listed
    ids = renderer.render(request.chat, placeholders, tools)
    return ThinkerPrompt(ids, _contents(by_kind), kwargs, features, request.cache_salt)


def to_vllm_data(media: Sequence[Medium], *, use_audio_in_video: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return vLLM's `multi_modal_data` and `mm_processor_kwargs`, which it passes to HF's `Qwen2_5OmniProcessor`.

    Image: PIL RGB; audio: float32 [S] at 16 kHz; video: uint8 [T, H, W, 3]. `second_per_grid_ts` has the seconds
    between two time steps of each video, by its true rate. The audio tracks of videos that are used come before all
    other audio.

    Raises:
        BadRequest: `use_audio_in_video` with a video without sound.
    """
    by_kind, kwargs = _for_vllm(media, use_audio_in_video=use_audio_in_video)
    return _contents(by_kind), kwargs


def _for_vllm(media: Sequence[Medium], *, use_audio_in_video: bool) -> tuple[dict[str, list[Medium]], dict[str, Any]]:
    """Return the media of each kind that there is, in vLLM's order, and the arguments of its processor."""
    videos = [item for item in media if isinstance(item, Video)]
    kwargs: dict[str, Any] = {}
    if videos:
        kwargs["second_per_grid_ts"] = [FRAME_FACTOR / video.fps for video in videos]
        if use_audio_in_video:
            kwargs["use_audio_in_video"] = True
    sounds = [_sound_of(video, index) for index, video in enumerate(videos)] if use_audio_in_video else []
    found: dict[str, list[Medium]] = {
        "image": [item for item in media if isinstance(item, Image)],
        "audio": [*sounds, *(item for sound in media if isinstance(sound, Audio) for item in sound.items)],
        "video": [*videos],
    }
    return {kind: items for kind, items in found.items() if items}, kwargs


def _contents(by_kind: Mapping[str, Sequence[Medium]]) -> dict[str, Any]:
    return {kind: [_content(item) for item in items] for kind, items in by_kind.items()}


def _content(medium: Medium) -> object:
    match medium:
        case Image():
            return medium.pixels
        case Audio():
            return medium.samples
        case Video():
            return medium.frames


def _sound_of(video: Video, index: int) -> Audio:
    if video.audio is None:
        raise BadRequest(f"use_audio_in_video: video {index} of the request has no audio track")
    return video.audio

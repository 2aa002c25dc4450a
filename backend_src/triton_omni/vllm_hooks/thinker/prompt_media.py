# SPDX-License-Identifier: Apache-2.0
"""The media of a prompt before any of them is processed: whether each has its place, how many tokens they will take.

Sizes are scaled as vLLM says that HF's processors do; it knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from triton_omni.core.errors import BadRequest
from triton_omni.session.engine import ThinkerPrompt
from triton_omni.vllm_hooks.shared.compat import Qwen2_5OmniThinkerProcessingInfo


@contextmanager
def medium_refused() -> Iterator[None]:
    """Messages of HF's and vLLM's processors may print the media themselves, so they go to the log alone.

    Raises:
        BadRequest: instead.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadRequest("a medium could not be processed; it may be too short or too small") from error


def check_placeholders(prompt: ThinkerPrompt, media_ids: Mapping[str, int]) -> None:
    """One placeholder a medium; the sound of a video shares the video's.

    Args:
        prompt: before expansion.
        media_ids: the placeholder's id by kind.

    Raises:
        BadRequest: there are more or fewer of a kind.
    """
    items = {kind: len(prompt.multi_modal_data.get(kind, ())) for kind in media_ids}
    if _sounds_in_video(prompt):
        items["audio"] -= items["video"]
    for kind, token_id in media_ids.items():
        places = prompt.token_ids.count(token_id)
        if places != items[kind]:
            raise BadRequest(f"{kind}: {items[kind]} media were given for {places} placeholders")


def expanded_length(info: Qwen2_5OmniThinkerProcessingInfo, prompt: ThinkerPrompt, media_ids: Mapping[str, int]) -> int:
    """Tokens of a prompt once its placeholders are expanded; a video with its sound has two more around it.

    Raises:
        BadRequest: a medium's size is one that no processor takes.
    """
    placeholders = sum(map(prompt.token_ids.count, media_ids.values()))
    around = 2 * len(prompt.multi_modal_data.get("video", ())) if _sounds_in_video(prompt) else 0
    with medium_refused():
        return len(prompt.token_ids) - placeholders + around + media_length(info, prompt.multi_modal_data)


def _sounds_in_video(prompt: ThinkerPrompt) -> bool:
    return bool(prompt.mm_processor_kwargs.get("use_audio_in_video"))


def media_length(info: Qwen2_5OmniThinkerProcessingInfo, media: Mapping[str, Sequence[Any]]) -> int:
    """Tokens of all media, without those around them.

    Args:
        info: vLLM's, of the checkpoint's processors.
        media: "image" (PIL, or uint8 [H, W, 3]), "audio" (float32 [S]), "video" (uint8 [T, H, W, 3]).
    """
    return sum(_TOKENS[kind](info, medium) for kind, items in media.items() for medium in items)


def _of_image(info: Qwen2_5OmniThinkerProcessingInfo, image: Any) -> int:
    width, height = image.size if hasattr(image, "getbands") else (image.shape[1], image.shape[0])
    processor = info.get_image_processor()
    return info.get_num_image_tokens(image_width=width, image_height=height, image_processor=processor, mm_kwargs={})


def _of_video(info: Qwen2_5OmniThinkerProcessingInfo, video: Any) -> int:
    frames, height, width, _ = video.shape
    processor: Any = info.get_hf_processor()
    # HF's processor of all media goes before that of videos, whose own bounds are others.
    bounds = processor.valid_processor_kwargs._defaults["videos_kwargs"]["size"]
    return info.get_num_video_tokens(
        image_width=width,
        image_height=height,
        num_frames=frames,
        image_processor=processor.video_processor,
        mm_kwargs={"videos_kwargs": {"size": bounds}},
    )


def _of_sound(info: Qwen2_5OmniThinkerProcessingInfo, sound: Any) -> int:
    """Source: `Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths` of transformers, and its extractor's mask."""
    extractor = info.get_feature_extractor()
    frames = -(-min(len(sound), extractor.n_samples) // extractor.hop_length)
    return int(((frames - 1) // 2 + 1 - 2) // 2 + 1)


_TOKENS: Final[Mapping[str, Callable[[Qwen2_5OmniThinkerProcessingInfo, Any], int]]] = {
    "image": _of_image,
    "video": _of_video,
    "audio": _of_sound,
}

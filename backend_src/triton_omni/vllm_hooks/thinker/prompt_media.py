# SPDX-License-Identifier: Apache-2.0
"""The media of a prompt before any of them is processed: their places, their numbers of tokens, and their order as in
HF. The order covers pictures and sound of a video that is heard, and M-RoPE positions.

Sizes are scaled as HF's processors do, by vLLM's account. It knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triton_omni.core.errors import BadRequest
from triton_omni.session.engine import ThinkerPrompt
from triton_omni.vllm_hooks.shared.compat import Qwen2_5OmniThinkerProcessingInfo


@contextmanager
def medium_refused() -> Iterator[None]:
    """Replace errors of HF's and vLLM's processors, which may print media, and write them to the log alone.

    Raises:
        BadRequest: in place of the error.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise BadRequest("a medium could not be processed; it may be too short or too small") from error


def check_placeholders(prompt: ThinkerPrompt, media_ids: Mapping[str, int]) -> None:
    """Check that each medium has one placeholder; the sound of a video shares the video's.

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
        BadRequest: no processor takes a medium of this size.
    """
    placeholders = sum(map(prompt.token_ids.count, media_ids.values()))
    around = 2 * len(prompt.multi_modal_data.get("video", ())) if _sounds_in_video(prompt) else 0
    return len(prompt.token_ids) - placeholders + around + media_length(info, prompt.multi_modal_data)


def _sounds_in_video(prompt: ThinkerPrompt) -> bool:
    return bool(prompt.mm_processor_kwargs.get("use_audio_in_video"))


@medium_refused()
def media_length(info: Qwen2_5OmniThinkerProcessingInfo, media: Mapping[str, Sequence[Any]]) -> int:
    """Tokens of all media, without those around them.

    Args:
        info: vLLM's, of the checkpoint's processors.
        media: "image" (PIL, or uint8 [H, W, 3]), "audio" (float32 [S]), "video" (uint8 [T, H, W, 3]).

    Raises:
        BadRequest: no processor takes a medium of this size.
    """
    return sum(_TOKENS[kind](info, medium) for kind, items in media.items() for medium in items)


def _of_image(info: Qwen2_5OmniThinkerProcessingInfo, image: Any) -> int:
    width, height = image.size if hasattr(image, "getbands") else (image.shape[1], image.shape[0])
    processor = info.get_image_processor()
    return info.get_num_image_tokens(image_width=width, image_height=height, image_processor=processor, mm_kwargs={})


def _of_video(info: Qwen2_5OmniThinkerProcessingInfo, video: Any) -> int:
    frames, height, width, _ = video.shape
    processor: Any = info.get_hf_processor()
    # HF's processor of all media takes precedence over that of videos, whose bounds differ.
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


Indices = NDArray[np.int64]


@dataclass(frozen=True)
class TimeScale:
    """Scale from times of a video to positions; from the checkpoint."""

    per_second: int
    chunk_seconds: float

    @property
    def chunk(self) -> int:
        """Positions of one chunk, in which pictures come before their sound."""
        return int(self.per_second * self.chunk_seconds)


@dataclass(frozen=True)
class Placed:
    """One medium in a prompt whose placeholders are expanded."""

    begin: int
    """Index of its first token."""
    length: int
    grid: tuple[int, int, int] | None = None
    """Grid of pictures: time steps, rows and columns; None = sound."""
    second_per_grid: float = 1.0
    """Seconds between two time steps; without effect for an image."""
    is_heard: bool = False
    """True if a video's sound lies between its pictures, and a begin and an end token around both."""


def film_order(steps: int, size: int, sounds: int, second_per_grid: float, scale: TimeScale) -> NDArray[np.bool_]:
    """Return the tokens of a heard video that are pictures: bool [steps * size + sounds].

    Chunks of pictures and of sound alternate. Source: `replace_multimodal_special_tokens` of HF's processor. There a
    token begins at most one chunk, so after a gap of several chunks the first tokens form chunks of one token.

    Args:
        steps: time steps.
        size: tokens of one.
        sounds: tokens of the sound.
        second_per_grid: seconds between two time steps.
        scale: of the checkpoint.
    """
    pictures, begun = [0], 1
    for time in np.arange(steps) * second_per_grid * scale.per_second:
        late = min(max(int(time // scale.chunk) + 1 - begun, 0), size)
        pictures += [1] * late
        pictures[-1] += size - late
        begun += late
    chunks = [min(scale.chunk, sounds - first) for first in range(0, sounds, scale.chunk)]
    longest = max(len(pictures), len(chunks))
    counts = np.zeros((longest, 2), np.int64)
    counts[: len(pictures), 0], counts[: len(chunks), 1] = pictures, chunks
    return np.repeat(np.tile([True, False], longest), counts.ravel())


def prompt_positions(tokens: Indices, media: Sequence[Placed], video_id: int, scale: TimeScale) -> Indices:
    """M-RoPE positions int64 [3, P] of a prompt. Source: `get_rope_index` of transformers.

    Args:
        tokens: the P ids.
        media: in the order of the prompt; a heard video and its sound are one medium.
        video_id: id of a video's picture tokens.
        scale: of the checkpoint.
    """
    positions = np.empty((3, len(tokens)), np.int64)
    done = following = 0
    for medium in media:
        following = _lay_text(positions, done, medium.begin, following)
        done = medium.begin + medium.length
        here = positions[:, medium.begin : done]
        if medium.is_heard:
            is_picture = tokens[medium.begin + 1 : done - 1] == video_id
            following = _lay_film(here, is_picture, medium, following, scale)
        else:
            here[:] = following + _steps(medium, scale)
            following = int(here.max()) + 1
    _lay_text(positions, done, len(tokens), following)
    return positions


def _lay_text(positions: Indices, begin: int, end: int, following: int) -> int:
    positions[:, begin:end] = np.arange(following, following + end - begin)
    return following + end - begin


def _lay_film(here: Indices, is_picture: NDArray[np.bool_], film: Placed, following: int, scale: TimeScale) -> int:
    """Lay out a heard video: its two begin tokens share a position, and its two end tokens too."""
    inner = here[:, 1:-1]
    inner[:, is_picture] = following + _steps(film, scale)
    inner[:, ~is_picture] = following + np.arange(np.count_nonzero(~is_picture))
    others = np.flatnonzero(is_picture != is_picture[-1])
    end = int(inner[:, others[-1] + 1 if len(others) else 0 :].max()) + 1
    here[:, 0], here[:, -1] = following - 1, end
    return end


def _steps(medium: Placed, scale: TimeScale) -> Indices:
    """Positions [3, N] of a medium from 0 on: time, row and column of a picture's tokens, or thrice the index."""
    if medium.grid is None:
        return np.broadcast_to(np.arange(medium.length), (3, medium.length))
    indices = np.indices(medium.grid).reshape(3, -1)
    # In float32, as in HF: in float64 a product near a whole number may truncate to another.
    times = indices[0].astype(np.float32) * np.float32(medium.second_per_grid) * np.float32(scale.per_second)
    indices[0] = times.astype(np.int64)
    return indices

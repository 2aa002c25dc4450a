# SPDX-License-Identifier: Apache-2.0
"""vLLM's processor of a prompt's media, with sounds of their own beside videos that are heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from transformers import BatchFeature, WhisperFeatureExtractor

from triton_omni.vllm_hooks.shared.compat import Qwen2_5OmniThinkerMultiModalProcessor, Qwen2_5OmniThinkerProcessingInfo
from triton_omni.vllm_hooks.thinker.prompt_media import TimeScale, film_order

TIMES: Final = "second_per_grid_ts"


class ProcessingInfo(Qwen2_5OmniThinkerProcessingInfo):
    """vLLM's, with HF's processor but for the padding of sounds, and frames taken as they come."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        """The processor. vLLM keeps one for each set of arguments and gives it to nobody else, so it may be changed."""
        processor = super().get_hf_processor(**_without_times(kwargs))
        if not isinstance(processor.feature_extractor, LeastPaddedFeatures):
            processor.feature_extractor = LeastPaddedFeatures.from_dict(processor.feature_extractor.to_dict())
            # Frames were scaled when they were decoded; HF warns of a cap of its own that is not decided on.
            processor.video_processor.cap_pixels_per_frame = False
        return processor


class MediaProcessor(Qwen2_5OmniThinkerMultiModalProcessor):
    """vLLM's. Where videos are heard, the first sounds are theirs, in their order; the others have placeholders.

    vLLM computes the features of such sounds, and then refuses a prompt with more sounds than videos. It also reads
    `second_per_grid_ts`, the seconds between two time steps of each video, which HF's processor does not know: that has
    one rate for all videos.
    """

    def _call_hf_processor(self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        return super()._call_hf_processor(hf_data, _without_times(hf_kwargs))

    def _postprocess_hf_mm_data(
        self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object], processed_data: BatchFeature
    ) -> BatchFeature:
        processed = super()._postprocess_hf_mm_data(hf_data, hf_kwargs, processed_data)
        if (times := hf_kwargs.get(TIMES)) is not None:
            processed[TIMES] = torch.tensor(times, dtype=torch.float32)
        return processed

    @classmethod
    def omni_get_updates_use_audio_in_video(
        cls, thinker_config: Any, audio_len: int, video_grid_thw: Any, video_second_per_grid_t: float
    ) -> list[int]:
        """Ids that take the place of a heard video, in HF's order."""
        steps, rows, columns = map(int, video_grid_thw)
        size = rows * columns // thinker_config.vision_config.spatial_merge_size**2
        scale = TimeScale(thinker_config.position_id_per_seconds, thinker_config.seconds_per_chunk)
        is_picture = film_order(steps, size, audio_len, video_second_per_grid_t, scale)
        inner = np.where(is_picture, thinker_config.video_token_index, thinker_config.audio_token_index)
        return [thinker_config.audio_start_token_id, *inner.tolist(), thinker_config.audio_end_token_id]

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> tuple[list[int], Mapping[str, list[Any]]]:
        """Ids with expanded placeholders, and where each medium is."""
        updates = mm_res.prompt_updates
        videos = len(updates.get("video", ()))
        own = [_numbered(item, index) for index, item in enumerate(updates.get("audio", ())[videos:])]
        if not own or not _are_heard(mm_res.kwargs.get("video", ())):
            return super()._maybe_apply_prompt_updates(mm_items, mm_res)
        counts = mm_items.get_all_counts()
        self._validate_mm_kwargs(mm_res.kwargs, counts)
        self._validate_mm_updates(updates, counts)
        ids, places = self._apply_prompt_updates(mm_res.prompt_ids, {**updates, "audio": own})
        films = {"video": places["video"]}
        heard = self._derive_audio_from_video_placeholders(films, {**updates, "audio": updates["audio"][:videos]})
        others = [replace(place, item_idx=videos + place.item_idx) for place in places["audio"]]
        # A video before its sound, which begins at the same token: vLLM's order for embeddings that do not interleave.
        found = {**places, "video": heard["video"]}
        del found["audio"]
        found["audio"] = [*heard["audio"], *others]
        self._validate_mm_placeholders(found, counts)
        return ids, found


def _without_times(kwargs: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != TIMES}


def _numbered(updates: Sequence[Any], index: int) -> list[Any]:
    return [replace(update, item_idx=index) for update in updates]


def _are_heard(videos: Sequence[Mapping[str, Any] | None]) -> bool:
    return any(video is not None and bool(video["use_audio_in_video"].data) for video in videos)


class LeastPaddedFeatures(WhisperFeatureExtractor):
    """HF's extractor, which computes the same features of far fewer frames.

    HF pads every sound to the longest that the model takes, 300 s as published, and drops the frames of the padding
    again: ten seconds of sound took as long as five minutes. Zeros as long as a window after the longest sound are
    enough: no kept frame, and none with sound in it, sees the end of the padding, which is mirrored.
    """

    def __call__(self, raw_speech: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """Do as HF's; `max_length`, in samples, is the least that gives the same, for a list of sounds [S]."""
        if not args and kwargs.get("max_length") is None and isinstance(raw_speech, list | tuple):
            kwargs["max_length"] = self._enough(raw_speech)
        features: BatchFeature = super().__call__(raw_speech, *args, **kwargs)
        return features

    def _enough(self, sounds: Sequence[Any]) -> int | None:
        """Samples, for sounds [S] each, as vLLM gives them; None for HF's other forms, which are padded as HF does."""
        if not all(isinstance(sound, np.ndarray) and sound.ndim == 1 for sound in sounds):
            return None
        frames = -(-(max(map(len, sounds)) + self.n_fft) // self.hop_length)
        return int(min(frames * self.hop_length, self.n_samples))

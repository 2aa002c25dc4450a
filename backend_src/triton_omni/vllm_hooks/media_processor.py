# SPDX-License-Identifier: Apache-2.0
"""vLLM's processor of a prompt's media, with sounds of their own beside videos that are heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from triton_omni.vllm_hooks.compat import Qwen2_5OmniThinkerMultiModalProcessor, Qwen2_5OmniThinkerProcessingInfo
from triton_omni.vllm_hooks.sound_features import LeastPaddedFeatures


class ProcessingInfo(Qwen2_5OmniThinkerProcessingInfo):
    """vLLM's, with HF's processor but for the padding of sounds, and frames taken as they come."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        """The processor. vLLM keeps one for each set of arguments and gives it to nobody else, so it may be changed."""
        processor = super().get_hf_processor(**kwargs)
        if not isinstance(processor.feature_extractor, LeastPaddedFeatures):
            processor.feature_extractor = LeastPaddedFeatures.from_dict(processor.feature_extractor.to_dict())
            # Frames were scaled when they were decoded; HF warns of a cap of its own that is not decided on.
            processor.video_processor.cap_pixels_per_frame = False
        return processor


class MediaProcessor(Qwen2_5OmniThinkerMultiModalProcessor):
    """vLLM's. Where videos are heard, the first sounds are theirs, in their order; those behind have placeholders.

    vLLM computes the features of such sounds, and then refuses a prompt with more sounds than videos.
    """

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


def _numbered(updates: Sequence[Any], index: int) -> list[Any]:
    return [replace(update, item_idx=index) for update in updates]


def _are_heard(videos: Sequence[Mapping[str, Any] | None]) -> bool:
    return any(video is not None and bool(video["use_audio_in_video"].data) for video in videos)

# SPDX-License-Identifier: Apache-2.0
"""vLLM's processor of a prompt's media, for one medium at a time, and for further sounds beside heard videos."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import BatchFeature, WhisperFeatureExtractor

from triton_omni.session.engine import Features, SoundContext, ThinkerPrompt
from triton_omni.vllm_hooks.shared.compat import (
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalProcessingResult,
    ProcessorInputs,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
    TimingContext,
    set_default_torch_num_threads,
)
from triton_omni.vllm_hooks.thinker.prompt_media import TimeScale, film_order

TIMES: Final = "second_per_grid_ts"
HEARD: Final = "use_audio_in_video"
FLOOR: Final = 2.0
"""Floor below the loudest value: 8 decades, in HF's features a quarter each (`WhisperFeatureExtractor`)."""
_SOUND, _MASK, _LENGTH = "input_audio_features", "feature_attention_mask", "audio_feature_lengths"
_SIZES: Final = (_LENGTH, "image_grid_thw", "video_grid_thw")
"""Fields that determine a medium's number of tokens."""


class ProcessingInfo(Qwen2_5OmniThinkerProcessingInfo):
    """vLLM's info with HF's processor, which pads sounds less and takes frames as they come."""

    def get_hf_processor(self, **kwargs: object) -> Any:
        """Return the processor; vLLM keeps one for each set of arguments and shares none, so it may be changed."""
        processor = super().get_hf_processor(**_without_times(kwargs))
        if not isinstance(processor.feature_extractor, LeastPaddedFeatures):
            processor.feature_extractor = LeastPaddedFeatures.from_dict(processor.feature_extractor.to_dict())
            # Frames were scaled when they were decoded; HF warns of a cap of its own that is not decided on.
            processor.video_processor.cap_pixels_per_frame = False
        return processor


@dataclass
class MediaInputs(ProcessorInputs):
    """vLLM's inputs, with the features of media that were processed before."""

    features: Mapping[str, Sequence[Features]] = field(default_factory=dict)


class MediaProcessor(Qwen2_5OmniThinkerMultiModalProcessor):
    """vLLM's processor, for one medium at a time. If videos are heard, the first sounds are theirs, in their order; the
    others have placeholders.

    A medium processed beside others may differ in its last bits: sounds are padded to the longest. By itself it has the
    same features in every prompt, so they can be kept.

    vLLM computes the features of such sounds, and then refuses a prompt with more sounds than videos. It also reads
    `second_per_grid_ts`, the seconds between two time steps of each video, which HF's processor does not know: that has
    one rate for all videos.
    """

    _numbers = itertools.count()

    def place(self, prompt: ThinkerPrompt) -> dict[str, Any]:
        """Process the media of a prompt, expand its placeholders, and return vLLM's engine input.

        Raises:
            ValueError, TypeError: a medium cannot be processed.
        """
        inputs = MediaInputs(
            list(prompt.token_ids),
            # vLLM limits a request's media, and a long sound may have more pieces than that.
            self.info.parse_mm_data(prompt.multi_modal_data, validate=False),
            hf_processor_mm_kwargs=prompt.mm_processor_kwargs,
            features=prompt.features,
        )
        with set_default_torch_num_threads():
            return dict(self.apply(inputs, TimingContext(enabled=False)))

    def _cached_apply_hf_processor(
        self, inputs: ProcessorInputs, timing_ctx: TimingContext
    ) -> MultiModalProcessingResult:
        media, options = inputs.mm_data_items, inputs.hf_processor_mm_kwargs
        known = inputs.features if isinstance(inputs, MediaInputs) else {}
        slots = {kind: known.get(kind) or [Features() for _ in media[kind]] for kind in media}
        found = {kind: self._items(kind, list(media[kind]), slots[kind]) for kind in media}
        # Without the pixels, which vLLM would join.
        sizes = {kind: [_fields(item, _SIZES) for item in items] for kind, items in found.items()}
        if "video" in found:
            found["video"] = _timed(found["video"], options)
        return MultiModalProcessingResult(
            prompt_ids=inputs.prompt,
            kwargs=MultiModalKwargsItems(found),
            # vLLM's own need the content, which known media do not have any more.
            hashes={kind: [slot.identifier or f"own-{next(self._numbers)}" for slot in slots[kind]] for kind in slots},
            prompt_updates=self._get_mm_prompt_updates(media, options, MultiModalKwargsItems(sizes)),
        )

    def _items(self, kind: str, media: Sequence[Any], slots: Sequence[Features]) -> list[MultiModalKwargsItem]:
        """Return the features of the media of one kind; those not known yet are filled in."""
        for medium, slot in zip(media, slots, strict=True):
            if slot.item is None:
                context = slot.context
                slot.item = (
                    self._processed(kind, medium) if context is None else self._piece(len(medium), slot, context)
                )
                slot.size = sum(element.data.nbytes for element in slot.item.values())
        return [slot.item for slot in slots]

    def _processed(self, kind: str, medium: Any) -> MultiModalKwargsItem:
        alone = self.info.parse_mm_data({kind: [medium]}, validate=False)
        data = self._apply_hf_processor_main(alone, {})
        items: MultiModalKwargsItems = MultiModalKwargsItems.from_hf_inputs(data, self._get_mm_fields_config(data, {}))
        return MultiModalKwargsItem({name: _compact(element) for name, element in items[kind][0].items()})

    def _piece(self, samples: int, slot: Features, context: SoundContext) -> MultiModalKwargsItem:
        """Return a piece's features as in the whole sound, independent of the sound after it.

        HF raises each value to `FLOOR` below the largest of the whole sound; here it is the largest up to the piece's
        end.
        """
        item = self._processed("audio", context.samples)
        found = cast(Tensor, item[_SOUND].data)
        before = -math.inf if context.before is None else context.before.loudest
        slot.loudest, slot.context = max(before, float(found.max())), None
        frames = -(-samples // self.info.get_feature_extractor().hop_length)
        own = found[:, context.skipped : context.skipped + frames].clamp(min=slot.loudest - FLOOR)
        return _with(item, {_SOUND: own, _MASK: torch.ones(frames, dtype=torch.long), _LENGTH: torch.tensor(frames)})

    @classmethod
    def omni_get_updates_use_audio_in_video(
        cls, thinker_config: Any, audio_len: int, video_grid_thw: Any, video_second_per_grid_t: float
    ) -> list[int]:
        """Return the ids that replace a heard video's placeholder, in HF's order."""
        steps, rows, columns = map(int, video_grid_thw)
        size = rows * columns // thinker_config.vision_config.spatial_merge_size**2
        scale = TimeScale(thinker_config.position_id_per_seconds, thinker_config.seconds_per_chunk)
        is_picture = film_order(steps, size, audio_len, video_second_per_grid_t, scale)
        inner = np.where(is_picture, thinker_config.video_token_index, thinker_config.audio_token_index)
        return [thinker_config.audio_start_token_id, *inner.tolist(), thinker_config.audio_end_token_id]

    def _maybe_apply_prompt_updates(self, mm_items: Any, mm_res: Any) -> tuple[list[int], Mapping[str, list[Any]]]:
        """Return ids with expanded placeholders, and the place of each medium."""
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


def _compact(element: Any) -> Any:
    """Copy a field's tensor out of a larger one: a sound's mask is a view of a mask of all samples."""
    tensor = element.data
    return element if tensor.untyped_storage().nbytes() == tensor.nbytes else replace(element, data=tensor.clone())


def _fields(item: MultiModalKwargsItem, names: Sequence[str]) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({name: item[name] for name in names if name in item})


def _timed(videos: Sequence[MultiModalKwargsItem], options: Mapping[str, Any]) -> list[MultiModalKwargsItem]:
    """Return the videos with the request's options: their times, and whether they are heard."""
    fields = [{HEARD: torch.tensor(bool(options.get(HEARD)))} for _ in videos]
    for own, seconds in zip(fields, options.get(TIMES, ()), strict=False):
        own[TIMES] = torch.tensor(seconds)
    return [_with(video, own) for video, own in zip(videos, fields, strict=True)]


def _with(item: MultiModalKwargsItem, values: Mapping[str, Tensor]) -> MultiModalKwargsItem:
    changed = {name: replace(item[name], data=value) for name, value in values.items()}
    return MultiModalKwargsItem({**item, **changed})


def _without_times(kwargs: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != TIMES}


def _numbered(updates: Sequence[Any], index: int) -> list[Any]:
    return [replace(update, item_idx=index) for update in updates]


def _are_heard(videos: Sequence[Mapping[str, Any] | None]) -> bool:
    return any(video is not None and bool(video[HEARD].data) for video in videos)


class LeastPaddedFeatures(WhisperFeatureExtractor):
    """HF's extractor with far less padding, and the same features.

    HF pads every sound to the model's longest, 300 s as published, and drops the frames of the padding again: ten
    seconds of sound took as long as five minutes. A window of zeros after the longest sound is enough: no kept frame
    sees the mirrored end of the padding.
    """

    def __call__(self, raw_speech: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """Do as HF's; for a list of sounds [S], `max_length` is the least number of samples that gives the same."""
        if not args and kwargs.get("max_length") is None and isinstance(raw_speech, list | tuple):
            kwargs["max_length"] = self._enough(raw_speech)
        features: BatchFeature = super().__call__(raw_speech, *args, **kwargs)
        return features

    def _enough(self, sounds: Sequence[Any]) -> int | None:
        """Return the padded samples for a list of sounds [S], as from vLLM; None = another form, padded as by HF."""
        if not all(isinstance(sound, np.ndarray) and sound.ndim == 1 for sound in sounds):
            return None
        frames = -(-(max(map(len, sounds)) + self.n_fft) // self.hop_length)
        return int(min(frames * self.hop_length, self.n_samples))

# SPDX-License-Identifier: Apache-2.0
"""Whisper's features of a sound, without those of the silence that pads it to five minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import BatchFeature, WhisperFeatureExtractor


class LeastPaddedFeatures(WhisperFeatureExtractor):
    """HF's extractor, which computes the same features of far fewer frames.

    HF pads every sound to the longest that the model takes, 300 s as published, and drops the frames of the padding
    again: ten seconds of sound took as long as five minutes. Zeros as long as a window behind the longest sound are
    enough: no frame that is kept, and none that has sound in it, sees the end of the padding, which is mirrored.
    """

    def __call__(self, raw_speech: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """As HF's; `max_length`, in samples, is the least that gives the same unless it is given."""
        if kwargs.get("max_length") is None:
            kwargs["max_length"] = self._enough(raw_speech)
        features: BatchFeature = super().__call__(raw_speech, *args, **kwargs)
        return features

    def _enough(self, sounds: Sequence[NDArray[np.float32]] | NDArray[np.float32]) -> int:
        lengths = [len(sound) for sound in sounds] if isinstance(sounds, list | tuple) else [len(sounds)]
        frames = -(-(max(lengths) + self.n_fft) // self.hop_length)
        return int(min(frames * self.hop_length, self.n_samples))

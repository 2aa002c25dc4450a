# SPDX-License-Identifier: Apache-2.0
"""Whisper's features of a sound, without those of the silence that pads it to five minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import BatchFeature, WhisperFeatureExtractor


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

# SPDX-License-Identifier: Apache-2.0
"""Features of sounds that are padded with little silence are HF's, which pads them to five minutes.

To the last bit but one, and they are of the order of 1: of a few frames some processors' BLAS sums in another order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

# vLLM's import walks over every attribute of torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

RATE = 16_000
LONGEST_S = 8
LAST_BITS = 2.0**-23


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [159],
        [160],
        [161],
        [399, 5000],
        [40_000, 3, 16_000],
        # With a window of silence after it, it is longer than the model takes; the last one is so without.
        [LONGEST_S * RATE - 300],
        [LONGEST_S * RATE],
        [(LONGEST_S + 1) * RATE],
    ],
    ids=str,
)
def test_the_same_features_of_the_same_frames(lengths: list[int]) -> None:
    from triton_omni.vllm_hooks.thinker.media_processor import LeastPaddedFeatures

    plain = WhisperFeatureExtractor(feature_size=128, chunk_length=LONGEST_S, return_attention_mask=True)
    random = np.random.default_rng(0)
    sounds = [random.normal(0, 0.1, length).astype(np.float32) for length in lengths]
    found = []
    for extractor in (plain, LeastPaddedFeatures(**plain.to_dict())):
        given = extractor(
            sounds, sampling_rate=RATE, padding="max_length", return_tensors="pt", return_attention_mask=True
        )
        kept = given["attention_mask"].bool()
        found.append((kept.sum(-1).tolist(), given["input_features"].permute(0, 2, 1)[kept], kept.shape[1]))
    (counts, features, padded), (our_counts, our_features, our_padded) = found
    assert our_counts == counts
    torch.testing.assert_close(our_features, features, rtol=0, atol=LAST_BITS)
    assert our_padded == min(padded, -(-(min(max(lengths), LONGEST_S * RATE) + 400) // 160))

# SPDX-License-Identifier: Apache-2.0
"""Sampling options of each stage as types; the server chooses what is left out.

At run time these are plain dictionaries: the server checks every value and names the one that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class TalkerOptions(TypedDict, total=False):
    """How codec codes are drawn, 50 for a second of speech."""

    temperature: float
    """0 to 2; 0 is greedy."""
    top_p: float
    top_k: int
    """0 = all."""
    min_p: float
    repetition_penalty: float
    """0.1 to 10; 1 = none."""
    presence_penalty: float
    """-2 to 2, once for each token that the reply has."""
    frequency_penalty: float
    """-2 to 2, as often as the reply has the token."""
    max_tokens: int
    min_tokens: int
    """It does not end by itself before."""


class ThinkerOptions(TalkerOptions, total=False):
    """How the reply's text is drawn, and what it keeps to."""

    logit_bias: Mapping[int, float] | Mapping[str, float]
    """Token id to -100 … 100."""
    stop: Sequence[str]
    """The reply ends before the first of these strings, in text and in speech."""
    json_schema: Mapping[str, Any]
    """The reply is JSON of this schema."""


class MediaOptions(TypedDict, total=False):
    """How many frames of a video are taken, and how large pictures are."""

    fps: float
    """Frames a second, up to 60; 2 unless chosen."""
    max_frames: int
    """Maximum frames of one video, from 2 up to the deployment's limit."""
    max_pixels: int
    """Maximum pixels of one image or frame, which are scaled down to it: 100,352 to 12,845,056."""


class Token2WavOptions(TypedDict, total=False):
    """How codes become a waveform."""

    preset: str
    """A name of `presets` in the deployment's settings: `reference` or `fast`, as shipped."""
    mode: Literal["streaming", "offline"]
    solver: Literal["rk4", "euler"]
    num_steps: int
    guidance_scale: float
    max_lead_s: float
    """Seconds of sound that may be made ahead of what is heard, 1 to 120."""

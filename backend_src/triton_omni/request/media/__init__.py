# SPDX-License-Identifier: Apache-2.0
"""Encoded media of a request in, arrays as HF's processor takes them out.

Limits are checked on headers before memory is spent, and again while decoding, since headers lie. The content of a
medium decides its kind, never a declared name. This package knows nothing of chats, tokens or vLLM.
"""

from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.decode import decode_media, decode_medium
from triton_omni.request.media.image import decode_image
from triton_omni.request.media.sniffing import sniff
from triton_omni.request.media.types import SAMPLE_RATE, Audio, Image, Medium, PixelRange, Video, VisionSizes
from triton_omni.request.media.video import decode_video

__all__ = [
    "SAMPLE_RATE",
    "Audio",
    "Image",
    "Medium",
    "PixelRange",
    "Video",
    "VisionSizes",
    "decode_audio",
    "decode_image",
    "decode_media",
    "decode_medium",
    "decode_video",
    "sniff",
]

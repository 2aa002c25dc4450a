# SPDX-License-Identifier: Apache-2.0
"""Choose a medium's decoder by its first bytes; every error names the medium. Knows no codec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from triton_omni.core.errors import BadRequest, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.image import decode_image
from triton_omni.request.media.sniffing import KINDS_OF, sniff
from triton_omni.request.media.types import Medium, Video, VisionSizes
from triton_omni.request.media.video import Container, decode_video


class DecodeMedium(Protocol):
    """`decode_medium`, or what does the same elsewhere."""

    def __call__(
        self, part: MediaPart, index: int, limits: RequestLimits, sizes: VisionSizes, *, with_audio: bool
    ) -> Medium:
        """Decode a medium."""


def decode_medium(
    part: MediaPart, index: int, limits: RequestLimits, sizes: VisionSizes, *, with_audio: bool
) -> Medium:
    """Decode one medium; `index` counts the request's media in the order of the chat.

    Raises:
        BadRequest, TooLarge: the message begins with the medium's index and kind.
    """
    try:
        return _decode(part, limits, sizes, with_audio)
    except OmniError as error:
        raise type(error)(f"medium {index} ({part.kind}): {error.message}") from error


def decode_media(
    parts: Sequence[MediaPart],
    limits: RequestLimits,
    sizes: VisionSizes | None = None,
    *,
    with_audio: bool,
    decode: DecodeMedium = decode_medium,
) -> tuple[Medium, ...]:
    """Decode the media of a request one after another.

    Args:
        parts: `OmniRequest.media`.
        limits: of the deployment.
        sizes: what pictures are resized to; None = the defaults.
        with_audio: take the sound of videos (`use_audio_in_video`).
        decode: decodes one of them.

    Raises:
        BadRequest, TooLarge: the message begins with the medium's index and kind.
        TooLarge: the frames of all videos have more pixels than one video's may.
    """
    chosen = sizes or VisionSizes()
    media: list[Medium] = []
    pixels = 0
    for index, part in enumerate(parts):
        media.append(decode(part, index, limits, chosen, with_audio=with_audio))
        added = _pixels_of_frames(media[-1])
        # All are held until the prompt is known to fit; one alone was scaled down to about so many.
        if added and pixels and pixels + added > limits.max_video_pixels:
            raise TooLarge(
                f"medium {index} (video): with it {pixels + added} pixels in the frames of all videos, "
                f"the limit is {limits.max_video_pixels}"
            )
        pixels += added
    return tuple(media)


def _pixels_of_frames(medium: Medium) -> int:
    return math.prod(medium.frames.shape[:3]) if isinstance(medium, Video) else 0


def _decode(part: MediaPart, limits: RequestLimits, sizes: VisionSizes, with_audio: bool) -> Medium:
    found = sniff(part.data)
    if found is None or part.kind not in KINDS_OF[found]:
        allowed = ", ".join(name for name, kinds in KINDS_OF.items() if part.kind in kinds)
        raise BadRequest(f"must be one of {allowed}; found {found or 'an unknown format'}")
    if part.kind == "audio":
        return decode_audio(part.data, limits)
    if part.kind == "image":
        return decode_image(part.data, limits, sizes)
    container: Container = "mp4" if found == "mp4" else "webm"
    return decode_video(part.data, container, limits, sizes, with_audio=with_audio)

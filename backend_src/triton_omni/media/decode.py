# SPDX-License-Identifier: Apache-2.0
"""Which decoder a medium goes to, by its first bytes; every error names the medium.

Knows the magic numbers, no codec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Protocol

from triton_omni.chat import MediaKind, MediaPart
from triton_omni.errors import BadRequest, OmniError, TooLarge
from triton_omni.media.audio import decode_audio
from triton_omni.media.image import decode_image
from triton_omni.media.types import Medium, Video, VisionSizes
from triton_omni.media.video import Container, decode_video
from triton_omni.settings import RequestLimits

FileType = Literal["wav", "flac", "ogg", "mp3", "png", "jpeg", "webp", "mp4", "webm"]

_KIND_OF: dict[FileType, MediaKind] = {
    "wav": "audio",
    "flac": "audio",
    "ogg": "audio",
    "mp3": "audio",
    "png": "image",
    "jpeg": "image",
    "webp": "image",
    "mp4": "video",
    "webm": "video",
}


def sniff(data: bytes) -> FileType | None:
    """What a file is by its first bytes, or None."""
    if data[:4] == b"RIFF":
        riff: dict[bytes, FileType] = {b"WAVE": "wav", b"WEBP": "webp"}
        return riff.get(data[8:12])
    magic: tuple[tuple[int, bytes, FileType], ...] = (
        (0, b"\x89PNG\r\n\x1a\n", "png"),
        (0, b"\xff\xd8\xff", "jpeg"),
        (0, b"fLaC", "flac"),
        (0, b"OggS", "ogg"),
        (0, b"ID3", "mp3"),
        (4, b"ftyp", "mp4"),
        (0, b"\x1aE\xdf\xa3", "webm"),
    )
    for start, expected, name in magic:
        if data[start : start + len(expected)] == expected:
            return name
    # An MPEG frame header: 11 sync bits, then layer III.
    return "mp3" if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 else None


class DecodeMedium(Protocol):
    """`decode_medium`, or what does the same elsewhere."""

    def __call__(
        self, part: MediaPart, index: int, limits: RequestLimits, sizes: VisionSizes, *, with_audio: bool
    ) -> Medium: ...


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
    if found is None or _KIND_OF[found] != part.kind:
        allowed = ", ".join(name for name, kind in _KIND_OF.items() if kind == part.kind)
        raise BadRequest(f"must be one of {allowed}; found {found or 'an unknown format'}")
    if part.kind == "audio":
        return decode_audio(part.data, limits)
    if part.kind == "image":
        return decode_image(part.data, limits, sizes)
    container: Container = "mp4" if found == "mp4" else "webm"
    return decode_video(part.data, container, limits, sizes, with_audio=with_audio)

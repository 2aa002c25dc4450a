# SPDX-License-Identifier: Apache-2.0
"""Chooses a medium's decoder by its first bytes; every error names the medium. Knows no codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from triton_omni.core.errors import BadRequest, OmniError
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media.audio import decode_audio
from triton_omni.request.media.files import KINDS_OF, sniff
from triton_omni.request.media.image import decode_image
from triton_omni.request.media.types import Medium, VisionSizes
from triton_omni.request.media.video import Container, decode_video

Take = Callable[[Medium, int], None]
"""Called with each medium and its index once it is decoded; may refuse it, and the rest is not decoded."""


def take_all(_medium: Medium, _index: int) -> None:
    """Refuse nothing."""


class DecodeMedium(Protocol):
    """`decode_medium`, or an equivalent in another process."""

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
    take: Take = take_all,
    decode: DecodeMedium = decode_medium,
) -> tuple[Medium, ...]:
    """Decode the media of a request one after another.

    Args:
        parts: `OmniRequest.media`.
        limits: of the deployment.
        sizes: what pictures are resized to; None = the defaults.
        with_audio: take the sound of videos (`use_audio_in_video`).
        take: called with each; it may raise to refuse it.
        decode: decodes one of them.

    Raises:
        BadRequest, TooLarge: the message begins with the medium's index and kind.
    """
    chosen = sizes or VisionSizes()
    media: list[Medium] = []
    for index, part in enumerate(parts):
        media.append(decode(part, index, limits, chosen, with_audio=with_audio))
        take(media[-1], index)
    return tuple(media)


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

# SPDX-License-Identifier: Apache-2.0
"""Counts the tracks of a video's file, and the samples that an mp4's tables claim, before FFmpeg allocates for them.

FFmpeg opens a decoder for each track. FFmpeg's index has an entry for each sample of a table, multiplied by its edits,
even if the file lacks the data. Two kilobytes can claim gigabytes. Knows the few boxes that do so (ISO/IEC 14496-12),
the name of a webm's codecs (RFC 9559), and no codec.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits

SAMPLES_PER_SECOND: Final = 50_000
"""Maximum samples a second; uncompressed sound has the most, one for each sample of the sound."""
SHOWN_SAMPLES_FACTOR: Final = 2
"""Factor of the samples that edits may show over those of the tables."""
MOST_BOXES: Final = 10_000
"""Maximum outermost boxes; a file in fragments of a tenth of a second has twenty a second."""

MOST_TRACKS: Final = 32
"""Maximum tracks: cameras write up to eight, with places and movements; a film with languages has twenty."""

_FFMPEG_REFUSES: Final = (2**32 - 1) // 24
"""Entries beyond which FFmpeg makes no index. Text that spells a box's name claims more, and so is ignored."""
_TABLE = re.compile(rb"stsz|stz2|trun|elst|cmov|trak")
"""Names of the boxes; their places in the tree do not matter, since FFmpeg reads a box anywhere."""
_EDIT_BYTES: Final = 12
_CODEC_NAME = re.compile(
    rb"[VASDB]_[A-Z](?:(?<=\x86[\x80-\xff].{3})|(?<=\x86[\x40-\x7f].{4})|(?<=\x86[\x20-\x3f].{5})"
    rb"|(?<=\x86[\x10-\x1f].{6})|(?<=\x86[\x08-\x0f].{7})|(?<=\x86[\x04-\x07].{8})|(?<=\x86[\x02\x03].{9})"
    rb"|(?<=\x86\x01.{10}))",
    re.DOTALL,
)
"""Codec element of a webm's track, after any spelling of its length; FFmpeg opens no track without one."""


def check_webm(data: bytes) -> None:
    """Refuse more tracks than a video has.

    Raises:
        BadRequest: there are too many.
    """
    _check_tracks(sum(1 for _ in _CODEC_NAME.finditer(data)))


def _check_tracks(tracks: int) -> None:
    if tracks > MOST_TRACKS:
        raise BadRequest(f"{tracks} tracks, the limit is {MOST_TRACKS}; send a file with the film and its sound alone")


def check_mp4(data: bytes, limits: RequestLimits) -> None:
    """Refuse tables that claim more samples than a video within the limits has.

    Raises:
        BadRequest: more samples than the file has bytes, more tracks than a video has, or tables that are themselves
            compressed.
        TooLarge: more samples, or more of them shown by edits, than `limits.max_video_seconds` can need.
    """
    samples = edits = tracks = 0
    for start, end in _tables_outside_media(data):
        name, body = data[start : start + 4], data[start + 4 : min(end, start + 16)].ljust(12, b"\xff")
        if name == b"cmov":
            raise BadRequest("its header is compressed (cmov), which is not supported")
        if name == b"trak":
            tracks += 1
        elif name == b"elst":
            edits += min(int.from_bytes(body[4:8]), (end - start - 12) // _EDIT_BYTES)
        else:
            count = int.from_bytes(body[4:8] if name == b"trun" else body[8:12])
            samples += count if count < _FFMPEG_REFUSES else 0
    _check_tracks(tracks)
    most = int(limits.max_video_seconds * SAMPLES_PER_SECOND)
    if samples > len(data):
        raise BadRequest(f"its tables claim {samples} samples in a file of {len(data)} bytes")
    if samples > most:
        raise TooLarge(f"its tables claim {samples} samples, the limit is {most}")
    if samples * edits > SHOWN_SAMPLES_FACTOR * most:
        raise TooLarge(f"{edits} edits of {samples} samples, the limit of both is {SHOWN_SAMPLES_FACTOR * most}")


def _tables_outside_media(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start of each table's name and the end of its outermost box; media data are skipped, as FFmpeg does."""
    position, boxes = 0, 0
    while position + 8 <= len(data):
        boxes += 1
        if boxes > MOST_BOXES:
            raise BadRequest(f"it has over {MOST_BOXES} outermost boxes")
        size = int.from_bytes(data[position : position + 4])
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16])
        end = min(position + size, len(data)) if size >= 8 else len(data)
        if data[position + 4 : position + 8] != b"mdat":
            for found in _TABLE.finditer(data, position + 8, end):
                yield found.start(), end
        position = end

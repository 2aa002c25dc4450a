# SPDX-License-Identifier: Apache-2.0
"""Measures the lost part of a sound, by bytes and time stamps; refuses sounds that are mostly lost or never end.

It reads the pages of an Ogg file (RFC 3533): the starts of its links, the ends of pages, the number of samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.packet import Packet

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.request.media.files import FileType

MOST_LOST = 0.5
MAX_PACKETS_PER_SECOND = 1000
"""Bounds the time for packets without sound; Opus has up to 400 a second."""

_DENSE: tuple[FileType, ...] = ("mp3", "aac", "amr", "ogg")
"""Formats in which packets, or the pages that hold them, follow each other without anything between."""
_IN_ORDER: tuple[FileType, ...] = (*_DENSE, "flac", "webm")
"""Formats whose last packet is near the end of the file."""
_LONGEST_PAUSES: dict[FileType, float] = {"flac": 0.1, "ogg": 0.1, "webm": 1.0, "mp4": 1.0}
"""Longest gap in seconds between two packets without a loss: an encoder may write no packets for silence (Opus writes
one every 0.4 s)."""
_TAGS = (b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN")


@dataclass
class DamageCount:
    """Counts one track, whose file may have several pieces.

    Attributes:
        kind: of the file; None = the file has other tracks, so places and pauses say nothing.
        max_seconds: maximum seconds of the sound; bounds the packets of all pieces.
        piece: the piece that is decoded now.
    """

    kind: FileType | None
    max_seconds: float
    piece: bytes = b""
    packets: int = 0
    decoded_bytes: int = 0
    lost_bytes: int = 0
    decoded_s: float = 0.0
    lost_s: float = 0.0
    _end: int | None = None
    _next_s: float = math.inf

    def start_piece(self, piece: bytes) -> None:
        """Begin to count the next piece."""
        self.piece, self._end, self._next_s = piece, None, math.inf

    def count_packet(self, packet: Packet[AudioStream], *, is_decoded: bool) -> None:
        """Count a packet, and the bytes between it and the one before.

        Raises:
            TooLarge: more packets than a sound of `max_seconds` has.
        """
        self.packets += 1
        if self.packets > (most := math.ceil(self.max_seconds * MAX_PACKETS_PER_SECOND)):
            raise TooLarge(
                f"more than {most} packets of sound, the limit for {self.max_seconds:g} seconds; send a part"
            )
        if is_decoded:
            self.decoded_bytes += packet.size
        else:
            self.lost_bytes += packet.size
        if packet.pos is None:
            return
        if self.kind in _DENSE:
            self._skip_to(packet.pos)
        self._end = ogg_page_end(self.piece, packet.pos) if self.kind == "ogg" else packet.pos + packet.size

    def count_frame(self, frame: AudioFrame) -> None:
        """Count a frame, and the time missing before it."""
        seconds = frame.samples / frame.sample_rate
        self.decoded_s += seconds
        if frame.time is not None and self.kind is not None:
            pause = frame.time - self._next_s
            self.lost_s += pause if pause > _LONGEST_PAUSES.get(self.kind, math.inf) else 0
            self._next_s = frame.time + seconds

    def end(self, size: int, *, is_cut: bool) -> None:
        """Count the bytes after the last packet in a piece of `size` bytes, which damage may have cut off."""
        if is_cut or self.kind in _IN_ORDER:
            self._skip_to(size)

    def check(self) -> None:
        """Refuse a track that is mostly lost.

        Raises:
            BadRequest: less than half of it is left.
        """
        parts = ((self.lost_bytes, self.decoded_bytes), (self.lost_s, self.decoded_s))
        share = max(lost / ((lost + decoded) or 1) for lost, decoded in parts)
        if share > MOST_LOST:
            raise BadRequest(
                f"damaged: {share:.0%} of the sound is lost, the limit is {MOST_LOST:.0%}; encode or send it anew"
            )

    def _skip_to(self, place: int) -> None:
        if self._end is not None and not self.piece.startswith(_TAGS, self._end):
            self.lost_bytes += max(0, place - self._end)


# --- pages of an Ogg file ---------------------------------------------------------------------------------------------


MOST_LINKS = 2000
"""Maximum links; each is opened like a file of its own, in half a millisecond."""
_FIRST_PAGE = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")
"""First page of a stream, by flag 2."""
_HEADER = 27
_POSITION = 6


def ogg_links(data: bytes) -> Iterator[bytes]:
    """Yield the pieces of a chained file; each is a whole file, so codecs and rates may differ.

    A piece begins with the first pages of its streams, one after another.

    Raises:
        BadRequest: over `MOST_LINKS`.
    """
    start, follows, count = 0, 0, 1
    for found in _FIRST_PAGE.finditer(data):
        place = found.start()
        if place not in (start, follows):
            yield data[start:place]
            start, count = place, count + 1
            if count > MOST_LINKS:
                raise BadRequest(f"over {MOST_LINKS} streams are joined in it, which is the limit; encode it anew")
        follows = ogg_page_end(data, place)
    yield data[start:]


def ogg_page_end(data: bytes, place: int) -> int:
    """Return the end of the page that begins at `place`."""
    segments = data[place + _HEADER - 1] if place + _HEADER <= len(data) else 0
    table = data[place + _HEADER : place + _HEADER + segments]
    return place + _HEADER + len(table) + sum(table)


def last_ogg_position(data: bytes) -> int:
    """Return the number of samples of a file's only stream, by its last page."""
    place = data.rfind(b"OggS") + _POSITION
    return int.from_bytes(data[place : place + 8], "little")

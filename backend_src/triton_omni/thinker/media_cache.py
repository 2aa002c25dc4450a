# SPDX-License-Identifier: Apache-2.0
"""Keeps the processed features of media, so that a medium that comes again is neither decoded nor processed.

Features depend on the encoded bytes and the options alone. Callers are kept apart by their salt: a caller finds only
what came with the same salt, and a request without one neither finds nor leaves anything.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from cachetools import LRUCache

from triton_omni.core.metrics import Metric
from triton_omni.request.chat import MediaKind, MediaPart
from triton_omni.request.media.types import Audio, Medium, Video, VisionSizes
from triton_omni.session.engine import Features

ENTRY_BYTES: Final = 4096
"""Bytes that an entry counts for besides its tensors."""


@dataclass(frozen=True)
class MediaKey:
    """Everything that the features of one medium depend on, and the caller's salt."""

    salt: str = field(repr=False)
    sha256: bytes
    """The digest of the encoded bytes, or of a piece's samples."""
    kind: MediaKind
    sizes: VisionSizes | None
    """None for sounds, which have no options."""
    with_audio: bool = False
    in_pieces: bool = False

    @classmethod
    def of(
        cls, part: MediaPart, sizes: VisionSizes, *, with_audio: bool, in_pieces: bool = False, salt: str
    ) -> MediaKey:
        """Return the key of a request's medium; of the options only those that its kind has count."""
        digest = hashlib.sha256(part.data).digest()
        return cls(
            salt,
            digest,
            part.kind,
            sizes=None if part.kind == "audio" else sizes,
            with_audio=with_audio and part.kind == "video",
            in_pieces=in_pieces and part.kind == "audio",
        )

    @classmethod
    def of_piece(cls, digest: bytes, salt: str) -> MediaKey:
        """Return the key of a piece of sound; `digest` is that of all samples its features depend on."""
        return cls(salt, digest, "audio", sizes=None)

    def name(self, medium: Medium) -> None:
        """Give the features of a medium of this key their identifier, and those of its sound another."""
        identifier = hashlib.sha256(repr((self.salt, self)).encode()).hexdigest()
        medium.features.identifier = identifier
        if isinstance(medium, Video) and medium.audio is not None:
            medium.audio.features.identifier = f"{identifier}-sound"


class MediaCache:
    """Outlines of decoded media with their features, the least recently used dropped first. Safe to use from many
    threads.

    Args:
        limit_bytes: of all entries together; 0 = nothing is kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._entries: LRUCache[MediaKey, Medium] = LRUCache(limit_bytes, getsizeof=_size)
        self._lock = threading.Lock()
        self._lookups = {"hit": 0, "miss": 0}

    @property
    def held_bytes(self) -> int:
        """Bytes that all entries have together."""
        return int(self._entries.currsize)

    def find(self, keys: Sequence[MediaKey]) -> list[Medium | None]:
        """Return what is kept of each medium, None where nothing is."""
        with self._lock:
            found = [self._entries.get(key) for key in keys]
            misses = found.count(None)
            self._lookups["miss"] += misses
            self._lookups["hit"] += len(found) - misses
        return found

    def metrics(self) -> Iterator[Metric]:
        """Yield the bytes held, and how many media were looked up with which result."""
        yield Metric("omni_media_cache_bytes", self.held_bytes)
        for result, count in self._lookups.items():
            yield Metric("omni_media_lookups_total", count, {"result": result})

    def keep(self, key: MediaKey, medium: Medium) -> None:
        """Keep a medium that was processed; one larger than the whole cache is not kept."""
        if any(part.item is None for part in _parts(medium)) or _size(medium) > self._entries.maxsize:
            return
        with self._lock:
            if key not in self._entries:
                self._entries[key] = medium.outline


def _size(medium: Medium) -> int:
    return ENTRY_BYTES + sum(part.size for part in _parts(medium))


def _parts(medium: Medium) -> list[Features]:
    match medium:
        case Audio():
            return [item.features for item in medium.items]
        case Video() if medium.audio is not None:
            return [medium.features, medium.audio.features]
        case _:
            return [medium.features]

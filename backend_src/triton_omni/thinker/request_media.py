# SPDX-License-Identifier: Apache-2.0
"""The media of one request, decoded or found in the cache; sounds in pieces where the request asks for that.

The thinker's audio tower encodes each window of a sound by itself. So a longer sound begins with the same embeddings as
a shorter one, and what was computed for the start of an utterance serves the whole. Only the extractor looks at a whole
sound: it raises quiet values to a floor below the loudest. The floor of a piece is that of the sound up to its end.

The cache keeps processed features, so that a medium that comes again is neither decoded nor processed. They depend on
the encoded bytes and the options alone. Callers are kept apart by their salt: a caller finds only what came with the
same salt, and a request without one neither finds nor leaves anything.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from triton_omni.checkpoint.facts import SoundWindow
from triton_omni.core.errors import TooLarge
from triton_omni.core.metrics import Metric
from triton_omni.request.chat import MediaKind, MediaPart
from triton_omni.request.media.decode import Take
from triton_omni.request.media.decoders import Decoders
from triton_omni.request.media.killable import IsWanted
from triton_omni.request.media.types import Audio, Medium, Video, VisionSizes
from triton_omni.request.parse import OmniRequest
from triton_omni.session.engine import Features, SoundContext

# --- the cache --------------------------------------------------------------------------------------------------------


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


# --- media of a request -----------------------------------------------------------------------------------------------


LEAST_FRAMES = 3
"""Fewer frames at the end of a sound have no token."""


@dataclass(frozen=True)
class Room:
    """The room of a prompt for media, which bounds what is held of a request until the prompt is made."""

    tokens_of: Callable[[Medium], int]
    """Tokens of a medium."""
    max_model_len: int
    """Tokens of a prompt."""

    def taker(self) -> Take:
        """Count the media of a request; raises `TooLarge` at the first one for which there is no room."""
        taken = 0

        def take(medium: Medium, index: int) -> None:
            nonlocal taken
            taken += self.tokens_of(medium)
            if taken > self.max_model_len:
                raise TooLarge(
                    f"the prompt has {taken} tokens up to medium {index} ({type(medium).__name__.lower()}) without its "
                    f"text; this deployment's limit is {self.max_model_len} (max_model_len): send shorter, smaller or "
                    "fewer media"
                )

        return take


class RequestMedia:
    """Brings the media of requests; safe to use from many threads.

    Args:
        window: of the checkpoint's audio tower.
        room: for the media of a request.
    """

    def __init__(self, decoders: Decoders, cache: MediaCache, window: SoundWindow, room: Room) -> None:
        self._decoders, self._cache, self._window, self._room = decoders, cache, window, room

    def bring(self, request: OmniRequest, is_wanted: IsWanted) -> tuple[list[Medium], dict[MediaKey, Medium]]:
        """Return the media of a request in order, and those to `keep` once they are processed.

        Raises:
            BadRequest, TooLarge: see `Decoders.decode`.
            TooLarge: a prompt has no room for so many, or such large ones.
        """
        sizes = VisionSizes().within(**vars(request.mm_processor_kwargs))
        with_audio, salt, in_pieces = request.use_audio_in_video, request.cache_salt, request.audio_in_pieces
        keys = [
            MediaKey.of(part, sizes, with_audio=with_audio, in_pieces=in_pieces, salt=salt)
            for part in request.media
            if salt is not None
        ]
        found = self._cache.find(keys)
        decoded = self._decoders.decode(
            request.media,
            sizes,
            with_audio=with_audio,
            is_wanted=is_wanted,
            take=self._room.taker(),
            known=found,
        )
        media: list[Medium] = list(decoded)
        kept: dict[MediaKey, Medium] = {}
        for index, medium in enumerate(media):
            if in_pieces and isinstance(medium, Audio) and not medium.pieces:
                media[index] = self._divided(medium, salt, kept)
        for key, medium in zip(keys, media, strict=False):
            key.name(medium)
            # A sound that is still being spoken comes again as a longer one; its pieces are kept.
            if not (request.prefill_only and isinstance(medium, Audio) and medium.pieces):
                kept[key] = medium
        return media, kept

    def keep(self, kept: dict[MediaKey, Medium]) -> None:
        """Keep media whose features are filled in."""
        for key, medium in kept.items():
            self._cache.keep(key, medium)

    def _divided(self, sound: Audio, salt: str | None, kept: dict[MediaKey, Medium]) -> Audio:
        """Return a sound with its pieces, those that are known from the cache; the others are added to `kept`."""
        pieces: list[Audio] = []
        for context, samples, digest in divide(sound.samples, self._window):
            before = pieces[-1].features if pieces else None
            key = None if salt is None else MediaKey.of_piece(digest, salt)
            piece = None if key is None else self._cache.find([key])[0]
            if not isinstance(piece, Audio):
                skipped = self._window.margin if pieces else 0
                piece = Audio(samples, features=Features(context=SoundContext(context, skipped, before)))
                if key is not None:
                    key.name(piece)
                    kept[key] = piece
            pieces.append(piece)
        return replace(sound, pieces=tuple(pieces))


def divide(
    samples: NDArray[np.float32], window: SoundWindow
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], bytes]]:
    """Yield the windows of a sound [S]: its samples with those around it, its samples, and a digest of all up to there.

    An end that is too short for a token is left out, unless it is the whole sound.
    """
    margin, digest = window.margin * window.hop, b""
    for start in range(0, max(1, len(samples)), window.samples):
        own = samples[start : start + window.samples]
        if start and -(-len(own) // window.hop) < LEAST_FRAMES:
            return
        end = start + window.samples + margin
        digest = hashlib.sha256(digest + samples[start:end].tobytes()).digest()
        yield samples[max(0, start - margin) : end], own, digest

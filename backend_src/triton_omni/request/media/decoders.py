# SPDX-License-Identifier: Apache-2.0
"""Decodes the media of requests in processes of their own, within the CPU time and the memory that a request may use.

Knows no codec: a file that stops or crashes its decoder ends that process, and no other request.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from triton_omni.core.errors import BadRequest, InternalError, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media import decode
from triton_omni.request.media.files import header_seconds
from triton_omni.request.media.killable import (
    ForkServer,
    IsWanted,
    KillableProcess,
    Killed,
    OutOfHeaderTime,
    OutOfMemory,
    OutOfTime,
    Unwanted,
)
from triton_omni.request.media.types import Medium, VisionSizes


class Decoders:
    """Processes that decode, as many as threads ask at once; safe to call from many threads."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._idle: list[KillableProcess] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._server = ForkServer(decode.__name__)

    def decode(
        self,
        parts: Sequence[MediaPart],
        sizes: VisionSizes | None = None,
        *,
        with_audio: bool,
        is_wanted: IsWanted,
        take: decode.Take = decode.take_all,
        known: Sequence[Medium | None] = (),
    ) -> tuple[Medium, ...]:
        """Decode the media of one request one after another; see `decode.decode_media`.

        Args:
            parts: `OmniRequest.media`.
            sizes: what pictures are resized to, and how videos are sampled; None = the defaults.
            with_audio: take the sound of videos (`use_audio_in_video`).
            is_wanted: polled; the work ends at once when it returns False.
            take: called with each medium; it may raise to refuse it.
            known: the earlier result for each of `parts`, if known; it counts as if decoded again.

        Raises:
            BadRequest, TooLarge: the message begins with the medium's index and kind.
            InternalError: nobody wants the media any more, or `close` was called.
        """
        if not parts:
            return ()
        with self._borrowed() as process:
            budget = _Budget(process, self._limits, is_wanted, known)
            return decode.decode_media(
                parts, self._limits, sizes, with_audio=with_audio, take=take, decode=budget.decode
            )

    def close(self) -> None:
        """End the idle processes; each other one ends once its work is done or no longer wanted."""
        with self._lock:
            self._is_closed = True
            for process in self._idle:
                process.kill()
            self._idle.clear()
            self._server.close()

    @contextmanager
    def _borrowed(self) -> Iterator[KillableProcess]:
        """A process that is used again, unless its work was cut short."""
        process = self._idle_or_new()
        is_sound = False
        try:
            yield process
            is_sound = True
        except OmniError as error:
            is_sound = not isinstance(error.__cause__, Killed)
            raise
        finally:
            self._give_back(process, is_sound=is_sound)

    def _idle_or_new(self) -> KillableProcess:
        """An idle process that still runs, or a new one."""
        with self._lock:
            if self._is_closed:  # a fork server started from here on would outlive its owner's use
                raise InternalError("the server is shutting down")
            while self._idle:
                if (process := self._idle.pop()).is_running:
                    return process
                process.kill()
            return self._server.process(self._limits.max_decode_bytes)

    def _give_back(self, process: KillableProcess, *, is_sound: bool) -> None:
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(process)
                return
        process.kill()


class _Budget:
    """Decodes the media of one request in one process, within the rest of the request's CPU time."""

    def __init__(
        self, process: KillableProcess, limits: RequestLimits, is_wanted: IsWanted, known: Sequence[Medium | None]
    ) -> None:
        self._process, self._limits, self._is_wanted, self._known = process, limits, is_wanted, known
        self._left = limits.max_decode_seconds

    def decode(
        self, part: MediaPart, index: int, limits: RequestLimits, sizes: VisionSizes, *, with_audio: bool
    ) -> Medium:
        """Do as `decode.decode_medium`, in the process."""
        call = functools.partial(decode.decode_medium, part, index, limits, sizes, with_audio=with_audio)
        try:
            if self._left <= 0:
                raise OutOfTime
            medium = self._known[index] if self._known else None
            if medium is None:
                decoded, used = self._process.run(call, self._left, self._is_wanted)
                medium = replace(decoded, cpu_seconds=used)
        except Killed as killed:
            raise self._refusal(killed, part, index) from killed
        self._left -= medium.cpu_seconds
        return medium

    def _refusal(self, killed: Killed, part: MediaPart, index: int) -> OmniError:
        named = f"medium {index} ({part.kind})"
        match killed:
            case Unwanted():
                return InternalError(f"nobody waits for medium {index} any more")
            case OutOfTime():
                return TooLarge(
                    f"{named}: decoding a request's media takes more than {self._limits.max_decode_seconds:g} seconds "
                    "of CPU time, the limit (max_decode_seconds); send shorter, smaller or fewer files"
                )
            case OutOfHeaderTime():
                return TooLarge(
                    f"{named}: reading its header takes more than {header_seconds(self._limits):g} seconds of CPU "
                    "time, the limit; send a file without tags and chapters"
                )
            case OutOfMemory():
                return TooLarge(
                    f"{named}: decoding it takes more than {self._limits.max_decode_bytes} bytes of memory, the limit "
                    "(max_decode_bytes); send a file with fewer pixels, tracks or embedded data"
                )
            case _:
                return BadRequest(
                    f"{named}: its decoder crashed ({killed}); the file is damaged, or uses a rare feature: encode it "
                    "anew"
                )

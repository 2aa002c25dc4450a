# SPDX-License-Identifier: Apache-2.0
"""The spoken input of a session: sound as it comes, the turns in it, and its prefill while somebody speaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from triton_omni_client import AsyncListening, BadRequest, Media
from triton_omni_gateway.errors import bad_request

from .buffer import InputBuffer
from .config import AudioInput, PcmFormat, SemanticVad, ServerVad
from .detection import detector_of
from .formats import BYTES_A_MS, SHORTEST_MS, InputDecoder
from .limits import RealtimeLimits
from .turns import Change, Started, Stopped, TurnDetector

_SLICE_SECONDS = 1
"""Length that is heard at once: the detector of speech takes 3 ms for it, in which nobody else is served."""
Prefill = Callable[[], AsyncListening[Media] | None]


class SpeechInput:
    """The way from what a client appends to utterances.

    Args:
        limits: how much may wait.
        audio: how sound comes and turns are found.
        prefill: begins an utterance whose sound the server computes while it comes; None = the server does not.
    """

    def __init__(self, limits: RealtimeLimits, audio: AudioInput, prefill: Prefill) -> None:
        self._buffer = InputBuffer(limits.max_buffer_seconds)
        self._prefill = prefill
        self._listening: AsyncListening[Media] | None = None
        self._audio = audio
        self._decoder = InputDecoder(audio.format)
        self._detector = detector_of(audio.turn_detection)
        self.kept_from_ms: int | None = None
        """Sound from here on is kept also where nobody speaks."""

    @property
    def end_ms(self) -> int:
        """How much sound came so far."""
        return self._buffer.end_ms

    @property
    def speaks(self) -> bool:
        """True while somebody speaks, as far as turns are detected."""
        return self._detector is not None and self._detector.speaks

    @property
    def detection(self) -> ServerVad | SemanticVad | None:
        """How turns are found."""
        return self._audio.turn_detection

    def configure(self, audio: AudioInput) -> None:
        """Go on in another way; a format that changes ends what was half a sample."""
        if audio.format != self._audio.format:
            self._decoder = InputDecoder(audio.format)
        if audio.turn_detection != self._audio.turn_detection:
            self._detector = detector_of(audio.turn_detection)
            self._restart()
            self.close()
        self._audio = audio

    def slices(self, data: bytes) -> Iterator[bytes]:
        """The appended sound, in pieces of a second.

        Raises:
            GatewayError: 400, there is no room for it.
        """
        self._buffer.check_room(self._heard_bytes(data))
        piece = _SLICE_SECONDS * self._bytes_a_second
        for at in range(0, len(data), piece):
            yield data[at : at + piece]

    def overflows(self, data: bytes) -> bool:
        """True if somebody has spoken for so long that the appended sound has no room beside."""
        return self.speaks and self._buffer.would_overflow(self._heard_bytes(data))

    def _heard_bytes(self, data: bytes) -> int:
        return len(data) * 1000 * BYTES_A_MS // self._bytes_a_second

    @property
    def _bytes_a_second(self) -> int:
        return self._audio.format.rate * (2 if isinstance(self._audio.format, PcmFormat) else 1)

    def feed(self, data: bytes) -> Iterator[Change]:
        """Take the next sound and tell who begins or ends to speak in it."""
        pcm = self._decoder.decode(data)
        self._buffer.append(pcm)
        if self._listening is not None:
            self._listening.write(np.frombuffer(pcm, "<i2"))
        if self._detector is None:
            self._begin_prefill(self._buffer.begin_ms)
            return
        for change in self._detector.feed(pcm):
            yield change
            if isinstance(change, Started):  # which ends a response: beside one, nothing is computed ahead
                self._begin_prefill(change.begin_ms)
        self._forget(self._detector)

    def _forget(self, detector: TurnDetector) -> None:
        needed = detector.needed_from_ms
        self._buffer.forget_before(needed if self.kept_from_ms is None else min(needed, self.kept_from_ms))

    def _begin_prefill(self, begin_ms: int) -> None:
        if self._listening is None and (listening := self._prefill()) is not None:
            self._listening = listening
            listening.write(np.frombuffer(self._buffer.since(begin_ms), "<i2"))

    def stop(self) -> Stopped | None:
        """End the turn here; None where it has ended already."""
        return self._detector.stop() if self._detector is not None and self._detector.speaks else None

    def between(self, begin_ms: int, end_ms: int) -> bytes:
        """The sound between two places, which stays."""
        return self._buffer.since(begin_ms)[: (end_ms - begin_ms) * BYTES_A_MS]

    def utterance(self, begin_ms: int, end_ms: int) -> bytes:
        """The sound between two places, PCM16 at 16 kHz; what came before its end is gone."""
        self._end_prefill()
        return self._buffer.take(begin_ms, end_ms)

    def commit(self) -> bytes:
        """All sound that waits.

        Raises:
            GatewayError: 400, it is under 100 ms, and stays.
        """
        self._buffer.append(self._decoder.end())
        waits = self._buffer.end_ms - self._buffer.begin_ms
        if waits < SHORTEST_MS:
            said = f"The input audio buffer has {waits} ms of sound: append at least {SHORTEST_MS} ms, then commit."
            raise bad_request(said, code="input_audio_buffer_commit_empty")
        self._end_prefill()
        sound = self._buffer.take(self._buffer.begin_ms, self._buffer.end_ms)
        self._restart()
        return sound

    def clear(self) -> None:
        """Drop all sound that waits."""
        self._decoder.end()
        self._buffer.clear()
        self._restart()
        self.close()

    def close(self) -> None:
        """Cancel what the server computes ahead."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _restart(self) -> None:
        if self._detector is not None:
            self._detector.start_at(self._buffer.end_ms)

    def _end_prefill(self) -> None:
        """The utterance is whole: what the server computes of it is used by its reply."""
        if self._listening is not None:
            try:
                self._listening.ask()
            except BadRequest:  # no sound was written
                self._listening.close()
            self._listening = None

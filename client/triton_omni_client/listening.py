# SPDX-License-Identifier: Apache-2.0
"""An utterance that the server computes while it is still being spoken.

The server takes sound in windows of two seconds. When another window is complete, a request that only prefills sends
the sound so far: a hint. At the end of speech the server has the rest alone to compute. A hint may fail, the reply is
the same without it.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .audio import pcm16_from_waveform, wav_header
from .client import OmniClient, Stream
from .closing import Closing
from .deltas import AsyncDeltaIterator
from .errors import BadRequest, ConnectionFailed, OmniClientError, Overloaded, Timeout
from .http import HttpClient
from .messages import Media, Request
from .retry import NO_RETRY, Retry

HEARD_RATE: Final = 16_000
"""Samples a second of an utterance; the server resamples none of it."""
WINDOW: Final = 2 * HEARD_RATE
"""Samples of a window."""
REACH: Final = HEARD_RATE // 50
"""Samples after a window without which it is not complete."""
_SAMPLE_BYTES = 2
_PASSING = (Overloaded, Timeout, ConnectionFailed)
"""Errors that cost one hint; another one says that longer hints would fail too."""

Samples = NDArray[np.float32] | NDArray[np.int16]
TurnT = TypeVar("TurnT")


class AsyncSource(Protocol):
    """A taker of hints: `AsyncOmniClient`, or an object in front of several servers."""

    def stream(self, request: Request, *, retry: Retry | None = None) -> AsyncDeltaIterator:
        """Send a request; its deltas come by iterating over the result."""


class _Utterance(Closing, Generic[TurnT]):
    """Base of both kinds of listening, blocking and asynchronous: the sound so far, and the next hint."""

    def __init__(self, hint: Callable[[Media], Request], ask: Callable[..., TurnT]) -> None:
        self.refusal: OmniClientError | None = None
        """Why this utterance has no more hints; None while the server takes them."""
        self._hint = hint
        self._ask = ask
        self._pcm = bytearray()
        self._hinted = 0
        self._is_hinting = False
        self._has_ended = False
        self._stream: Stream | AsyncDeltaIterator | None = None
        self._lock = threading.Lock()

    def write(self, samples: Samples) -> None:
        """Add a block of the microphone; returns at once. After the end of the utterance it does nothing.

        Args:
            samples: [S] or [S, 1], float32 in [-1, 1] or int16, at 16 kHz.

        Raises:
            BadRequest: samples of another shape or type, or not finite.
        """
        pcm = _pcm16(samples)
        with self._lock:
            if not self._has_ended:
                self._pcm += pcm
            request = None if self._is_hinting else self._next()
        if request is not None:
            self._send_hints(request)

    def ask(self, text: str = "", **options: Any) -> TurnT:
        """End the utterance, and ask as `Conversation.ask` does with the sound as medium; waits for no hint.

        A hint that is under way goes on, since the reply uses what it computes. After an error the utterance may be
        asked again.

        Raises:
            BadRequest: a value that no server accepts, or no sound was written.
        """
        with self._lock:
            self._has_ended = True
            if not self._pcm:
                raise BadRequest("the utterance has no sound: write samples before ask, and ask before close")
            sound = self._sound(len(self._pcm) // _SAMPLE_BYTES)
        return self._ask(text, [sound], **options)

    def close(self) -> None:
        """Drop the sound and cancel the hint that is under way; after `ask` it does nothing."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            self._pcm.clear()
            stream = self._stream
        if stream is not None:
            stream.close()

    @abstractmethod
    def _send_hints(self, request: Request) -> None:
        """Send a hint in the background, and those that are due when it has ended."""

    def _next(self) -> Request | None:
        """Return the hint that is due, if one is; under the lock."""
        windows = (len(self._pcm) // _SAMPLE_BYTES - REACH) // WINDOW
        self._is_hinting = windows > self._hinted and not self._has_ended and self.refusal is None
        if not self._is_hinting:
            return None
        self._hinted = windows
        return self._hint(self._sound(windows * WINDOW + REACH))

    def _sound(self, samples: int) -> Media:
        return Media("audio", wav_header(samples, HEARD_RATE) + self._pcm[: samples * _SAMPLE_BYTES])

    def _after(self, error: OmniClientError | None) -> Request | None:
        """Return the next hint once one has ended."""
        with self._lock:
            if not isinstance(error, _PASSING):
                self.refusal = error
            return self._next()

    def _note(self, stream: Stream | AsyncDeltaIterator) -> None:
        """Keep the stream of the hint that is under way, which `close` may have come before."""
        with self._lock:
            self._stream = stream
            is_dropped = self._has_ended and not self._pcm
        if is_dropped:
            stream.close()


class Listening(_Utterance[TurnT]):
    """An utterance of `Conversation.listen`; a thread sends its hints. `write` may be called from any thread."""

    def __init__(
        self, client: OmniClient | HttpClient, hint: Callable[[Media], Request], ask: Callable[..., TurnT]
    ) -> None:
        super().__init__(hint, ask)
        self._client = client

    def _send_hints(self, request: Request) -> None:
        threading.Thread(target=self._run, args=(request,), name="listening", daemon=True).start()

    def _run(self, request: Request | None) -> None:
        while request is not None:
            failure = None
            try:
                stream = self._client.stream(request, retry=NO_RETRY)
                self._note(stream)
                stream.collect()
            except OmniClientError as error:
                failure = error
            request = self._after(failure)


class AsyncListening(_Utterance[TurnT]):
    """An utterance of `Conversation.listen_async`; a task sends its hints. For the client's event loop alone."""

    def __init__(self, client: AsyncSource, hint: Callable[[Media], Request], ask: Callable[..., TurnT]) -> None:
        super().__init__(hint, ask)
        self._client = client
        self._task: asyncio.Task[None] | None = None

    def _send_hints(self, request: Request) -> None:
        self._task = asyncio.create_task(self._run(request))

    async def _run(self, request: Request | None) -> None:
        while request is not None:
            failure = None
            try:
                stream = self._client.stream(request, retry=NO_RETRY)
                self._note(stream)
                await stream.collect()
            except OmniClientError as error:
                failure = error
            request = self._after(failure)


def _pcm16(samples: Samples) -> bytes:
    if samples.ndim == 2 and samples.shape[1] == 1:
        samples = samples[:, 0]
    if samples.ndim != 1:
        raise BadRequest(f"samples: shape {list(samples.shape)} is neither [S] nor [S, 1]; write one channel")
    if samples.dtype == np.int16:
        return samples.astype("<i2").tobytes()
    if samples.dtype != np.float32:
        raise BadRequest(f"samples: {samples.dtype} is neither float32 nor int16; convert them")
    if not np.isfinite(samples).all():
        raise BadRequest("samples: some are not finite; write numbers in [-1, 1]")
    return pcm16_from_waveform(samples.astype(np.float32, copy=False))

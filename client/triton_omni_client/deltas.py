# SPDX-License-Identifier: Apache-2.0
"""Base of every iterator over a reply's deltas, blocking and with `await`, independent of their source.

Closing one cancels the request, and so does losing it: gRPC cancels a call that is collected as garbage.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self

from .audio import Waveform
from .closing import Closing
from .messages import AudioDelta, Delta, TextDelta
from .reply import Reply


class DeltaIterator(Iterator[Delta], Closing):
    """The deltas of one reply as they come; leaving its `with` block before its end cancels the request."""

    @abstractmethod
    def close(self) -> None:
        """Cancel the request unless it has ended."""

    @abstractmethod
    def reply(self) -> Reply:
        """The reply so far."""

    def texts(self) -> Iterator[str]:
        """The pieces of the text alone; what else comes is kept for `reply`. Closing this iterator cancels as well."""
        with self:
            for delta in self:
                if isinstance(delta, TextDelta):
                    yield delta.text

    def waveforms(self) -> Iterator[Waveform]:
        """The pieces of the speech alone, float32 [S] at 24 kHz; otherwise as `texts`."""
        with self:
            for delta in self:
                if isinstance(delta, AudioDelta):
                    yield delta.samples

    def collect(self) -> Reply:
        """Take all that is still to come and return the whole reply.

        Raises:
            OmniClientError: the server's error.
        """
        with self:
            for _ in self:
                pass
        return self.reply()


class AsyncDeltaIterator(AsyncIterator[Delta]):
    """The twin of `DeltaIterator` for `async for` and `async with`."""

    @abstractmethod
    def close(self) -> None:
        """Cancel the request unless it has ended."""

    @abstractmethod
    def reply(self) -> Reply:
        """The reply so far."""

    async def texts(self) -> AsyncIterator[str]:
        """The pieces of the text alone; what else comes is kept for `reply`. Closing this iterator cancels as well."""
        async with self:
            async for delta in self:
                if isinstance(delta, TextDelta):
                    yield delta.text

    async def waveforms(self) -> AsyncIterator[Waveform]:
        """The pieces of the speech alone, float32 [S] at 24 kHz; otherwise as `texts`."""
        async with self:
            async for delta in self:
                if isinstance(delta, AudioDelta):
                    yield delta.samples

    async def collect(self) -> Reply:
        """Take all that is still to come and return the whole reply.

        Raises:
            OmniClientError: the server's error.
        """
        async with self:
            async for _ in self:
                pass
        return self.reply()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

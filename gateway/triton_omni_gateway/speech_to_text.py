# SPDX-License-Identifier: Apache-2.0
"""The words of recordings: windows of them are asked for side by side, and told in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import NamedTuple

from triton_omni_client import Info, Overloaded, TextDelta

from .pool import PooledStream
from .recordings import Cutter, Window
from .settings import GatewaySettings
from .transcription import Segment

_TRIES = 20
"""How often a window after the first is asked for where the server has no free session: others of it are done."""
_TRY_AGAIN_MS = 1000
Ask = Callable[[bytes, str], AbstractAsyncContextManager[PooledStream]]
"""Sends the request for the words of a window, a WAV file, under a label for logs."""


class _Listening(NamedTuple):
    """A window that is being asked for."""

    window: Window
    pieces: asyncio.Queue[str | None]
    """Its words as they come, and None at their end."""
    task: asyncio.Task[Info | None]
    """Returns the server's account, or raises why there is none."""


class SpeechToText:
    """Writes down recordings, whoever sent them.

    Args:
        settings: of the gateway.
        recorded: called with the seconds of each recording that was heard to its end.
    """

    def __init__(self, settings: GatewaySettings, recorded: Callable[[float], None]) -> None:
        self._windows_at_once = settings.windows_at_once
        self._recorded = recorded
        self._cutter = Cutter(
            settings.window_seconds,
            settings.max_recording_seconds,
            settings.recording_cpu_seconds,
            settings.recordings_at_once,
        )

    async def pieces(self, data: bytes, param: str, label: str, ask: Ask) -> AsyncGenerator[str | Segment, None]:
        """All words in order as they come, and each window's segment after its words.

        Args:
            data: a file.
            param: its name in refusals.
            label: of the first window's request; the others have their number after it.
            ask: sends a request; again, where the server has no free session for a later window.

        Raises:
            GatewayError: 400 or 413, the file is refused.
            OmniClientError: a request failed.
        """
        said, end = False, 0.0
        async with aclosing(self._listenings(self._cutter.windows(data, param), label, ask)) as listenings:
            async for one in listenings:
                texts: list[str] = []
                while (text := await one.pieces.get()) is not None:
                    piece = text if texts else text.lstrip()
                    if piece:
                        texts.append(f" {piece}" if said and not texts else piece)
                        yield texts[-1]
                said, end = said or bool(texts), one.window.end
                yield Segment(one.window.begin, end, "".join(texts), await one.task)
        self._recorded(end)

    async def _listenings(
        self, cut: AsyncGenerator[Window, None], label: str, ask: Ask
    ) -> AsyncGenerator[_Listening, None]:
        """The windows in order, the next ones being asked for; what is not used to its end is cancelled."""
        under_way: deque[_Listening] = deque()
        count = 0
        try:
            async with aclosing(cut) as windows:
                async for window in windows:
                    under_way.append(_start_listening(window, count, label, ask))
                    count += 1
                    if len(under_way) == self._windows_at_once:
                        yield under_way[0]
                        under_way.popleft()
            while under_way:
                yield under_way[0]
                under_way.popleft()
        finally:
            for one in under_way:
                one.task.cancel()
            await asyncio.gather(*(one.task for one in under_way), return_exceptions=True)


def _start_listening(window: Window, number: int, label: str, ask: Ask) -> _Listening:
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    named = f"{label}.{number}" if number else label
    listening = _listen(lambda: ask(window.data, named), pieces, _TRIES if number else 1)
    return _Listening(window, pieces, asyncio.create_task(listening))


async def _listen(
    ask: Callable[[], AbstractAsyncContextManager[PooledStream]], pieces: asyncio.Queue[str | None], tries: int
) -> Info | None:
    """Put the words of a window into `pieces`, and None at their end, whatever it is."""
    try:
        while True:
            tries -= 1
            try:
                return await _hear(ask(), pieces)
            except Overloaded as error:
                if not tries:
                    raise
                await asyncio.sleep((error.retry_after_ms or _TRY_AGAIN_MS) / 1000)
    finally:
        pieces.put_nowait(None)


async def _hear(asked: AbstractAsyncContextManager[PooledStream], pieces: asyncio.Queue[str | None]) -> Info | None:
    info: Info | None = None
    async with asked as stream:
        async for delta in stream:
            if isinstance(delta, TextDelta):
                pieces.put_nowait(delta.text)
            elif isinstance(delta, Info):
                info = delta
    return info

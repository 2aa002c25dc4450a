# SPDX-License-Identifier: Apache-2.0
"""A conversation: it keeps the turns, media included, and of a reply that was cut off only what was heard.

Each turn sends all that came before. A server with a prefix cache computes again only what is new.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from .aio import AsyncOmniClient, AsyncStream
from .client import OmniClient, Stream
from .deltas import AsyncDeltaIterator, DeltaIterator
from .errors import OmniClientError
from .heard import heard_text
from .http import HttpClient
from .listening import AsyncListening, Listening
from .messages import Delta, Media, Request, media_fields
from .reply import Reply, Timings

_SALT_BYTES = 24
HINT_PRIORITY: Final = 1
"""Priority of a hint that is given none: after the requests of the default priority, whose callers wait for a reply."""
StreamT = TypeVar("StreamT", bound=Stream | AsyncStream)


@dataclass(frozen=True)
class Turn:
    """One turn: the user's text and media, and the heard part of the reply."""

    text: str
    media: tuple[Media, ...]
    reply: str
    """Empty when nothing was heard."""

    def messages(self) -> list[dict[str, Any]]:
        """The turn as messages of a chat; the parts of media take the next elements of `Request.media`."""
        said = [user_message(self.text, self.media)]
        return [*said, {"role": "assistant", "content": self.reply}] if self.reply else said


def user_message(text: str, media: Sequence[Media]) -> dict[str, Any]:
    """A user's message: its media first, in order, then its text."""
    content: list[dict[str, str]] = [{"type": medium.kind} for medium in media]
    if text:
        content.append({"type": "text", "text": text})
    return {"role": "user", "content": content}


class Conversation:
    """The turns so far, and the way to the next one.

    A turn that is asked while the reply before it still runs ends that reply, as one who is talked over falls silent.
    A reply that fails leaves the conversation as it was before its question.

    Args:
        system: system prompt; None leaves it to the server, whose own the spoken voice is trained for.
        options: fields of `Request` for every turn, for example `voice`; those of a turn go before them. Unless
            `cache_salt` is among them, it is drawn: turns share the server's cache with each other and nobody else.
    """

    def __init__(self, *, system: str | None = None, **options: Any) -> None:
        self.system = system
        self.options = {"cache_salt": secrets.token_urlsafe(_SALT_BYTES), **options}
        self._turns: list[Turn] = []
        self._open: weakref.ref[SpokenTurn | AsyncSpokenTurn] | None = None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns that are over, oldest first."""
        return tuple(self._turns)

    def request(self, text: str = "", media: Sequence[Media] = (), **options: Any) -> Request:
        """The request of a next turn, with all turns before; `add` keeps its outcome.

        Raises:
            BadRequest: a value that no server accepts.
        """
        turns = self.turns  # another thread may add one
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += [message for turn in turns for message in turn.messages()]
        shown = [*(medium for turn in turns for medium in turn.media), *media]
        messages.append(user_message(text, media))
        return Request(messages=messages, **media_fields(shown), **(self.options | options))

    def add(self, text: str, media: Sequence[Media], reply: str) -> None:
        """Keep a turn that was held in another way, for example by `HttpClient.unary`."""
        self._turns.append(Turn(text, tuple(media), reply))

    def ask(
        self, client: OmniClient | HttpClient, text: str = "", media: Sequence[Media] = (), **options: Any
    ) -> SpokenTurn:
        """Ask; the reply comes by iterating over the result, and is kept when it ends or is closed.

        Raises:
            BadRequest: a value that no server accepts; a reply that still runs goes on.
        """
        turn = SpokenTurn(client.stream(self._next(text, media, options)), self._record(text, media))
        self._open = weakref.ref(turn)
        return turn

    def ask_async(
        self, client: AsyncOmniClient, text: str = "", media: Sequence[Media] = (), **options: Any
    ) -> AsyncSpokenTurn:
        """`ask` for `async for`."""
        turn = AsyncSpokenTurn(client.stream(self._next(text, media, options)), self._record(text, media))
        self._open = weakref.ref(turn)
        return turn

    def listen(self, client: OmniClient | HttpClient, **options: Any) -> Listening[SpokenTurn]:
        """Begin a turn whose sound the server computes while it is still being spoken; see `Listening`.

        It ends a reply that still runs. From now on all turns send their sounds with `audio_in_pieces`, so that the
        server knows those of earlier turns again.

        Args:
            client: whom to ask.
            options: fields of `Request` for this turn and its hints; hints have a `priority` after that of replies
                unless one is among the options.

        Raises:
            BadRequest: a value that no server accepts; a reply that still runs goes on.
        """
        return Listening(client, self._hints(options), partial(self.ask, client, **options))

    def listen_async(self, client: AsyncOmniClient, **options: Any) -> AsyncListening[AsyncSpokenTurn]:
        """`listen` for `AsyncOmniClient`."""
        return AsyncListening(client, self._hints(options), partial(self.ask_async, client, **options))

    def stop(self, heard: float | None = None) -> None:
        """End the reply that still runs, if one does; see `SpokenTurn.close`."""
        turn = self._open() if self._open is not None else None
        if turn is not None:
            turn.close(heard)

    def reset(self) -> None:
        """Forget every turn; a reply that still runs is ended and forgotten too."""
        self.stop()
        self._turns.clear()

    def _hints(self, options: dict[str, Any]) -> Callable[[Media], Request]:
        """Return what makes a hint of a sound."""

        def hint(*sound: Media) -> Request:
            fields = {"priority": HINT_PRIORITY, **self.options, **options, "prefill_only": True}
            return self.request(media=sound, **fields)

        hint().check()
        self.stop()
        self.options["audio_in_pieces"] = True
        return hint

    def _next(self, text: str, media: Sequence[Media], options: dict[str, Any]) -> Request:
        """Return the request of the next turn. It ends a reply that still runs and keeps the heard part of it."""
        # Once before: one that cannot be asked ends nothing.
        self.request(text, media, **options).check()
        self.stop()
        return self.request(text, media, **options)

    def _record(self, text: str, media: Sequence[Media]) -> _Record:
        return _Record(self._turns, Turn(text, tuple(media), ""))


class _Record:
    """One turn's entry in a conversation: made when its reply ends, made smaller when less of it was heard."""

    def __init__(self, turns: list[Turn], turn: Turn) -> None:
        self._turns = turns
        self._turn = turn
        self._done = False

    def end(self, taken: Callable[[], Reply], heard: float | None = None) -> None:
        """The reply has ended, by itself or cut off.

        Args:
            taken: what was taken of it.
            heard: seconds of its speech that were heard; None: all that was taken.
        """
        if not self._done:
            self._done = True
            self._turn = replace(self._turn, reply=taken().text)
            self._turns.append(self._turn)
        if heard is not None:
            self._cut(taken(), heard)

    def _cut(self, reply: Reply, heard: float) -> None:
        total = reply.timings.audio if reply.info is not None else None
        shorter = replace(self._turn, reply=heard_text(reply.text, heard, total))
        for place, turn in enumerate(self._turns):
            if turn is self._turn:
                self._turns[place] = self._turn = shorter

    def fail(self) -> None:
        """There was no reply: nothing is kept."""
        self._done = True


class _Spoken(Generic[StreamT]):
    """Base of both kinds of turn, blocking and asynchronous."""

    def __init__(self, stream: StreamT, record: _Record) -> None:
        self._stream = stream
        self._record = record

    def close(self, heard: float | None = None) -> None:
        """Cancel the request unless it has ended, and keep what was heard.

        Args:
            heard: seconds of speech that reached the listener, also of a reply that has ended already; the text that
                was spoken in them is estimated (`heard_text`). None: all that was taken from this iterator.
        """
        self._stream.close()
        self._record.end(self.reply, heard)

    def timings(self) -> Timings:
        """Times as the client saw them, of the deltas taken so far."""
        return self._stream.timings()

    def reply(self) -> Reply:
        """The reply so far."""
        return self._stream.reply()

    def __del__(self) -> None:
        self.close()


class SpokenTurn(_Spoken[Stream], DeltaIterator):
    """The deltas of a conversation's reply, see `Stream`; what was heard of it is kept when it ends or is closed."""

    def __next__(self) -> Delta:
        try:
            return next(self._stream)
        except StopIteration:
            self._record.end(self.reply)
            raise
        except OmniClientError:
            self._record.fail()
            raise


class AsyncSpokenTurn(_Spoken[AsyncStream], AsyncDeltaIterator):
    """The twin of `SpokenTurn` for `async for`."""

    async def __anext__(self) -> Delta:
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            self._record.end(self.reply)
            raise
        except OmniClientError:
            self._record.fail()
            raise

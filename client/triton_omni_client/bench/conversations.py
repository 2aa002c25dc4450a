# SPDX-License-Identifier: Apache-2.0
"""Requests of conversations by number, each with the whole history, and the script file that says what is asked."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triton_omni_client.aio import AsyncOmniClient
from triton_omni_client.audio import wav_header
from triton_omni_client.conversation import HINT_PRIORITY, Conversation
from triton_omni_client.errors import BadRequest
from triton_omni_client.listening import HEARD_RATE, AsyncListening
from triton_omni_client.messages import Media, Request
from triton_omni_client.options import read_media

from .workload import ScriptTurn, Workload

_FILES = ("image", "audio", "video")
_BLOCK_S: Final = 0.1
"""Sound that a microphone gives at once."""


class Conversations:
    """Holds a run's conversations: request `index` is turn `index % turns` of conversation `index // turns`.

    A turn whose reply failed is missing from the history of the turns after it, as in the library's `Conversation`.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._open: dict[int, Conversation] = {}

    def request(self, index: int) -> Request:
        """Return the request of this number, with the turns that were answered before it."""
        conversation, asked = self._conversation(index), self._workload.turn(index)
        if (index + 1) % self._workload.turns == 0:
            del self._open[index // self._workload.turns]
        return conversation.request(asked.text, asked.media, **self._workload.options(index))

    def answered(self, index: int, reply: str) -> None:
        """Keep the turn of this request with the text of its whole reply; of a last turn nothing needs to be kept."""
        conversation = self._open.get(index // self._workload.turns)
        if conversation is not None:
            asked = self._workload.turn(index)
            conversation.add(asked.text, asked.media, reply)

    async def speak(self, index: int, client: AsyncOmniClient) -> None:
        """Send the sound of this request's turn while it is spoken, in real time; returns when it was spoken."""
        conversation, asked = self._conversation(index), self._workload.turn(index)
        options = self._workload.options(index) | {"request_id": None, "priority": HINT_PRIORITY, "prefill_only": True}
        for place, sound in enumerate(asked.media):
            if sound.kind != "audio":
                continue
            hint = partial(_request_of, conversation, asked.media[:place], options)
            # Its `ask` ends the utterance; the turn itself is the run's to send.
            listening = AsyncListening(client, hint, lambda *_: None)
            loop = asyncio.get_running_loop()
            begin = loop.time()
            for number, block in enumerate(_blocks(sound), 1):
                await asyncio.sleep(begin + number * _BLOCK_S - loop.time())
                listening.write(block)
            listening.ask(asked.text)

    def _conversation(self, index: int) -> Conversation:
        """Return the conversation of this request, which its first turn opens."""
        number = index // self._workload.turns
        if number not in self._open:
            pieces = {"audio_in_pieces": True} if self._workload.speaks else {}
            self._open[number] = Conversation(system=self._workload.system, **pieces)
        return self._open[number]


def _request_of(
    conversation: Conversation, shown: Sequence[Media], options: Mapping[str, Any], sound: Media
) -> Request:
    return conversation.request(media=[*shown, sound], **options)


def spoken(media: Iterable[Media]) -> list[Media]:
    """Return media with their sounds as `AsyncListening` sends them.

    Raises:
        BadRequest: a sound is no WAV file of 16-bit samples, mono, at 16 kHz.
    """
    return [_spoken(medium) if medium.kind == "audio" else medium for medium in media]


def _spoken(sound: Media) -> Media:
    try:
        with wave.open(io.BytesIO(sound.data)) as file:
            found = file.getnchannels(), file.getsampwidth(), file.getframerate()
            samples = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise BadRequest(f"{sound.name}: no WAV file of 16-bit samples ({error}); convert it") from error
    if found != (1, 2, HEARD_RATE):
        raise BadRequest(
            f"{sound.name}: {found[0]} channels of {8 * found[1]} bits at {found[2]} Hz; convert it to 1 channel of "
            f"16 bits at {HEARD_RATE} Hz"
        )
    return Media(sound.kind, wav_header(len(samples) // 2, HEARD_RATE) + samples, sound.name)


def _blocks(sound: Media) -> Iterator[NDArray[np.int16]]:
    samples = np.frombuffer(sound.data, np.int16, offset=len(wav_header(0, HEARD_RATE)))
    size = int(_BLOCK_S * HEARD_RATE)
    return (samples[begin : begin + size] for begin in range(0, len(samples), size))


def read_script(path: Path) -> tuple[ScriptTurn, ...]:
    """Read the turns of a JSON file: a list of objects with `text` and lists of files by `image`, `audio` and `video`.

    Names of files are relative to the script's folder.

    Raises:
        BadRequest: the script or one of its files cannot be read, or a field of it is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"script {path}: cannot be read: {error}") from error
    if not isinstance(found, list) or not found:
        raise BadRequest(f"script {path}: must be a list of at least one turn, found {type(found).__name__}")
    return tuple(_turn(turn, path.parent, f"script {path}: turn {number}") for number, turn in enumerate(found, 1))


def _turn(found: object, folder: Path, where: str) -> ScriptTurn:
    if not isinstance(found, dict):
        raise BadRequest(f"{where}: must be an object, found {type(found).__name__}")
    if unknown := sorted(found.keys() - {"text", *_FILES}):
        raise BadRequest(f"{where}: unknown key {unknown[0]!r} (known: text, {', '.join(_FILES)})")
    text = found.get("text", "")
    if not isinstance(text, str):
        raise BadRequest(f"{where}: text must be a string, found {type(text).__name__}")
    media = read_media(*(_paths(found.get(kind, []), folder, f"{where}: {kind}") for kind in _FILES))
    if not text and not media:
        raise BadRequest(f"{where}: has neither text nor media; give it one of them")
    return ScriptTurn(text, tuple(media))


def _paths(found: Any, folder: Path, where: str) -> list[Path]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise BadRequest(f"{where} must be a list of file names, found {json.dumps(found)}")
    return [folder / name for name in found]

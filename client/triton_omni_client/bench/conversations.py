# SPDX-License-Identifier: Apache-2.0
"""Requests of conversations by number, each with the whole history, and the script file that says what is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triton_omni_client.conversation import Conversation
from triton_omni_client.errors import BadRequest
from triton_omni_client.messages import Request
from triton_omni_client.options import read_media

from .workload import ScriptTurn, Workload

_FILES = ("image", "audio", "video")


class Conversations:
    """Holds a run's conversations: request `index` is turn `index % turns` of conversation `index // turns`.

    A turn whose reply failed is missing from the history of the turns after it, as in the library's `Conversation`.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._open: dict[int, Conversation] = {}

    def request(self, index: int) -> Request:
        """Return the request of this number, with the turns that were answered before it."""
        number, turn = divmod(index, self._workload.turns)
        if turn == 0:
            self._open[number] = Conversation(system=self._workload.system)
        is_last = turn == self._workload.turns - 1
        conversation = self._open.pop(number) if is_last else self._open[number]
        asked = self._workload.turn(index)
        return conversation.request(asked.text, asked.media, **self._workload.options(index))

    def answered(self, index: int, reply: str) -> None:
        """Keep the turn of this request with the text of its whole reply; of a last turn nothing needs to be kept."""
        conversation = self._open.get(index // self._workload.turns)
        if conversation is not None:
            asked = self._workload.turn(index)
            conversation.add(asked.text, asked.media, reply)


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

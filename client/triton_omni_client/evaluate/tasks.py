# SPDX-License-Identifier: Apache-2.0
"""The task file (JSON): questions for a server, and the words of right replies. `mini.json` is the built-in one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from triton_omni_client.errors import BadRequest

BUILT_IN: Final = Path(__file__).with_name("mini.json")
PLACE: Final = "{text}"
"""Stands for the sentence in the prompt `say`."""
COLORS: Final = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (245, 220, 40),
    "orange": (250, 140, 20),
    "purple": (130, 40, 170),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
    "gray": (128, 128, 128),
}
SHAPES: Final = ("circle", "square", "triangle", "diamond", "cross")
WORLD_TEXTS: Final = 8000
"""Texts that are drawn from the world, about."""
_SLOT = re.compile(r"\{([^{}]+)\}")
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Thing:
    """One coloured shape of a picture."""

    shape: str
    color: str
    at: Sequence[float] = (0.5, 0.5)
    """Its centre: fractions of width and height."""
    size: float = 0.6
    """Its height as a fraction of the picture's."""


@dataclass(frozen=True)
class PictureTask:
    """A question about a picture: `things` to draw, or a `file`."""

    expected: Sequence[str]
    """A right reply has all words of one of them."""
    ask: str = ""
    things: Sequence[Thing] = ()
    ground: str = "white"
    file: Path | None = None


@dataclass(frozen=True)
class SoundTask:
    """A spoken question: a `text` that the server itself speaks first, or a `file`."""

    expected: Sequence[str]
    """A right reply has all words of one of them."""
    ask: str = ""
    """Text beside the sound; most have none."""
    text: str = ""
    file: Path | None = None


@dataclass(frozen=True)
class Tasks:
    """All questions of an evaluation."""

    name: str
    say: str = f"Say: {PLACE}"
    """Prompt that has a sentence spoken."""
    sentences: Sequence[str] = ()
    prompts: Sequence[str] = ()
    """Questions with free replies."""
    pictures: Sequence[PictureTask] = ()
    sounds: Sequence[SoundTask] = ()
    world: Sequence[str] = field(default=(), repr=False)
    """Texts of the model's world, for pocketsphinx's language model; `{slot}` stands for one of its choices."""
    slots: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    """Choices by the name of the slot."""

    def world_texts(self) -> list[str]:
        """Return some thousands of texts, each text of the world equally often; the draws are the same each time."""
        draw = random.Random(0)
        times = max(1, WORLD_TEXTS // max(1, len(self.world)))
        return [
            _SLOT.sub(lambda found: draw.choice(self.slots[found[1]]), text)
            for text in self.world
            for _ in range(times)
        ]


def read_tasks(path: Path) -> Tasks:
    """Read a task file; names of files in it are relative to its folder.

    Raises:
        BadRequest: it cannot be read, or a field of it is wrong.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadRequest(f"tasks {path}: cannot be read: {error}") from error
    return _Reader(path).tasks(found)


class _Reader:
    """Reader of one file; refusals name the file and the field."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tasks(self, found: Any) -> Tasks:
        given = self._fields(found, Tasks, "")
        for name in ("sentences", "prompts", "world"):
            self._check(name, given.get(name, []), "a list of texts", _are_texts)
        for name, choices in self._check("slots", given.get("slots", {}), "an object", _is_object).items():
            self._check(
                f"slots.{name}", choices, "a list of one text or more", lambda value: value and _are_texts(value)
            )
        for slot in _SLOT.findall(" ".join(given.get("world", []))):
            self._check("world", slot, "the name of a slot", lambda name: name in given.get("slots", {}))
        self._check("name", given["name"], "a text", _is_text)
        self._check("say", given.get("say", PLACE), f"a text with {PLACE}", lambda value: PLACE in str(value))
        for name, read in (("pictures", self._picture), ("sounds", self._sound)):
            listed = self._check(name, given.get(name, []), "a list", lambda value: isinstance(value, list))
            given[name] = [read(each, f"{name}[{at}]") for at, each in enumerate(listed)]
        return Tasks(**given)

    def _picture(self, found: Any, where: str) -> PictureTask:
        given = self._task(found, PictureTask, "things", where)
        things = given.get("things", [])
        given["things"] = [self._thing(each, f"{where}.things[{at}]") for at, each in enumerate(things)]
        self._color(f"{where}.ground", given.get("ground", "white"))
        return PictureTask(**given)

    def _sound(self, found: Any, where: str) -> SoundTask:
        given = self._task(found, SoundTask, "text", where)
        self._check(f"{where}.text", given.get("text", ""), "a text", lambda value: isinstance(value, str))
        return SoundTask(**given)

    def _task(self, found: Any, kind: type, made_from: str, where: str) -> dict[str, Any]:
        """Check the fields that pictures and sounds share; exactly one of `made_from` and `file` is given."""
        given = self._fields(found, kind, where)
        self._check(f"{where}.expected", given["expected"], "a list of one text or more", lambda value: value != [])
        self._check(f"{where}.expected", given["expected"], "a list of texts", _are_texts)
        self._check(f"{where}.ask", given.get("ask", ""), "a text", lambda value: isinstance(value, str))
        if bool(given.get(made_from)) == bool(given.get("file")):
            raise self._refusal(where, f"give either {made_from} or file")
        if given.get("file"):
            file = self._path.parent / str(given["file"])
            given["file"] = self._check(f"{where}.file", file, "a file that is there", Path.is_file)
        return given

    def _thing(self, found: Any, where: str) -> Thing:
        given = self._fields(found, Thing, where)
        shapes = f"one of {', '.join(SHAPES)}"
        self._check(f"{where}.shape", given["shape"], shapes, lambda value: value in SHAPES)
        self._color(f"{where}.color", given["color"])
        self._check(f"{where}.at", given.get("at", [0, 0]), "two numbers from 0 to 1", _is_place)
        self._check(f"{where}.size", given.get("size", 1), "a number above 0, up to 1", _is_size)
        return Thing(**given)

    def _color(self, where: str, value: Any) -> None:
        self._check(where, value, f"one of {', '.join(COLORS)}", lambda name: name in COLORS)

    def _fields(self, found: Any, kind: type, where: str) -> dict[str, Any]:
        """Return an object's fields; refuse unknown and missing ones."""
        given: dict[str, Any] = dict(self._check(where, found, "an object", _is_object))
        known = {each.name: each for each in fields(kind)}
        if unknown := given.keys() - known.keys():
            raise self._refusal(where, f"unknown field {min(unknown)!r}; known are {', '.join(known)}")
        for name, each in known.items():
            if name not in given and each.default is each.default_factory is MISSING:
                raise self._refusal(where, f"{name!r} is missing")
        return given

    def _check(self, where: str, value: Kind, wanted: str, allowed: Callable[[Kind], bool]) -> Kind:
        if not allowed(value):
            raise self._refusal(where, f"{value!r:.80} is not {wanted}")
        return value

    def _refusal(self, where: str, said: str) -> BadRequest:
        return BadRequest(f"tasks {self._path}: {where}{': ' if where else ''}{said}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_place(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_size(value: Any) -> bool:
    return _is_number(value) and value > 0

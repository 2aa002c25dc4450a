# SPDX-License-Identifier: Apache-2.0
"""Calls of functions that a reply makes: its pieces as they come, and whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .parsing import as_mapping, optional


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of a call of a function; nothing of it is text or speech."""

    index: int
    """Number of the call in its reply, from 0; pieces of one follow all those of the one before."""
    id: str | None = None
    """Id of the call; only its first piece has `id` and `name`."""
    name: str | None = None
    arguments: str = ""
    """The next characters of the arguments, which are JSON."""

    @classmethod
    def from_json(cls, value: object) -> ToolCallDelta:
        """Read a piece.

        Raises:
            Internal: a key of a wrong type.
        """
        piece = as_mapping(value, "info.tool_call_deltas")
        index = optional(piece, "index", int)
        texts = {name: optional(piece, name, str) for name in ("id", "name", "arguments")}
        return cls(index or 0, texts["id"], texts["name"], texts["arguments"] or "")


@dataclass(frozen=True)
class ToolCall:
    """A whole call of a function."""

    id: str
    """By which a message of the role `tool` names it."""
    name: str
    arguments: str
    """JSON of an object that keeps to the tool's schema; cut off where the reply was."""

    @classmethod
    def from_json(cls, value: object) -> ToolCall:
        """Read a call.

        Raises:
            Internal: a key of a wrong type.
        """
        call = as_mapping(value, "info.tool_calls")
        return cls(*(optional(call, name, str) or "" for name in ("id", "name", "arguments")))


def whole_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of which these are all pieces, in order; one that was cut off is as far as it came."""
    found: dict[int, tuple[str, str, list[str]]] = {}
    for piece in pieces:
        call = found.setdefault(piece.index, (piece.id or "", piece.name or "", []))
        call[2].append(piece.arguments)
    return tuple(ToolCall(call_id, name, "".join(parts)) for call_id, name, parts in found.values())

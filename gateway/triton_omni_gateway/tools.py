# SPDX-License-Identifier: Apache-2.0
"""Calls of functions in OpenAI's words. Pure."""

from __future__ import annotations

from typing import Any

from triton_omni_client import ToolCall, ToolCallDelta


def called(call: ToolCall) -> dict[str, Any]:
    """A call of a whole reply."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def call_chunk(piece: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call in a stream; the first one names it, all others continue its arguments."""
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}

# SPDX-License-Identifier: Apache-2.0
"""Functions in a session: those that replies may call, their calls and their results as items. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from triton_omni_gateway.errors import bad_request

from .config import FunctionTool, Json, NamedTool, SoundFormat
from .events import GivenItem, new_id

_BYTES_A_TOKEN, _ITEM_TOKENS = 3, 20


@dataclass(eq=False)
class CallItem:
    """A call of a function; one that was cut off is not told to the model."""

    name: str
    call_id: str
    arguments: str = ""
    """JSON."""
    item_id: str = field(default_factory=lambda: new_id("item"))
    status: Literal["in_progress", "completed", "incomplete"] = "completed"

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.name) + len(self.call_id) + len(self.arguments)

    @property
    def tokens(self) -> float:
        """An estimate of its tokens in a prompt."""
        return _ITEM_TOKENS + self.size / _BYTES_A_TOKEN

    def told(self, _sound_format: SoundFormat | None = None) -> Json:
        """The item as events show it."""
        head = {"id": self.item_id, "object": "realtime.item", "type": "function_call", "status": self.status}
        return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.arguments}

    def called(self) -> Json:
        """The call as a message of a chat has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(eq=False)
class OutputItem:
    """The output of a function call."""

    call_id: str
    output: str
    item_id: str = field(default_factory=lambda: new_id("item"))
    status: Literal["completed"] = "completed"

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.call_id) + len(self.output)

    @property
    def tokens(self) -> float:
        """An estimate of its tokens in a prompt."""
        return _ITEM_TOKENS + self.size / _BYTES_A_TOKEN

    def told(self, _sound_format: SoundFormat | None = None) -> Json:
        """The item as events show it."""
        head = {"id": self.item_id, "object": "realtime.item", "type": "function_call_output", "status": self.status}
        return {**head, "call_id": self.call_id, "output": self.output}

    def message(self) -> Json:
        """The result as a message of a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


def made_call(given: GivenItem, path: str) -> CallItem | OutputItem:
    """A call or a result as its client gave it at a path of an event.

    Raises:
        GatewayError: 400, a key is missing.
    """
    item_id = given.id or new_id("item")
    if given.type == "function_call_output":
        return OutputItem(needed(given, "call_id", path), needed(given, "output", path), item_id)
    call_id = given.call_id or new_id("call")
    return CallItem(needed(given, "name", path), call_id, needed(given, "arguments", path), item_id)


def needed(given: GivenItem, key: str, path: str) -> str:
    """The value of an item's key.

    Raises:
        GatewayError: 400, the key is missing.
    """
    value = getattr(given, key)
    if value is None:
        said = f"Missing required parameter: '{path}.{key}'."
        raise bad_request(said, param=f"{path}.{key}", code="missing_required_parameter")
    return str(value)


def tool_fields(tools: Sequence[FunctionTool], choice: str | NamedTool, parallel: bool | None) -> dict[str, Any]:
    """The fields of a request that offer functions, in the form of chat completions; none where there are none."""
    if not tools:
        return {}
    named: Any = choice
    if isinstance(choice, NamedTool):
        named = {"type": "function", "function": {"name": choice.name}}
    functions = [{"type": "function", "function": tool.function()} for tool in tools]
    return {"tools": functions, "tool_choice": named, "parallel_tool_calls": parallel}

# SPDX-License-Identifier: Apache-2.0
"""The functions that a request's reply may call, OpenAI style. Pure; knows neither the template nor a grammar."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.schema_limits import check_schema_limits, subschemas
from triton_omni.request.strict_json import StrictModel, compact_json, shown, validate, without_nulls
from triton_omni.session.engine import MAX_CALLS, Function, ToolRules

NAME: Final = r"^[A-Za-z0-9_-]{1,64}$"
"""Names of functions, as at OpenAI. No name can close the quotes around it."""
_MODES: Final = ("auto", "none", "required")
_NO_PARAMETERS: Final = {"type": "object", "additionalProperties": False}

Name = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _Function(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(StrictModel):
    type: Literal["function"]
    function: _Function


class _NamedFunction(StrictModel):
    name: Name


class _NamedTool(StrictModel):
    type: Literal["function"]
    function: _NamedFunction


class ToolParameters(StrictModel):
    """The keys of `sampling_parameters` that are about tools."""

    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True


@dataclass(frozen=True)
class Tools:
    """Checked tools of a request."""

    listed: tuple[dict[str, Any], ...]
    """The tools as they came, for the prompt, but for keys that are null; null inside a schema is data."""
    rules: ToolRules


NO_CALLS: Final = Tools((), ToolRules(max_calls=0))
"""Rules of a request without callable functions, whose chat has calls."""


def read_tools(given: ToolParameters, limits: RequestLimits, root: str) -> Tools | None:
    """Return the tools of a request; None = it has none.

    Args:
        given: the keys about tools.
        limits: of the deployment.
        root: path of the object that holds them.

    Raises:
        BadRequest: a value is wrong; the message names the key path, the value and what is allowed.
        TooLarge: a limit is exceeded.
    """
    path = f"{root}.tools"
    _check_size(given.tools, limits, path)
    functions = [_function(tool, limits, f"{path}[{index}]") for index, tool in enumerate(given.tools)]
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadRequest(f"{path}[{index}].function.name: {shown(name)} is given twice")
    mode, named = _choice(given.tool_choice, names, f"{root}.tool_choice")
    if not functions:
        return None
    most = 1 if named is not None or not given.parallel_tool_calls else MAX_CALLS
    rules = ToolRules(
        functions=tuple(functions),
        named=named,
        may_speak=mode in ("auto", "none"),
        max_calls=0 if mode == "none" else most,
    )
    listed = ({**without_nulls(tool), "function": without_nulls(tool["function"])} for tool in given.tools)
    return Tools(tuple(listed), rules)


def check_name(name: str, path: str) -> None:
    """Refuse a function's name that does not fit `NAME`.

    Raises:
        BadRequest: it does not.
    """
    if not re.fullmatch(NAME, name):
        raise BadRequest(f"{path}: must have 1 to 64 of the characters A-Z, a-z, 0-9, _ and - (got {shown(name)})")


def _check_size(tools: Sequence[dict[str, Any]], limits: RequestLimits, path: str) -> None:
    if len(tools) > limits.max_tools:
        raise TooLarge(f"{path}: {len(tools)} tools, the limit is {limits.max_tools}")
    size = len(compact_json(tools).encode())
    if size > limits.max_tools_bytes:
        raise TooLarge(f"{path}: {size} bytes without spaces, the limit is {limits.max_tools_bytes}")


def _function(tool: dict[str, Any], limits: RequestLimits, path: str) -> Function:
    function = validate(_Tool, tool, path).function
    check_name(function.name, f"{path}.function.name")
    if function.parameters is None:
        return Function(function.name, compact_json(_NO_PARAMETERS))
    where = f"{path}.function.parameters"
    schema = {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise BadRequest(f'{where}.type: must be "object" (got {shown(schema["type"])})')
    check_schema_limits(schema, where)
    text = compact_json(schema)
    if len(text.encode()) > limits.max_schema_bytes:
        raise TooLarge(f"{where}: {len(text.encode())} bytes, the limit is {limits.max_schema_bytes}")
    return Function(function.name, compact_json(_closed(schema)), is_strict=bool(function.strict))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which objects without `additionalProperties` have only the properties that they list.

    JSON Schema would allow any others, and a model could write keys up to its limit. xgrammar and outlines close them
    too.
    """
    closed = copy.deepcopy(schema)
    nodes: list[Any] = [closed]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict) and _lists_all(node):
            node.setdefault("additionalProperties", False)
        nodes += (inner for _, inner in subschemas(node, ""))
    return closed


def _lists_all(node: dict[str, Any]) -> bool:
    """False for an object that requires properties that it does not list: closed, it would match nothing."""
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or "minProperties" in node:
        return False
    return all(isinstance(key, str) and key in listed for key in required)


def _choice(choice: str | dict[str, Any], names: Sequence[str], path: str) -> tuple[str, str | None]:
    """Return the mode, and the function that must be called, if one is named."""
    if isinstance(choice, dict):
        name = validate(_NamedTool, choice, path).function.name
        if name not in names:
            raise BadRequest(f"{path}.function.name: {shown(name)} is none of the tools")
        return "required", name
    if choice not in _MODES:
        allowed = ", ".join(_MODES)
        raise BadRequest(f"{path}: must be one of {allowed}, or an object that names a function (got {shown(choice)})")
    if choice == "required" and not names:
        raise BadRequest(f'{path}: "required" needs tools, and there are none')
    return choice, None

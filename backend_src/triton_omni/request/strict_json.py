# SPDX-License-Identifier: Apache-2.0
"""Strict parsing of untrusted JSON: bytes in, a tree of plain Python values out.

Size and nesting are bounded before the parser allocates; duplicate keys, NaN, invalid UTF-8 and unpaired
surrogates are refused by name; a schema then checks the tree. This module knows nothing of chats or of sampling.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.validation import wanted_kind, wanted_limit

MAX_DEPTH = 32
MAX_KEYS = 64
"""Maximum keys of an object whose keys are known."""
SHOWN_CHARACTERS = 80

# A whole string (skipped in one step) or one bracket outside of strings. An unterminated string also matches whole:
# otherwise the search would restart at each quote in it, for a time quadratic in its length, with Python's lock held.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
# Base64 of a medium; `\` because some encoders write `/` as `\/`. Possessive, so that the matcher looks at each
# character once.
_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/=\\]++")
_SHORTEST_MEDIUM = 1024
_IN_JSON = {"a list": "an array", "a mapping": "an object"}
_PLAIN_KEY = re.compile(rf"[A-Za-z0-9_]{{1,{SHOWN_CHARACTERS}}}")


def without_nulls(tree: Any) -> Any:
    """An object without its keys that are null; any other value as it is."""
    return {key: value for key, value in tree.items() if value is not None} if isinstance(tree, dict) else tree


class StrictModel(BaseModel):
    """No coercion (a bool is no int), no unknown key, finite numbers only. A key that is null counts as not given."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        """Leave out what is null, also of an unknown key: programs send all keys that they know."""
        return without_nulls(given)


def compact_json(tree: object) -> str:
    """JSON of a parsed tree, without spaces and keys as they came.

    Raises:
        ValueError: it holds a number that is not finite.
    """
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def shown(value: object) -> str:
    """`value` for an error message: at most 80 characters, escapes of control and other characters included.

    Show only the header of a data URI: the rest is a medium.
    """
    if isinstance(value, str):
        return _shown_text(value)
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, list):
        return f"an array of {len(value)} elements"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value!r:.{SHOWN_CHARACTERS}}"


def _shown_text(text: str) -> str:
    cut = text[:SHOWN_CHARACTERS]
    if cut[:5].lower() == "data:":
        cut = cut.partition(",")[0]
    while len(ascii(cut)) > SHOWN_CHARACTERS + 2:
        cut = cut[:-1]
    return ascii(cut) + ("..." if len(cut) < len(text) else "")


def key_step(key: str) -> str:
    """One key of a key path; a key that is no plain name is quoted and escaped."""
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f".{shown(key)}"


def decode_utf8(raw: bytes, name: str) -> str:
    """Text of `raw`; `name` is the input it came in.

    Raises:
        BadRequest: not UTF-8 (which rules out encoded surrogates too); the message gives the byte's place.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name}: byte {error.start} (0x{raw[error.start]:02x}) is not valid UTF-8") from error


def parse_json(raw: bytes, name: str, *, max_bytes: int, max_media_bytes: int = 0) -> object:
    """Parse one JSON document.

    Args:
        raw: UTF-8 bytes of the document.
        name: the input it came in, the root of every key path in a message.
        max_bytes: limit of everything but long base64 runs.
        max_media_bytes: limit of the base64 runs together; 0 = they count as text.

    Raises:
        TooLarge: a limit is exceeded, found before the document is parsed.
        BadRequest: the document is not strict JSON.
    """
    _check_size(raw, name, max_bytes, max_media_bytes)
    text = decode_utf8(raw, name)
    _check_depth(raw, name)
    try:
        tree: object = json.loads(text, object_pairs_hook=_Pairs(name), parse_constant=_Constants(name))
    except json.JSONDecodeError as error:
        raise BadRequest(f"{name}: not JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:
        limit = sys.get_int_max_str_digits()
        raise BadRequest(f"{name}: an integer has more than {limit} digits; give it as a string") from error
    # UTF-8 has no unpaired surrogates, so only an escape can name one.
    if b"\\u" in raw:
        _check_surrogates(tree, name)
    return tree


class _Pairs:
    """`object_pairs_hook` that refuses a key given twice."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise BadRequest(f"{self._name}: key {shown(key)} is given twice in one object")
                seen.add(key)
        return made


class _Constants:
    """`parse_constant` that refuses NaN and the infinities, which JSON does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, token: str) -> NoReturn:
        raise BadRequest(f"{self._name}: {token} is not a JSON number; only finite numbers are allowed")


def _check_size(raw: bytes, name: str, max_bytes: int, max_media_bytes: int) -> None:
    size = len(raw)
    if size > max_bytes + max_media_bytes:
        raise TooLarge(f"{name}: {size} bytes, the limit is {max_bytes + max_media_bytes}")
    if size <= max_bytes:
        return
    runs = (run.end() - run.start() for run in _BASE64_RUN.finditer(raw))
    media = sum(length for length in runs if length >= _SHORTEST_MEDIUM)
    if media > max_media_bytes:
        raise TooLarge(f"{name}: {media} bytes of base64, the limit is {max_media_bytes}")
    if size - media > max_bytes:
        raise TooLarge(f"{name}: {size - media} bytes besides base64 media, the limit is {max_bytes}")


def _check_depth(raw: bytes, name: str) -> None:
    # With fewer brackets than levels, as in most documents, their places do not matter.
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _STRUCTURE.finditer(raw):
        first = raw[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise BadRequest(f"{name}: nested deeper than {MAX_DEPTH} levels at byte {token.start()}")
        elif first in b"]}":
            depth -= 1


def _check_surrogates(tree: object, path: str) -> None:
    if isinstance(tree, str):
        check_text(tree, path)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            check_text(key, f"{path}: key {shown(key)}")
            _check_surrogates(value, path + key_step(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            _check_surrogates(value, f"{path}[{index}]")


def check_text(text: str, path: str) -> None:
    """Refuse text that UTF-8 cannot carry: JSON lets an escape name half a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadRequest(f"{path}: unpaired surrogate U+{code:04X} at character {error.start}") from error


SchemaT = TypeVar("SchemaT", bound=StrictModel)


def validate(schema: type[SchemaT], tree: object, path: str) -> SchemaT:
    """Check `tree` against a schema.

    Raises:
        BadRequest: the message names the key path under `path`, the value and what is allowed.
        TooLarge: it has too many keys, each of which would be described.
    """
    if not isinstance(tree, dict):
        raise BadRequest(f"{path}: must be an object (got {shown(tree)})")
    if len(tree) > MAX_KEYS:
        raise TooLarge(f"{path}: {len(tree)} keys, the limit is {MAX_KEYS}")
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise BadRequest(_describe(error, path)) from error


def _describe(error: ValidationError, path: str) -> str:
    """Return the first fault as `path.to.key: what is allowed (got what came)`, and the number of further ones."""
    items = error.errors(include_url=False)
    first = items[0]
    where = path + "".join(f"[{step}]" if isinstance(step, int) else key_step(step) for step in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"{where}: unknown key"
    elif first["type"] == "missing":
        text = f"{where}: is required"
    else:
        text = f"{where}: {_allowed(first)} (got {shown(first['input'])})"
    return text if len(items) == 1 else f"{text}; and {len(items) - 1} more"


def _allowed(fault: ErrorDetails) -> str:
    if limit := wanted_limit(fault["type"], fault.get("ctx", {})):
        return f"must {limit}"
    kind = wanted_kind(fault["type"])
    return f"must be {_IN_JSON.get(kind, kind)}" if kind else fault["msg"]

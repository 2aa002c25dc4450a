# SPDX-License-Identifier: Apache-2.0
"""The parameters of a Triton request beside its inputs. All names are accepted, except those meant as inputs.

Triton's `/generate` makes a parameter of every field that is no input, and of each key in its field `parameters`. The
thinker's sampling keys are taken from there, as in vLLM's backend. Keys of other stages are refused by name,
since they would change nothing. Other names may belong to a proxy or a tracer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import MAX_NAME
from triton_omni.request.parse import sampling_places

CLIENT_INPUTS: Final = ("text_input", "messages", "media", "sampling_parameters")
_TAKEN: Final = ("sampling_parameters", "sampling_parameters.thinker")
"""Paths of the keys that a parameter may stand for."""
_OF_TRITON: Final = ("timeout", "priority")
"""Names of Triton's own parameters; their units differ from those of the keys."""
MAX_PARAMETERS: Final = 64
MAX_CHARACTERS: Final = 1 << 16
"""Maximum characters of all parameters together, as JSON."""


def read_id(request: Any) -> str:
    """The id of a client's Triton request.

    Raises:
        BadRequest: it is not UTF-8, which Triton's HTTP frontend does not check.
        TooLarge: it is too long.
    """
    try:
        request_id = str(request.request_id())
    except ValueError as error:
        raise BadRequest("id: not UTF-8") from error
    if len(request_id) > MAX_NAME:
        raise TooLarge(f"id: {len(request_id)} characters, the limit is {MAX_NAME}: send a shorter one")
    return request_id


def read_parameters(request: Any) -> Mapping[str, Any]:
    """Return the parameters of a client's Triton request, without Triton's own.

    Raises:
        BadRequest: one has the name of a later stage's key, or nearly that of an input; or they cannot be read.
        TooLarge: there are too many, or they are too long.
    """
    try:
        text = request.parameters() or "{}"
        if len(text) > MAX_CHARACTERS:
            raise TooLarge(f"parameters: {len(text)} characters of JSON, the limit is {MAX_CHARACTERS}")
        given: dict[str, Any] = json.loads(text)
    except ValueError as error:  # not UTF-8, or a number that is not finite
        raise BadRequest("parameters: cannot be read") from error
    if len(given) > MAX_PARAMETERS:
        raise TooLarge(f"parameters: {len(given)} are given, the limit is {MAX_PARAMETERS}")
    _check_names(given)
    return given


def sampling_of(parameters: Mapping[str, Any], given: bytes | None) -> bytes | None:
    """Return the input `sampling_parameters` of a request: as given, or made of the request's parameters.

    Raises:
        BadRequest: both have keys.
    """
    thinker = {name: value for name, value in parameters.items() if _place(name) == _TAKEN[1]}
    whole = {name: value for name, value in parameters.items() if _place(name) == _TAKEN[0]}
    if not (thinker or whole):
        return given
    if given and given.strip() != b"null":
        name = next(iter({**whole, **thinker}))
        raise BadRequest(f"{name}: a parameter beside sampling_parameters; put it into {_place(name)}")
    if isinstance(thinker.get("stop"), str):
        thinker["stop"] = [thinker["stop"]]  # a parameter cannot be a list
    return json.dumps({**whole, **({"thinker": thinker} if thinker else {})}).encode()


def _place(name: str) -> str | None:
    """Return the path of a parameter's key; None = it is no key."""
    places = [] if name in _OF_TRITON else sampling_places(name)
    return places[0] if places and places[0] in _TAKEN else None


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if _place(name) is None and (places := " or ".join(sampling_places(name))):
            raise BadRequest(f"{name}: not a field of a request, it belongs into {places}")
        if near := get_close_matches(name, CLIENT_INPUTS, n=1, cutoff=0.75):
            raise BadRequest(f"{name}: not a field of a request (did you mean {near[0]}?)")

# SPDX-License-Identifier: Apache-2.0
"""The parameters of a Triton request beside its inputs: anybody's pass, but for those that were meant as inputs.

To Triton's `/generate` every field that is no input is a parameter, and so is a sampling key in the wrong place: it is
refused by name, since it would change nothing. Other names may belong to a proxy or a tracer.
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
    """The parameters of a client's Triton request, but for those that are Triton's own.

    Raises:
        BadRequest: one has the name of a key of `sampling_parameters`, or nearly that of an input; or they cannot be
            read.
        TooLarge: they are too many or too long.
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


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if places := " or ".join(sampling_places(name)):
            raise BadRequest(f"{name}: not a field of a request, it belongs into {places}")
        if near := get_close_matches(name, CLIENT_INPUTS, n=1, cutoff=0.75):
            raise BadRequest(f"{name}: not a field of a request (did you mean {near[0]}?)")

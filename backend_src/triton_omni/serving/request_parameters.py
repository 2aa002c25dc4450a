# SPDX-License-Identifier: Apache-2.0
"""What a Triton request may have beside its inputs: Triton's own parameters, `traceparent`, and forwarded headers.

To Triton's `/generate` every field that is no input is a parameter, and so is a sampling key in the wrong place: it is
refused by name, since it would change nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from triton_omni.errors import BadRequest
from triton_omni.request import sampling_places
from triton_omni.strict_json import shown

CLIENT_INPUTS: Final = ("text_input", "messages", "media", "sampling_parameters")

KNOWN: Final = frozenset(
    {
        "id",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "binary_data_output",
        "triton_enable_empty_final_response",
        "traceparent",
    }
)
"""Triton takes most of its own out of requests of gRPC and `/infer`, `priority` and `timeout` among them, and leaves
them in those of `/generate`. There these two do nothing, and keys of `sampling_parameters` have their names."""

NONE_FORWARDED: Final = re.compile(r"(?!)")


def read_parameters(request: Any, forwarded: re.Pattern[str] = NONE_FORWARDED) -> Mapping[str, Any]:
    """The parameters of a client's Triton request.

    Args:
        request: Triton's.
        forwarded: names of headers that come as parameters.

    Raises:
        BadRequest: there is an unknown one, or they cannot be read.
    """
    try:
        given: dict[str, Any] = json.loads(request.parameters() or "{}")
    except ValueError as error:  # not UTF-8, or a number that is not finite
        raise BadRequest("parameters: cannot be read") from error
    check_names(name for name in given if not forwarded.search(name))
    return given


def check_names(names: Iterable[str]) -> None:
    """Refuse the first parameter that is not known.

    Raises:
        BadRequest: it names the parameter, where it belongs if that is known, and what a request has.
    """
    for name in names:
        if name not in KNOWN:
            places = " or ".join(sampling_places(name))
            hint = f", it belongs into {places}" if places else ""
            inputs = f"{', '.join(CLIENT_INPUTS[:-1])} and {CLIENT_INPUTS[-1]}"
            raise BadRequest(f"{_plain(name)}: not a field of a request{hint}; its fields are {inputs}")


def forwarded_headers(arguments: Sequence[str]) -> re.Pattern[str]:
    """Names of the headers that a tritonserver of these arguments hands to its models as parameters."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for protocol in ("http", "grpc"):
        parser.add_argument(f"--{protocol}-header-forward-pattern", default="")
    given, _ = parser.parse_known_args(arguments)
    # Case is ignored below; Python takes RE2's sign of it at the begin of a whole pattern alone.
    patterns = [text.removeprefix("(?i)") for text in vars(given).values() if text]
    try:
        return re.compile("|".join(f"(?:{text})" for text in patterns) or NONE_FORWARDED.pattern, re.IGNORECASE)
    except re.error:  # RE2 knows what Python does not: nothing of such a server is refused
        return re.compile("")


def _plain(name: str) -> str:
    return name if re.fullmatch(r"\w{1,80}", name, re.ASCII) else shown(name)

# SPDX-License-Identifier: Apache-2.0
"""The bounds of a JSON body that are checked before anything is built of it. Pure."""

from __future__ import annotations

import re

from .errors import bad_request

MAX_DEPTH = 64
"""Maximum depth of nested objects and arrays; the Triton server allows less in its inputs."""
MAX_TOKENS = 32768
"""Strings, brackets and commas: a chat of 1024 messages has 15,000. A million unknown keys would take 800 MiB."""
_TOKEN = re.compile(rb'["\[\]{},]')
# A string that never ends is one, too: else the search would begin anew at each quote in it.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_json(body: bytes) -> None:
    """Refuse a body of too many tokens or levels, in a time that grows with its length alone.

    Raises:
        GatewayError: 400, with the limit. Invalid JSON passes: the parser refuses it.
    """
    depth = tokens = at = 0
    while (found := _TOKEN.search(body, at)) is not None:
        at = found.end()
        tokens += 1
        if tokens > MAX_TOKENS:
            said = f"The body has more than {MAX_TOKENS} strings, brackets and commas; send less in one request."
            raise bad_request(said, code="invalid_json")
        match found[0]:
            case b'"':
                at = _end_of_string(body, at)
            case b"[" | b"{":
                depth += 1
                if depth > MAX_DEPTH:
                    said = f"The body nests objects and arrays deeper than {MAX_DEPTH} levels, at byte {at}."
                    raise bad_request(said, code="invalid_json")
            case b"]" | b"}":
                depth -= 1


def _end_of_string(body: bytes, begin: int) -> int:
    """The place after the string whose first character is at `begin`."""
    quote = body.find(b'"', begin)
    # The common case, a medium in base64, at the speed of memory; the expression takes ten times as long.
    if quote >= begin and body[quote - 1 : quote] != b"\\":
        return quote + 1
    found = _STRING.match(body, begin - 1)
    return len(body) if found is None else found.end()

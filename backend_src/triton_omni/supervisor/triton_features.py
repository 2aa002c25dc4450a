# SPDX-License-Identifier: Apache-2.0
"""How one tritonserver differs from others: the options that its program knows, and the version that it answers with.

The program tells its options before it starts (`--help`), but its version only as a running server (`GET /v2`).
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import closing
from typing import Final

from triton_omni.supervisor.machine import ServerError, TritonInstall

CLIENT_SHARED_MEMORY: Final = "allow-client-shm"
"""Since 2.68 (26.04); from then on clients may share memory only where it is true."""
HTTP_BODY_LIMIT: Final = "http-max-input-size"
"""Since 2.59 (25.06); bodies that are binary or JSON are held to it since 2.62 (25.10)."""
ERRORS_WAIT_SINCE: Final = (2, 66)
"""26.02: from then on an ensemble sends an error only after the last step of the request has ended."""

GUARD_TRIED: Final = ((2, 51), (2, 71))
"""The oldest and the newest version with which the stall guard was tried: releases 24.10 and 26.07."""

_OPTION: Final = re.compile(r"^\s*--([a-z0-9-]+)", re.MULTILINE)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.")
_ANSWERS_WITHIN_S: Final = 30.0

Version = tuple[int, int]
"""Major and minor number of Triton's own version; 2.51 is that of the release 24.10."""


def errors_wait(version: Version | None) -> bool:
    """True if a request whose step never ends gets no error; assumed where the version is unknown (None)."""
    return version is None or version >= ERRORS_WAIT_SINCE


def guard_warning(version: Version | None) -> str | None:
    """Return a warning if the stall guard was not tried with this version, or with an unknown one (None)."""
    if version is not None and GUARD_TRIED[0] <= version <= GUARD_TRIED[1]:
        return None
    (oldest, newest), found = (".".join(map(str, tried)) for tried in GUARD_TRIED), version or ("unknown",)
    return (
        f"the stall guard was tried with Triton {oldest} to {newest}, this is {'.'.join(map(str, found))}; "
        "if the server ends by a signal, start it with --no-stall-guard"
    )


def known_options(install: TritonInstall, environment: Mapping[str, str]) -> frozenset[str]:
    """Names of the options that a tritonserver lists for `--help`, which ends the program with 1; without their dashes.

    Raises:
        ServerError: the program cannot be run.
    """
    try:
        asked = subprocess.run(
            [str(install.binary), "--help"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except OSError as error:
        raise ServerError(f"{install.binary} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{install.binary} --help says nothing within {_ANSWERS_WITHIN_S:g} s") from error
    return frozenset(_OPTION.findall(asked.stdout))


def server_version(address: str) -> Version | None:
    """The version of the running server at `HOST:PORT` of HTTP; None where it gives no answer that has one."""
    try:
        with closing(http.client.HTTPConnection(address, timeout=_ANSWERS_WITHIN_S)) as connection:
            connection.request("GET", "/v2")
            told = json.loads(connection.getresponse().read())
        found = _VERSION.match(told["version"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    return (int(found[1]), int(found[2])) if found else None

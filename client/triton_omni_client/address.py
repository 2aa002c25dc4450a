# SPDX-License-Identifier: Apache-2.0
"""Where a server listens, as a user writes it down: a wrong address is refused before anything is asked."""

from __future__ import annotations

import contextlib
import re
from urllib.parse import SplitResult, urlsplit

from .errors import BadRequest

DEFAULT_URL = "localhost:8001"
DEFAULT_HTTP_URL = "http://localhost:8000"

_SCHEME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):(?![0-9]+$)")
"""Schemes of gRPC's other address forms, which gRPC checks itself; a host with such a name and a port is none."""


def is_http(url: str) -> bool:
    """True if an address is a URL of HTTP."""
    return url.lower().startswith(("http://", "https://"))


def http_url(url: str, example: str = DEFAULT_HTTP_URL) -> SplitResult:
    """The parts of a URL of HTTP; `example` is told where it is none.

    Raises:
        BadRequest: so it is.
    """
    with contextlib.suppress(ValueError):
        found = urlsplit(url)
        if is_http(url) and found.hostname and found.port != 0:
            return found
    raise BadRequest(f"{url!r} is no HTTP URL such as {example}")


def server_address(url: str) -> str:
    """`url`, if a server can be asked there, over HTTP or gRPC.

    Raises:
        BadRequest: it is neither a URL of HTTP nor an address of gRPC.
    """
    if not is_http(url):
        return grpc_address(url)
    http_url(url)
    return url


def grpc_address(url: str) -> str:
    """`url`, if gRPC can be asked there.

    Raises:
        BadRequest: it is no HOST:PORT; left to itself gRPC would take another port, or none.
    """
    if _SCHEME.match(url):
        return url
    host, colon, port = url.rpartition(":")
    if "://" in url:
        raise BadRequest(f"{url!r} is no address of gRPC, which is HOST:PORT without a scheme, such as {DEFAULT_URL}")
    if not colon:
        raise BadRequest(f"{url!r} has no port; HOST:PORT of gRPC is wanted, such as {DEFAULT_URL}")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise BadRequest(f"{url!r}: {port!r} is no port from 1 to 65535; HOST:PORT of gRPC is such as {DEFAULT_URL}")
    if not host or (":" in host and not host.startswith("[")):
        raise BadRequest(f"{url!r} has no host; HOST:PORT of gRPC is such as {DEFAULT_URL} or [::1]:8001")
    return url

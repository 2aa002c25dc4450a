# SPDX-License-Identifier: Apache-2.0
"""Keeps web pages of other sites from a gateway without API keys: every browser on its network can reach it.

A page may send any address a POST of text or of a form without asking, and whoever owns its name may let that name mean
the gateway's address. A browser tells both: by `Content-Type`, `Origin` and `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from .errors import GatewayError
from .settings import ALL_ORIGINS

JSON = "application/json"
_LOCAL = "localhost"
_WITHOUT_KEYS = "this gateway has no API keys, so that it"


def refuse_web_page(
    headers: Headers, method: str, names: Sequence[str], origins: Sequence[str] = (), takes: str = JSON
) -> GatewayError | None:
    """Why a request may come from a page of another origin; None where it cannot.

    Args:
        headers: of the request.
        method: of the request.
        names: host names that mean this gateway, beside `localhost` and every IP address.
        origins: those whose pages may ask.
        takes: media type of bodies. A page may send a form without asking; its browser tells `Origin` then, too.
    """
    host = headers.get("host", "")
    if not _is_ours(host, names):
        said = f"The header Host is {host[:80]!a}: {_WITHOUT_KEYS} answers to an IP address, localhost"
        return _forbidden(f"{said} and the names given by --allow-host.")
    origin = headers.get("origin")
    is_allowed = origin is None or origin in origins or ALL_ORIGINS in origins
    if origin is not None and not is_allowed and not _is_same(origin, host, names):
        said = (
            f"The header Origin is {origin[:80]!a}: {_WITHOUT_KEYS} takes no requests from web pages of other origins"
        )
        return _forbidden(f"{said}; --allow-origin takes those of one, --allow-host those of a name.")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind != takes:
        said = f"The header Content-Type is {kind[:80]!a}: {_WITHOUT_KEYS} takes bodies of {takes} alone here."
        return GatewayError(415, said, code="unsupported_media_type")
    return None


def _forbidden(message: str) -> GatewayError:
    return GatewayError(403, message, code="forbidden_origin")


def _is_ours(host: str, names: Sequence[str]) -> bool:
    """True if a `Host` is a name of this machine, or an address; another site's name must be refused."""
    name = _name(f"//{host}")
    if name == _LOCAL or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str, names: Sequence[str]) -> bool:
    """True if a page's origin is this host, or a name of this machine: a proxy may have changed the host."""
    return origin.partition("://")[2].lower() == host.lower() or _name(origin) in names


def _name(url: str) -> str:
    """The host of an address in lower case, without its port; empty where it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""

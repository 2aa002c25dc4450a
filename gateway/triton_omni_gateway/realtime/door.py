# SPDX-License-Identifier: Apache-2.0
"""WebSockets are for callers with an API key or a client secret; without keys, for all but foreign pages."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from triton_omni_gateway.errors import GatewayError, unauthorized
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.origins import refuse_web_page
from triton_omni_gateway.settings import GatewaySettings

from .secrets import ClientSecrets

PATH: Final = "/v1/realtime"
SUBPROTOCOL: Final = "realtime"
_KEY_BEGIN = "openai-insecure-api-key."
"""Begin of the subprotocol by which a page, which can set no header, sends a key."""


def refuse_socket(
    scope: Scope, settings: GatewaySettings, keys: ApiKeys, secrets: ClientSecrets
) -> GatewayError | None:
    """Why a WebSocket is not opened; None where it is, and the scope's state then tells who calls."""
    headers, state = Headers(scope=scope), scope["state"]
    authorization = headers.get("authorization") or _key_of(scope)
    secret = secrets.find(authorization)
    if secret is not None:
        state |= {"caller": secret.caller, "session": secret.session}
        return None
    if not keys:
        return refuse_web_page(headers, "GET", settings.host_names, settings.origins)
    caller = keys.caller(authorization)
    if caller is None:
        return unauthorized(has_key=bool(authorization))
    state["caller"] = caller
    return None


def _key_of(scope: Scope) -> str:
    keys = (name.removeprefix(_KEY_BEGIN) for name in scope["subprotocols"] if name.startswith(_KEY_BEGIN))
    return next((f"Bearer {key}" for key in keys), "")

# SPDX-License-Identifier: Apache-2.0
"""WebSockets are for callers with an API key or a client secret; without keys, for all but foreign pages."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from triton_omni_gateway.errors import GatewayError, wrong_key
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.origins import refuse_web_page
from triton_omni_gateway.settings import GatewaySettings

from .secrets import ClientSecrets, is_secret

PATH: Final = "/v1/realtime"
SUBPROTOCOL: Final = "realtime"
_KEY_BEGIN = "openai-insecure-api-key."
"""Begin of the subprotocol by which a page, which can set no header, sends a key."""


def refuse_socket(
    scope: Scope, settings: GatewaySettings, keys: ApiKeys, secrets: ClientSecrets
) -> GatewayError | None:
    """Why a WebSocket is not opened; None where it is, and the scope's state then tells who calls."""
    headers, state = Headers(scope=scope), scope["state"]
    if not keys and (refusal := refuse_web_page(headers, "GET", settings.host_names, settings.origins)) is not None:
        return refusal
    authorization = headers.get("authorization") or _key_of(scope)
    caller = keys.caller(authorization)
    if not caller and is_secret(authorization):  # a key may begin like one
        try:
            secret = secrets.read(authorization)
        except GatewayError as error:
            return error
        state |= {"caller": secret.caller, "session": secret.session}
        return None
    if caller is None:
        return wrong_key(authorization)
    state["caller"] = caller
    return None


def _key_of(scope: Scope) -> str:
    keys = (name.removeprefix(_KEY_BEGIN) for name in scope["subprotocols"] if name.startswith(_KEY_BEGIN))
    return next((f"Bearer {key}" for key in keys), "")

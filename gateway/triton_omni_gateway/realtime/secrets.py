# SPDX-License-Identifier: Apache-2.0
"""Client secrets: keys of a short life for one's own clients, such as pages, which open sessions and nothing else.

A secret carries what it means, sealed under the API key that it was made with. No gateway keeps any, so all gateways of
that key take it. Without keys anybody can make one, and it opens nothing that is not open.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from triton_omni_gateway.errors import GatewayError, bad_request, unauthorized
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.schemas import parse

from .config import AnyConfig, Json, SessionConfig, Strict, given_of

LONGEST: Final = 7680
"""Characters of a secret. It travels in one line of a request's head, of which the gateway and common proxies read
8 KiB; names of the header and of subprotocols take the rest.
"""
_MOST_BYTES: Final = 1 << 16
"""Bytes that a secret carries: without keys anybody can make a short one that unpacks to megabytes."""
_BEGIN: Final = "ek_"
_SCHEME: Final = "bearer "
_LABEL: Final = b"triton-omni client secret"
_SEAL_BYTES: Final = hashlib.sha256().digest_size
_CURE: Final = "take a new one by POST /v1/realtime/client_secrets."


class ExpiresAfter(Strict):
    """How long a secret holds."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(strict=True, ge=10, le=7200)] = 600


class SecretRequest(Strict):
    """The body of `POST /v1/realtime/client_secrets`."""

    expires_after: ExpiresAfter = ExpiresAfter()
    session: AnyConfig = SessionConfig()


class _Carried(Strict):
    """The content of a secret."""

    expires_at: int
    session: AnyConfig


@dataclass(frozen=True)
class Secret:
    """The meaning of a secret."""

    caller: str
    session: Json
    """The configuration that its sessions begin with."""
    expires_at: int
    """Seconds since the epoch."""


class ClientSecrets:
    """Makes secrets and reads them.

    Args:
        keys: whose callers they stand for.
        clock: seconds since the epoch.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._clock = clock

    def make(self, caller: str, session: Json, seconds: int) -> tuple[str, Secret]:
        """A secret, and its meaning.

        Raises:
            GatewayError: 413, the session's configuration is too long.
        """
        made = Secret(caller, session, int(self._clock()) + seconds)
        text = json.dumps({"expires_at": made.expires_at, "session": session}, separators=(",", ":")).encode()
        packed = zlib.compress(text, zlib.Z_BEST_COMPRESSION)
        value = _BEGIN + base64.urlsafe_b64encode(_seal(caller, packed) + packed).rstrip(b"=").decode()
        if len(text) > _MOST_BYTES or len(value) > LONGEST:
            said = (
                f"Invalid value for 'session': its client secret would carry {len(text)} bytes in {len(value)} "
                f"characters, and may carry {_MOST_BYTES} in {LONGEST}, since it travels in a header: leave out long "
                "instructions and tools, and send them by `session.update`."
            )
            raise GatewayError(413, said, code="too_large", param="session")
        return value, made

    def read(self, authorization: str) -> Secret:
        """Return the meaning of the secret in a header `Authorization`.

        Raises:
            GatewayError: 401, it is none of these keys, or has expired; 400, a newer gateway made it.
        """
        sealed = _unpacked(authorization[len(_SCHEME) :].strip().removeprefix(_BEGIN))
        seal, packed = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        callers = (name for name in self._keys.callers if hmac.compare_digest(seal, _seal(name, packed)))
        caller = next(callers, None)
        if caller is None:
            raise unauthorized(f"Incorrect client secret provided, or its API key is gone: {_CURE}")
        try:
            text = zlib.decompressobj().decompress(packed, _MOST_BYTES)
        except zlib.error as error:  # of anybody, where there are no keys
            raise unauthorized(f"Incorrect client secret provided: {_CURE}") from error
        try:
            carried = parse(_Carried, text)
        except GatewayError as error:
            said = f"This gateway cannot read the client secret: {error.message} {_CURE}"
            raise bad_request(said, param=error.param, code=error.code) from error
        if carried.expires_at <= self._clock():
            raise unauthorized(f"The client secret has expired: {_CURE}")
        return Secret(caller, given_of(carried.session), carried.expires_at)


def is_secret(authorization: str) -> bool:
    """True if a header `Authorization` has the form of one with a secret."""
    scheme, value = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
    return scheme.lower() == _SCHEME and value.strip().startswith(_BEGIN)


def _seal(caller: str, packed: bytes) -> bytes:
    """Return the seal of a caller, whose name is a digest of its key: nobody can make it without the key."""
    return hmac.digest(bytes.fromhex(caller), _LABEL + hashlib.sha256(packed).digest(), "sha256")


def _unpacked(value: str) -> bytes:
    """The bytes of a secret; none of what is no base64."""
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return b""

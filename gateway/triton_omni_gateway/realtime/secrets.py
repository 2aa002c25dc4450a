# SPDX-License-Identifier: Apache-2.0
"""Client secrets: keys of a short life for one's own clients, such as pages, which open sessions and nothing else."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from triton_omni_gateway.errors import overloaded

from .config import AnyConfig, SessionConfig, Strict

_SCHEME = "bearer "


class ExpiresAfter(Strict):
    """How long a secret holds."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(strict=True, ge=10, le=7200)] = 600


class SecretRequest(Strict):
    """The body of `POST /v1/realtime/client_secrets`."""

    expires_after: ExpiresAfter = ExpiresAfter()
    session: AnyConfig = SessionConfig()


@dataclass(frozen=True)
class Secret:
    """The meaning of a secret."""

    caller: str
    session: Mapping[str, Any]
    """The configuration that its sessions begin with."""
    expires_at: float


class ClientSecrets:
    """The secrets of this process, of which digests alone are kept.

    Args:
        most: secrets of one caller that hold at once; others' do not count, so nobody takes all.
        clock: seconds since the epoch.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.time) -> None:
        self._most = most
        self._clock = clock
        self._secrets: dict[bytes, Secret] = {}

    def make(self, caller: str, session: Mapping[str, Any], seconds: int) -> tuple[str, Secret]:
        """A new secret, and what it stands for.

        Raises:
            GatewayError: 429, the caller has too many.
        """
        now = self._clock()
        self._secrets = {digest: secret for digest, secret in self._secrets.items() if secret.expires_at > now}
        if sum(secret.caller == caller for secret in self._secrets.values()) >= self._most:
            raise overloaded(f"{self._most} client secrets of this key hold, its limit; let some expire.")
        value = f"ek_{secrets.token_hex(16)}"
        made = self._secrets[_digest(value)] = Secret(caller, session, now + seconds)
        return value, made

    def find(self, authorization: str) -> Secret | None:
        """Return what the secret in a header `Authorization` stands for; None = there is none, or it has expired."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        found = self._secrets.get(_digest(authorization[len(_SCHEME) :].strip()))
        return found if found is not None and found.expires_at > self._clock() else None


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()

# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads one model of a running tritonserver, over its HTTP endpoint and with a key that clients have not.

The key guards all that changes how the server runs, or tells of others' requests. It is drawn at each start unless the
operator has set one. It stands on tritonserver's command line, the only place where Triton takes it: who may read that
on the server's machine has it, too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import secrets
from collections.abc import Mapping

HEADER = "triton-omni-control"
"""Of HTTP; gRPC's metadata has `triton-grpc-protocol-` in front."""
KEY_VARIABLE = "OMNI_CONTROL_KEY"
_KEY = re.compile(r"[A-Za-z0-9_-]{16,128}")
_GUARDED = ("model-repository", "statistics", "trace", "logging")
"""What the key is needed for, over gRPC and HTTP. Over HTTP also shared memory, which no client of ours uses there."""
_UNLOAD_TIMEOUT_S = 10.0
"""Triton answers at once and waits for the model's requests afterwards."""


class ModelControlError(RuntimeError):
    """Triton did not do it; the message is its reason."""


class ModelControl:
    """Explicit model control of one server.

    Args:
        host, port: of its HTTP endpoint, as seen from here.
        load_timeout_s: what loading a model may take.
        key: that the server is to want; None = a new one.
    """

    def __init__(self, host: str, port: int, load_timeout_s: float, key: str | None = None) -> None:
        self._host, self._port = host, port
        self._load_timeout_s = load_timeout_s
        self._key = key or secrets.token_hex(16)

    @property
    def flags(self) -> list[str]:
        """tritonserver's arguments: every model is loaded at the start, and later whoever has the key may."""
        secret = f"{HEADER}={self._key}"
        return [
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api={','.join((*_GUARDED, 'shared-memory'))}:{secret}",
            f"--grpc-restricted-protocol={','.join(_GUARDED)}:{secret}",
        ]

    def unload(self, model: str) -> None:
        """Have `model`, and each ensemble that uses it, take no more requests; returns before they have ended.

        Raises:
            ModelControlError: Triton refused, or could not be asked.
        """
        self._post(f"/v2/repository/models/{model}/unload", _UNLOAD_TIMEOUT_S)

    def load(self, model: str) -> None:
        """Load `model` and what uses it; returns when they take requests.

        Raises:
            ModelControlError: it could not be loaded, or Triton could not be asked.
        """
        self._post(f"/v2/repository/models/{model}/load", self._load_timeout_s)

    def _post(self, path: str, timeout_s: float) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, b"{}", {HEADER: self._key})
                answer = connection.getresponse()
                status, body = answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise ModelControlError(f"{type(error).__name__}: {error}") from error
        if status != http.HTTPStatus.OK:
            raise ModelControlError(_reason(body))


def operator_key(environment: Mapping[str, str]) -> str | None:
    """The key that the operator has set by `OMNI_CONTROL_KEY`; None = none.

    Raises:
        ValueError: it cannot stand on a command line and in a header, or is too short to be one.
    """
    key = environment.get(KEY_VARIABLE) or None
    if key is not None and _KEY.fullmatch(key) is None:
        raise ValueError(f"{KEY_VARIABLE} must be 16 to 128 letters, digits, - or _ (it has {len(key)} characters)")
    return key


def _reason(body: bytes) -> str:
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    return next((line for line in text.splitlines() if line), "no reason was given")

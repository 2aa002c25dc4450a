# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads one model of a running tritonserver, over its HTTP endpoint and with the supervisor's own key.

The key is drawn at each start and keeps clients from doing the same. It stands on tritonserver's command line, the
only place where Triton takes it: who may read that on the server's machine has it, too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets

HEADER = "triton-omni-control"
_UNLOAD_TIMEOUT_S = 10.0
"""Triton answers at once and waits for the model's requests afterwards."""


class ModelControlError(RuntimeError):
    """Triton did not do it; the message is its reason."""


class ModelControl:
    """Explicit model control of one server.

    Args:
        host, port: of its HTTP endpoint, as seen from here.
        load_timeout_s: what loading a model may take.
    """

    def __init__(self, host: str, port: int, load_timeout_s: float) -> None:
        self._host, self._port = host, port
        self._load_timeout_s = load_timeout_s
        self._key = secrets.token_hex(16)

    @property
    def flags(self) -> list[str]:
        """tritonserver's arguments: every model is loaded at the start, and later whoever has the key may."""
        restricted = f"model-repository:{HEADER}={self._key}"
        return [
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api={restricted}",
            f"--grpc-restricted-protocol={restricted}",
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


def _reason(body: bytes) -> str:
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    return next((line for line in text.splitlines() if line), "no reason was given")

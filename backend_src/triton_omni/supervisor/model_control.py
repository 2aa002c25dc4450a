# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads one model of a running tritonserver, over its gRPC endpoint, with a key that clients do not have.

It does not use HTTP: Triton loads a model on the thread that serves the request, and every other connection of that
thread waits for the load, for seconds or a minute. gRPC has a separate thread for this.

The key protects every protocol that changes the server or shows others' requests. It is drawn at each start unless the
operator has set one. Triton takes it only on its command line, so anybody who can read that on the server's machine has
the key.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Final

from tritonclient.grpc import InferenceServerClient  # type: ignore[import-untyped]
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

from triton_omni.core.endpoint import OWN_CHANNEL

HEADER = "triton-omni-control"
"""Name of the HTTP header; gRPC's metadata has a prefix."""
_GRPC_PREFIX: Final = "triton-grpc-protocol-"
KEY_VARIABLE = "OMNI_CONTROL_KEY"
_KEY = re.compile(r"[A-Za-z0-9_-]{16,128}")
_GUARDED = ("model-repository", "statistics", "trace", "logging", "shared-memory")
"""Protocols that need the key, over gRPC and HTTP."""
_UNLOAD_TIMEOUT_S = 10.0
"""Triton answers at once and waits for the model's requests afterwards."""


class ModelControlError(RuntimeError):
    """Triton failed to load or unload a model; the message is its reason."""


class ModelControl:
    """Explicit model control of one server.

    Args:
        url: `HOST:PORT` of its gRPC endpoint, as seen from here.
        load_timeout_s: maximum seconds for loading a model.
        key: key that the server will require; None = a new one.
        client_shared_memory: whether clients may register shared memory over gRPC without the key. No client of ours
            does over HTTP.
    """

    def __init__(
        self, url: str, load_timeout_s: float, key: str | None = None, *, client_shared_memory: bool = False
    ) -> None:
        self._url = url
        self._load_timeout_s = load_timeout_s
        self._key = key or secrets.token_hex(16)
        self._client_shared_memory = client_shared_memory

    @property
    def flags(self) -> list[str]:
        """tritonserver's arguments: every model is loaded at the start, and later whoever has the key may."""
        secret = f"{HEADER}={self._key}"
        over_grpc = [name for name in _GUARDED if name != "shared-memory" or not self._client_shared_memory]
        return [
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api={','.join(_GUARDED)}:{secret}",
            f"--grpc-restricted-protocol={','.join(over_grpc)}:{secret}",
        ]

    def unload(self, model: str) -> None:
        """Have `model`, and each ensemble that uses it, take no more requests; returns before they have ended.

        Raises:
            ModelControlError: Triton refused, or could not be asked.
        """
        with self._told() as (triton, headers):
            triton.unload_model(model, headers, client_timeout=_UNLOAD_TIMEOUT_S)

    def load(self, model: str) -> None:
        """Load `model` and what uses it; returns when they take requests.

        Raises:
            ModelControlError: it could not be loaded, or Triton could not be asked.
        """
        with self._told() as (triton, headers):
            triton.load_model(model, headers, client_timeout=self._load_timeout_s)

    @contextlib.contextmanager
    def _told(self) -> Iterator[tuple[InferenceServerClient, dict[str, str]]]:
        """Give a connection and the key for it; failures of a call become `ModelControlError`."""
        try:
            with InferenceServerClient(self._url, channel_args=OWN_CHANNEL) as triton:
                yield triton, {f"{_GRPC_PREFIX}{HEADER}": self._key}
        except InferenceServerException as error:
            lines = (error.message() or "").splitlines()
            raise ModelControlError(next(filter(None, lines), "no reason was given")) from error


def operator_key(environment: Mapping[str, str]) -> str | None:
    """The key that the operator has set by `OMNI_CONTROL_KEY`; None = none.

    Raises:
        ValueError: it is too short, or not usable on a command line and in a header.
    """
    key = environment.get(KEY_VARIABLE) or None
    if key is not None and _KEY.fullmatch(key) is None:
        raise ValueError(f"{KEY_VARIABLE} must be 16 to 128 letters, digits, - or _ (it has {len(key)} characters)")
    return key

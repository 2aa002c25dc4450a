# SPDX-License-Identifier: Apache-2.0
"""Remembers which JSON schemas were tried, and tells no caller what another one's schemas were."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Sequence
from typing import Final

from cachetools import LRUCache

from triton_omni.vllm_hooks.thinker.schema_trial import Verdict, try_schemas

KEPT: Final = 256
"""Verdicts; most callers ask for the same few schemas again and again."""


class SchemaVerdicts:
    """Verdicts on the schemas that were tried last; safe to use from many threads.

    By time a caller could tell what another one has asked for. So those of one salt share their verdicts, as those
    without a salt do, and neither schemas nor what quotes them is kept.
    """

    def __init__(self) -> None:
        self._verdicts: LRUCache[bytes, Verdict] = LRUCache(KEPT)
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()

    def of(self, schemas: Sequence[str], salt: str | None = None) -> Verdict:
        """Return the verdict on schemas that belong together, which are tried unless that is known.

        Raises:
            RuntimeError: see `try_schemas`.
        """
        key = hashlib.blake2b(repr((salt, *schemas)).encode(), key=self._secret).digest()
        with self._lock:
            known = self._verdicts.get(key)
        if known is not None:
            return known
        found = try_schemas(schemas)
        # Another reason quotes the schema.
        if not found.reason or found.is_too_costly:
            with self._lock:
                self._verdicts[key] = found
        return found

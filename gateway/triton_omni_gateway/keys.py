# SPDX-License-Identifier: Apache-2.0
"""API keys: who may call. Keys come from the environment or a file, never from a command line that others can list."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from .settings import SettingsError

VARIABLE = "OMNI_API_KEYS"
"""Environment variable with keys, separated by commas."""
_SCHEME = "bearer "


class ApiKeys:
    """The accepted keys; with none, everybody is let in.

    Only digests are kept, and every one is compared in constant time: neither a key's characters nor its place shows
    in how long an answer takes.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Take keys, each of which may have a name after it."""
        pairs = [key.split(None, 1) for key in keys]
        self._digests = tuple(_digest(pair[0]) for pair in pairs)
        self._names = {_digest(key).hex(): name for key, *names in pairs for name in names}

    def __bool__(self) -> bool:
        """True if requests need a key."""
        return bool(self._digests)

    @property
    def callers(self) -> tuple[str, ...]:
        """All names that `caller` may return."""
        return tuple(digest.hex() for digest in self._digests) or ("",)

    def caller(self, authorization: str) -> str | None:
        """Return a name of the caller whom the header `Authorization`, its bytes read as Latin-1, admits.

        None = nobody. The name is the same for all uses of a key, and empty where no key is needed.
        """
        if not self._digests:
            return ""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        key = authorization[len(_SCHEME) :].strip(" \t")
        # No standard says how a header holds other letters than ASCII's: some senders encode in UTF-8, some in Latin-1.
        given = (hashlib.sha256(key.encode("latin-1", "replace")).digest(), _digest(key))
        matches = [digest for one in given for digest in self._digests if hmac.compare_digest(one, digest)]
        return matches[0].hex() if matches else None

    def name_of(self, caller: str) -> str:
        """The name of a caller's key for logs; a part of its digest if it has none, empty for no caller."""
        return self._names.get(caller, f"key-{caller[:8]}" if caller else "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(environment: Mapping[str, str], file: Path | None = None) -> ApiKeys:
    """The keys of `OMNI_API_KEYS` and of a file of one key a line (blank lines and `#` comments are skipped).

    After a key and a space may stand its name, for logs.

    Raises:
        SettingsError: the file cannot be read, or either is there and holds no key.
    """
    keys: list[str] = []
    if VARIABLE in environment:
        keys += _some(environment[VARIABLE].split(","), VARIABLE)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SettingsError(f"--api-keys {file}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"--api-keys {file}: not text in UTF-8 at byte {error.start}") from error
        keys += _some([line for line in lines if not line.lstrip().startswith("#")], f"--api-keys {file}")
    return ApiKeys(keys)


def _some(candidates: Iterable[str], source: str) -> list[str]:
    keys = [key.strip() for key in candidates if key.strip()]
    # An empty list would open the gateway to everybody, which nobody means who names a source of keys.
    if not keys:
        raise SettingsError(f"{source} holds no key")
    return keys

# SPDX-License-Identifier: Apache-2.0
"""Tries JSON schemas in a separate process: some crash llguidance's process, and others take it minutes.

The process has limits of CPU time and memory. Its verdict on a schema holds for the thinker's process,
which compiles the same schema with less of both. Verdicts are kept, and show no caller another caller's schemas.
"""

from __future__ import annotations

import hashlib
import json
import resource
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from cachetools import LRUCache

CPU_SECONDS: Final = 2
MEMORY_BYTES: Final = 512 << 20
STACK_BYTES: Final = 1 << 20
"""Half of the smallest stack of a thinker's thread, which is 2 MiB without a limit of the system."""
_WITHIN_S: Final = 60.0
"""Seconds that the process may take, far beyond its CPU time."""
_OPTIONS: Final[Any] = {"whitespace_flexible": True}
"""Options of vLLM's compilation."""
_EMPTY: Final = "no reply satisfies it (does a $ref lead to itself?)"
_OVERLAPPING: Final = "the alternatives of oneOf may overlap: use anyOf"


class Verdict(NamedTuple):
    """The result of trying a schema: the reason against it, if any."""

    reason: str = ""
    """Reason why it cannot be used; empty = it can."""
    path: str = ""
    """Path of the key at fault, below the schema; empty = no single key."""
    is_too_costly: bool = False
    number: int = 0
    """Index of the first schema at fault among those tried together."""


def try_schemas(schemas: Sequence[str]) -> Verdict:
    """Compile schemas in the process, one after the other; safe to call from many threads.

    Args:
        schemas: JSON of each, in one line. A string in place of an object is a whole grammar.

    Raises:
        RuntimeError: the process failed.
    """
    # An embedded interpreter, as in Triton's stub, does not know the program that starts another one.
    command = [str(Path(sys.prefix) / "bin" / "python3"), "-m", __name__]
    try:
        content = "\n".join(schemas).encode()
        ended = subprocess.run(command, input=content, capture_output=True, timeout=_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(f"it takes more than {_WITHIN_S:g} s", is_too_costly=True)
    reasons = [json.loads(line) for line in ended.stdout.splitlines()]
    for number, reason in enumerate(reasons):
        if reason:
            # A process that ended during the search for the key has already reported the reason.
            return Verdict(reason, "".join(reasons[number + 1 :]), number=number)
    if len(reasons) == len(schemas):
        return Verdict()
    if ended.returncode >= 0:
        raise RuntimeError(f"a schema could not be tried: {ended.stderr.decode(errors='replace')}")
    return _verdict_on_end(-ended.returncode)._replace(number=len(reasons))


def _verdict_on_end(ended_by: int) -> Verdict:
    if ended_by in (signal.SIGXCPU, signal.SIGKILL):
        return Verdict(f"it takes more than {CPU_SECONDS} s of CPU time", is_too_costly=True)
    if ended_by == signal.SIGABRT:
        return Verdict(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory", is_too_costly=True)
    if ended_by == signal.SIGSEGV:
        return Verdict(f"it takes more than {STACK_BYTES >> 10} KiB of stack", is_too_costly=True)
    return Verdict(f"its compiler crashed ({signal.Signals(ended_by).name})")


# In the process.


def main() -> None:
    """Write a line of JSON for each schema on standard input: the reason why it cannot be used, and for the first such
    schema the key at fault.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    for schema in sys.stdin.buffer.read().decode().split("\n"):
        reason = why_not(schema)
        print(json.dumps(_in_our_words(reason)), flush=True)
        if reason:
            print(json.dumps(key_at_fault(json.loads(schema), reason)))
            return


def why_not(schema: str) -> str:
    """Return the compiler's reason against a schema or grammar, or its first token, in one line; empty = none."""
    import llguidance

    try:
        if schema.startswith('"'):
            grammar = llguidance.LLMatcher.grammar_from_lark(json.loads(schema))
        else:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=_OPTIONS)
    except ValueError as error:
        return str(error)
    # A vocabulary of single bytes: cost and result of compiling a schema do not depend on the words.
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    found: str = matcher.get_error()
    return " ".join(found.partition("<backtrace>")[0].split())


def key_at_fault(schema: dict[str, Any] | str, reason: str) -> str:
    """Return the path of the smallest part that is refused for the same reason by itself; a grammar has none."""
    from triton_omni.request.strict_json import key_step

    if isinstance(schema, str):
        return ""
    # A part is tried together with the definitions that it may refer to.
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path: str
    for path, node in reversed(list(_nodes(schema))):
        kind = {key: node[key] for key in ("type",) if key in node}
        for key, value in node.items():
            if key not in definitions and why_not(json.dumps({**definitions, **kind, key: value})) == reason:
                return f"{path}{key_step(key)}"
        if path and why_not(json.dumps({**definitions, **node})) == reason:
            return path
    return ""


def _nodes(schema: object) -> Iterator[tuple[str, dict[str, Any]]]:
    from triton_omni.request.schema_limits import subschemas

    stack = [("", schema)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, dict):
            yield path, node
        stack += subschemas(node, path)


def _in_our_words(reason: str) -> str:
    if reason.startswith("NoExtensionBias"):
        return _EMPTY
    return _OVERLAPPING if reason.startswith("oneOf constraints are not supported") else reason


if __name__ == "__main__":
    main()


# --- verdicts ---------------------------------------------------------------------------------------------------------


KEPT: Final = 256
"""Maximum verdicts kept; most callers use the same few schemas."""


class SchemaVerdicts:
    """Verdicts on the schemas that were tried last; safe to use from many threads.

    A fast answer would tell a caller that another one used the same schema. So only callers of one salt, or without
    any, share verdicts. Neither schemas nor reasons that quote them are kept.
    """

    def __init__(self) -> None:
        self._verdicts: LRUCache[bytes, Verdict] = LRUCache(KEPT)
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()

    def of(self, schemas: Sequence[str], salt: str | None = None) -> Verdict:
        """Return the verdict on schemas that belong together; they are tried unless it is known.

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

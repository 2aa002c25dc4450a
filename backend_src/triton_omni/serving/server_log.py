# SPDX-License-Identifier: Apache-2.0
"""Takes the output of tritonserver to a file or to standard error, and keeps its end to say why a server died.

It knows the form of two of Triton's log lines and nothing of the models.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import IO

_KEPT_LINES = 400
# `E1121 02:22:03.042 42 model_lifecycle.cc:654] "failed to load 'thinker' version 1: Internal: SettingsError: …"`:
# a message of several lines is quoted, its line ends escaped; the first line has the reason.
_FAILED_MODEL = re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*?)(?:\\n|\"?$)")
_ERROR = re.compile(r"^(?:E\d{4} .*?\] \"?|error: )(?P<reason>.*?)(?:\\n.*|\"?)$")


class ServerLog:
    """One server's output; `follow` it once, `close` it after the process ended."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._pump: threading.Thread | None = None

    @property
    def hint(self) -> str:
        """Where to read more, as the end of a sentence."""
        return f" (log: {self.path})" if self.path is not None else ""

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Copy the process's standard output from now on, in a thread of its own."""
        if process.stdout is None:
            raise ValueError("the process was started without a pipe for its output")
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._pump = threading.Thread(target=self._copy, args=(process.stdout,), name="server-log", daemon=True)
        self._pump.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait until all output is copied."""
        if self._pump is not None:
            self._pump.join(timeout_s)

    def tail(self, lines: int = 20) -> list[str]:
        """The last lines seen."""
        return list(self._tail)[-lines:]

    def reason(self) -> str:
        """Why the server died, in one sentence: the first model that failed, else the last error line."""
        lines = list(self._tail)
        for line in lines:
            if found := _FAILED_MODEL.search(line):
                return f"model {found['model']} cannot be loaded: {found['reason'].strip()}"
        errors = [found["reason"] for line in lines if (found := _ERROR.match(line))]
        return errors[-1] if errors else (lines[-1] if lines else "it said nothing")

    def _copy(self, source: IO[bytes]) -> None:
        with ExitStack() as stack:
            stack.enter_context(source)
            sink = sys.stderr if self.path is None else stack.enter_context(self.path.open("w", encoding="utf-8"))
            for raw in source:
                line = raw.decode("utf-8", errors="replace")
                self._tail.append(line.rstrip("\n"))
                sink.write(line)
                sink.flush()

# SPDX-License-Identifier: Apache-2.0
"""Waits of tests: for a state, and never for a time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable

IN_TIME_S = 120.0
"""Seconds for any event on the slowest machine. A test that waits so long has failed."""
FOREVER_S = 600
"""Longer than any test waits."""


def wait_for(condition: Callable[[], object], message: str = "condition not met") -> None:
    """Poll until it holds, for `IN_TIME_S` at most."""
    deadline = time.monotonic() + IN_TIME_S
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.002)

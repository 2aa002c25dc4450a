# SPDX-License-Identifier: Apache-2.0
"""Lists the files and connections that a call opens, by an audit hook.

The hook lives in a process of its own, since it cannot be taken away again. Before Python 3.12 a process with a hook
also fails to start threads under coverage: `sys.settrace` gives way to other threads while hooks run.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton_omni.core.errors import OmniError

Watch = Callable[[Callable[[], object]], list[str]]

_opened: list[str] = []
_watching = False


@contextmanager
def watch() -> Iterator[Watch]:
    """A function that tells what a call, which can be pickled and may be refused, opens in the other process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=sys.addaudithook, initargs=(_hook,)) as pool:
        yield lambda call: pool.submit(_opened_by, call).result()


def _opened_by(call: Callable[[], object]) -> list[str]:
    global _watching  # noqa: PLW0603 - what an audit hook looks at
    _opened.clear()
    _watching = True
    try:
        call()
    except OmniError:
        pass
    finally:
        _watching = False
    return list(_opened)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _watching and (event == "open" or event.startswith(("socket.", "urllib.", "subprocess.", "os.system"))):
        _opened.append(f"{event} {args[0]!r}")

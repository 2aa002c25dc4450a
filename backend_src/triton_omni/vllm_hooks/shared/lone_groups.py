# SPDX-License-Identifier: Apache-2.0
"""Process groups of an engine that is one process and talks to nobody.

vLLM makes a dozen of them for any number of processes. gloo gives each a thread that wakes up a hundred times a second:
a twentieth of a core for two idle stages. gloo also gives each a port, which any local user may connect to. It ends the
process once so many are connected that no file can be opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_GLOO, _SILENT = "gloo", "fake"
"""torch's names of backends. The second gives what it is given, which is right in a group of one."""


@contextmanager
def lone_groups(processes: int) -> Iterator[None]:
    """Has no group that is made within communicate, if there is one process alone."""
    if processes > 1:
        yield
        return
    # It registers itself.
    import torch.testing._internal.distributed.fake_pg

    new_group, begin = torch.distributed.new_group, torch.distributed.init_process_group

    def new_lone_group(ranks: Any = None, *, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend=_silent(backend), **options)

    def begin_alone(backend: Any = None, *arguments: Any, **options: Any) -> None:
        begin(_silent(backend), *arguments, **options)

    torch.distributed.new_group = new_lone_group  # type: ignore[assignment]
    torch.distributed.init_process_group = begin_alone
    try:
        yield
    finally:
        torch.distributed.new_group = new_group
        torch.distributed.init_process_group = begin


def _silent(backend: Any) -> Any:
    return _SILENT if backend == _GLOO else backend

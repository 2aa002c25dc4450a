# SPDX-License-Identifier: Apache-2.0
"""Ends the stages and removes the shared memory of a tritonserver that did not stop in order.

It knows processes and files; others decide when a server is stopped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Final

import psutil

from triton_omni.session.server_folder import (
    is_own,
    process_id,
    process_namespace,
    process_of,
    remove_stale,
    server_name,
)

_SHARED_MEMORY = Path("/dev/shm")
_KILLED_WITHIN_S = 10.0
_POLL_S = 0.01
_REGIONS = "triton_omni_"
OWN_REGIONS_OPTION: Final = f"shm-region-prefix-name={_REGIONS}"
"""Start of the option by which the command line of one of our servers is recognised."""
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_PROCESSES = "triton-omni-"
"""Prefix of the names of `server_folder.server_name`."""


def end_group(leader: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and everything in the group; it may have ended by itself already.

    Stages outlive a server that was killed, and ignore SIGTERM.
    """
    kill_group(leader.pid)
    leader.wait()
    _await_end(leader.pid)


def end_group_of(name: str) -> None:
    """End the group of a process that is no child of this one, by its `server_name`."""
    leader = process_id(name)
    with contextlib.suppress(OSError):  # the leader is gone; its group may be there
        if server_name(leader) != name:
            return  # the group is gone too, and its id has been reused
    kill_group(leader)
    _await_end(leader)


def kill_group(group: int) -> None:
    """Have all processes of a group end, without waiting for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _await_end(group: int) -> None:
    deadline = time.monotonic() + _KILLED_WITHIN_S
    while members(group) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def has_followers(leader: subprocess.Popen[bytes]) -> bool:
    """True if another process of the group that `leader` leads runs."""
    return bool(members(leader.pid) - {leader.pid})


def members(group: int) -> set[int]:
    """Process ids of a process group; one that has ended and is not yet collected by its parent does not count."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # ended meanwhile
            if os.getpgid(pid) == group and psutil.Process(pid).status() not in _ENDED:
                found.add(pid)
    return found


def new_region_prefix(owner: int) -> str:
    """Return a prefix for the names of one server's regions of shared memory, unlike any other's.

    Args:
        owner: process id of its supervisor; once that is gone, regions that nobody maps are stale.
    """
    return f"{_REGIONS}{server_name(owner).removeprefix(_PROCESSES)}_{secrets.token_hex(4)}_"


def _own_regions() -> str:
    return f"{_REGIONS}{os.getuid()}-{process_namespace()}-"


def remove_stale_regions() -> list[str]:
    """Remove the regions that servers of this user left here when they were killed with their supervisors.

    Returns:
        Names of the removed regions.
    """
    stale = stale_regions()
    for region in stale:
        region.unlink(missing_ok=True)
    return [region.name for region in stale]


def stale_regions() -> list[Path]:
    """Regions of servers of this user whose supervisors are gone, and that no process has mapped.

    It leaves out files of other process-id namespaces, since it cannot see whether their processes live.
    """
    found = [region for region in _own_files(_own_regions()) if _owner_is_gone(region)]
    mapped = _mapped_regions() if found else set()
    return [region for region in found if region.name not in mapped]


def _owner_is_gone(region: Path) -> bool:
    owner = region.name.removeprefix(_REGIONS).partition("_")[0]
    return process_of(f"{_PROCESSES}{owner}") is None


def _mapped_regions() -> set[str]:
    """Names of the regions that any process has mapped; psutil reads the maps from the far slower `smaps`."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            lines = maps.read_text(errors="replace").splitlines()
            mapped.update(line.rpartition("/")[2] for line in lines if f"/{_REGIONS}" in line)
    return mapped


def remove_shared_memory(prefix: str) -> None:
    """Remove the shared memory of ended servers: Triton's regions of this prefix, and ledgers."""
    for region in _own_files(prefix):
        region.unlink(missing_ok=True)
    remove_stale()


def _own_files(prefix: str) -> list[Path]:
    """Files of this user with this prefix. Any user may make such files, and only their owner can remove them."""
    return [path for path in _SHARED_MEMORY.glob(f"{prefix}*") if is_own(path, stat.S_ISREG)]

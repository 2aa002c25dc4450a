# SPDX-License-Identifier: Apache-2.0
"""A server's own folder in shared memory, its name, and the checks that no other user has a hand in it.

It holds the ledger (`session/ledger_table.py`), the offers of the rings (`link/ring.py`) and the sockets of the bells
(`link/ring.py`). Nobody can guess its name, and only the server's user may open what is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = Path("/dev/shm")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class LedgerError(RuntimeError):
    """The ledger cannot be used: another protocol, another user's file, or stages that do not fit together."""


def server_name(server_pid: int) -> str:
    """A name that two servers never share, on one host or in containers with a shared /dev/shm.

    Made of the user, the process-id namespace, the server's process id and its start time.
    """
    start = _stat(server_pid)[19]
    return f"triton-omni-{os.getuid()}-{process_namespace(server_pid)}-{server_pid}-{start}"


def ledger_name(server_pid: int) -> str:
    """The name of a server's folder: `server_name`, and a part that another user cannot compute.

    That part is a hash of the addresses at which the kernel has put the process. They are random, stay the same for its
    whole life, and only its own user can read them.

    Raises:
        FileNotFoundError: there is no such process, or it has ended.
    """
    try:
        addresses = Path(f"/proc/{server_pid}/auxv").read_bytes()
    except ProcessLookupError as error:  # its parent has not asked after it yet
        raise FileNotFoundError(f"process {server_pid} has ended") from error
    return f"{server_name(server_pid)}-{hashlib.blake2b(addresses, digest_size=6).hexdigest()}"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on, the state; the command's name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid: int) -> bool:
    """True if the process exists and has not ended; a zombie counts as ended."""
    try:
        return pid > 0 and _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def process_namespace(pid: int | None = None) -> str:
    """Number of the namespace in which a process, by default this one, has its id."""
    return Path(f"/proc/{pid or 'self'}/ns/pid").readlink().name.strip("pid:[]")


def table_path(name: str) -> Path:
    """The file of the table of this name."""
    return _SHARED_MEMORY / name / "ledger"


def own_folder(name: str) -> Path:
    """The folder of this name, which is made if it is not there.

    Raises:
        LedgerError: another user made it first, or others may look into it.
    """
    folder = _SHARED_MEMORY / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=stat.S_IRWXU)
    _check_owner(folder)
    return folder


def remove_folder(name: str) -> None:
    """Remove the folder with all that is in it."""
    shutil.rmtree(_SHARED_MEMORY / name, ignore_errors=True)


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file in a server's folder.

    Raises:
        FileNotFoundError: there is none.
        LedgerError: folder or file belongs to another user, is open to others, or is a link; or it is no file, and
            to open a pipe could last for ever.
    """
    _check_owner(path.parent)
    _check_owner(path)
    if not stat.S_ISREG(path.lstat().st_mode):
        raise LedgerError(f"{path} is no file ({stat.filemode(path.lstat().st_mode)}): stop the server, then remove it")
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def _check_owner(path: Path) -> None:
    found, own = path.lstat(), os.getuid()
    if found.st_uid != own or stat.S_ISLNK(found.st_mode) or found.st_mode & _OTHERS:
        raise LedgerError(
            f"{path} belongs to user {found.st_uid} and has mode {stat.filemode(found.st_mode)}; this server needs one "
            f"that belongs to its user, {own}, and that nobody else may open: remove it, then start the server again"
        )


def remove_stale() -> list[str]:
    """Remove this user's folders whose server is gone (a killed server cannot); return their names."""
    stale = [folder.name for folder in own_folders() if server_of(folder) is None]
    for name in stale:
        remove_folder(name)
    return stale


def own_folders() -> list[Path]:
    """This user's folders of this process-id namespace, those whose server is gone among them."""
    found = _SHARED_MEMORY.glob(f"triton-omni-{os.getuid()}-{process_namespace()}-*-*-*")
    return sorted(path for path in found if is_own(path, stat.S_ISDIR))


def is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """True if a path is there, is this user's, and has a mode of a kind such as `stat.S_ISDIR`; follows no link."""
    try:
        found = path.lstat()
    except FileNotFoundError:  # its server removed it this moment
        return False
    return is_kind(found.st_mode) and found.st_uid == os.getuid()


def server_of(folder: Path) -> int | None:
    """Process id of the running server whose folder this is; None = it is gone."""
    return process_of(folder.name.rpartition("-")[0])


def process_of(name: str) -> int | None:
    """Process id of the running process that `server_name` names so; None = it is gone."""
    pid = process_id(name)
    try:
        lives = name == server_name(pid) and is_running(pid)
    except OSError:  # nobody has this number, or another user has
        return None
    return pid if lives else None


def process_id(name: str) -> int:
    """The number in a name that `server_name` gave; 0, which is no process's, in any other."""
    fields = name.split("-")
    return int(fields[4]) if len(fields) == 6 and fields[4].isdigit() else 0

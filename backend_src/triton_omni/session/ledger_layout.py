# SPDX-License-Identifier: Apache-2.0
"""Where what stands in the session ledger's table, which file it is, and whose; for stages and for the supervisor.

Layout (unsigned 64-bit words): the header, a block a stage, one record a slot, then the unary model's block. Every word
has one writing process. The table is in a folder of its server's own, with the offers of the rings (`link/ring.py`) and
the sockets of the bells (`link/doorbell.py`). Nobody can guess the folder's name, and only the server's user may open
what is in it. It imports nothing heavy: the supervisor reads the table without torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import shutil
import stat
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

from triton_omni.core.errors import StageName

CAPACITY: Final = 2048
"""Records in the table; a deployment uses the first of them, twice its `max_sessions` (`thinker/slots.py`)."""

PROTOCOL_VERSION: Final = 9
"""Version of the messages between stages and of this table."""
MAGIC: Final = 0x6F6D6E692D6C6467  # "omni-ldg"
STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")
WATCHED: Final[tuple[StageName, ...]] = (*STAGES, "unary")
"""Models whose processes the supervisor watches."""
WORD: Final = 8
_HEADER_WORDS: Final = 14
SECRET_BYTES: Final = 32
STAGE_WORDS: Final = 16
RECORD_WORDS: Final = 40
_UNARY_BLOCK: Final = _HEADER_WORDS + len(STAGES) * STAGE_WORDS + CAPACITY * RECORD_WORDS
_UNARY_WORDS: Final = 3
TABLE_WORDS: Final = _UNARY_BLOCK + _UNARY_WORDS
_SHARED_MEMORY: Final = Path("/dev/shm")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_HELD_POLL_S: Final = 0.02

# Words of the header. The process that makes the table writes the first words, with the secret of this server start.
# The supervisor alone writes the words from LOST on: the lost epoch of each stage, whether each new process waits
# before it loads, the phase of the server's stop, and its failures to start a stage or to change readiness.
MAGIC_WORD, VERSION_WORD, SECRET, _, _, _, LOST, _, _, HELD, _, _, LEAVING, FAULTS = range(_HEADER_WORDS)
DRAINING, ENDING = 1, 2
"""Values of LEAVING: no session begins any more; those that are open end now. 0 = the server goes on."""
# Words of a stage's block.
EPOCH, PID, BEAT, FINGERPRINT, DTYPE, HIDDEN, DEVICE, CLAIMED, BROKEN = range(9)
# The unary model's: its process, its open requests, and, written by the supervisor, whether its new process waits.
UNARY_PID, UNARY_OPEN, UNARY_HELD = range(_UNARY_BLOCK, TABLE_WORDS)
# Words of a record: four of the thinker's, then twelve of each stage.
GENERATION, EPOCHS, OPENED, DEADLINE = range(4)
CLOSED, CONSUMED, RETURNED, CANCELLED, FAILED, WANTED, OUTCOME, REACHED, PLACED, BEHIND, PLACED_NS, FETCHED = range(12)
FIRST_STAGE_WORD: Final = 4
SESSION_WORDS: Final = 12

COUNT_BITS: Final = 32
COUNT_MASK: Final = (1 << COUNT_BITS) - 1
EPOCH_BITS: Final = 16
"""Bits of each stage's epoch in a record's EPOCHS."""

# Where a stage's block begins in the table, its words among LOST and HELD, and its words in a record.
BLOCKS: Final = {stage: _HEADER_WORDS + number * STAGE_WORDS for number, stage in enumerate(STAGES)}
LOSSES: Final = {stage: LOST + number for number, stage in enumerate(STAGES)}
HOLDS: Final = {stage: HELD + number for number, stage in enumerate(STAGES)} | {"unary": UNARY_HELD}
PIDS: Final = {stage: block + PID for stage, block in BLOCKS.items()} | {"unary": UNARY_PID}
FIELDS: Final = {stage: FIRST_STAGE_WORD + number * SESSION_WORDS for number, stage in enumerate(STAGES)}
FIRST_RECORD: Final = _HEADER_WORDS + len(STAGES) * STAGE_WORDS


class LedgerError(RuntimeError):
    """The table cannot be used: another protocol, another user's file, or stages that do not fit together."""


def record(slot: int) -> int:
    """Where a slot's record begins."""
    return FIRST_RECORD + slot * RECORD_WORDS


def epoch(words: memoryview, stage: StageName) -> int:
    """How often `stage` was loaded by this server; 0 = never."""
    return words[BLOCKS[stage] + EPOCH]


def silent_for(words: memoryview, stage: StageName) -> float:
    """Seconds since the last heartbeat of `stage`."""
    return (time.monotonic_ns() - words[BLOCKS[stage] + BEAT]) / 1e9


def pack_epochs(words: memoryview) -> int:
    """The present epochs of all stages in one word."""
    packed = 0
    for number, block in enumerate(BLOCKS.values()):
        packed |= (words[block + EPOCH] & ((1 << EPOCH_BITS) - 1)) << number * EPOCH_BITS
    return packed


def lost_of(words: memoryview, epochs: int) -> list[StageName]:
    """Return the stages that died in or after these epochs (`pack_epochs`)."""
    mask = (1 << EPOCH_BITS) - 1
    return [
        stage
        for number, stage in enumerate(STAGES)
        if (lost := words[LOST + number]) and lost >= epochs >> number * EPOCH_BITS & mask
    ]


def is_open(words: memoryview, at: int) -> bool:
    """True if the record at `at` holds a session that the thinker has not ended."""
    return bool(words[at + GENERATION]) and not is_closed(words, at, "thinker")


def is_held(words: memoryview, at: int) -> bool:
    """True if the record at `at` holds an open session and every stage's process is still the one that began it."""
    return is_open(words, at) and not lost_of(words, words[at + EPOCHS])


def is_closed(words: memoryview, at: int, stage: StageName) -> bool:
    """True if `stage` has finished with the session of the record at `at`."""
    return words[at + FIELDS[stage] + CLOSED] >> COUNT_BITS == words[at + GENERATION]


def secret(words: memoryview) -> bytes:
    """By which the stages of one server start know each other's messages (`wire.Seal`); it never leaves them."""
    return words[SECRET : SECRET + SECRET_BYTES // WORD].tobytes()


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


def map_table(path: Path) -> mmap.mmap:
    """The table's memory.

    Raises:
        LedgerError: the file is no table of this layout, or not this user's alone.
        FileNotFoundError: there is none.
    """
    with os.fdopen(open_own(path, os.O_RDWR), "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size != TABLE_WORDS * WORD:
            raise LedgerError(f"{path} has {size} bytes, a ledger has {TABLE_WORDS * WORD}: remove it")
        return mmap.mmap(file.fileno(), size)


def wait_while_held(name: str, stage: StageName, seconds: float) -> None:
    """Until the supervisor lets the new process of `stage` load, for `seconds` at most: the old one still has memory,
    or too many have died. At a server's first start nobody holds it.

    Raises:
        LedgerError: as of `map_table`.
    """
    deadline = time.monotonic() + seconds
    try:
        table = map_table(table_path(name))
    except FileNotFoundError:
        return
    with contextlib.closing(table), memoryview(table) as plain, plain.cast("Q") as words:
        while words[HOLDS[stage]] and time.monotonic() < deadline:
            time.sleep(_HELD_POLL_S)


def create_table(name: str, protocol_version: int) -> None:
    """Make the table if it is not there, with a new secret.

    Written whole under a name of its own and then linked, so that of several loads at once exactly one wins and
    nobody ever sees a half-made table.

    Raises:
        LedgerError: as of `own_folder`.
    """
    path = own_folder(name) / table_path(name).name
    if path.exists():
        return
    table = array("Q", bytes(TABLE_WORDS * WORD))
    table[MAGIC_WORD], table[VERSION_WORD] = MAGIC, protocol_version
    table[SECRET : SECRET + SECRET_BYTES // WORD] = array("Q", secrets.token_bytes(SECRET_BYTES))
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(table.tobytes())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


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

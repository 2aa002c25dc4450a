# SPDX-License-Identifier: Apache-2.0
"""Where what stands in the session ledger's table, which file it is, and whose; for stages and for the supervisor.

Layout (unsigned 64-bit words): the header, a block a stage, then one record a slot. Every word has one writing
process. It imports nothing heavy: the supervisor reads the table without torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from array import array
from pathlib import Path
from typing import Final

from triton_omni.errors import StageName

CAPACITY: Final = 2048
"""Records in the table; a deployment uses the first of them, twice its `max_sessions` (`ledger.Slots`)."""

MAGIC: Final = 0x6F6D6E692D6C6467  # "omni-ldg"
STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")
WORD: Final = 8
_HEADER_WORDS: Final = 9
STAGE_WORDS: Final = 16
RECORD_WORDS: Final = 48
TABLE_WORDS: Final = _HEADER_WORDS + len(STAGES) * STAGE_WORDS + CAPACITY * RECORD_WORDS
_SHARED_MEMORY: Final = Path("/dev/shm")
_HELD_POLL_S: Final = 0.02

# Words of the header. The supervisor alone writes those from LOST on: which epoch of it was lost, a word a stage;
# whether its new process is to wait before it loads anything, the same; and how the server comes to its end.
MAGIC_WORD, VERSION_WORD, LOST, _, _, HELD, _, _, LEAVING = range(_HEADER_WORDS)
DRAINING, ENDING = 1, 2
"""Values of LEAVING: no session begins any more; those that are open end now. 0 = the server goes on."""
# Words of a stage's block.
EPOCH, PID, BEAT, FINGERPRINT, DTYPE, HIDDEN, DEVICE, CLAIMED, BROKEN = range(9)
# Words of a record: six of the thinker's, then twelve of each stage.
GENERATION, NONCE_HIGH, NONCE_LOW, EPOCHS, OPENED, DEADLINE = range(6)
CLOSED, CONSUMED, RETURNED, CANCELLED, FAILED, WANTED, OUTCOME, REACHED, PLACED, BEHIND, PLACED_NS, FETCHED = range(12)
FIRST_STAGE_WORD: Final = 6
SESSION_WORDS: Final = 12

COUNT_BITS: Final = 32
COUNT_MASK: Final = (1 << COUNT_BITS) - 1
EPOCH_BITS: Final = 16
"""Bits of each stage's epoch in a record's EPOCHS."""

# Where a stage's block begins in the table, its words among LOST and HELD, and its words in a record.
BLOCKS: Final = {stage: _HEADER_WORDS + number * STAGE_WORDS for number, stage in enumerate(STAGES)}
LOSSES: Final = {stage: LOST + number for number, stage in enumerate(STAGES)}
HOLDS: Final = {stage: HELD + number for number, stage in enumerate(STAGES)}
FIELDS: Final = {stage: FIRST_STAGE_WORD + number * SESSION_WORDS for number, stage in enumerate(STAGES)}
FIRST_RECORD: Final = _HEADER_WORDS + len(STAGES) * STAGE_WORDS


class LedgerError(RuntimeError):
    """The table cannot be used: another protocol, or stages that do not fit together."""


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
    """Which stages died in or after these epochs (`pack_epochs`)."""
    mask = (1 << EPOCH_BITS) - 1
    return [
        stage
        for number, stage in enumerate(STAGES)
        if (lost := words[LOST + number]) and lost >= epochs >> number * EPOCH_BITS & mask
    ]


def is_open(words: memoryview, at: int) -> bool:
    """Whether the record at `at` holds a session that the thinker has not ended."""
    return bool(words[at + GENERATION]) and not is_closed(words, at, "thinker")


def is_held(words: memoryview, at: int) -> bool:
    """Whether the record at `at` holds an open session all of whose stages live as they did when it began."""
    return is_open(words, at) and not lost_of(words, words[at + EPOCHS])


def is_closed(words: memoryview, at: int, stage: StageName) -> bool:
    """Whether `stage` has finished with the session of the record at `at`."""
    return words[at + FIELDS[stage] + CLOSED] >> COUNT_BITS == words[at + GENERATION]


def server_name(server_pid: int) -> str:
    """A name that two servers never share, on one host or in containers with a shared /dev/shm.

    Made of the user, the process-id namespace, the server's process id and its start time.
    """
    start = _stat(server_pid)[19]
    return f"triton-omni-{os.getuid()}-{process_namespace(server_pid)}-{server_pid}-{start}"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on, the state; the command's name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def process_namespace(pid: int | None = None) -> str:
    """Number of the namespace in which a process, by default this one, has its id."""
    return Path(f"/proc/{pid or 'self'}/ns/pid").readlink().name.strip("pid:[]")


def table_path(name: str) -> Path:
    """The file of the table of this name."""
    return _SHARED_MEMORY / name


def map_table(path: Path) -> mmap.mmap:
    """The table's memory.

    Raises:
        LedgerError: the file is no table of this layout.
        FileNotFoundError: there is none.
    """
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size != TABLE_WORDS * WORD:
            raise LedgerError(f"{path} has {size} bytes, a ledger has {TABLE_WORDS * WORD}: remove it")
        return mmap.mmap(file.fileno(), size)


def wait_while_held(name: str, stage: StageName, seconds: float) -> None:
    """Until the supervisor lets the new process of `stage` load, for `seconds` at most: the old one still has memory,
    or too many have died. At a server's first start nobody holds it.
    """
    path, deadline = table_path(name), time.monotonic() + seconds
    if path.exists():
        with contextlib.closing(map_table(path)) as table, memoryview(table) as plain, plain.cast("Q") as words:
            while words[HOLDS[stage]] and time.monotonic() < deadline:
                time.sleep(_HELD_POLL_S)


def create_table(path: Path, protocol_version: int) -> None:
    """Make the table if it is not there.

    Written whole under a name of its own and then linked, so that of several loads at once exactly one wins and
    nobody ever sees a half-made table.
    """
    if path.exists():
        return
    table = array("Q", bytes(TABLE_WORDS * WORD))
    table[MAGIC_WORD], table[VERSION_WORD] = MAGIC, protocol_version
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(table.tobytes())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def remove_stale() -> list[str]:
    """Remove this user's tables whose server is gone (a killed server cannot); return their names."""
    removed = []
    for path in own_tables():
        with contextlib.suppress(OSError):
            if server_of(path) is None:
                path.unlink()
                removed.append(path.name)
    return removed


def own_tables() -> list[Path]:
    """This user's tables of this process-id namespace, those whose server is gone among them."""
    return sorted(_SHARED_MEMORY.glob(f"triton-omni-{os.getuid()}-{process_namespace()}-*-*"))


def server_of(path: Path) -> int | None:
    """Process id of the running server whose table this is; None = it is gone."""
    # A table that a live server's stage is just making has its server's name in front (`create_table`).
    return process_of(path.name.partition(".")[0])


def process_of(name: str) -> int | None:
    """Process id of the running process that `server_name` names so; None = it is gone."""
    pid = process_id(name)
    try:
        # One that has ended and that its parent has not asked after yet is gone, too.
        lives = name == server_name(pid) and _stat(pid)[0] not in "ZX"
    except OSError:  # nobody has this number, or another user has
        return None
    return pid if lives else None


def process_id(name: str) -> int:
    """The number in a name that `server_name` gave; 0, which is no process's, in any other."""
    fields = name.split("-")
    return int(fields[4]) if len(fields) == 6 and fields[4].isdigit() else 0

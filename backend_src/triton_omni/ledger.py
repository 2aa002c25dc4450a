# SPDX-License-Identifier: Apache-2.0
"""The session ledger: one table in shared memory that all stages of one server read.

It carries what Triton's ensemble does not, since it runs against the direction of the data: credits (what a stage
consumed), what a stage waits for, cancellation, in which stage a session failed, and who has finished with it. There
are no locks: every 8-byte field has exactly one writing process, and a field that concerns a session holds that
session's generation, so that a value left by an earlier session of the slot is never taken for the present one.

Layout (unsigned 64-bit words): the header, a block a stage, then one record a slot.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triton_omni.errors import StageName
from triton_omni.wire import PROTOCOL_VERSION, SessionKey

CAPACITY: Final = 1024
"""Records in the table; a deployment's `max_sessions` uses the first of them."""

_MAGIC: Final = 0x6F6D6E692D6C6467  # "omni-ldg"
_WORD: Final = 8
_STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")
_HEADER_WORDS: Final = 8
_STAGE_WORDS: Final = 8
_RECORD_WORDS: Final = 24
_TABLE_WORDS: Final = _HEADER_WORDS + len(_STAGES) * _STAGE_WORDS + CAPACITY * _RECORD_WORDS
_SHARED_MEMORY: Final = Path("/dev/shm")

# Words of a stage's block.
_EPOCH, _PID, _BEAT, _FINGERPRINT, _DTYPE, _HIDDEN, _DEVICE, _CLAIMED = range(8)
# Words of a record: three of the thinker's, then six of each stage.
_GENERATION, _NONCE_HIGH, _NONCE_LOW = range(3)
_CLOSED, _CONSUMED, _RETURNED, _CANCELLED, _FAILED, _WANTED = range(6)
_FIRST_STAGE_WORD: Final = 3
_SESSION_WORDS: Final = 6

_COUNT_BITS: Final = 32
_COUNT_MASK: Final = (1 << _COUNT_BITS) - 1

# Where a stage's block begins in the table, and its words in a record.
_BLOCKS: Final = {stage: _HEADER_WORDS + number * _STAGE_WORDS for number, stage in enumerate(_STAGES)}
_FIELDS: Final = {stage: _FIRST_STAGE_WORD + number * _SESSION_WORDS for number, stage in enumerate(_STAGES)}
_FIRST_RECORD: Final = _HEADER_WORDS + len(_STAGES) * _STAGE_WORDS


class LedgerError(RuntimeError):
    """The table cannot be used: another protocol, or stages that do not fit together."""


@dataclass(frozen=True)
class StageFacts:
    """What the stages of one server must agree on; 0 = this stage does not care."""

    fingerprint: int
    """64 bits of the checkpoint's content."""
    dtype: int = 0
    """`1 + index` of the links' dtype, see `serving/launch.py`."""
    hidden_size: int = 0
    device: int = 0
    """`1 + index` of the GPU, which need not be the others'."""


def server_name(server_pid: int) -> str:
    """A name that two servers never share, on one host or in containers with a shared /dev/shm.

    Made of the user, the process-id namespace, the server's process id and its start time.
    """
    namespace = Path(f"/proc/{server_pid}/ns/pid").readlink().name.strip("pid:[]")
    # Field 22 of /proc/PID/stat; the command name before it may hold spaces, so count from its closing bracket.
    start = Path(f"/proc/{server_pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"triton-omni-{os.getuid()}-{namespace}-{server_pid}-{start}"


class SessionLedger:
    """One stage's view of the table.

    Args:
        name: the table's name, the same in every stage of one server (`server_name`).
        stage: whose fields this process may write.
        facts: checked against those of the stages already there.

    Raises:
        LedgerError: the table is of another protocol version, or a stage's facts differ from ours.
    """

    def __init__(self, name: str, stage: StageName, facts: StageFacts | None = None) -> None:
        self.path = _SHARED_MEMORY / name
        self._stage = stage
        _create(self.path)
        with self.path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size != _TABLE_WORDS * _WORD:
                raise LedgerError(f"{self.path} has {size} bytes, a ledger has {_TABLE_WORDS * _WORD}: remove it")
            self._map = mmap.mmap(file.fileno(), size)
        # Its items are plain integers: every poll reads some of every session's, and numpy's cost ten times as much.
        self._words = memoryview(self._map).cast("Q")
        self._check_header()
        if facts is not None:
            self._register(facts)

    def close(self) -> None:
        """Unmap the table; the last model of the server to leave removes its file."""
        self._enter(0)
        if not any(self._words[block + _PID] for block in _BLOCKS.values()):
            self.path.unlink(missing_ok=True)
        self._words.release()
        self._map.close()

    # Heartbeats: the seam for whoever watches the stages.

    def beat(self) -> None:
        """Say that this stage's loop is alive now."""
        self._words[_BLOCKS[self._stage] + _BEAT] = time.monotonic_ns()

    def epoch(self, stage: StageName) -> int:
        """How often `stage` was loaded by this server; 0 = never."""
        return self._words[_BLOCKS[stage] + _EPOCH]

    def silent_for(self, stage: StageName) -> float:
        """Seconds since the last heartbeat of `stage`."""
        return (time.monotonic_ns() - self._words[_BLOCKS[stage] + _BEAT]) / 1e9

    # Precedence on a device that stages share.

    def claim_device(self, until_ns: int) -> None:
        """token2wav only: ask the other stages on its device to start no step before then; 0 = no more."""
        self._words[_BLOCKS[self._stage] + _CLAIMED] = until_ns

    def device_claimed(self) -> bool:
        """Whether another stage claims this stage's device now."""
        words, own, claiming = self._words, _BLOCKS[self._stage], _BLOCKS["token2wav"]
        until_ns = words[claiming + _CLAIMED]
        if not until_ns or own == claiming or words[own + _DEVICE] != words[claiming + _DEVICE]:
            return False
        return time.monotonic_ns() < until_ns

    # Sessions.

    def publish(self, slot: int) -> SessionKey:
        """Thinker only: begin a new session in a free slot."""
        words, record = self._words, _record(slot)
        generation = (words[record + _GENERATION] + 1) % (1 << _COUNT_BITS) or 1
        nonce = secrets.randbits(128)
        words[record + _NONCE_HIGH], words[record + _NONCE_LOW] = nonce >> 64, nonce & (2**64 - 1)
        words[record + _GENERATION] = generation
        return SessionKey(slot, generation, f"{nonce:032x}")

    def is_current(self, key: SessionKey) -> bool:
        """Whether `key` names the session that its slot holds now."""
        if not 0 <= key.slot < CAPACITY:
            return False
        words, record = self._words, _record(key.slot)
        if words[record + _GENERATION] != key.generation:
            return False
        nonce = f"{words[record + _NONCE_HIGH] << 64 | words[record + _NONCE_LOW]:032x}"
        # As bytes: the key may come from outside, and only ASCII strings can be compared as they are.
        return secrets.compare_digest(nonce.encode(), key.nonce.encode())

    def mark_closed(self, key: SessionKey, sent: int = 0) -> None:
        """This stage's last sender of the session is final, `sent` messages left by it, and its state is dropped."""
        self._write(key, _CLOSED, _counted(key, sent))

    def mark_cancelled(self, key: SessionKey) -> None:
        """This stage saw that the client is gone."""
        self._write(key, _CANCELLED, key.generation)

    def mark_failed(self, key: SessionKey) -> None:
        """This stage gave the session up."""
        self._write(key, _FAILED, key.generation)

    def count_consumed(self, key: SessionKey, messages: int) -> None:
        """This stage has copied `messages` data messages of the session so far."""
        self._write(key, _CONSUMED, _counted(key, messages))

    def count_returned(self, key: SessionKey) -> None:
        """This stage has ended one more of the session's requests; on the sending thread of its slot only."""
        self._write(key, _RETURNED, _counted(key, self.returned(key, self._stage) + 1))

    def want(self, key: SessionKey, count: int) -> None:
        """This stage can do nothing before it has `count` rows or codes of the session, from the first on."""
        self._write(key, _WANTED, _counted(key, min(count, _COUNT_MASK)))

    def wanted(self, key: SessionKey, stage: StageName) -> int | None:
        """Rows or codes of the session, from the first on, that `stage` waits for; None = it has not said."""
        return self._count(key, stage, _WANTED)

    def closed(self, key: SessionKey, stage: StageName) -> bool:
        """Whether `stage` has finished with the session."""
        return self._count(key, stage, _CLOSED) is not None

    def consumed(self, key: SessionKey, stage: StageName) -> int:
        """Data messages of the session that `stage` has copied."""
        return self._count(key, stage, _CONSUMED) or 0

    def returned(self, key: SessionKey, stage: StageName) -> int:
        """Requests of the session that `stage` has ended."""
        return self._count(key, stage, _RETURNED) or 0

    def in_transit(self, key: SessionKey, sender: StageName, receiver: StageName) -> int | None:
        """Messages from `sender` whose requests `receiver` has not ended; None = the sender may still send."""
        sent = self._count(key, sender, _CLOSED)
        return None if sent is None else sent - self.returned(key, receiver)

    def cancelled(self, key: SessionKey) -> bool:
        """Whether any stage saw that the client is gone."""
        return self._any_said(key, _CANCELLED)

    def failed(self, key: SessionKey) -> bool:
        """Whether any stage gave the session up."""
        return self._any_said(key, _FAILED)

    def is_over(self, key: SessionKey) -> bool:
        """Whether a session that was opened needs nothing more from thinker and talker: its slot holds another one,
        the client is gone, a stage gave it up, or token2wav has answered all. Each session is asked at each poll.
        """
        held = self._words[_record(key.slot) + _GENERATION] == key.generation
        return not held or self.closed(key, "token2wav") or self.cancelled(key) or self.failed(key)

    # Layout.

    def _check_header(self) -> None:
        if self._words[0] != _MAGIC or self._words[1] != PROTOCOL_VERSION:
            raise LedgerError(
                f"{self.path} is a ledger of protocol version {self._words[1]}, this stage speaks "
                f"{PROTOCOL_VERSION}: stop the server that made it"
            )

    def _register(self, facts: StageFacts) -> None:
        words, own = self._words, _BLOCKS[self._stage]
        words[own + _FINGERPRINT] = facts.fingerprint
        words[own + _DTYPE], words[own + _HIDDEN] = facts.dtype, facts.hidden_size
        words[own + _DEVICE], words[own + _CLAIMED] = facts.device, 0
        # Entered before looking at the others: of two stages that load at once, one at least sees the other.
        self._enter(os.getpid())
        try:
            self._check_others(facts)
        except LedgerError:
            self._enter(0)
            raise
        words[own + _EPOCH] += 1
        self.beat()

    def _enter(self, pid: int) -> None:
        """Say which process serves this model; 0 = none any more."""
        self._words[_BLOCKS[self._stage] + _PID] = pid

    def _check_others(self, facts: StageFacts) -> None:
        for other in _STAGES:
            block = self._words[_BLOCKS[other] : _BLOCKS[other] + _STAGE_WORDS].tolist()
            if other != self._stage and block[_PID]:
                _check_agreement(self._stage, facts, other, block)

    def _write(self, key: SessionKey, word: int, value: int) -> None:
        """One of this stage's words, unless the slot holds a later session already, whose words these are."""
        record = _record(key.slot)
        if self._words[record + _GENERATION] == key.generation:
            self._words[record + _FIELDS[self._stage] + word] = value

    def _count(self, key: SessionKey, stage: StageName, word: int) -> int | None:
        """The count in one of a stage's words; None if an earlier session of the slot left it."""
        found = self._words[_record(key.slot) + _FIELDS[stage] + word]
        return found & _COUNT_MASK if found >> _COUNT_BITS == key.generation else None

    def _any_said(self, key: SessionKey, word: int) -> bool:
        words, first, generation = self._words, _record(key.slot) + _FIRST_STAGE_WORD + word, key.generation
        return (
            words[first] == generation
            or words[first + _SESSION_WORDS] == generation
            or words[first + 2 * _SESSION_WORDS] == generation
        )


class Slots:
    """The thinker's free slots. Thread-safe: requests arrive on Triton's threads, sessions end on the loop's."""

    def __init__(self, ledger: SessionLedger, max_sessions: int) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._free = list(range(max_sessions))[::-1]

    def allocate(self) -> SessionKey | None:
        """Begin a session, or None when all slots are taken."""
        with self._lock:
            return self._ledger.publish(self._free.pop()) if self._free else None

    def release(self, key: SessionKey) -> None:
        """Give the slot back; every stage has closed the session."""
        with self._lock:
            self._free.append(key.slot)

    @property
    def free(self) -> int:
        """Slots that can be allocated now."""
        with self._lock:
            return len(self._free)


def _counted(key: SessionKey, count: int) -> int:
    """A count of this session in one word, together with the generation that it belongs to."""
    return key.generation << _COUNT_BITS | count


def _record(slot: int) -> int:
    """Where a slot's record begins."""
    return _FIRST_RECORD + slot * _RECORD_WORDS


def _check_agreement(stage: StageName, facts: StageFacts, other: StageName, block: Sequence[int]) -> None:
    pairs = (
        ("checkpoint fingerprint", facts.fingerprint, block[_FINGERPRINT]),
        ("dtype of the links", facts.dtype, block[_DTYPE]),
        ("hidden size", facts.hidden_size, block[_HIDDEN]),
    )
    for what, ours, theirs in pairs:
        if ours and theirs and ours != theirs:
            raise LedgerError(
                f"{what} of {stage} is {ours:#x}, of {other} {theirs:#x}: load the same checkpoint in both"
            )


def _create(path: Path) -> None:
    """Make the table if it is not there.

    Written whole under a name of its own and then linked, so that of several loads at once exactly one wins and
    nobody ever sees a half-made table.
    """
    if path.exists():
        return
    table = array("Q", bytes(_TABLE_WORDS * _WORD))
    table[0], table[1] = _MAGIC, PROTOCOL_VERSION
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
    namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    removed = []
    for path in _SHARED_MEMORY.glob(f"triton-omni-{os.getuid()}-{namespace}-*-*"):
        # A table that a live server's stage is just making has its server's name in front (`_create`).
        table = path.name.partition(".")[0]
        pid = table.split("-")[4]
        with contextlib.suppress(OSError):
            if not (pid.isdigit() and Path(f"/proc/{pid}").exists() and table == server_name(int(pid))):
                path.unlink()
                removed.append(path.name)
    return removed

# SPDX-License-Identifier: Apache-2.0
"""The session ledger's table: its fields, declared once, and the access to them that all of its readers share.

The stages (`session/ledger.py`), the supervisor (`session/ledger_view.py`) and the doctor (`session/ledger_view.py`)
read and write by these declarations, from which the layout is computed. A field is an unsigned 64-bit word. Processors
read and write it whole, and it has one writing process, so the table needs no locks. This module imports nothing heavy:
the supervisor reads the table without torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import signal
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from triton_omni.core.errors import StageName
from triton_omni.session.server_folder import LedgerError, open_own, own_folder, table_path

PROTOCOL_VERSION: Final = 14
"""Version of the messages between stages and of this table."""
CAPACITY: Final = 2048
"""Records in the table; a deployment uses the first of them, twice its `max_sessions` (`thinker/slots.py`)."""
STAGES: Final[tuple[StageName, ...]] = ("thinker", "talker", "token2wav")
WATCHED: Final[tuple[StageName, ...]] = (*STAGES, "unary")
"""Models whose processes the supervisor watches."""
STACKS_SIGNAL: Final = signal.SIGUSR1
"""Has such a process write where its threads are, to the server's log, and end."""
COUNT_BITS: Final = 32
COUNT_MASK: Final = (1 << COUNT_BITS) - 1
"""Largest value of a stamped field, and largest generation."""
DRAINING, ENDING = 1, 2
"""Values of LEAVING: no session may begin; open sessions end now. 0 = the server goes on."""
_MAGIC: Final = 0x6F6D6E692D6C6467  # "omni-ldg"
_WORD_BYTES: Final = 8
_EPOCH_BITS: Final = 16
_EPOCH_MASK: Final = (1 << _EPOCH_BITS) - 1
_HELD_POLL_S: Final = 0.02

Writer = Literal["maker", "supervisor", "thinker", "model"]
"""The process that makes the table, the supervisor, the thinker, or the model whose word it is."""

FIELDS: Final[list[Field]] = []
"""All fields, in the order of their declaration."""


@dataclass(frozen=True, eq=False)
class Field:
    """Declares a field; `FIELDS` then lists it."""

    name: str
    writer: Writer
    meaning: str
    models: tuple[StageName | None, ...] = (None,)
    """Models that have a word each; (None,) = the word belongs to the server, or to the session, as a whole."""
    per_session: bool = False
    """True if each slot's record has the field."""
    words: int = 1
    at: dict[StageName | None, int] = field(default_factory=dict, repr=False)
    """Position of its first word for each model, in the record of slot 0 if the field is `per_session`."""

    def __post_init__(self) -> None:
        FIELDS.append(self)


class StampedField(Field):
    """A stage's field of a session: a count of `COUNT_BITS`, stamped with the session's generation. So no reader takes
    the count of an earlier session in the slot for this one's.
    """


def _stamped(name: str, meaning: str) -> StampedField:
    return StampedField(name, "model", meaning, STAGES, per_session=True)


# The server's fields. The first two have the same place in every version.
MAGIC: Final = Field("magic", "maker", "Tells a ledger from another file.")
VERSION: Final = Field("version", "maker", "Protocol version of the program that made the table.")
SECRET: Final = Field("secret", "maker", "Key of this server start that signs the stages' messages.", words=4)
LEAVING: Final = Field("leaving", "supervisor", "Phase of the server's stop: 0, DRAINING or ENDING.")
FAULTS: Final = Field("faults", "supervisor", "Failures to start a stage or to change readiness, counted.")

# Fields of each model, or of some.
LOST: Final = Field("lost", "supervisor", "Last epoch of the stage whose process died; 0 = none did.", STAGES)
HELD: Final = Field("held", "supervisor", "1 = the model's next process waits before it loads.", WATCHED)
PID: Final = Field("pid", "model", "Process of the model, or its last one; 0 = none, or it left in order.", WATCHED)
EPOCH: Final = Field("epoch", "model", "Number of times that this server has loaded the stage.", STAGES)
BEAT: Final = Field("beat", "model", "When the stage's loop last turned, monotonic ns.", STAGES)
FINGERPRINT: Final = Field("fingerprint", "model", "64 bits of the checkpoint's content.", STAGES)
DTYPE: Final = Field("dtype", "model", "1 + index of the links' dtype; 0 = the stage does not care.", STAGES)
HIDDEN_SIZE: Final = Field("hidden_size", "model", "Width of a row; 0 = the stage does not care.", STAGES)
DEVICE: Final = Field("device", "model", "1 + index of the stage's GPU; 0 = it has none.", STAGES)
BROKEN: Final = Field("broken", "model", "Last epoch in which the stage's engine failed; 0 = none.", STAGES)
CLAIMED: Final = Field(
    "claimed", "model", "Until when its GPU's other stages start no step, monotonic ns.", ("token2wav",)
)
WINDOWS: Final = Field("windows", "model", "1 = it launches windows, or its GPU runs them.", ("token2wav",))
OPEN_REQUESTS: Final = Field("open_requests", "model", "Unary requests that only this process can end.", ("unary",))

# Fields of each session.
GENERATION: Final = Field("generation", "thinker", "Number of the slot's session; 0 = it had none.", per_session=True)
EPOCHS: Final = Field("epochs", "thinker", "Epochs of all stages when the session began.", per_session=True)
OPENED: Final = Field("opened", "thinker", "When the session began, monotonic ns.", per_session=True)
DEADLINE: Final = Field("deadline", "thinker", "When it ends at the latest, monotonic ns; 0 = unset.", per_session=True)

# Fields of each session and stage.
CLOSED: Final = _stamped("closed", "The stage sent so many messages in all, and has dropped its state.")
CONSUMED: Final = _stamped("consumed", "Data messages that the stage has copied.")
RETURNED: Final = _stamped("returned", "Requests of the session that the stage has ended.")
CANCELLED: Final = _stamped("cancelled", "The stage saw that the client is gone.")
FAILED: Final = _stamped("failed", "The stage gave the session up.")
WANTED: Final = _stamped("wanted", "Rows or codes, from the first on, without which the stage can do nothing.")
OUTCOME: Final = _stamped("outcome", "How the stage ended the client's request (`RequestOutcome.to_number`).")
REACHED: Final = _stamped("reached", "The stage has the session; after token2wav has, the client hears how it ends.")
PLACED: Final = _stamped("placed", "Rows or codes that the stage has put into the next one's ring.")
CACHED: Final = _stamped("cached", "First tokens of the prompt whose rows the stage has no need of.")
FETCHED: Final = _stamped("fetched", "Rows or codes that the stage has copied from its ring, whose places are free.")
# Unstamped: a reader reads PLACED before them, and the stage writes it after them.
BY_MESSAGE: Final = Field(
    "by_message", "model", "Number of items before the ring's, sent in messages.", STAGES, per_session=True
)
PLACED_NS: Final = Field(
    "placed_ns", "model", "When the last of PLACED were sent, monotonic ns.", STAGES, per_session=True
)


def _lay_out(start: int, *, per_session: bool) -> int:
    """Place the fields from word `start` on, those of one model side by side; return where they end."""
    for model in (None, *WATCHED):
        for declared in FIELDS:
            if declared.per_session == per_session and model in declared.models:
                declared.at[model] = start
                start += declared.words
    return start


_FIRST_RECORD: Final = _lay_out(0, per_session=False)
RECORD_WORDS: Final = _lay_out(_FIRST_RECORD, per_session=True) - _FIRST_RECORD
TABLE_WORDS: Final = _FIRST_RECORD + CAPACITY * RECORD_WORDS
_DEATH_WORDS: Final = tuple((stage, LOST.at[stage], number * _EPOCH_BITS) for number, stage in enumerate(STAGES))


class Table:
    """One ledger, read and written by field.

    Args:
        path: its file (`server_folder.table_path`).
        snapshot: True = read it once, so that the reader can neither write to it nor keep it alive.

    Raises:
        FileNotFoundError: there is none.
        LedgerError: the file is no table of this layout, or not this user's alone.
    """

    def __init__(self, path: Path, *, snapshot: bool = False) -> None:
        with os.fdopen(open_own(path, os.O_RDONLY if snapshot else os.O_RDWR), "rb") as file:
            _check_head(path, file.fileno())
            self._memory = file.read() if snapshot else mmap.mmap(file.fileno(), TABLE_WORDS * _WORD_BYTES)
        # Its items are plain integers: every poll reads some of every session's, and numpy's cost ten times as much.
        self._words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Unmap the table."""
        self._words.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()

    def word(self, declared: Field, model: StageName | None = None, slot: int = 0) -> int:
        """A field's word as it is; that of a stamped field has its stamp."""
        return self._words[declared.at[model] + slot * RECORD_WORDS]

    def set_word(self, declared: Field, value: int, model: StageName | None = None, slot: int = 0) -> None:
        """Set a field's word; for the field's writer only."""
        self._words[declared.at[model] + slot * RECORD_WORDS] = value

    def secret(self) -> bytes:
        """The key with which the stages of one server start seal their messages (`wire.Seal`); it never leaves them."""
        return self._words[SECRET.at[None] : SECRET.at[None] + SECRET.words].tobytes()

    def silent_for(self, model: StageName) -> float:
        """Seconds since the model's loop last turned; 0 = it has none."""
        return (time.monotonic_ns() - self.word(BEAT, model)) / 1e9 if model in BEAT.models else 0.0

    def is_broken(self, model: StageName) -> bool:
        """True if the model's engine has failed since it was loaded."""
        return model in EPOCH.models and 0 < self.word(EPOCH, model) == self.word(BROKEN, model)

    def epochs(self) -> int:
        """The present epochs of all stages in one word, for `lost_since`."""
        return sum((self.word(EPOCH, stage) & _EPOCH_MASK) << shift for stage, _, shift in _DEATH_WORDS)

    def lost_since(self, epochs: int) -> list[StageName]:
        """Return the stages that died in or after these epochs."""
        words, found = self._words, []
        for stage, at, shift in _DEATH_WORDS:  # each poll asks for every session, and nearly always none has died
            if (lost := words[at]) and lost >= epochs >> shift & _EPOCH_MASK:
                found.append(stage)
        return found

    def is_held(self, slot: int) -> bool:
        """True if the slot holds a session that the thinker has not ended, and no stage has died since it began."""
        is_open = self.word(GENERATION, slot=slot) and not self.is_closed(slot, "thinker")
        return bool(is_open) and not self.lost_since(self.word(EPOCHS, slot=slot))

    def is_closed(self, slot: int, stage: StageName) -> bool:
        """True if `stage` has finished with the session in the slot."""
        return self.word(CLOSED, stage, slot) >> COUNT_BITS == self.word(GENERATION, slot=slot)


def _check_head(path: Path, file: int) -> None:
    """Check the words that are at the same place in every version, then the size.

    Raises:
        LedgerError: the file is no table of this layout.
    """
    size, expected = os.fstat(file).st_size, TABLE_WORDS * _WORD_BYTES
    magic, version = array("Q", os.pread(file, 2 * _WORD_BYTES, 0).ljust(2 * _WORD_BYTES, b"\0"))
    if magic != _MAGIC:
        raise LedgerError(f"{path} is no session ledger: remove it")
    if version != PROTOCOL_VERSION:
        raise LedgerError(
            f"{path} is a ledger of protocol version {version}, this program speaks {PROTOCOL_VERSION}: "
            "stop the server that made it"
        )
    if size != expected:
        raise LedgerError(f"{path} has {size} bytes, a ledger has {expected}: remove it")


def create_table(name: str) -> None:
    """Make the table if it is not there, with a new secret.

    Written whole under a name of its own and then linked, so that of several loads at once exactly one wins and
    nobody ever sees a half-made table.

    Raises:
        LedgerError: as of `own_folder`.
    """
    path = own_folder(name) / table_path(name).name
    if path.exists():
        return
    table = array("Q", bytes(TABLE_WORDS * _WORD_BYTES))
    table[MAGIC.at[None]], table[VERSION.at[None]] = _MAGIC, PROTOCOL_VERSION
    start, end = SECRET.at[None], SECRET.at[None] + SECRET.words
    table[start:end] = array("Q", secrets.token_bytes(SECRET.words * _WORD_BYTES))
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(table.tobytes())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def wait_while_held(name: str, model: StageName, seconds: float) -> None:
    """Wait until the supervisor lets the new process of `model` load, `seconds` at most.

    The old process may still have memory, or too many may have died. At a server's first start there is no wait.

    Raises:
        LedgerError: as of `Table`.
    """
    deadline = time.monotonic() + seconds
    try:
        table = Table(table_path(name))
    except FileNotFoundError:
        return
    with contextlib.closing(table):
        while table.word(HELD, model) and time.monotonic() < deadline:
            time.sleep(_HELD_POLL_S)

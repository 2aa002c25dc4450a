# SPDX-License-Identifier: Apache-2.0
"""The session ledger as the stages of one server use it.

It carries what flows against the direction of the ensemble: credits (consumed messages), each stage's next need,
cancellation, failures, and closed sessions. `session/ledger_table.py` declares its fields. A session's key reads and
writes the fields of that session alone, never those of another one in its slot.

Memory order: two words tell of others that were written before: `PLACED` of the items in the ring, and `RETURNED` of
`CLOSED`. `fence` keeps that order on Arm too, where a processor may swap accesses. Every other word stands for itself,
and a session's key reaches a stage by a message that follows the record.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_table as table
from triton_omni.session.ledger_table import (
    CANCELLED,
    CLOSED,
    COUNT_BITS,
    COUNT_MASK,
    FAILED,
    RECORD_WORDS,
    STAGES,
    StampedField,
)
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.server_folder import LedgerError, remove_folder, table_path
from triton_omni.session.wire import Seal, SessionKey

_FENCE: Final = threading.Lock()


@dataclass(frozen=True)
class StageFacts:
    """Facts that all stages of one server must agree on; 0 = this stage does not care."""

    fingerprint: int
    """64 bits of the checkpoint's content."""
    dtype: int = 0
    """`1 + index` of the links' dtype, see `stub/launch.py`."""
    hidden_size: int = 0
    device: int = 0
    """`1 + index` of the GPU, which need not be the others'."""


class Placed(NamedTuple):
    """Items of a session in the next stage's ring."""

    total: int
    """Rows or codes that were put there, those that were read among them."""
    by_message: int
    """Number of earlier items, which came in messages."""
    sent_ns: int
    """System-wide monotonic clock when the last of them were given away, nanoseconds."""


class SessionLedger(table.Table):
    """One stage's view of the table.

    Args:
        name: the server folder's name, the same in every stage of one server (`server_folder.ledger_name`).
        stage: whose fields this process may write.
        facts: checked against those of the stages already there.

    Raises:
        LedgerError: the table is of another protocol version or not this user's alone, or a stage's facts differ from
            ours.
    """

    def __init__(self, name: str, stage: StageName, facts: StageFacts | None = None) -> None:
        self.path = table_path(name)
        self.name, self.stage = name, stage
        table.create_table(name)
        super().__init__(self.path)
        if facts is not None:
            self._register(facts)

    def close(self) -> None:
        """Unmap the table; the last model of the server to leave removes its folder."""
        self.set_word(table.PID, 0, self.stage)
        if not any(self.word(table.PID, stage) for stage in STAGES):
            remove_folder(self.name)
        super().close()

    def seal(self, sender: StageName) -> Seal:
        """Key that signs a stage's messages and tells them from a caller's."""
        return Seal(self.secret(), sender)

    # The stage itself.

    def beat(self) -> None:
        """Say that this stage's loop is alive now."""
        self.set_word(table.BEAT, time.monotonic_ns(), self.stage)

    def say_broken(self) -> None:
        """This stage's engine has failed: it serves nothing more, and asks to be started again."""
        self.set_word(table.BROKEN, self.word(table.EPOCH, self.stage), self.stage)

    def device_claimed(self) -> bool:
        """True if token2wav claims this stage's device for itself now."""
        until_ns = self.word(table.CLAIMED, "token2wav")
        if not until_ns or self.stage == "token2wav" or not self.shares_device_with("token2wav"):
            return False
        return time.monotonic_ns() < until_ns

    def device_has_windows(self) -> bool:
        """True if token2wav makes windows on this stage's device now."""
        return bool(self.word(table.WINDOWS, "token2wav")) and self.shares_device_with("token2wav")

    def shares_device_with(self, stage: StageName) -> bool:
        """True if this stage and `stage` run on one device."""
        return self.word(table.DEVICE, self.stage) == self.word(table.DEVICE, stage)

    # Sessions.

    def publish(self, slot: int) -> SessionKey:
        """Thinker only: begin a new session in a free slot."""
        generation = (self.word(table.GENERATION, slot=slot) + 1) % (1 << COUNT_BITS) or 1
        self.set_word(table.EPOCHS, self.epochs(), slot=slot)
        self.set_word(table.OPENED, time.monotonic_ns(), slot=slot)
        self.set_word(table.DEADLINE, 0, slot=slot)
        self.set_word(table.GENERATION, generation, slot=slot)
        return SessionKey(slot, generation)

    def set_deadline(self, key: SessionKey, deadline_ns: int) -> None:
        """Thinker only: when the session is to be over at the latest, by the monotonic clock."""
        if self.holds(key):
            self.set_word(table.DEADLINE, deadline_ns, slot=key.slot)

    def holds(self, key: SessionKey) -> bool:
        """True if `key` names the session that its slot holds now."""
        return self.word(table.GENERATION, slot=key.slot) == key.generation

    def write(self, key: SessionKey, field: StampedField, count: int = 0) -> None:
        """Write this stage's field of a session, unless its slot holds a later one. A count above `COUNT_MASK` is
        written as that.
        """
        if self.holds(key):
            stamped = key.generation << COUNT_BITS | min(count, COUNT_MASK)
            self._words[field.at[self.stage] + key.slot * RECORD_WORDS] = stamped

    def read(self, key: SessionKey, field: StampedField, stage: StageName) -> int | None:
        """The count that `stage` has written for the session; None = it has written none."""
        found = self._words[field.at[stage] + key.slot * RECORD_WORDS]
        return found & COUNT_MASK if found >> COUNT_BITS == key.generation else None

    def count(self, key: SessionKey, field: StampedField, stage: StageName) -> int:
        """The same, but 0 if it has written none."""
        return self.read(key, field, stage) or 0

    def has(self, key: SessionKey, field: StampedField, stage: StageName | None = None) -> bool:
        """True if `stage`, by default any, has written the field for the session."""
        words, record = self._words, key.slot * RECORD_WORDS
        if stage is not None:
            return words[field.at[stage] + record] >> COUNT_BITS == key.generation
        for at in field.at.values():  # noqa: SIM110 - `any` takes twice as long, and each poll asks for every session
            if words[at + record] >> COUNT_BITS == key.generation:
                return True
        return False

    def say_outcome(self, key: SessionKey, ending: RequestOutcome) -> None:
        """This stage ends the client's request so; to be said before the stage closes the session."""
        self.write(key, table.OUTCOME, ending.to_number())

    def outcome(self, key: SessionKey, stage: StageName) -> RequestOutcome | None:
        """Return the outcome that `stage` gave the client's request; None = it did not end it."""
        number = self.read(key, table.OUTCOME, stage)
        return RequestOutcome.from_number(number) if number else None

    def count_returned(self, key: SessionKey) -> None:
        """This stage has ended one more of the session's requests; on the sending thread of its slot only."""
        before = self.count(key, table.RETURNED, self.stage)
        fence()
        self.write(key, table.RETURNED, before + 1)

    def returned(self, key: SessionKey, stage: StageName) -> int:
        """Requests of the session that `stage` has ended."""
        found = self.count(key, table.RETURNED, stage)
        fence()
        return found

    def in_transit(self, key: SessionKey, sender: StageName, receiver: StageName) -> int | None:
        """Messages from `sender` whose requests `receiver` has not ended; None = the sender may still send."""
        returned, sent = self.returned(key, receiver), self.read(key, CLOSED, sender)
        return None if sent is None else sent - returned

    def place(self, key: SessionKey, placed: Placed) -> None:
        """This stage has put so much of the session into the next one's ring (`link/ring.py`), and it may be read."""
        if not self.holds(key):
            return
        self.set_word(table.BY_MESSAGE, placed.by_message, self.stage, key.slot)
        self.set_word(table.PLACED_NS, placed.sent_ns, self.stage, key.slot)
        # Written last: a reader of this field reads the other ones after it.
        fence()
        self.write(key, table.PLACED, placed.total)

    def placing(self, key: SessionKey, stage: StageName) -> Placed:
        """The items of the session that `stage` has put into the next one's ring."""
        total = self.count(key, table.PLACED, stage)
        fence()
        return Placed(total, self.word(table.BY_MESSAGE, stage, key.slot), self.word(table.PLACED_NS, stage, key.slot))

    def lost_stages(self, key: SessionKey) -> list[StageName]:
        """Stages whose process died since the session began; nearly always none."""
        return self.lost_since(self.word(table.EPOCHS, slot=key.slot))

    def is_served(self, key: SessionKey) -> bool:
        """True if an engine may still hold something of an open session. token2wav then has more to do than to send
        ready audio, and not every stage has closed the session.
        """
        if self.outcome(key, "token2wav") is not None:
            return False
        return not all(self.has(key, CLOSED, stage) for stage in STAGES)

    def awaits_talker(self, key: SessionKey) -> bool:
        """True if token2wav has answered all of a session and only the talker's request has not ended. Should that
        process die now, the thinker alone can still end the client's stream.
        """
        settled = self.has(key, CLOSED, "token2wav") and not self.has(key, CANCELLED) and not self.has(key, FAILED)
        return settled and not self.has(key, CLOSED, "talker")

    def is_over(self, key: SessionKey) -> bool:
        """True if an opened session needs nothing more from thinker and talker. Its slot holds another session, its
        client is gone, a stage gave it up, or token2wav has answered all. Each session is asked at each poll.
        """
        ended = not self.holds(key) or self.has(key, CLOSED, "token2wav")
        return ended or self.has(key, CANCELLED) or self.has(key, FAILED)

    # Registration.

    def _register(self, facts: StageFacts) -> None:
        own = self.stage
        self.set_word(table.FINGERPRINT, facts.fingerprint, own)
        self.set_word(table.DTYPE, facts.dtype, own)
        self.set_word(table.HIDDEN_SIZE, facts.hidden_size, own)
        self.set_word(table.DEVICE, facts.device, own)
        for left in (table.CLAIMED, table.WINDOWS):
            if own in left.models:
                self.set_word(left, 0, own)
        # Entered before looking at the others: of two stages that load at once, one at least sees the other.
        self.set_word(table.PID, os.getpid(), own)
        try:
            self._check_others(facts)
        except LedgerError:
            self.set_word(table.PID, 0, own)
            raise
        self.set_word(table.EPOCH, self.word(table.EPOCH, own) + 1, own)
        self.beat()

    def _check_others(self, facts: StageFacts) -> None:
        pairs = (
            ("checkpoint fingerprint", facts.fingerprint, table.FINGERPRINT),
            ("dtype of the links", facts.dtype, table.DTYPE),
            ("hidden size", facts.hidden_size, table.HIDDEN_SIZE),
        )
        for other in STAGES:
            if other == self.stage or not self.word(table.PID, other):
                continue
            for fact, ours, field in pairs:
                theirs = self.word(field, other)
                if ours and theirs and ours != theirs:
                    raise LedgerError(
                        f"{fact} of {self.stage} is {ours:#x}, of {other} {theirs:#x}: load the same checkpoint in both"
                    )


def fence() -> None:
    """Order all memory accesses before the call before all after it, on every processor.

    Accesses may move into a locked region but not out of it, so two regions are needed.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass

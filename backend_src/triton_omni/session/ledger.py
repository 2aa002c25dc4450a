# SPDX-License-Identifier: Apache-2.0
"""The session ledger: one table in shared memory that all stages of one server read.

It carries what flows against the direction of the ensemble: credits (consumed messages), each stage's next need,
cancellation, failures, and closed sessions. It has no locks: each 8-byte field has one writing process. A session's
field holds its generation, so that no reader takes a value of an earlier session in that slot. The supervisor announces
deaths of stages (`session/stage_board.py`).

Memory order: a word is read and written whole. Two words tell of others that were written before: `PLACED` of the items
in the ring, and `RETURNED` of `CLOSED`. `fence` keeps that order on Arm too, where a processor may swap accesses. Every
other word stands for itself, and a session's key reaches a stage by a message that follows the record.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from triton_omni.core.errors import StageName
from triton_omni.session import ledger_layout as layout
from triton_omni.session.ledger_layout import PROTOCOL_VERSION, STAGES, LedgerError
from triton_omni.session.outcome import RequestOutcome
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
    behind: int
    """Number of earlier items, which came in messages."""
    sent_ns: int
    """System-wide monotonic clock when the last of them were given away, nanoseconds."""


class SessionLedger:
    """One stage's view of the table.

    Args:
        name: the table's name, the same in every stage of one server (`ledger_layout.ledger_name`).
        stage: whose fields this process may write.
        facts: checked against those of the stages already there.

    Raises:
        LedgerError: the table is of another protocol version or not this user's alone, or a stage's facts differ from
            ours.
    """

    def __init__(self, name: str, stage: StageName, facts: StageFacts | None = None) -> None:
        self.path = layout.table_path(name)
        self.name, self.stage = name, stage
        layout.create_table(name, PROTOCOL_VERSION)
        self._map = layout.map_table(self.path)
        # Its items are plain integers: every poll reads some of every session's, and numpy's cost ten times as much.
        self._words = memoryview(self._map).cast("Q")
        self._check_header()
        if facts is not None:
            self._register(facts)

    def close(self) -> None:
        """Unmap the table; the last model of the server to leave removes its folder."""
        self._enter(0)
        if not any(self._words[block + layout.PID] for block in layout.BLOCKS.values()):
            layout.remove_folder(self.name)
        self._words.release()
        self._map.close()

    def seal(self, sender: StageName) -> Seal:
        """Key that signs a stage's messages and tells them from a caller's."""
        return Seal(layout.secret(self._words), sender)

    # Fields that the supervisor watches.

    def beat(self) -> None:
        """Say that this stage's loop is alive now."""
        self._words[layout.BLOCKS[self.stage] + layout.BEAT] = time.monotonic_ns()

    def epoch(self, stage: StageName) -> int:
        """How often `stage` was loaded by this server; 0 = never."""
        return layout.epoch(self._words, stage)

    def silent_for(self, stage: StageName) -> float:
        """Seconds since the last heartbeat of `stage`."""
        return layout.silent_for(self._words, stage)

    def say_broken(self) -> None:
        """This stage's engine has failed: it serves nothing more, and asks to be started again."""
        own = layout.BLOCKS[self.stage]
        self._words[own + layout.BROKEN] = self._words[own + layout.EPOCH]

    @property
    def draining(self) -> bool:
        """True if the server is about to stop: no session may begin."""
        return self._words[layout.LEAVING] != 0

    @property
    def ending(self) -> bool:
        """True if the server no longer waits for open sessions."""
        return self._words[layout.LEAVING] == layout.ENDING

    @property
    def faults(self) -> int:
        """How often the supervisor failed to start a stage or to change readiness."""
        return self._words[layout.FAULTS]

    # Precedence on a device that stages share.

    def claim_device(self, until_ns: int) -> None:
        """token2wav only: ask the other stages on its device to start no step before then; 0 = no more."""
        self._words[layout.BLOCKS[self.stage] + layout.CLAIMED] = until_ns

    def device_claimed(self) -> bool:
        """True if another stage claims this stage's device now."""
        until_ns = self._words[layout.BLOCKS["token2wav"] + layout.CLAIMED]
        if not until_ns or self.stage == "token2wav" or not self.shares_device_with("token2wav"):
            return False
        return time.monotonic_ns() < until_ns

    def shares_device_with(self, stage: StageName) -> bool:
        """True if this stage and `stage` run on one device."""
        own, other = (layout.BLOCKS[name] + layout.DEVICE for name in (self.stage, stage))
        return self._words[own] == self._words[other]

    # Sessions.

    def publish(self, slot: int) -> SessionKey:
        """Thinker only: begin a new session in a free slot."""
        words, at = self._words, layout.record(slot)
        generation = (words[at + layout.GENERATION] + 1) % (1 << layout.COUNT_BITS) or 1
        words[at + layout.EPOCHS] = layout.pack_epochs(words)
        words[at + layout.OPENED], words[at + layout.DEADLINE] = time.monotonic_ns(), 0
        words[at + layout.GENERATION] = generation
        return SessionKey(slot, generation)

    def set_deadline(self, key: SessionKey, deadline_ns: int) -> None:
        """Thinker only: when the session is to be over at the latest, by the monotonic clock."""
        if self.holds(key):
            self._words[layout.record(key.slot) + layout.DEADLINE] = deadline_ns

    def holds(self, key: SessionKey) -> bool:
        """True if `key` names the session that its slot holds now."""
        return self._words[layout.record(key.slot) + layout.GENERATION] == key.generation

    def mark_closed(self, key: SessionKey, sent: int = 0) -> None:
        """This stage's last sender of the session is final, `sent` messages left by it, and its state is dropped."""
        self._write(key, layout.CLOSED, _counted(key, sent))

    def is_served(self, key: SessionKey) -> bool:
        """True if an engine may still hold something of an open session. token2wav then has more to do than to send
        ready audio, and not every stage has closed the session.
        """
        if self.outcome(key, "token2wav") is not None:
            return False
        return not all(self.closed(key, stage) for stage in STAGES)

    def mark_reached(self, key: SessionKey) -> None:
        """This stage has the session; from token2wav its client then hears how it ends."""
        self._write(key, layout.REACHED, key.generation)

    def has_reached(self, key: SessionKey, stage: StageName) -> bool:
        """True if `stage` has or had the session."""
        return self._words[layout.record(key.slot) + layout.FIELDS[stage] + layout.REACHED] == key.generation

    def mark_cancelled(self, key: SessionKey) -> None:
        """This stage saw that the client is gone."""
        self._write(key, layout.CANCELLED, key.generation)

    def mark_failed(self, key: SessionKey) -> None:
        """This stage gave the session up."""
        self._write(key, layout.FAILED, key.generation)

    def say_outcome(self, key: SessionKey, ending: RequestOutcome) -> None:
        """This stage ends the client's request so; to be said before the stage closes the session."""
        self._write(key, layout.OUTCOME, _counted(key, ending.to_number()))

    def outcome(self, key: SessionKey, stage: StageName) -> RequestOutcome | None:
        """How `stage` ended the client's request; None = it did not."""
        number = self._count(key, stage, layout.OUTCOME)
        return RequestOutcome.from_number(number) if number else None

    def count_consumed(self, key: SessionKey, messages: int) -> None:
        """This stage has copied `messages` data messages of the session so far."""
        self._write(key, layout.CONSUMED, _counted(key, messages))

    def count_returned(self, key: SessionKey) -> None:
        """This stage has ended one more of the session's requests; on the sending thread of its slot only."""
        before = self._count(key, self.stage, layout.RETURNED) or 0
        fence()
        self._write(key, layout.RETURNED, _counted(key, before + 1))

    def want(self, key: SessionKey, count: int) -> None:
        """This stage can do nothing before it has `count` rows or codes of the session, from the first on."""
        self._write(key, layout.WANTED, _counted(key, min(count, layout.COUNT_MASK)))

    def wanted(self, key: SessionKey, stage: StageName) -> int | None:
        """Rows or codes of the session, from the first on, that `stage` waits for; None = it has not said."""
        return self._count(key, stage, layout.WANTED)

    def place(self, key: SessionKey, placed: Placed) -> None:
        """This stage has put so much of the session into the next one's ring (`link/ring.py`), and it may be read."""
        if not self.holds(key):
            return
        words, own = self._words, layout.record(key.slot) + layout.FIELDS[self.stage]
        words[own + layout.BEHIND], words[own + layout.PLACED_NS] = placed.behind, placed.sent_ns
        # Written last: a reader of this field reads the other ones after it.
        fence()
        words[own + layout.PLACED] = _counted(key, placed.total)

    def placed(self, key: SessionKey, stage: StageName) -> int:
        """Rows or codes of the session that `stage` has put into the next one's ring."""
        return self._count(key, stage, layout.PLACED) or 0

    def placing(self, key: SessionKey, stage: StageName) -> Placed:
        """The same, with all that `stage` says of it."""
        total, at = self.placed(key, stage), layout.record(key.slot) + layout.FIELDS[stage]
        fence()
        return Placed(total, self._words[at + layout.BEHIND], self._words[at + layout.PLACED_NS])

    def fetch(self, key: SessionKey, count: int) -> None:
        """This stage has copied so many rows or codes of the session from its ring; their places are free again."""
        self._write(key, layout.FETCHED, _counted(key, count))

    def fetched(self, key: SessionKey, stage: StageName) -> int:
        """Rows or codes of the session that `stage` has copied from its ring."""
        return self._count(key, stage, layout.FETCHED) or 0

    def closed(self, key: SessionKey, stage: StageName) -> bool:
        """True if `stage` has finished with the session."""
        return self._count(key, stage, layout.CLOSED) is not None

    def consumed(self, key: SessionKey, stage: StageName) -> int:
        """Data messages of the session that `stage` has copied."""
        return self._count(key, stage, layout.CONSUMED) or 0

    def returned(self, key: SessionKey, stage: StageName) -> int:
        """Requests of the session that `stage` has ended."""
        found = self._count(key, stage, layout.RETURNED) or 0
        fence()
        return found

    def in_transit(self, key: SessionKey, sender: StageName, receiver: StageName) -> int | None:
        """Messages from `sender` whose requests `receiver` has not ended; None = the sender may still send."""
        returned, sent = self.returned(key, receiver), self._count(key, sender, layout.CLOSED)
        return None if sent is None else sent - returned

    def cancelled(self, key: SessionKey) -> bool:
        """True if any stage saw that the client is gone."""
        return self._any_said(key, layout.CANCELLED)

    def failed(self, key: SessionKey) -> bool:
        """True if any stage gave the session up."""
        return self._any_said(key, layout.FAILED)

    def lost_stages(self, key: SessionKey) -> list[StageName]:
        """Stages whose process died since the session began; asked at each poll, and nearly always none."""
        words = self._words
        if not (words[layout.LOST] or words[layout.LOST + 1] or words[layout.LOST + 2]):
            return []
        return layout.lost_of(words, words[layout.record(key.slot) + layout.EPOCHS])

    def awaits_talker(self, key: SessionKey) -> bool:
        """True if token2wav has answered all of a session and only the talker's request has not ended. Should that
        process die now, the thinker alone can still end the client's stream.
        """
        settled = self.closed(key, "token2wav") and not self.cancelled(key) and not self.failed(key)
        return settled and not self.closed(key, "talker")

    def is_over(self, key: SessionKey) -> bool:
        """True if an opened session needs nothing more from thinker and talker. Its slot holds another session, its
        client is gone, a stage gave it up, or token2wav has answered all. Each session is asked at each poll.
        """
        return not self.holds(key) or self.closed(key, "token2wav") or self.cancelled(key) or self.failed(key)

    # Layout.

    def _check_header(self) -> None:
        if self._words[layout.MAGIC_WORD] != layout.MAGIC or self._words[layout.VERSION_WORD] != PROTOCOL_VERSION:
            raise LedgerError(
                f"{self.path} is a ledger of protocol version {self._words[layout.VERSION_WORD]}, this stage speaks "
                f"{PROTOCOL_VERSION}: stop the server that made it"
            )

    def _register(self, facts: StageFacts) -> None:
        words, own = self._words, layout.BLOCKS[self.stage]
        words[own + layout.FINGERPRINT] = facts.fingerprint
        words[own + layout.DTYPE], words[own + layout.HIDDEN] = facts.dtype, facts.hidden_size
        words[own + layout.DEVICE], words[own + layout.CLAIMED] = facts.device, 0
        # Entered before looking at the others: of two stages that load at once, one at least sees the other.
        self._enter(os.getpid())
        try:
            self._check_others(facts)
        except LedgerError:
            self._enter(0)
            raise
        words[own + layout.EPOCH] += 1
        self.beat()

    def _enter(self, pid: int) -> None:
        """Say which process serves this model; 0 = none any more."""
        self._words[layout.BLOCKS[self.stage] + layout.PID] = pid

    def _check_others(self, facts: StageFacts) -> None:
        for other in STAGES:
            block = self._words[layout.BLOCKS[other] : layout.BLOCKS[other] + layout.STAGE_WORDS].tolist()
            if other != self.stage and block[layout.PID]:
                _check_agreement(self.stage, facts, other, block)

    def _write(self, key: SessionKey, word: int, value: int) -> None:
        """One of this stage's words, unless the slot holds a later session already, whose words these are."""
        if self.holds(key):
            self._words[layout.record(key.slot) + layout.FIELDS[self.stage] + word] = value

    def _count(self, key: SessionKey, stage: StageName, word: int) -> int | None:
        """The count in one of a stage's words; None if an earlier session of the slot left it."""
        found = self._words[layout.record(key.slot) + layout.FIELDS[stage] + word]
        return found & layout.COUNT_MASK if found >> layout.COUNT_BITS == key.generation else None

    def _any_said(self, key: SessionKey, word: int) -> bool:
        words, first, generation = self._words, layout.record(key.slot) + layout.FIRST_STAGE_WORD + word, key.generation
        return (
            words[first] == generation
            or words[first + layout.SESSION_WORDS] == generation
            or words[first + 2 * layout.SESSION_WORDS] == generation
        )


def fence() -> None:
    """Order all memory accesses before the call before all after it, on every processor.

    Accesses may move into a locked region but not out of it, so two regions are needed.
    """
    with _FENCE:
        pass
    with _FENCE:
        pass


def _counted(key: SessionKey, count: int) -> int:
    """A count of this session in one word, together with the generation that it belongs to."""
    return key.generation << layout.COUNT_BITS | count


def _check_agreement(stage: StageName, facts: StageFacts, other: StageName, block: Sequence[int]) -> None:
    pairs = (
        ("checkpoint fingerprint", facts.fingerprint, block[layout.FINGERPRINT]),
        ("dtype of the links", facts.dtype, block[layout.DTYPE]),
        ("hidden size", facts.hidden_size, block[layout.HIDDEN]),
    )
    for what, ours, theirs in pairs:
        if ours and theirs and ours != theirs:
            raise LedgerError(
                f"{what} of {stage} is {ours:#x}, of {other} {theirs:#x}: load the same checkpoint in both"
            )

# SPDX-License-Identifier: Apache-2.0
"""The sending end of a link: what goes by the ring lies there before the ledger says so, and before any message."""

import secrets
import threading
import time

import pytest
import torch

from triton_omni.link.ring import Doorbell, offer_ring
from triton_omni.link.send_queue import SendQueue
from triton_omni.link.sender import LOOK_NS, LinkSender, RingWriter
from triton_omni.session import server_folder
from triton_omni.session.ledger import SessionLedger, StageFacts
from triton_omni.session.ledger_table import CONSUMED, EPOCH, FETCHED, PLACED
from triton_omni.session.wire import Kind, ThinkerMessage

CPU = torch.device("cpu")
PLACES = 4


def waiting(*codes, placed=0, by_message=0):
    """A send queue with codes for a ring, after so many that were placed, and before that left in messages."""
    send_queue = SendQueue(100)
    send_queue.by_message, send_queue.given = by_message, by_message + placed
    send_queue.announced = send_queue.given
    send_queue.put(torch.tensor(codes, dtype=torch.int32))
    return send_queue


def carry(ring_writer, key, send_queue, wanted):
    """As `LinkSender.send` does."""
    room = ring_writer.room(key, send_queue.placed)
    if batch := send_queue.pop_ring_batch(room, ring_writer.places, wanted):
        ring_writer.carry(key, batch)


@pytest.fixture
def ledgers():
    name = f"triton-omni-test-{secrets.token_hex(6)}"
    ledgers = tuple(SessionLedger(name, stage, StageFacts(1)) for stage in ("thinker", "talker"))
    yield ledgers
    for ledger in ledgers:
        ledger.close()


def offer(ledger):
    return offer_ring(
        ledger.name, "talker", ledger.word(EPOCH, "talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )


@pytest.fixture
def ring(ledgers):
    ring = offer_ring(
        ledgers[1].name, "talker", ledgers[1].word(EPOCH, "talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    yield ring
    ring.close()


@pytest.fixture
def ring_writer(ledgers, ring):
    ring_writer = RingWriter(ledgers[0], "talker", CPU)
    ring_writer.find_ring(LOOK_NS)
    yield ring_writer
    ring_writer.close()


def test_those_of_all_sessions_leave_together_and_are_told_of_with_one_ring(ledgers, ring, ring_writer):
    heard = threading.Semaphore(0)
    bell = Doorbell(ledgers[0].name, "talker", heard.release)
    keys = [ledgers[0].publish(slot) for slot in range(2)]
    before_ns = time.monotonic_ns()
    ledgers[1].write(keys[1], FETCHED, 2)
    for key, send_queue in zip(keys, (waiting(5, 6, by_message=9), waiting(7, 8, placed=3)), strict=True):
        carry(ring_writer, key, send_queue, wanted=None)
        assert not send_queue.held
    told_ns = time.monotonic_ns()
    assert not ring.memory.any()
    assert not heard.acquire(timeout=0.01)
    ring_writer.flush()
    assert ring.memory.tolist() == [[5, 6, 0, 0], [8, 0, 0, 7]]
    placed = [ledgers[1].placing(key, "thinker") for key in keys]
    assert [(one.total, one.by_message) for one in placed] == [(2, 9), (5, 0)]
    assert before_ns < placed[0].sent_ns < placed[1].sent_ns < told_ns
    assert heard.acquire(timeout=60)
    assert not heard.acquire(timeout=0.05)
    ring_writer.flush()
    assert not heard.acquire(timeout=0.05), "nothing is left to tell"
    bell.close()


def test_codes_that_complete_nothing_are_copied_and_not_announced(ledgers, ring, ring_writer):
    key, send_queue = ledgers[0].publish(0), waiting(5)
    carry(ring_writer, key, send_queue, wanted=2)
    ring_writer.flush()
    assert ring.memory[0].tolist() == [5, 0, 0, 0]
    assert ledgers[1].count(key, PLACED, "thinker") == send_queue.announced == 0
    carry(ring_writer, key, send_queue, wanted=1)
    ring_writer.flush()
    assert ledgers[1].count(key, PLACED, "thinker") == send_queue.announced == 1, "fewer are wanted now"


def test_the_last_codes_are_announced_whatever_is_wanted(ledgers, ring_writer):
    key, send_queue = ledgers[0].publish(0), waiting(5)
    send_queue.finish_tensors()
    carry(ring_writer, key, send_queue, wanted=9)
    ring_writer.flush()
    assert ledgers[1].count(key, PLACED, "thinker") == 1


def test_codes_that_fill_half_of_the_places_are_announced(ledgers, ring_writer):
    assert PLACES == 4
    key, send_queue = ledgers[0].publish(0), waiting(5)
    found = []
    for code in (6, 7, 8):
        carry(ring_writer, key, send_queue, wanted=99)
        ring_writer.flush()
        found.append(ledgers[1].count(key, PLACED, "thinker"))
        send_queue.put(torch.tensor([code], dtype=torch.int32))
    assert found == [0, 2, 2]


def test_there_is_room_for_what_was_fetched(ledgers, ring_writer):
    key = ledgers[0].publish(0)
    assert ring_writer.room(key, placed=0) == PLACES
    assert ring_writer.room(key, placed=3) == 1
    ledgers[1].write(key, FETCHED, 2)
    assert ring_writer.room(key, placed=3) == 3
    send_queue = waiting(1, 2, 3, 4, placed=3)
    for _ in range(2):
        carry(ring_writer, key, send_queue, wanted=None)
        assert (send_queue.placed, send_queue.held) == (6, 1), "there is room for three"
    later = ledgers[0].publish(0)
    assert ring_writer.room(later, placed=0) == PLACES, "what an earlier session of the slot left counts for nothing"


def test_a_slot_beyond_the_ring_has_no_places(ledgers, ring_writer):
    assert ring_writer.has_places(ledgers[0].publish(1))
    beyond = ledgers[0].publish(2)
    assert not ring_writer.has_places(beyond)
    assert ring_writer.room(beyond, placed=0) == 0
    send_queue = SendQueue(100)
    send_queue.put(torch.tensor([5], dtype=torch.int32))
    carry(ring_writer, beyond, send_queue, wanted=None)
    assert (send_queue.uses_ring, send_queue.held) == (False, 1)


def test_without_an_offer_there_are_none(ledgers):
    ring_writer = RingWriter(ledgers[0], "talker", CPU)
    ring_writer.find_ring(LOOK_NS)
    assert not ring_writer.has_places(ledgers[0].publish(0))
    ring_writer.close()


def test_a_ring_that_comes_later_is_found_at_the_next_look(ledgers):
    ring_writer, key = RingWriter(ledgers[0], "talker", CPU), ledgers[0].publish(0)
    ring_writer.find_ring(LOOK_NS)
    ring = offer_ring(
        ledgers[1].name, "talker", ledgers[1].word(EPOCH, "talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    ring_writer.find_ring(2 * LOOK_NS - 1)
    assert not ring_writer.has_places(key), "it does not look all the time"
    ring_writer.find_ring(2 * LOOK_NS)
    assert ring_writer.has_places(key)
    ring_writer.close()
    ring.close()


def test_nothing_goes_into_the_ring_of_a_process_that_is_gone(ledgers, ring, ring_writer):
    """The next one would look for it in its own."""
    key = ledgers[0].publish(0)
    send_queue = waiting(5)
    carry(ring_writer, key, send_queue, wanted=None)
    ledgers[1].set_word(EPOCH, 2, "talker")
    ring_writer.flush()
    assert not ring.memory.any()
    assert ledgers[1].count(key, PLACED, "thinker") == 0
    ring_writer.find_ring(2 * LOOK_NS - 1)
    assert not ring_writer.has_places(key)
    assert ring_writer.room(key, placed=0) == 0
    later = offer_ring(
        ledgers[1].name, "talker", ledgers[1].word(EPOCH, "talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    ring_writer.find_ring(3 * LOOK_NS)
    assert ring_writer.has_places(key)
    later.close()


def test_a_ring_that_cannot_be_had_is_told_once_a_cause_and_once_it_is_had(ledgers, ring, caplog):
    path = server_folder.table_path(ledgers[1].name).with_name("talker-ring")
    sound = path.read_bytes()
    ring_writer = RingWriter(ledgers[0], "talker", CPU)
    looks = iter(range(LOOK_NS, 100 * LOOK_NS, LOOK_NS))
    for content in (b"\x02\x00no", b"", sound):
        path.write_bytes(content)
        for _ in range(3):
            ring_writer.find_ring(next(looks))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    assert all(line.startswith("what goes to talker takes Triton's messages") for line in told[:2])
    assert told[0] != told[1]
    assert told[2] == "what goes to talker takes the ring now"
    ring_writer.close()


class Sent:
    """A session whose messages are kept, and what the ledger says of its ring when each leaves."""

    def __init__(self, ledger, reader, largest=100, **queue):
        self.key, self.sender, self.send_queue = ledger.publish(0), self, SendQueue(largest, **queue)
        self.sequence = self.sent = self.refused = self.left_ns = 0
        self.reader, self.messages, self.placed, self.losses = reader, [], [], []

    def send(self, tensors, ready=None, lost=None):
        del ready
        self.messages.append(tensors)
        self.placed.append(self.reader.count(self.key, PLACED, "thinker"))
        self.losses.append(lost)


def sender(ledger, wanted=None, refused=()):
    link = LinkSender(
        ledger,
        "talker",
        CPU,
        wanted=lambda session: wanted,
        to_message=lambda session, batch: ThinkerMessage(
            key=session.key, kind=Kind.TEXT, sequence=session.sequence, text=batch.text, rows=batch.tensor
        ),
        to_tensors=lambda message: message,
        when_refused=lambda session, kind: refused.append((session, kind)),
    )
    link.ring.find_ring(LOOK_NS)
    return link


def test_the_first_items_go_in_a_message_and_the_others_by_the_ring_before_any_later_message(ledgers, ring):
    link, session = sender(ledgers[0]), Sent(ledgers[0], ledgers[1], start=2)
    put = session.send_queue.put
    put(torch.tensor([1], dtype=torch.int32))
    link.send([session], 0)
    assert session.messages == [], "the next stage cannot start with one"
    put(torch.tensor([2, 3], dtype=torch.int32))
    link.send([session], 0)
    put(torch.tensor([4], dtype=torch.int32))
    session.send_queue.put_text("a")
    link.send([session], 0)
    assert [None if one.rows is None else one.rows.tolist() for one in session.messages] == [[1, 2, 3], None]
    assert session.placed == [0, 1], "the ring's note is there before the message"
    assert ring.memory[0].tolist() == [4, 0, 0, 0]
    assert ledgers[1].placing(session.key, "thinker").by_message == 3
    link.ring.close()


@pytest.mark.parametrize("wanted", [None, 4])
def test_without_a_ring_all_items_go_in_messages(ledgers, wanted):
    link, session = sender(ledgers[0], wanted), Sent(ledgers[0], ledgers[1], start=2)
    for code in range(1, 5):
        session.send_queue.put(torch.tensor([code], dtype=torch.int32))
        link.send([session], 0)
    found = [one.rows.tolist() for one in session.messages]
    assert found == ([[1, 2], [3]] if wanted is None else [[1, 2], [3, 4]]), "of four, the last waits for a credit"
    link.ring.close()


def test_messages_are_numbered_and_a_refused_one_is_counted(ledgers):
    refused = []
    link, session = sender(ledgers[0], refused=refused), Sent(ledgers[0], ledgers[1])
    for kind in (Kind.OPEN, Kind.HEARTBEAT, Kind.TEXT):
        link.send_message(session, ThinkerMessage(key=session.key, kind=kind, sequence=session.sequence))
    assert [(one.number, one.sequence) for one in session.messages] == [(1, 0), (2, 1), (3, 1)]
    assert all(one.sent_ns for one in session.messages)
    session.losses[1]()
    assert (session.refused, refused) == (1, [(session, Kind.HEARTBEAT)])
    link.ring.close()


def test_the_messages_under_way_are_counted_with_their_bytes(ledgers):
    link, session = sender(ledgers[0]), Sent(ledgers[0], ledgers[1], largest=4)
    session.send_queue.put(torch.arange(7))
    link.send([session], 0)
    assert {metric.name: metric.value for metric in link.metrics([session])} == {
        "omni_credits_used": 2,
        "omni_pool_bytes": 7 * 8,
    }
    ledgers[1].write(session.key, CONSUMED, 1)
    assert next(link.metrics([session])).value == 1
    link.ring.close()

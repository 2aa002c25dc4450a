# SPDX-License-Identifier: Apache-2.0
"""What is put into a ring lies there before the ledger says so, and only as much as there are places."""

import secrets
import threading
import time

import pytest
import torch

from triton_omni.link.doorbell import Doorbell
from triton_omni.link.ring import offer_ring
from triton_omni.link.ring_writer import LOOK_NS, RingWriter
from triton_omni.link.send_queue import SendQueue
from triton_omni.session import server_folder
from triton_omni.session.ledger import SessionLedger, StageFacts
from triton_omni.session.ledger_table import EPOCH, FETCHED, PLACED

CPU = torch.device("cpu")
PLACES = 4


def waiting(*codes, placed=0, behind=0):
    """An send queue with codes for a ring, behind so many that were placed, and before that left in messages."""
    send_queue = SendQueue(100)
    send_queue.behind, send_queue.given = behind, behind + placed
    send_queue.put(torch.tensor(codes, dtype=torch.int32))
    return send_queue


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
    for key, send_queue in zip(keys, (waiting(5, 6, behind=9), waiting(7, 8, placed=3)), strict=True):
        assert ring_writer.queue_copy(key, send_queue)
        ring_writer.queue_note(key, send_queue)
    told_ns = time.monotonic_ns()
    assert not ring.memory.any()
    assert not heard.acquire(timeout=0.01)
    ring_writer.flush()
    assert ring.memory.tolist() == [[5, 6, 0, 0], [8, 0, 0, 7]]
    placed = [ledgers[1].placing(key, "thinker") for key in keys]
    assert [(one.total, one.behind) for one in placed] == [(2, 9), (5, 0)]
    assert before_ns < placed[0].sent_ns < placed[1].sent_ns < told_ns
    assert heard.acquire(timeout=5)
    assert not heard.acquire(timeout=0.05)
    ring_writer.flush()
    assert not heard.acquire(timeout=0.05), "nothing is left to tell"
    bell.close()


def test_what_is_placed_and_not_told_is_copied_alone(ledgers, ring, ring_writer):
    key = ledgers[0].publish(0)
    ring_writer.queue_copy(key, waiting(5))
    ring_writer.flush()
    assert ring.memory[0].tolist() == [5, 0, 0, 0]
    assert ledgers[1].count(key, PLACED, "thinker") == 0


def test_there_is_room_for_what_was_fetched(ledgers, ring_writer):
    key = ledgers[0].publish(0)
    assert ring_writer.room(key, waiting()) == PLACES
    assert ring_writer.room(key, waiting(placed=3)) == 1
    ledgers[1].write(key, FETCHED, 2)
    assert ring_writer.room(key, waiting(placed=3)) == 3
    send_queue = waiting(1, 2, 3, 4, placed=3)
    assert ring_writer.queue_copy(key, send_queue)
    assert (send_queue.placed, send_queue.held) == (6, 1)
    assert not ring_writer.queue_copy(key, send_queue), "there is none left"
    later = ledgers[0].publish(0)
    assert ring_writer.room(later, waiting()) == PLACES, "what an earlier session of the slot left counts for nothing"


def test_half_of_the_places_are_half_of_them_and_more(ring_writer):
    assert [ring_writer.is_half_full(count) for count in range(PLACES + 1)] == [False, False, True, True, True]


def test_a_slot_beyond_the_ring_has_no_places(ledgers, ring_writer):
    assert ring_writer.has_places(ledgers[0].publish(1))
    beyond = ledgers[0].publish(2)
    assert not ring_writer.has_places(beyond)
    assert ring_writer.room(beyond, waiting()) == 0


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
    assert ring_writer.queue_copy(key, send_queue)
    ring_writer.queue_note(key, send_queue)
    ledgers[1].set_word(EPOCH, 2, "talker")
    ring_writer.flush()
    assert not ring.memory.any()
    assert ledgers[1].count(key, PLACED, "thinker") == 0
    ring_writer.find_ring(2 * LOOK_NS - 1)
    assert not ring_writer.has_places(key)
    assert ring_writer.room(key, waiting()) == 0
    assert not ring_writer.is_half_full(PLACES)
    later = offer_ring(
        ledgers[1].name, "talker", ledgers[1].word(EPOCH, "talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    ring_writer.find_ring(3 * LOOK_NS)
    assert ring_writer.has_places(key)
    later.close()


def test_a_ring_that_cannot_be_had_is_told_once_a_look(ledgers, ring, caplog):
    path = server_folder.table_path(ledgers[1].name).with_name("talker-ring")
    path.write_bytes(b"\x02\x00no")
    ring_writer = RingWriter(ledgers[0], "talker", CPU)
    ring_writer.find_ring(LOOK_NS)
    ring_writer.find_ring(LOOK_NS + 1)
    assert len(caplog.records) == 1
    assert "what goes to talker takes Triton's messages" in caplog.text
    ring_writer.close()
    path.unlink()

# SPDX-License-Identifier: Apache-2.0
"""What is put into a ring lies there before the ledger says so, and only as much as there are places."""

import secrets
import threading
import time

import pytest
import torch

from triton_omni import ledger_layout
from triton_omni.bell import Bell
from triton_omni.ledger import SessionLedger, StageFacts
from triton_omni.outbox import Outbox
from triton_omni.placing import LOOK_NS, Placer
from triton_omni.ring import offer_ring

CPU = torch.device("cpu")
PLACES = 4


def waiting(*codes, placed=0, behind=0):
    """An outbox with codes for a ring, behind so many that were placed, and before that left in messages."""
    outbox = Outbox(100)
    outbox.behind, outbox.given = behind, behind + placed
    outbox.put(torch.tensor(codes, dtype=torch.int32))
    return outbox


@pytest.fixture
def ledgers():
    name = f"triton-omni-test-{secrets.token_hex(6)}"
    ledgers = tuple(SessionLedger(name, stage, StageFacts(1)) for stage in ("thinker", "talker"))
    yield ledgers
    for ledger in ledgers:
        ledger.close()


def offer(ledger):
    return offer_ring(ledger.name, "talker", ledger.epoch("talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU)


@pytest.fixture
def ring(ledgers):
    ring = offer_ring(
        ledgers[1].name, "talker", ledgers[1].epoch("talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    yield ring
    ring.close()


@pytest.fixture
def placer(ledgers, ring):
    placer = Placer(ledgers[0], "talker", CPU)
    placer.look(LOOK_NS)
    yield placer
    placer.close()


def test_those_of_all_sessions_leave_together_and_are_told_of_with_one_ring(ledgers, ring, placer):
    heard = threading.Semaphore(0)
    bell = Bell(ledgers[0].name, "talker", heard.release)
    keys = [ledgers[0].publish(slot) for slot in range(2)]
    before_ns = time.monotonic_ns()
    ledgers[1].fetch(keys[1], 2)
    for key, outbox in zip(keys, (waiting(5, 6, behind=9), waiting(7, 8, placed=3)), strict=True):
        assert placer.take(key, outbox)
        placer.tell(key, outbox)
    told_ns = time.monotonic_ns()
    assert not ring.memory.any()
    assert not heard.acquire(timeout=0.01)
    placer.leave()
    assert ring.memory.tolist() == [[5, 6, 0, 0], [8, 0, 0, 7]]
    placed = [ledgers[1].placing(key, "thinker") for key in keys]
    assert [(one.total, one.behind) for one in placed] == [(2, 9), (5, 0)]
    assert before_ns < placed[0].sent_ns < placed[1].sent_ns < told_ns
    assert heard.acquire(timeout=5)
    assert not heard.acquire(timeout=0.05)
    placer.leave()
    assert not heard.acquire(timeout=0.05), "nothing is left to tell"
    bell.close()


def test_what_is_placed_and_not_told_is_copied_alone(ledgers, ring, placer):
    key = ledgers[0].publish(0)
    placer.take(key, waiting(5))
    placer.leave()
    assert ring.memory[0].tolist() == [5, 0, 0, 0]
    assert ledgers[1].placed(key, "thinker") == 0


def test_there_is_room_for_what_was_fetched(ledgers, placer):
    key = ledgers[0].publish(0)
    assert placer.room(key, waiting()) == PLACES
    assert placer.room(key, waiting(placed=3)) == 1
    ledgers[1].fetch(key, 2)
    assert placer.room(key, waiting(placed=3)) == 3
    outbox = waiting(1, 2, 3, 4, placed=3)
    assert placer.take(key, outbox)
    assert (outbox.placed, outbox.held) == (6, 1)
    assert not placer.take(key, outbox), "there is none left"
    later = ledgers[0].publish(0)
    assert placer.room(later, waiting()) == PLACES, "what an earlier session of the slot left counts for nothing"


def test_half_of_the_places_are_half_of_them_and_more(placer):
    assert [placer.is_half_full(count) for count in range(PLACES + 1)] == [False, False, True, True, True]


def test_a_slot_beyond_the_ring_has_no_places(ledgers, placer):
    assert placer.has_places(ledgers[0].publish(1))
    beyond = ledgers[0].publish(2)
    assert not placer.has_places(beyond)
    assert placer.room(beyond, waiting()) == 0


def test_without_an_offer_there_are_none(ledgers):
    placer = Placer(ledgers[0], "talker", CPU)
    placer.look(LOOK_NS)
    assert not placer.has_places(ledgers[0].publish(0))
    placer.close()


def test_a_ring_that_comes_later_is_found_at_the_next_look(ledgers):
    placer, key = Placer(ledgers[0], "talker", CPU), ledgers[0].publish(0)
    placer.look(LOOK_NS)
    ring = offer_ring(
        ledgers[1].name, "talker", ledgers[1].epoch("talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    placer.look(2 * LOOK_NS - 1)
    assert not placer.has_places(key), "it does not look all the time"
    placer.look(2 * LOOK_NS)
    assert placer.has_places(key)
    placer.close()
    ring.close()


def test_nothing_goes_into_the_ring_of_a_process_that_is_gone(ledgers, ring, placer):
    """The next one would look for it in its own."""
    key = ledgers[0].publish(0)
    outbox = waiting(5)
    assert placer.take(key, outbox)
    placer.tell(key, outbox)
    ledgers[1]._words[ledger_layout.BLOCKS["talker"] + ledger_layout.EPOCH] += 1
    placer.leave()
    assert not ring.memory.any()
    assert ledgers[1].placed(key, "thinker") == 0
    placer.look(2 * LOOK_NS - 1)
    assert not placer.has_places(key)
    assert placer.room(key, waiting()) == 0
    assert not placer.is_half_full(PLACES)
    later = offer_ring(
        ledgers[1].name, "talker", ledgers[1].epoch("talker"), shape=(2, PLACES), dtype=torch.int32, device=CPU
    )
    placer.look(3 * LOOK_NS)
    assert placer.has_places(key)
    later.close()


def test_a_ring_that_cannot_be_had_is_told_once_a_look(ledgers, ring, caplog):
    path = ledger_layout.table_path(ledgers[1].name).with_name("talker-ring")
    path.write_bytes(b"\x02\x00no")
    placer = Placer(ledgers[0], "talker", CPU)
    placer.look(LOOK_NS)
    placer.look(LOOK_NS + 1)
    assert len(caplog.records) == 1
    assert "what goes to talker takes Triton's messages" in caplog.text
    placer.close()
    path.unlink()

# SPDX-License-Identifier: Apache-2.0
"""The session ledger over shared memory: generations, credits, cancellation, agreement, files that stay."""

import contextlib
import itertools
import multiprocessing
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_omni.session import ledger as ledger_module
from triton_omni.session import server_folder
from triton_omni.session.ledger import Placed, SessionLedger, StageFacts
from triton_omni.session.ledger_table import (
    BY_MESSAGE,
    CANCELLED,
    CAPACITY,
    CLAIMED,
    CLOSED,
    CONSUMED,
    EPOCH,
    FAILED,
    FIELDS,
    GENERATION,
    MAGIC,
    PID,
    PLACED,
    PLACED_NS,
    RECORD_WORDS,
    RETURNED,
    VERSION,
    WINDOWS,
    StampedField,
    Table,
    create_table,
)
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.server_folder import LedgerError, own_folder, remove_stale, server_name, table_path
from triton_omni.session.wire import SessionKey
from triton_omni.thinker.slots import Slots
from waiting import IN_TIME_S

STAGES = ("thinker", "talker", "token2wav")
ORDERS = list(itertools.permutations(STAGES))
FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def name():
    return f"triton-omni-test-{secrets.token_hex(8)}"


@pytest.fixture
def attach(name):
    """Attach as a stage; all are detached at the end."""
    ledgers = []

    def attach_stage(stage, facts=None):
        ledgers.append(SessionLedger(name, stage, facts))
        return ledgers[-1]

    yield attach_stage
    for ledger in ledgers:
        with contextlib.suppress(ValueError):  # a test has closed it
            ledger.close()


@pytest.fixture
def thinker(attach):
    return attach("thinker")


@pytest.fixture
def talker(attach, thinker):
    return attach("talker")


COUNT = 7
STAMPED = {field.name: field for field in FIELDS if isinstance(field, StampedField)}
MARKS = {
    name: (
        lambda ledger, key, field=field: ledger.write(key, field, COUNT),
        lambda ledger, key, field=field: ledger.read(key, field, "talker") == COUNT,
    )
    for name, field in STAMPED.items()
} | {
    "placing": (
        lambda ledger, key: ledger.place(key, Placed(9, 4, 77)),
        lambda ledger, key: ledger.placing(key, "talker") == (9, 4, 77) and ledger.count(key, PLACED, "talker") == 9,
    ),
}
each_mark = pytest.mark.parametrize(("mark", "read"), MARKS.values(), ids=MARKS)


@each_mark
def test_what_one_stage_writes_the_other_reads(thinker, talker, mark, read):
    key = thinker.publish(3)
    assert not read(thinker, key)
    mark(talker, key)
    assert read(thinker, key)
    assert read(talker, key)


@each_mark
def test_slots_do_not_mix(thinker, talker, mark, read):
    keys = [thinker.publish(slot) for slot in (0, 1, CAPACITY - 1)]
    mark(talker, keys[1])
    assert [read(thinker, key) for key in keys] == [False, True, False]


def test_closed_and_consumed_are_told_by_stage(thinker, talker):
    key = thinker.publish(0)
    talker.write(key, CLOSED)
    talker.write(key, CONSUMED, 2)
    assert [thinker.has(key, CLOSED, stage) for stage in STAGES] == [False, True, False]
    assert [thinker.count(key, CONSUMED, stage) for stage in STAGES] == [0, 2, 0]


@pytest.mark.parametrize(
    "end",
    [
        lambda ledgers, key: ledgers["thinker"].publish(key.slot),
        lambda ledgers, key: ledgers["token2wav"].write(key, CLOSED),
        *(lambda ledgers, key, stage=stage: ledgers[stage].write(key, CANCELLED) for stage in STAGES),
        *(lambda ledgers, key, stage=stage: ledgers[stage].write(key, FAILED) for stage in STAGES),
    ],
)
def test_a_session_is_over_by_each_of_its_ends(attach, end):
    ledgers = {stage: attach(stage) for stage in STAGES}
    ended, other = ledgers["thinker"].publish(3), ledgers["thinker"].publish(4)
    for stage in ("thinker", "talker"):
        ledgers[stage].write(ended, CLOSED)
    assert not ledgers["talker"].is_over(ended), "token2wav still works"
    end(ledgers, ended)
    assert ledgers["talker"].is_over(ended)
    assert not ledgers["talker"].is_over(other)


def test_messages_in_transit_are_those_sent_and_not_returned(thinker, talker):
    key = thinker.publish(0)
    talker.count_returned(key)
    assert thinker.in_transit(key, "thinker", "talker") is None, "the thinker may still send"
    thinker.write(key, CLOSED, 3)
    assert thinker.in_transit(key, "thinker", "talker") == 2
    talker.count_returned(key)
    talker.count_returned(key)
    assert thinker.in_transit(key, "thinker", "talker") == 0
    later = thinker.publish(0)
    thinker.write(later, CLOSED, 1)
    assert thinker.in_transit(later, "thinker", "talker") == 1, "what an earlier session returned counts for no other"


def test_only_the_present_session_of_a_slot_holds(thinker, talker):
    old = thinker.publish(5)
    assert talker.holds(old)
    new = thinker.publish(5)
    assert new.generation == old.generation + 1
    assert not talker.holds(old)
    assert talker.holds(new)


@pytest.mark.parametrize(
    "forged",
    [
        {"slot": 6},
        {"generation": 0},
        {"generation": 2},
        {"generation": -1},
    ],
    ids=str,
)
def test_a_forged_key_is_not_current(thinker, talker, forged):
    key = thinker.publish(5)
    fields = {"slot": key.slot, "generation": key.generation}
    assert not talker.holds(SessionKey(**{**fields, **forged}))


def test_a_slot_never_used_holds_no_session(talker):
    assert not talker.holds(SessionKey(9, 1))


def test_generations_wrap_around_and_skip_zero(thinker, talker):
    thinker.set_word(GENERATION, 2**32 - 2, slot=2)
    last = thinker.publish(2)
    assert last.generation == 2**32 - 1
    talker.write(last, CONSUMED, 2**32 - 1)
    assert thinker.count(last, CONSUMED, "talker") == 2**32 - 1
    first = thinker.publish(2)
    assert first.generation == 1
    assert thinker.count(first, CONSUMED, "talker") == 0
    assert not talker.holds(last)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["publish", *STAMPED]), st.integers(0, 2), st.sampled_from(STAGES), st.integers(0, 9)),
    max_size=40,
)


@settings(max_examples=60)
@given(operations=OPERATIONS)
def test_any_history_leaves_what_each_session_was_told(operations):
    table = f"triton-omni-test-{secrets.token_hex(8)}"
    ledgers = {stage: SessionLedger(table, stage) for stage in STAGES}
    sessions, told = {}, {}
    try:
        for operation, slot, stage, count in operations:
            if operation == "publish":
                sessions[slot] = ledgers["thinker"].publish(slot)
            elif slot in sessions:
                ledgers[stage].write(sessions[slot], STAMPED[operation], count)
                told[operation, sessions[slot], stage] = count
        for key, (name, field) in itertools.product(sessions.values(), STAMPED.items()):
            expected = [told.get((name, key, stage)) for stage in STAGES]
            assert [ledgers["token2wav"].read(key, field, stage) for stage in STAGES] == expected
            assert ledgers["token2wav"].has(key, field) == any(count is not None for count in expected)
    finally:
        for ledger in ledgers.values():
            ledger.close()


# Processes.


def _count(name, stage, slots, rounds, go):
    ledger = SessionLedger(name, stage)
    go.wait(IN_TIME_S)
    for messages in range(1, rounds + 1):
        for key in slots:
            ledger.write(key, CONSUMED, messages)
    ledger.write(slots[0], FAILED)


def test_stages_of_several_processes_write_side_by_side(thinker, name):
    keys, rounds = [thinker.publish(slot) for slot in range(8)], 500
    go = FORK.Barrier(3)
    workers = [FORK.Process(target=_count, args=(name, stage, keys, rounds, go)) for stage in ("talker", "token2wav")]
    for worker in workers:
        worker.start()
    go.wait(IN_TIME_S)
    seen = [(0, 0)]
    while any(worker.is_alive() for worker in workers):
        seen.append(tuple(thinker.count(keys[3], CONSUMED, stage) for stage in ("talker", "token2wav")))
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert all(a <= b for before, after in itertools.pairwise(seen) for a, b in zip(before, after, strict=True))
    assert all(thinker.count(key, CONSUMED, stage) == rounds for key in keys for stage in ("talker", "token2wav"))
    assert [thinker.has(key, FAILED) for key in keys] == [True] + [False] * 7
    assert not any(thinker.has(key, CLOSED, "thinker") for key in keys)


def _attach(name, barrier, results):
    barrier.wait(IN_TIME_S)
    ledger = SessionLedger(name, "token2wav")
    results.put((ledger.path.stat().st_ino, ledger.secret()))


def test_eight_processes_that_create_at_once_make_one_whole_table(name, tables_folder):
    barrier, results = FORK.Barrier(8), FORK.Queue()
    workers = [FORK.Process(target=_attach, args=(name, barrier, results)) for _ in range(8)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=IN_TIME_S) for _ in workers]
    for worker in workers:
        worker.join()
    assert len(set(found)) == 1
    assert [path.name for path in (tables_folder / name).iterdir()] == ["ledger"]


def test_the_table_is_for_its_user_alone(thinker):
    assert thinker.path.stat().st_mode & 0o777 == 0o600
    assert thinker.path.parent.stat().st_mode & 0o777 == 0o700


# Agreement.


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (StageFacts(2, 1, 8), "checkpoint fingerprint of talker is 0x2, of thinker 0x1"),
        (StageFacts(1, 2, 8), "dtype of the links of talker is 0x2, of thinker 0x1"),
        (StageFacts(1, 1, 9), "hidden size of talker is 0x9, of thinker 0x8"),
    ],
)
def test_a_stage_that_disagrees_is_refused_by_name(attach, facts, sentence):
    attach("thinker", StageFacts(1, 1, 8))
    with pytest.raises(LedgerError, match=sentence):
        attach("talker", facts)


def test_a_refused_stage_leaves_no_trace(attach):
    attach("thinker", StageFacts(1, 1, 8))
    with pytest.raises(LedgerError):
        attach("talker", StageFacts(2, 1, 8))
    assert attach("token2wav", StageFacts(1, 1, 8)).word(EPOCH, "talker") == 0
    attach("talker", StageFacts(1, 1, 8))
    attach("token2wav", StageFacts(1))


def test_a_stage_that_does_not_care_agrees_with_all(attach):
    attach("thinker", StageFacts(1, 2, 8))
    attach("talker", StageFacts(1, 2, 8))
    attach("token2wav", StageFacts(1))


def test_a_stage_may_come_back_with_another_checkpoint_when_the_others_are_gone(attach):
    first = attach("thinker", StageFacts(1, 1, 8))
    first.set_word(PID, 0, "thinker")
    attach("talker", StageFacts(2, 1, 8))


def _register_often(name, stage, facts, barrier, results):
    for attempt in range(100):
        ledger = SessionLedger(f"{name}-{attempt}", stage)
        barrier.wait(IN_TIME_S)
        try:
            ledger._register(facts)
        except LedgerError:
            results.put(attempt)
    results.put(None)


def test_stages_that_disagree_and_load_at_once_are_not_both_let_in(name, tables_folder):
    barrier, results = FORK.Barrier(2), FORK.Queue()
    entries = [("thinker", StageFacts(1)), ("talker", StageFacts(2))]
    workers = [FORK.Process(target=_register_often, args=(name, *entry, barrier, results)) for entry in entries]
    for worker in workers:
        worker.start()
    refused = [attempt for _ in workers for attempt in iter(lambda: results.get(timeout=IN_TIME_S), None)]
    for worker in workers:
        worker.join()
    for attempt in range(100):
        shutil.rmtree(tables_folder / f"{name}-{attempt}")
    assert set(refused) == set(range(100))


def write_table(name, content):
    path = own_folder(name) / "ledger"
    path.touch(mode=0o600)
    path.write_bytes(content)


def test_a_table_of_another_version_is_refused(name):
    create_table(name)
    Table(table_path(name)).set_word(VERSION, 99)
    with pytest.raises(LedgerError, match="protocol version 99"):
        SessionLedger(name, "thinker")


def test_a_file_of_a_table_s_size_that_is_none_is_refused(name):
    create_table(name)
    Table(table_path(name)).set_word(MAGIC, 1)
    with pytest.raises(LedgerError, match=f"{name}/ledger is no session ledger"):
        SessionLedger(name, "thinker")


@pytest.mark.parametrize("size", [0, 27])
def test_a_file_that_is_no_table_is_refused(name, size):
    write_table(name, b"something else that is here"[:size])
    with pytest.raises(LedgerError, match=f"{name}/ledger is no session ledger"):
        SessionLedger(name, "thinker")


@pytest.mark.parametrize(("version", "message"), [(None, "has 512 bytes, a ledger has"), (9, "protocol version 9")])
def test_a_table_of_another_size_is_refused_by_its_version_first(name, version, message):
    """A server of an earlier version runs with it: nobody is told to remove its table."""
    create_table(name)
    if version is not None:
        Table(table_path(name)).set_word(VERSION, version)
    os.truncate(table_path(name), 512)
    with pytest.raises(LedgerError, match=message):
        SessionLedger(name, "thinker")


# Precedence on a device.


@pytest.mark.parametrize("device", [0, 1, 2])
def test_a_claim_holds_for_the_other_stages_of_the_device(attach, device):
    thinker, talker = attach("thinker", StageFacts(1, device=device)), attach("talker", StageFacts(1, device=7))
    token2wav = attach("token2wav", StageFacts(1, device=device))
    assert not thinker.device_claimed()
    token2wav.set_word(CLAIMED, time.monotonic_ns() + int(IN_TIME_S * 1e9), "token2wav")
    assert thinker.device_claimed()
    assert not talker.device_claimed()
    assert not token2wav.device_claimed()
    token2wav.set_word(CLAIMED, 0, "token2wav")
    assert not thinker.device_claimed()


def test_a_claim_ends_by_itself_and_with_the_stage_that_made_it(attach):
    thinker, token2wav = attach("thinker", StageFacts(1)), attach("token2wav", StageFacts(1))
    token2wav.set_word(CLAIMED, time.monotonic_ns() - 1, "token2wav")
    assert not thinker.device_claimed()
    token2wav.set_word(CLAIMED, time.monotonic_ns() + int(IN_TIME_S * 1e9), "token2wav")
    attach("token2wav", StageFacts(1))
    assert not thinker.device_claimed()


def test_windows_are_those_of_the_device_and_of_the_process_that_makes_them(attach):
    thinker, talker = attach("thinker", StageFacts(1, device=1)), attach("talker", StageFacts(1, device=2))
    token2wav = attach("token2wav", StageFacts(1, device=1))
    assert not thinker.device_has_windows()
    token2wav.set_word(WINDOWS, 1, "token2wav")
    assert thinker.device_has_windows()
    assert not talker.device_has_windows()
    attach("token2wav", StageFacts(1, device=1))
    assert not thinker.device_has_windows()


# Heartbeats.


def test_heartbeats_and_epochs_tell_of_each_stage(attach):
    thinker = attach("thinker", StageFacts(1))
    assert thinker.word(EPOCH, "thinker") == 1
    assert thinker.word(EPOCH, "talker") == 0
    assert thinker.silent_for("thinker") < IN_TIME_S
    time.sleep(0.3)
    assert thinker.silent_for("thinker") >= 0.3
    begin = time.monotonic()
    thinker.beat()
    assert thinker.silent_for("thinker") <= time.monotonic() - begin
    assert attach("thinker", StageFacts(1)).word(EPOCH, "thinker") == 2


# Memory order.


class Watched:
    """Words that note which of a record were read or written, and when a fence was there."""

    def __init__(self, ledger, key, stage, monkeypatch):
        self._words, self.seen = ledger._words, []
        record = key.slot * RECORD_WORDS
        self._names = {
            field.at[stage] + record: field.name.upper() for field in (PLACED, BY_MESSAGE, PLACED_NS, CLOSED, RETURNED)
        }
        monkeypatch.setattr(ledger, "_words", self)
        monkeypatch.setattr(ledger_module, "fence", lambda: self.seen.append("fence"))

    def __getitem__(self, at):
        self.seen += [f"read {self._names[at]}"] if at in self._names else []
        return self._words[at]

    def __setitem__(self, at, value):
        self.seen += [f"write {self._names[at]}"] if at in self._names else []
        self._words[at] = value


def test_items_in_the_ring_are_counted_after_all_that_is_said_of_them(attach, monkeypatch):
    thinker, talker = attach("thinker"), attach("talker")
    key = thinker.publish(0)
    watched = Watched(thinker, key, "thinker", monkeypatch)
    thinker.place(key, Placed(5, 2, 7))
    assert watched.seen == ["write BY_MESSAGE", "write PLACED_NS", "fence", "write PLACED"]
    watched = Watched(talker, key, "thinker", monkeypatch)
    assert talker.placing(key, "thinker") == Placed(5, 2, 7)
    assert watched.seen == ["read PLACED", "fence", "read BY_MESSAGE", "read PLACED_NS"]


def test_ended_requests_are_counted_after_the_close(attach, monkeypatch):
    thinker, talker = attach("thinker"), attach("talker")
    key = thinker.publish(0)
    watched = Watched(thinker, key, "thinker", monkeypatch)
    thinker.write(key, CLOSED, 3)
    thinker.count_returned(key)
    assert [one for one in watched.seen if not one.startswith("read")] == ["write CLOSED", "fence", "write RETURNED"]
    reading = Watched(talker, key, "thinker", monkeypatch)
    assert talker.in_transit(key, "thinker", "thinker") == 2
    assert reading.seen == ["read RETURNED", "fence", "read CLOSED"]


# Slots.


def test_slots_are_given_once_and_again_after_release(thinker):
    slots = Slots(thinker, 3)
    keys = [slots.allocate() for _ in range(3)]
    assert {key.slot for key in keys} == {0, 1, 2}
    assert len(slots.taken) == 3
    assert slots.allocate() is None
    slots.release(keys[1])
    again = slots.allocate()
    assert again.slot == keys[1].slot
    assert again.generation != keys[1].generation
    assert not thinker.holds(keys[1])


def by_token2wav(token2wav, slots, key):
    token2wav.say_outcome(key, RequestOutcome())


def by_the_thinker(token2wav, slots, key):
    slots.answer(key)


@pytest.mark.parametrize("answer", [by_token2wav, by_the_thinker])
def test_an_answered_session_keeps_its_slot_and_makes_place_for_another(attach, answer):
    thinker, token2wav = attach("thinker"), attach("token2wav")
    slots = Slots(thinker, 2)
    first, second = slots.allocate(), slots.allocate()
    answer(token2wav, slots, first)
    third = slots.allocate()
    assert len({first.slot, second.slot, third.slot}) == 3
    assert len(slots.taken) == 3
    assert slots.allocate() is None, "two are being served"
    slots.release(first)
    assert slots.allocate() is None, "its place was given already"
    assert len(slots.taken) == 2
    assert thinker.is_served(second)


def test_sessions_that_do_not_close_use_up_the_slots_in_the_end(attach):
    thinker, token2wav = attach("thinker"), attach("token2wav")
    slots = Slots(thinker, 2)
    keys = [slots.allocate() for _ in range(2)]
    for key in keys:
        token2wav.say_outcome(key, RequestOutcome())
    assert [slots.allocate() is None for _ in range(3)] == [False, False, True]
    assert len(slots.taken) == 4


def test_a_late_answer_of_an_earlier_session_counts_for_no_other(attach):
    thinker, token2wav = attach("thinker"), attach("token2wav")
    old, new = thinker.publish(3), thinker.publish(3)
    token2wav.say_outcome(old, RequestOutcome())
    assert thinker.is_served(new)
    token2wav.say_outcome(new, RequestOutcome())
    token2wav.say_outcome(old, RequestOutcome())
    assert not thinker.is_served(new)


def test_a_session_that_every_stage_has_closed_makes_place_before_its_slot_is_given_back(attach):
    ledgers = {stage: attach(stage) for stage in STAGES}
    slots = Slots(ledgers["thinker"], 1)
    left = slots.allocate()
    for stage in STAGES:
        assert slots.allocate() is None
        ledgers[stage].write(left, CLOSED)
    assert slots.allocate().slot != left.slot


# Names and files.


def test_a_servers_name_is_its_own(tmp_path):
    """The command name in /proc may hold spaces and brackets, which must not shift the start time."""
    program = tmp_path / "a) (b c) R 1 2"
    program.symlink_to(Path("/bin/sleep").resolve())
    with subprocess.Popen([program, "30"]) as other:
        try:
            wait_for_command(other.pid, "a) (b c) R 1 2")
            found = server_name(other.pid)
            stat = Path(f"/proc/{other.pid}/stat").read_text()
        finally:
            other.kill()
    uid, namespace, pid, start = found.removeprefix("triton-omni-").split("-")
    assert (int(uid), int(pid)) == (os.getuid(), other.pid)
    assert Path("/proc/self/ns/pid").stat().st_ino == int(namespace)
    assert int(start) == int(stat[stat.rindex(")") :].split()[20])
    assert server_name(os.getpid()) != found
    assert server_name(os.getpid()) == server_name(os.getpid())


def wait_for_command(pid, name):
    end = time.monotonic() + IN_TIME_S
    while name[:15] != Path(f"/proc/{pid}/comm").read_text().rstrip("\n"):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_tables_of_dead_servers_are_removed_and_others_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        alive, dead = server_name(os.getpid()), server_name(other.pid)
        other.communicate(b"\n")
    namespace = alive.split("-")[3]
    reused = alive.rpartition("-")[0] + "-1"
    foreign_namespace = dead.replace(f"-{namespace}-", f"-{int(namespace) + 1}-")
    foreign_user = dead.replace(f"omni-{os.getuid()}-", f"omni-{os.getuid() + 1}-")
    odd = [f"triton-omni-{os.getuid()}-", f"triton-omni-{os.getuid()}-x-y-z-0", "something-else"]
    gone, kept = (
        [f"{dead}-1a2b", f"{reused}-1a2b"],
        [f"{alive}-1a2b", f"{foreign_namespace}-1", f"{foreign_user}-1", *odd],
    )
    for folder in (*gone, *kept):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ledger").touch()
    assert sorted(remove_stale()) == sorted(gone)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.parametrize("last", STAGES)
def test_the_last_model_to_leave_removes_the_file(name, last):
    models = [*(stage for stage in STAGES if stage != last), last]
    ledgers = [SessionLedger(name, model, StageFacts(1)) for model in models]
    for ledger in ledgers[:-1]:
        ledger.close()
        assert ledger.path.exists()
    ledgers[-1].close()
    assert not ledgers[-1].path.exists()


@pytest.mark.parametrize("order", ORDERS)
def test_sessions_have_nobody_to_end_them_once_the_last_stage_has_died(order, name, monkeypatch, tmp_path):
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", tmp_path)
    create_table(name)
    board, left_open = StageBoard(name), []
    with contextlib.ExitStack() as running:
        stages = {stage: running.enter_context(subprocess.Popen(["sleep", "60"])) for stage in STAGES}
        for stage, process in stages.items():
            board.set_word(PID, process.pid, stage)
        for stage in order:
            stages[stage].kill()
            os.waitid(os.P_PID, stages[stage].pid, os.WEXITED | os.WNOWAIT)  # dead, and kept by its parent
            left_open.append(board.leaves_open(stage))
    assert left_open == [False, False, True]
    board.close()

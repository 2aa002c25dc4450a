# SPDX-License-Identifier: Apache-2.0
"""Items that wait on a link: credits, sizes, interval, wanted items; each leaves once, in order, the last one last."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_omni.core.errors import InternalError, TooLarge
from triton_omni.core.gpu import record_event
from triton_omni.link.send_queue import (
    CREDITS,
    MESSAGE_APART_NS,
    SESSION_NS,
    SendQueue,
    message_interval_ns,
)
from triton_omni.session.stage import as_omni_error

LONG_AGO = 10 * MESSAGE_APART_NS


def rows(start, count):
    return torch.arange(start, start + count)


def take_all(send_queue, consumed=0, now_ns=LONG_AGO, *, interval_ns=0, wanted=None):
    batches = []
    while (batch := send_queue.pop_batch(consumed, interval_ns=interval_ns, wanted=wanted, now_ns=now_ns)) is not None:
        batches.append(batch)
    return batches


def values(batches):
    return [batch.tensor.tolist() for batch in batches if batch.tensor is not None]


def test_an_empty_send_queue_gives_nothing():
    send_queue = SendQueue(largest=8)
    assert send_queue.pop_batch(0, now_ns=LONG_AGO) is None
    assert not send_queue.waiting
    assert send_queue.held == 0


def test_what_is_under_way_is_counted_in_messages_and_bytes():
    send_queue = SendQueue(largest=4)
    send_queue.put(rows(0, 10))
    take_all(send_queue)
    assert send_queue.under_way(0) == (2, 8 * 8)
    take_all(send_queue, consumed=1)
    # The first message is gone, and the last one is smaller.
    assert send_queue.under_way(1) == (2, 6 * 8)
    assert send_queue.under_way(2) == (1, 2 * 8)
    assert send_queue.under_way(3) == send_queue.under_way(7) == (0, 0)


def test_rows_leave_while_there_are_credits_and_wait_without():
    send_queue, consumed = SendQueue(largest=8), 0
    for n in range(CREDITS):
        send_queue.put(rows(n, 1))
        assert values(take_all(send_queue, consumed)) == [[n]]
    send_queue.put(rows(CREDITS, 1))
    assert take_all(send_queue, consumed) == []
    assert send_queue.waiting
    assert send_queue.held == 1
    assert values(take_all(send_queue, consumed + 1)) == [[CREDITS]]


def test_what_waits_for_a_credit_leaves_together():
    send_queue = SendQueue(largest=100)
    for n in range(10):
        send_queue.put(rows(n, 1))
        send_queue.pop_batch(0, now_ns=LONG_AGO)
    assert values(take_all(send_queue, CREDITS)) == [list(range(CREDITS, 10))]


def test_no_message_is_larger_than_the_largest():
    send_queue = SendQueue(largest=4)
    send_queue.put(rows(0, 10))
    batches, consumed = [], 0
    while send_queue.held:
        batches += take_all(send_queue, consumed)
        consumed = len(batches)
    assert values(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_fewer_than_wanted_wait_for_more_or_for_the_end():
    send_queue = SendQueue(largest=8)
    send_queue.put(rows(0, 3))
    assert take_all(send_queue, wanted=4) == []
    send_queue.put(rows(3, 2))
    assert values(take_all(send_queue, wanted=4)) == [[0, 1, 2, 3, 4]]
    send_queue.put(rows(5, 2))
    assert take_all(send_queue, wanted=4) == []  # the other side has not looked yet
    assert take_all(send_queue, wanted=8) == []
    send_queue.finish_tensors()
    assert values(take_all(send_queue, wanted=8)) == [[5, 6]]


def test_more_than_a_message_holds_is_not_waited_for():
    send_queue = SendQueue(largest=4)
    send_queue.put(rows(0, 4))
    assert values(take_all(send_queue, wanted=100)) == [[0, 1, 2, 3]]


INTERVAL = message_interval_ns(8)


def begun():
    """A send queue whose first row has just left."""
    send_queue = SendQueue(largest=8)
    send_queue.put(rows(0, 1))
    assert values(take_all(send_queue, interval_ns=INTERVAL)) == [[0]]
    return send_queue


def test_the_more_sessions_the_longer_the_interval():
    found = [message_interval_ns(sessions) for sessions in (0, 1, 32)]
    assert found == [MESSAGE_APART_NS, MESSAGE_APART_NS, 32 * SESSION_NS]


def test_rows_leave_together_after_the_interval():
    send_queue = begun()
    send_queue.put(rows(1, 1))
    assert take_all(send_queue, now_ns=LONG_AGO + INTERVAL - 1, interval_ns=INTERVAL) == []
    send_queue.put(rows(2, 1))
    assert values(take_all(send_queue, now_ns=LONG_AGO + INTERVAL, interval_ns=INTERVAL)) == [[1, 2]]


def test_a_full_message_and_the_last_rows_wait_for_no_interval():
    send_queue = begun()
    send_queue.put(rows(1, 10))
    assert values(take_all(send_queue, interval_ns=INTERVAL)) == [list(range(1, 9))]
    assert send_queue.held == 2
    send_queue.finish_tensors()
    assert values(take_all(send_queue, 1, interval_ns=INTERVAL)) == [[9, 10]]


def test_the_end_of_no_rows_is_no_message_which_the_first_text_would_wait_after():
    send_queue = SendQueue(largest=8)
    send_queue.finish_tensors()
    assert take_all(send_queue, interval_ns=INTERVAL) == []
    send_queue.put_text("Hello")
    [batch] = take_all(send_queue, interval_ns=INTERVAL)
    assert (batch.text, batch.tensor, batch.tensors_done) == ("Hello", None, True)


def test_wanted_rows_wait_for_no_interval():
    send_queue = begun()
    send_queue.put(rows(1, 1))
    assert values(take_all(send_queue, interval_ns=INTERVAL, wanted=2)) == [[1]]


def test_an_urgent_queue_waits_for_no_interval():
    send_queue = begun()
    send_queue.put(rows(1, 1))
    send_queue.put_text("a")
    send_queue.is_urgent = True
    [batch] = take_all(send_queue, interval_ns=INTERVAL)
    assert (batch.text, batch.tensor.tolist()) == ("a", [1])


def test_text_and_rows_wait_for_one_interval():
    send_queue = begun()
    send_queue.put(rows(1, 1))
    send_queue.put_text("a")
    assert take_all(send_queue, now_ns=LONG_AGO + INTERVAL - 1, interval_ns=INTERVAL) == []
    [batch] = take_all(send_queue, now_ns=LONG_AGO + INTERVAL, interval_ns=INTERVAL)
    assert (batch.text, batch.tensor.tolist()) == ("a", [1])


@pytest.mark.parametrize("uses_ring", [False, True])
def test_text_alone_leaves_once_an_interval(uses_ring):
    send_queue = SendQueue(largest=100)
    if uses_ring:
        send_queue.use_ring()
    times = []
    for now_ns in range(LONG_AGO, LONG_AGO + 5 * INTERVAL, INTERVAL // 8):
        send_queue.put_text("word ")
        if send_queue.pop_batch(0, interval_ns=INTERVAL, now_ns=now_ns):
            times.append(now_ns)
    assert [later - earlier for earlier, later in itertools.pairwise(times)] == [INTERVAL] * 4


def test_text_travels_with_rows():
    send_queue = SendQueue(largest=8)
    send_queue.put_text("one ")
    send_queue.put_text("two")
    send_queue.put(rows(0, 2))
    [batch] = take_all(send_queue, now_ns=0)
    assert (batch.text, batch.tensor.tolist()) == ("one two", [0, 1])


def test_text_without_a_credit_leaves_by_itself_but_not_too_often():
    send_queue = SendQueue(largest=8)
    send_queue.put_text("a")
    assert [p.text for p in take_all(send_queue, interval_ns=INTERVAL)] == ["a"]
    send_queue.put_text("b")
    assert take_all(send_queue, now_ns=LONG_AGO + INTERVAL - 1, interval_ns=INTERVAL) == []
    assert send_queue.waiting
    send_queue.put_text("c")
    assert [p.text for p in take_all(send_queue, now_ns=LONG_AGO + INTERVAL, interval_ns=INTERVAL)] == ["bc"]


def test_text_needs_no_credit():
    send_queue = SendQueue(largest=1)
    send_queue.put(rows(0, CREDITS + 1))
    take_all(send_queue)
    send_queue.put_text("still here")
    assert [p.text for p in take_all(send_queue, now_ns=2 * LONG_AGO)] == ["still here"]


def test_the_last_text_does_not_wait():
    send_queue = SendQueue(largest=8)
    send_queue.finish_tensors()
    send_queue.put_text("a")
    take_all(send_queue, now_ns=LONG_AGO)
    send_queue.put_text("b")
    send_queue.finish_text()
    [batch] = take_all(send_queue, now_ns=LONG_AGO)
    assert (batch.text, batch.last) == ("b", True)


def test_the_end_of_the_rows_is_told_once_with_the_last_of_them():
    send_queue = SendQueue(largest=8)
    send_queue.put(rows(0, 2))
    send_queue.finish_tensors()
    [batch] = take_all(send_queue)
    assert (batch.tensors_done, batch.last) == (True, False)
    send_queue.put_text("more")
    assert [(p.text, p.tensors_done) for p in take_all(send_queue, now_ns=2 * LONG_AGO)] == [("more", True)]
    send_queue.finish_text()
    assert [p.last for p in take_all(send_queue)] == [True]


def test_the_end_of_the_rows_is_told_alone_when_all_have_left():
    send_queue = SendQueue(largest=8)
    send_queue.put(rows(0, 2))
    assert [p.tensors_done for p in take_all(send_queue)] == [False]
    send_queue.finish_tensors()
    assert [(p.tensor, p.tensors_done, p.last) for p in take_all(send_queue)] == [(None, True, False)]
    assert take_all(send_queue, now_ns=2 * LONG_AGO) == []


def test_last_waits_for_rows_without_a_credit():
    send_queue = SendQueue(largest=1)
    send_queue.put(rows(0, CREDITS + 1))
    send_queue.finish_tensors()
    send_queue.finish_text()
    assert [p.last for p in take_all(send_queue)] == [False] * CREDITS
    assert send_queue.waiting
    assert [p.last for p in take_all(send_queue, CREDITS)] == [True]
    assert not send_queue.waiting


def test_nothing_follows_the_last():
    send_queue = SendQueue(largest=1)
    send_queue.finish_tensors()
    send_queue.finish_text()
    assert [p.last for p in take_all(send_queue)] == [True]
    send_queue.put_text("too late")
    assert send_queue.pop_batch(9, now_ns=2 * LONG_AGO) is None


def test_empty_rows_and_text_are_nothing():
    send_queue = SendQueue(largest=1)
    send_queue.put(rows(0, 0))
    send_queue.put_text("")
    assert take_all(send_queue) == []
    assert not send_queue.waiting


def test_one_tensor_leaves_without_a_copy():
    send_queue, tensor = SendQueue(largest=8), torch.ones(3, 4)
    send_queue.put(tensor)
    [batch] = take_all(send_queue)
    assert batch.tensor.data_ptr() == tensor.data_ptr()


def test_rows_that_leave_as_they_came_keep_their_event():
    send_queue, ready = SendQueue(largest=4), SimpleNamespace()
    send_queue.put(rows(0, 6), ready)
    assert [batch.ready for batch in take_all(send_queue)] == [ready, ready]


def test_rows_that_leave_together_are_joined_behind_the_last_ones_event():
    waited = []
    send_queue = SendQueue(largest=8)
    for number in range(3):
        send_queue.put(rows(number, 1), SimpleNamespace(wait=lambda number=number: waited.append(number)))
    [batch] = take_all(send_queue)
    assert waited == [2]
    assert batch.ready is None, "on the CPU they are there"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7)),
        st.tuples(st.just("text"), st.text("abc", max_size=3)),
        st.tuples(st.just("take"), st.integers(0, 2 * MESSAGE_APART_NS)),
        st.tuples(st.just("consume"), st.integers(1, CREDITS)),
        st.tuples(st.just("finish tensors"), st.none()),
        st.tuples(st.just("finish text"), st.none()),
    ),
    max_size=60,
)


class Link:
    """Drives an send queue as a stage does, and checks every batch on its way."""

    def __init__(self, largest, sessions, wanted):
        self.send_queue, self.interval_ns = SendQueue(largest), message_interval_ns(sessions)
        self.largest, self.wanted = largest, wanted
        self.put, self.text = 0, ""
        self.batches, self.consumed, self.now = [], 0, 0
        self.tensors_done = self.text_done = False

    def act(self, action, value):
        if action == "put" and not self.tensors_done:
            self.send_queue.put(rows(self.put, value))
            self.put += value
        elif action == "text" and not self.text_done:
            self.send_queue.put_text(value)
            self.text += value
        elif action == "take":
            self.now += value
            self.take()
        elif action == "consume":
            self.consumed = min(self.consumed + value, len(values(self.batches)))
        elif action == "finish tensors":
            self.tensors_done = True
            self.send_queue.finish_tensors()
        elif action == "finish text":
            self.text_done = True
            self.send_queue.finish_text()

    def take(self):
        batch = self.send_queue.pop_batch(
            self.consumed, interval_ns=self.interval_ns, wanted=self.wanted, now_ns=self.now
        )
        if batch is None:
            return
        if batch.tensor is not None:
            assert 1 <= len(batch.tensor) <= self.largest
            given = sum(map(len, values(self.batches))) + len(batch.tensor)
            assert given >= (self.wanted or 0) or self.tensors_done or len(batch.tensor) == self.largest
        self.batches.append(batch)
        assert len(values(self.batches)) - self.consumed <= CREDITS

    def settle(self):
        """All leaves while the other side consumes and wants more, the end told or not."""
        for _ in range(200):
            self.consumed = len(values(self.batches))
            self.now += self.interval_ns
            self.wanted = None if self.wanted is None else sum(map(len, values(self.batches))) + 1
            self.take()
        assert self.send_queue.held == 0
        assert "".join(batch.text for batch in self.batches) == self.text

    def drain(self):
        self.act("finish tensors", None)
        self.act("finish text", None)
        while self.send_queue.waiting:
            before = len(self.batches)
            self.take()
            if len(self.batches) == before:
                assert self.consumed < len(values(self.batches)), "stuck with credits left"
                self.consumed += 1


@settings(max_examples=200)
@given(
    actions=ACTIONS,
    largest=st.integers(1, 6),
    sessions=st.integers(0, 20),
    wanted=st.one_of(st.none(), st.integers(0, 12)),
    settles=st.booleans(),
)
def test_whatever_the_order_everything_leaves_once_and_last_comes_last(actions, largest, sessions, wanted, settles):
    link = Link(largest, sessions, wanted)
    for action, value in actions:
        link.act(action, value)
    if settles:
        link.settle()
    link.drain()
    assert list(itertools.chain.from_iterable(values(link.batches))) == list(range(link.put))
    assert "".join(batch.text for batch in link.batches) == link.text
    assert [batch.last for batch in link.batches] == [False] * (len(link.batches) - 1) + [True]
    done = [batch.tensors_done for batch in link.batches]
    assert done == sorted(done)
    assert all(batch.tensor is None for batch in link.batches[done.index(True) + 1 :])
    assert link.send_queue.held == 0


def test_an_error_of_ours_stays_and_any_other_is_internal(caplog):
    ours = TooLarge("too many")
    assert as_omni_error(ours, "r1") is ours
    other = as_omni_error(KeyError("secret"), "r1")
    assert type(other) is InternalError
    assert "KeyError" in other.message
    assert "secret" not in other.message
    assert "request r1" in caplog.text
    assert as_omni_error(torch.OutOfMemoryError(), "r1").message == "the device has no memory for this request"


def test_an_event_marks_the_stream_of_its_device_not_of_the_threads(monkeypatch):
    marked = []
    event = SimpleNamespace(record=lambda *streams: marked.extend(streams))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    second = torch.device("cuda", 1)
    assert record_event(second) is not None
    assert marked == [("stream of", second)]
    assert record_event(torch.device("cpu")) is None


def test_what_goes_by_the_ring_leaves_by_itself_and_the_end_waits_for_it():
    send_queue = SendQueue(largest=100)
    send_queue.use_ring()
    for n in range(5):
        send_queue.put(rows(n, 1))
    send_queue.put_text("words")
    assert take_all(send_queue)[0].text == "words", "text waits for no row"
    tensor, _ = send_queue.pop_items(3)
    assert tensor.tolist() == [0, 1, 2]
    assert (send_queue.given, send_queue.placed, send_queue.held) == (3, 3, 2)
    send_queue.finish_tensors()
    send_queue.finish_text()
    assert take_all(send_queue) == []
    assert send_queue.pop_items(9)[0].tolist() == [3, 4]
    assert send_queue.held == 0
    assert [(batch.tensor, batch.tensors_done, batch.last) for batch in take_all(send_queue)] == [(None, True, True)]
    assert send_queue.under_way(0) == (0, 0), "no message had any"


def test_what_left_in_messages_before_is_none_of_what_was_placed():
    send_queue = SendQueue(largest=100)
    assert (send_queue.uses_ring, send_queue.placed, send_queue.by_message) == (False, 0, None)
    send_queue.put(rows(0, 6))
    take_all(send_queue)
    assert send_queue.placed == 0
    send_queue.use_ring()
    send_queue.put(rows(6, 2))
    send_queue.pop_items(2)
    send_queue.use_ring()
    assert (send_queue.uses_ring, send_queue.placed, send_queue.by_message, send_queue.given) == (True, 2, 6, 8)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30), st.integers(1, 8), st.integers(0, 3))
def test_the_ring_gets_each_item_once_and_is_told_of_all(steps, places, by_message):
    """Each step puts items, and fetches some of those that were told of."""
    send_queue, put, found, told, fetched = SendQueue(largest=100), by_message, [], 0, 0
    send_queue.put(rows(0, by_message))
    take_all(send_queue)
    # A ring of one place takes an item a step.
    for count, most in [*steps, *[(0, 5)] * (sum(count for count, _ in steps) + 2)]:
        send_queue.put(rows(put, count))
        put += count
        if batch := send_queue.pop_ring_batch(places - (send_queue.placed - fetched), places, wanted=None):
            assert (batch.start, batch.by_message) == (len(found), by_message)
            found += [] if batch.tensor is None else batch.tensor.tolist()
            assert batch.total == len(found) <= fetched + places
            told = batch.total if batch.announced else told
        fetched = min(told, fetched + most)
    assert found == list(range(by_message, put))
    assert told == send_queue.placed == len(found)
    assert take_all(send_queue) == []


@pytest.mark.parametrize("item", [0, 1, 3, 4, 5, 9, 10])
@pytest.mark.parametrize("known_after", range(4))
def test_items_before_the_next_stage_s_begin_do_not_leave(item, known_after):
    send_queue, parts = SendQueue(largest=100, start=11, awaits_begin=True), [rows(0, 4), rows(4, 1), rows(5, 7)]
    for number, part in enumerate(parts):
        if number == known_after:
            send_queue.begin_at(item)
        send_queue.put(part)
        if number < known_after:
            assert values(take_all(send_queue)) == []
    if known_after == len(parts):
        assert send_queue.held == 12
        send_queue.begin_at(item)
    assert (send_queue.skipped, send_queue.held, send_queue.start) == (item, 12 - item, 11 - item)
    send_queue.finish_tensors()
    send_queue.finish_text()
    assert values(take_all(send_queue)) == [list(range(item, 12))]
    assert (send_queue.given, send_queue.held, send_queue.waiting) == (12 - item, 0, False)


def test_all_items_may_be_skipped():
    send_queue = SendQueue(largest=100, start=4, awaits_begin=True)
    send_queue.put(rows(0, 3))
    send_queue.finish_tensors()
    send_queue.finish_text()
    assert send_queue.pop_batch(0, now_ns=LONG_AGO) is None
    send_queue.begin_at(3)
    (last,) = take_all(send_queue)
    assert (last.tensor, last.tensors_done, last.last) == (None, True, True)

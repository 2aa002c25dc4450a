# SPDX-License-Identifier: Apache-2.0
"""What waits on a link: credits, sizes, pace, what is wanted; everything leaves once, in order, last comes last."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_omni.errors import InternalError, TooLarge
from triton_omni.outbox import AT_A_TIME, CREDITS, MESSAGE_NS, TEXT_APART_NS, Outbox, Pace, link_figures
from triton_omni.stage import as_omni_error
from triton_omni.streams import record_event

LONG_AGO = 10 * TEXT_APART_NS


def rows(start, count):
    return torch.arange(start, start + count)


def pace_of(sessions):
    pace = Pace()
    pace.sessions = sessions
    return pace


def take_all(outbox, consumed=0, now_ns=LONG_AGO, *, pace=None, wanted=None):
    parcels = []
    while (parcel := outbox.take(consumed, pace=pace, wanted=wanted, now_ns=now_ns)) is not None:
        parcels.append(parcel)
    return parcels


def values(parcels):
    return [parcel.tensor.tolist() for parcel in parcels if parcel.tensor is not None]


def test_an_empty_outbox_gives_nothing():
    outbox = Outbox(largest=8)
    assert outbox.take(0, now_ns=LONG_AGO) is None
    assert not outbox.waiting
    assert outbox.held == 0


def test_what_is_under_way_is_counted_in_messages_and_bytes():
    outbox = Outbox(largest=4)
    outbox.put(rows(0, 10))
    take_all(outbox)
    assert outbox.under_way(0) == (2, 8 * 8)
    take_all(outbox, consumed=1)
    # The first message is gone, and the last one is smaller.
    assert outbox.under_way(1) == (2, 6 * 8)
    assert outbox.under_way(2) == (1, 2 * 8)
    assert outbox.under_way(3) == outbox.under_way(7) == (0, 0)
    told = {figure.name: figure.value for figure in link_figures([(outbox, 1), (outbox, 2), (Outbox(largest=4), 0)])}
    assert told == {"omni_credits_used": 3, "omni_pool_bytes": 8 * 8}


def test_rows_leave_while_there_are_credits_and_wait_without():
    outbox, consumed = Outbox(largest=8), 0
    for n in range(CREDITS):
        outbox.put(rows(n, 1))
        assert values(take_all(outbox, consumed)) == [[n]]
    outbox.put(rows(CREDITS, 1))
    assert take_all(outbox, consumed) == []
    assert outbox.waiting
    assert outbox.held == 1
    assert values(take_all(outbox, consumed + 1)) == [[CREDITS]]


def test_what_waits_for_a_credit_leaves_together():
    outbox = Outbox(largest=100)
    for n in range(10):
        outbox.put(rows(n, 1))
        outbox.take(0, now_ns=LONG_AGO)
    assert values(take_all(outbox, CREDITS)) == [list(range(CREDITS, 10))]


def test_no_message_is_larger_than_the_largest():
    outbox = Outbox(largest=4)
    outbox.put(rows(0, 10))
    parcels, consumed = [], 0
    while outbox.held:
        parcels += take_all(outbox, consumed)
        consumed = len(parcels)
    assert values(parcels) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_fewer_than_wanted_wait_for_more_or_for_the_end():
    outbox = Outbox(largest=8)
    outbox.put(rows(0, 3))
    assert take_all(outbox, wanted=4) == []
    outbox.put(rows(3, 2))
    assert values(take_all(outbox, wanted=4)) == [[0, 1, 2, 3, 4]]
    outbox.put(rows(5, 2))
    assert take_all(outbox, wanted=4) == []  # the other side has not looked yet
    assert take_all(outbox, wanted=8) == []
    outbox.finish_tensors()
    assert values(take_all(outbox, wanted=8)) == [[5, 6]]


def test_more_than_a_message_holds_is_not_waited_for():
    outbox = Outbox(largest=4)
    outbox.put(rows(0, 4))
    assert values(take_all(outbox, wanted=100)) == [[0, 1, 2, 3]]


def begun(pace):
    """An outbox whose first row has just left."""
    outbox = Outbox(largest=8)
    outbox.put(rows(0, 1))
    assert values(take_all(outbox, pace=pace)) == [[0]]
    return outbox


def test_the_more_sessions_the_further_apart_their_rows_leave():
    assert [pace_of(sessions).apart_ns for sessions in (0, 1, 32)] == [0, MESSAGE_NS, 32 * MESSAGE_NS]
    pace = pace_of(8)
    outbox = begun(pace)
    outbox.put(rows(1, 1))
    assert take_all(outbox, now_ns=LONG_AGO + pace.apart_ns - 1, pace=pace) == []
    outbox.put(rows(2, 1))
    assert values(take_all(outbox, now_ns=LONG_AGO + pace.apart_ns, pace=pace)) == [[1, 2]]


def test_sessions_whose_rows_come_together_send_them_one_behind_another():
    pace, now = pace_of(10), LONG_AGO
    outboxes = [Outbox(largest=8) for _ in range(10)]
    for outbox in outboxes:
        outbox.put(rows(0, 1))
    left = []
    for _ in range(10):
        left.append([number for number, outbox in enumerate(outboxes) if take_all(outbox, now_ns=now, pace=pace)])
        now += MESSAGE_NS
    assert left[0] == list(range(AT_A_TIME))
    assert left[1:] == [*([number] for number in range(AT_A_TIME, 10)), *[[] for _ in range(AT_A_TIME - 1)]]


@pytest.mark.parametrize("step_ms", [3, 9, 25, 80])
@pytest.mark.parametrize("sessions", [1, 8, 32, 64])
def test_no_session_waits_for_ever_however_long_a_step_takes(sessions, step_ms):
    """As in the thinker: each step has a row for each session, and outboxes are asked behind a step alone."""
    pace, now = pace_of(sessions), LONG_AGO
    outboxes, left = [Outbox(largest=512) for _ in range(sessions)], [LONG_AGO] * sessions
    longest = 0
    for step in range(400):
        now += step_ms * 1_000_000
        for number, outbox in enumerate(outboxes):
            outbox.put(rows(step, 1))
            if take_all(outbox, outbox.messages, now, pace=pace):
                longest, left[number] = max(longest, now - left[number]), now
    assert min(left) > now - 2 * longest
    assert longest <= 2 * pace.apart_ns + 2 * step_ms * 1_000_000


def test_a_full_message_and_the_last_rows_wait_for_no_pace():
    pace = pace_of(8)
    outbox = begun(pace)
    outbox.put(rows(1, 10))
    assert values(take_all(outbox, pace=pace)) == [list(range(1, 9))]
    assert outbox.held == 2
    outbox.finish_tensors()
    assert values(take_all(outbox, 1, pace=pace)) == [[9, 10]]


def test_what_is_wanted_waits_for_no_pace():
    pace = pace_of(8)
    outbox = begun(pace)
    outbox.put(rows(1, 1))
    assert values(take_all(outbox, pace=pace, wanted=2)) == [[1]]


def test_text_waits_for_the_rows_that_wait_for_the_pace():
    pace = pace_of(1)
    outbox, now = begun(pace), 2 * LONG_AGO
    for _ in range(AT_A_TIME + 1):
        pace.turn_ns(now)
    outbox.put(rows(1, 1))
    outbox.put_text("a")
    assert take_all(outbox, now_ns=now, pace=pace) == []
    [parcel] = take_all(outbox, now_ns=now + 2 * MESSAGE_NS, pace=pace)
    assert (parcel.text, parcel.tensor.tolist()) == ("a", [1])


def test_text_of_many_sessions_leaves_further_apart():
    outbox, pace = Outbox(largest=8), pace_of(3 * TEXT_APART_NS // MESSAGE_NS)
    outbox.put_text("a")
    assert [p.text for p in take_all(outbox, pace=pace)] == ["a"]
    outbox.put_text("b")
    assert take_all(outbox, now_ns=LONG_AGO + pace.apart_ns - 1, pace=pace) == []
    assert [p.text for p in take_all(outbox, now_ns=LONG_AGO + pace.apart_ns, pace=pace)] == ["b"]


def test_text_travels_with_rows():
    outbox = Outbox(largest=8)
    outbox.put_text("one ")
    outbox.put_text("two")
    outbox.put(rows(0, 2))
    [parcel] = take_all(outbox, now_ns=0)
    assert (parcel.text, parcel.tensor.tolist()) == ("one two", [0, 1])


def test_text_without_a_credit_leaves_by_itself_but_not_too_often():
    outbox = Outbox(largest=8)
    outbox.put_text("a")
    assert [p.text for p in take_all(outbox, now_ns=LONG_AGO)] == ["a"]
    outbox.put_text("b")
    assert take_all(outbox, now_ns=LONG_AGO + TEXT_APART_NS - 1) == []
    assert outbox.waiting
    outbox.put_text("c")
    assert [p.text for p in take_all(outbox, now_ns=LONG_AGO + TEXT_APART_NS)] == ["bc"]


def test_text_needs_no_credit():
    outbox = Outbox(largest=1)
    outbox.put(rows(0, CREDITS + 1))
    take_all(outbox)
    outbox.put_text("still here")
    assert [p.text for p in take_all(outbox, now_ns=2 * LONG_AGO)] == ["still here"]


def test_the_last_text_does_not_wait():
    outbox = Outbox(largest=8)
    outbox.finish_tensors()
    outbox.put_text("a")
    take_all(outbox, now_ns=LONG_AGO)
    outbox.put_text("b")
    outbox.finish_text()
    [parcel] = take_all(outbox, now_ns=LONG_AGO)
    assert (parcel.text, parcel.last) == ("b", True)


def test_the_end_of_the_rows_is_told_once_with_the_last_of_them():
    outbox = Outbox(largest=8)
    outbox.put(rows(0, 2))
    outbox.finish_tensors()
    [parcel] = take_all(outbox)
    assert (parcel.tensors_done, parcel.last) == (True, False)
    outbox.put_text("more")
    assert [(p.text, p.tensors_done) for p in take_all(outbox, now_ns=2 * LONG_AGO)] == [("more", True)]
    outbox.finish_text()
    assert [p.last for p in take_all(outbox)] == [True]


def test_the_end_of_the_rows_is_told_alone_when_all_have_left():
    outbox = Outbox(largest=8)
    outbox.put(rows(0, 2))
    assert [p.tensors_done for p in take_all(outbox)] == [False]
    outbox.finish_tensors()
    assert [(p.tensor, p.tensors_done, p.last) for p in take_all(outbox)] == [(None, True, False)]
    assert take_all(outbox, now_ns=2 * LONG_AGO) == []


def test_last_waits_for_rows_without_a_credit():
    outbox = Outbox(largest=1)
    outbox.put(rows(0, CREDITS + 1))
    outbox.finish_tensors()
    outbox.finish_text()
    assert [p.last for p in take_all(outbox)] == [False] * CREDITS
    assert outbox.waiting
    assert [p.last for p in take_all(outbox, CREDITS)] == [True]
    assert not outbox.waiting


def test_nothing_follows_the_last():
    outbox = Outbox(largest=1)
    outbox.finish_tensors()
    outbox.finish_text()
    assert [p.last for p in take_all(outbox)] == [True]
    outbox.put_text("too late")
    assert outbox.take(9, now_ns=2 * LONG_AGO) is None


def test_empty_rows_and_text_are_nothing():
    outbox = Outbox(largest=1)
    outbox.put(rows(0, 0))
    outbox.put_text("")
    assert take_all(outbox) == []
    assert not outbox.waiting


def test_one_tensor_leaves_without_a_copy():
    outbox, tensor = Outbox(largest=8), torch.ones(3, 4)
    outbox.put(tensor)
    [parcel] = take_all(outbox)
    assert parcel.tensor.data_ptr() == tensor.data_ptr()


def test_rows_that_leave_as_they_came_keep_their_event():
    outbox, ready = Outbox(largest=4), SimpleNamespace()
    outbox.put(rows(0, 6), ready)
    assert [parcel.ready for parcel in take_all(outbox)] == [ready, ready]


def test_rows_that_leave_together_are_joined_behind_the_last_ones_event():
    waited = []
    outbox = Outbox(largest=8)
    for number in range(3):
        outbox.put(rows(number, 1), SimpleNamespace(wait=lambda number=number: waited.append(number)))
    [parcel] = take_all(outbox)
    assert waited == [2]
    assert parcel.ready is None, "on the CPU they are there"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7)),
        st.tuples(st.just("text"), st.text("abc", max_size=3)),
        st.tuples(st.just("take"), st.integers(0, 2 * TEXT_APART_NS)),
        st.tuples(st.just("consume"), st.integers(1, CREDITS)),
        st.tuples(st.just("finish tensors"), st.none()),
        st.tuples(st.just("finish text"), st.none()),
    ),
    max_size=60,
)


class Link:
    """Drives an outbox as a stage does, and checks every parcel on its way."""

    def __init__(self, largest, sessions, wanted):
        self.outbox, self.pace = Outbox(largest), pace_of(sessions)
        self.largest, self.wanted = largest, wanted
        self.put, self.text = 0, ""
        self.parcels, self.consumed, self.now = [], 0, 0
        self.tensors_done = self.text_done = False

    def act(self, action, value):
        if action == "put" and not self.tensors_done:
            self.outbox.put(rows(self.put, value))
            self.put += value
        elif action == "text" and not self.text_done:
            self.outbox.put_text(value)
            self.text += value
        elif action == "take":
            self.now += value
            self.take()
        elif action == "consume":
            self.consumed = min(self.consumed + value, len(values(self.parcels)))
        elif action == "finish tensors":
            self.tensors_done = True
            self.outbox.finish_tensors()
        elif action == "finish text":
            self.text_done = True
            self.outbox.finish_text()

    def take(self):
        parcel = self.outbox.take(self.consumed, pace=self.pace, wanted=self.wanted, now_ns=self.now)
        if parcel is None:
            return
        if parcel.tensor is not None:
            assert 1 <= len(parcel.tensor) <= self.largest
            given = sum(map(len, values(self.parcels))) + len(parcel.tensor)
            assert given >= (self.wanted or 0) or self.tensors_done or len(parcel.tensor) == self.largest
        self.parcels.append(parcel)
        assert len(values(self.parcels)) - self.consumed <= CREDITS

    def settle(self):
        """All leaves while the other side consumes and wants more, the end told or not."""
        for _ in range(200):
            self.consumed = len(values(self.parcels))
            self.now += self.pace.apart_ns + TEXT_APART_NS
            self.wanted = None if self.wanted is None else sum(map(len, values(self.parcels))) + 1
            self.take()
        assert self.outbox.held == 0
        assert "".join(parcel.text for parcel in self.parcels) == self.text

    def drain(self):
        self.act("finish tensors", None)
        self.act("finish text", None)
        while self.outbox.waiting:
            before = len(self.parcels)
            self.take()
            if len(self.parcels) == before:
                assert self.consumed < len(values(self.parcels)), "stuck with credits left"
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
    assert list(itertools.chain.from_iterable(values(link.parcels))) == list(range(link.put))
    assert "".join(parcel.text for parcel in link.parcels) == link.text
    assert [parcel.last for parcel in link.parcels] == [False] * (len(link.parcels) - 1) + [True]
    done = [parcel.tensors_done for parcel in link.parcels]
    assert done == sorted(done)
    assert all(parcel.tensor is None for parcel in link.parcels[done.index(True) + 1 :])
    assert link.outbox.held == 0


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


def test_what_goes_past_messages_leaves_by_itself_and_the_end_waits_for_it():
    outbox = Outbox(largest=100)
    outbox.go_past_messages()
    for n in range(5):
        outbox.put(rows(n, 1))
    outbox.put_text("words")
    assert take_all(outbox)[0].text == "words", "text waits for no row"
    tensor, _ = outbox.take_tensor(3)
    assert tensor.tolist() == [0, 1, 2]
    assert (outbox.given, outbox.placed, outbox.held) == (3, 3, 2)
    outbox.finish_tensors()
    outbox.finish_text()
    assert take_all(outbox) == []
    assert outbox.take_tensor(0) is None
    assert outbox.take_tensor(9)[0].tolist() == [3, 4]
    assert outbox.take_tensor(9) is None
    assert [(parcel.tensor, parcel.tensors_done, parcel.last) for parcel in take_all(outbox)] == [(None, True, True)]
    assert outbox.under_way(0) == (0, 0), "no message had any"


@pytest.mark.parametrize("past_messages", [False, True])
def test_text_that_has_no_rows_to_leave_with_leaves_half_as_often(past_messages):
    outbox, apart_ns = Outbox(largest=100), 20 * MESSAGE_NS * (2 if past_messages else 1)
    if past_messages:
        outbox.go_past_messages()
    times = []
    for now_ns in range(LONG_AGO, LONG_AGO + 5 * apart_ns, MESSAGE_NS):
        outbox.put_text("word ")
        if outbox.take(0, pace=pace_of(20), now_ns=now_ns):
            times.append(now_ns)
    assert [later - earlier for earlier, later in itertools.pairwise(times)] == [apart_ns] * 4


def test_what_left_in_messages_before_is_none_of_what_was_placed():
    outbox = Outbox(largest=100)
    assert (outbox.past_messages, outbox.placed, outbox.behind) == (False, 0, None)
    outbox.put(rows(0, 6))
    take_all(outbox)
    assert outbox.placed == 0
    outbox.go_past_messages()
    outbox.put(rows(6, 2))
    outbox.take_tensor(2)
    outbox.go_past_messages()
    assert (outbox.past_messages, outbox.placed, outbox.behind, outbox.given) == (True, 2, 6, 8)

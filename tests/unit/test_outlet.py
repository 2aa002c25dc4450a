# SPDX-License-Identifier: Apache-2.0
"""Answers to Triton: exactly one final, nothing after it, in order, and a fault of one answer harms no other."""

import functools
import threading

import pytest
import torch

from fake_pb_utils import PbUtils, Request, TritonError
from triton_omni.errors import BadRequest, Cancelled, DeadlineExceeded, InternalError, Overloaded, TooLarge
from triton_omni.serving.outlet import SendingThread, TritonOutlet

WAIT_S = 5.0


@pytest.fixture
def thread():
    thread = SendingThread("test")
    yield thread
    thread.close()


@pytest.fixture
def request_():
    return Request()


@pytest.fixture
def sender(request_):
    yield request_.sender
    assert request_.sender.violations == []


@pytest.fixture
def outlet(request_, thread, sender):
    del sender
    return TritonOutlet(PbUtils(), request_, [thread])


class Event:
    """A device event; `fault` is raised by waiting for it."""

    def __init__(self, log=None, fault=None):
        self.log, self.fault = log if log is not None else [], fault

    def synchronize(self):
        self.log.append("waited")
        if self.fault is not None:
            raise self.fault


def drained(thread):
    event = threading.Event()
    thread.put(event.set)
    assert event.wait(WAIT_S)


def texts(sender):
    return [bytes(outputs["TEXT"].as_numpy()[0]) for outputs in sender.outputs()]


def test_answers_leave_in_order_and_the_final_is_empty(outlet, sender, thread):
    for n in range(50):
        outlet.send({"TEXT": b"%d" % n, "CODES": torch.arange(n)})
    outlet.finish()
    drained(thread)
    assert texts(sender) == [b"%d" % n for n in range(50)]
    assert sender.outputs()[7]["CODES"].torch.tolist() == list(range(7))
    assert sender.finals == 1


@pytest.mark.parametrize("first", ["finish", "fail", "conclude"])
@pytest.mark.parametrize("second", ["finish", "fail", "conclude", "send"])
def test_nothing_follows_the_final(outlet, sender, thread, first, second):
    calls = {
        "finish": outlet.finish,
        "fail": lambda: outlet.fail(InternalError("x")),
        "send": lambda: outlet.send({"TEXT": b"late"}),
        "conclude": lambda: outlet.conclude({"TEXT": b"last"}, lambda: None, lambda: False),
    }
    calls[first]()
    calls[second]()
    drained(thread)
    calls[second]()
    drained(thread)
    assert sender.finals == 1
    assert texts(sender) == ([b"last"] if first == "conclude" else [])


def test_of_many_threads_that_finish_at_once_one_final_is_sent(thread):
    for _ in range(50):
        request = Request()
        outlet, barrier = TritonOutlet(PbUtils(), request, [thread]), threading.Barrier(4)

        def finish(outlet=outlet, barrier=barrier):
            barrier.wait(WAIT_S)
            outlet.finish()

        threads = [threading.Thread(target=finish) for _ in range(4)]
        for finishing in threads:
            finishing.start()
        for finishing in threads:
            finishing.join()
        drained(thread)
        assert request.sender.finals == 1
        assert request.sender.violations == []


def test_triton_is_not_asked_for_a_cancel_after_the_final(outlet, sender, thread):
    sender.cancelled = True
    assert outlet.is_cancelled()
    outlet.finish()
    drained(thread)
    asked = sender.cancel_queries
    assert not outlet.is_cancelled()
    assert sender.cancel_queries == asked


def test_a_watcher_beside_the_final_never_asks_too_late(thread):
    for _ in range(30):
        request, stop = Request(), threading.Event()
        outlet = TritonOutlet(PbUtils(), request, [thread])

        def watch(outlet=outlet, stop=stop):
            while not stop.is_set():
                outlet.is_cancelled()

        watcher = threading.Thread(target=watch)
        watcher.start()
        outlet.finish()
        assert request.sender.done.wait(WAIT_S)
        drained(thread)
        stop.set()
        watcher.join()
        assert request.sender.violations == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("x"), TritonError.INVALID_ARG),
        (TooLarge("x"), TritonError.INVALID_ARG),
        (Overloaded("x", retry_after_ms=9), TritonError.UNAVAILABLE),
        (Cancelled("x"), TritonError.CANCELLED),
        (DeadlineExceeded("x"), TritonError.UNAVAILABLE),
        (InternalError("x"), TritonError.INTERNAL),
    ],
    ids=lambda value: getattr(value, "code", None) if isinstance(value, Exception) else None,
)
def test_an_error_is_the_final_and_carries_tritons_code(outlet, sender, thread, error, code):
    outlet.fail(error)
    drained(thread)
    assert sender.finals == 1
    assert (sender.error.message(), sender.error.code()) == (error.to_text(), code)


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_what_comes_then_runs_after_the_final_has_left(outlet, sender, thread, how):
    finals = []
    end = outlet.finish if how == "finish" else lambda then: outlet.fail(InternalError("x"), then)
    end(then=lambda: finals.append(sender.finals))
    drained(thread)
    assert finals == [1]


@pytest.mark.parametrize("how", ["finish", "fail", "conclude"])
def test_then_runs_also_when_triton_refuses_the_final(outlet, sender, thread, monkeypatch, how):
    def refuse_finals(response=None, flags=0):
        assert not flags, "refused"

    ran = []
    monkeypatch.setattr(sender, "send", refuse_finals)
    then = functools.partial(ran.append, True)
    {
        "finish": lambda: outlet.finish(then=then),
        "fail": lambda: outlet.fail(InternalError("x"), then),
        "conclude": lambda: outlet.conclude({"TEXT": b"all"}, then, lambda: False),
    }[how]()
    drained(thread)
    assert ran == [True]


def test_the_device_is_waited_for_before_an_answer_leaves(outlet, sender, thread):
    log = []
    outlet.send({"TEXT": b"1"}, Event(log))
    outlet.finish(Event(log), lambda: log.append("final"))
    drained(thread)
    assert log == ["waited", "waited", "final"]
    assert texts(sender) == [b"1"]


def test_a_lost_device_still_gives_the_final_and_runs_then(outlet, sender, thread):
    ran = []
    outlet.finish(Event(fault=RuntimeError("device lost")), lambda: ran.append(True))
    drained(thread)
    assert sender.finals == 1
    assert ran == [True]


@pytest.mark.parametrize("cause", ["refused", "unwritable", "device lost"])
def test_an_answer_that_cannot_be_sent_is_told_and_harms_no_other(outlet, sender, thread, caplog, cause):
    told = []
    sender.fault = RuntimeError("pool is full") if cause == "refused" else None
    outlet.send(
        {"TEXT": object() if cause == "unwritable" else b"lost"},
        Event(fault=RuntimeError("device lost")) if cause == "device lost" else None,
        lambda: told.append(threading.current_thread().name),
    )
    drained(thread)
    sender.fault = None
    outlet.send({"TEXT": b"next"}, lost=lambda: told.append("nothing"))
    outlet.finish()
    drained(thread)
    assert told == ["test-send"]
    assert texts(sender) == [b"next"]
    assert sender.finals == 1
    assert "could not be sent" in caplog.text


def test_a_lost_answer_that_nobody_asks_about_harms_no_other(outlet, sender, thread):
    sender.fault = RuntimeError("pool is full")
    outlet.send({"TEXT": b"lost"})
    drained(thread)
    sender.fault = None
    outlet.send({"TEXT": b"next"})
    drained(thread)
    assert texts(sender) == [b"next"]


def test_a_whole_answer_is_concluded_by_its_last_response_and_the_empty_final(outlet, sender, thread):
    log = []
    outlet.send({"TEXT": b"first"})
    outlet.conclude({"TEXT": b"last"}, lambda: log.append(sender.finals), lambda: log.append("lost"))
    drained(thread)
    assert texts(sender) == [b"first", b"last"]
    assert log == [1]


@pytest.mark.parametrize("lost", ["first", "last"])
def test_an_answer_with_a_hole_is_not_concluded_but_left_to_who_is_told(outlet, sender, thread, lost):
    log = []

    def take_over():
        # From another thread, which may be quicker than the one that tells it.
        failing = threading.Thread(target=outlet.fail, args=(InternalError("a hole"), lambda: log.append("failed")))
        failing.start()
        failing.join()
        return True

    sender.fault = RuntimeError("pool is full") if lost == "first" else None
    outlet.send({"TEXT": b"first"})
    drained(thread)
    sender.fault = RuntimeError("pool is full") if lost == "last" else None
    outlet.conclude({"TEXT": b"last"}, lambda: log.append("concluded"), take_over)
    drained(thread)
    drained(thread)
    assert texts(sender) == ([b"first"] if lost == "last" else [])
    assert sender.error.message() == "a hole [omni:internal]"
    assert sender.finals == 1
    assert log == ["failed"]


def test_an_answer_with_a_hole_that_nobody_takes_over_is_failed_at_once(outlet, sender, thread):
    log = []
    sender.fault = RuntimeError("pool is full")
    outlet.conclude({"TEXT": b"last"}, lambda: log.append(sender.finals), lambda: False)
    thread.close()
    assert sender.error.message() == "a part of the reply could not be sent [omni:internal]"
    assert log == [1]


@pytest.fixture
def threads():
    threads = [SendingThread(f"test-{n}") for n in range(2)]
    yield threads
    for thread in threads:
        thread.close()


def test_outlets_of_one_slot_leave_in_order_and_those_of_another_do_not_wait_for_them(threads):
    gate, requests = threading.Event(), [Request() for _ in range(3)]
    first, second, other = (TritonOutlet(PbUtils(), request, threads) for request in requests)
    for outlet, slot in ((first, 3), (second, 5), (other, 4)):
        outlet.bind(slot)
    order = []
    first.finish(then=lambda: order.append(gate.wait(WAIT_S)))
    second.finish(then=lambda: order.append("second"))
    other.finish(then=lambda: order.append("other"))
    assert requests[2].sender.done.wait(WAIT_S), "another slot waits for the first"
    drained(threads[0])
    assert requests[1].sender.finals == 0
    gate.set()
    drained(threads[1])
    assert order == ["other", True, "second"]


def test_an_outlet_that_is_bound_to_no_slot_is_answered_too(threads):
    request = Request()
    TritonOutlet(PbUtils(), request, threads).fail(InternalError("x"))
    drained(threads[0])
    assert request.sender.finals == 1


def test_closing_sends_what_was_put_first():
    thread, request, gate = SendingThread("test"), Request(), threading.Event()
    outlet = TritonOutlet(PbUtils(), request, [thread])
    thread.put(lambda: gate.wait(WAIT_S))
    outlet.send({"TEXT": b"1"})
    outlet.finish()
    gate.set()
    thread.close()
    assert texts(request.sender) == [b"1"]
    assert request.sender.finals == 1


def test_an_idle_thread_holds_no_tensor_of_the_last_answer(thread):
    import weakref

    class Job:
        def __call__(self):
            pass

    job = Job()
    alive = weakref.ref(job)
    thread.put(job)
    drained_by_name(thread)
    del job
    assert alive() is None


def drained_by_name(thread):
    """Wait without putting a job that would replace the last one."""
    import time

    end = time.monotonic() + WAIT_S
    while not thread._jobs.empty():
        assert time.monotonic() < end
        time.sleep(0.001)
    time.sleep(0.02)


def test_an_answer_is_one_response_that_is_the_final(outlet, sender, thread):
    outlet.answer({"TEXT": b"all"})
    outlet.finish()
    drained(thread)
    assert texts(sender) == [b"all"]
    assert sender.finals == 1


def test_an_answer_that_cannot_be_written_becomes_an_error(outlet, sender, thread, caplog):
    outlet.answer({"TEXT": object()})
    drained(thread)
    assert sender.outputs() == []
    assert sender.error.message() == "the answer could not be written [omni:internal]"
    assert sender.finals == 1
    assert "could not be written" in caplog.text

# SPDX-License-Identifier: Apache-2.0
"""Answers to Triton: exactly one final, nothing after it, in order, and a fault of one answer harms no other."""

import functools
import threading
import time

import pytest
import torch

from fake_pb_utils import PbUtils, Request, TritonError
from triton_omni.core.errors import BadRequest, Cancelled, DeadlineExceeded, InternalError, Overloaded, TooLarge
from triton_omni.stub.response_sender import SendingThread, TritonResponseSender
from waiting import IN_TIME_S


@pytest.fixture
def thread():
    thread = SendingThread("test")
    yield thread
    thread.close()


@pytest.fixture
def request_():
    return Request()


@pytest.fixture
def triton_sender(request_):
    yield request_.sender
    assert request_.sender.violations == []


@pytest.fixture
def sender(request_, thread, triton_sender):
    del triton_sender
    return TritonResponseSender(PbUtils(), request_, [thread])


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
    assert event.wait(IN_TIME_S)


def texts(triton_sender):
    return [bytes(outputs["TEXT"].as_numpy()[0]) for outputs in triton_sender.outputs()]


def test_answers_leave_in_order_and_the_final_is_empty(sender, triton_sender, thread):
    for n in range(50):
        sender.send({"TEXT": b"%d" % n, "CODES": torch.arange(n)})
    sender.finish()
    drained(thread)
    assert texts(triton_sender) == [b"%d" % n for n in range(50)]
    assert triton_sender.outputs()[7]["CODES"].torch.tolist() == list(range(7))
    assert triton_sender.finals == 1


@pytest.mark.parametrize("first", ["finish", "fail", "conclude"])
@pytest.mark.parametrize("second", ["finish", "fail", "conclude", "send"])
def test_nothing_follows_the_final(sender, triton_sender, thread, first, second):
    calls = {
        "finish": sender.finish,
        "fail": lambda: sender.fail(InternalError("x")),
        "send": lambda: sender.send({"TEXT": b"late"}),
        "conclude": lambda: sender.conclude({"TEXT": b"last"}, lambda: None, lambda: False),
    }
    calls[first]()
    calls[second]()
    drained(thread)
    calls[second]()
    drained(thread)
    assert triton_sender.finals == 1
    assert texts(triton_sender) == ([b"last"] if first == "conclude" else [])


def test_of_many_threads_that_finish_at_once_one_final_is_sent(thread):
    for _ in range(50):
        request = Request()
        sender, barrier = TritonResponseSender(PbUtils(), request, [thread]), threading.Barrier(4)

        def finish(sender=sender, barrier=barrier):
            barrier.wait(IN_TIME_S)
            sender.finish()

        threads = [threading.Thread(target=finish) for _ in range(4)]
        for finishing in threads:
            finishing.start()
        for finishing in threads:
            finishing.join()
        drained(thread)
        assert request.sender.finals == 1
        assert request.sender.violations == []


def test_triton_is_not_asked_for_a_cancel_after_the_final(sender, triton_sender, thread):
    triton_sender.cancelled = True
    assert sender.is_cancelled()
    sender.finish()
    drained(thread)
    asked = triton_sender.cancel_queries
    assert not sender.is_cancelled()
    assert triton_sender.cancel_queries == asked


def test_a_watcher_beside_the_final_never_asks_too_late(thread):
    for _ in range(30):
        request, stop = Request(), threading.Event()
        sender = TritonResponseSender(PbUtils(), request, [thread])

        def watch(sender=sender, stop=stop):
            while not stop.is_set():
                sender.is_cancelled()

        watcher = threading.Thread(target=watch)
        watcher.start()
        sender.finish()
        assert request.sender.done.wait(IN_TIME_S)
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
def test_an_error_is_the_final_and_carries_tritons_code(sender, triton_sender, thread, error, code):
    sender.fail(error)
    drained(thread)
    assert triton_sender.finals == 1
    assert (triton_sender.error.message(), triton_sender.error.code()) == (error.to_text(), code)


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_what_comes_then_runs_after_the_final_has_left(sender, triton_sender, thread, how):
    finals = []
    end = sender.finish if how == "finish" else lambda then: sender.fail(InternalError("x"), then)
    end(then=lambda: finals.append(triton_sender.finals))
    drained(thread)
    assert finals == [1]


@pytest.mark.parametrize("how", ["finish", "fail", "conclude"])
def test_then_runs_also_when_triton_refuses_the_final(sender, triton_sender, thread, monkeypatch, how):
    def refuse_finals(response=None, flags=0):
        assert not flags, "refused"

    ran = []
    monkeypatch.setattr(triton_sender, "send", refuse_finals)
    then = functools.partial(ran.append, True)
    {
        "finish": lambda: sender.finish(then=then),
        "fail": lambda: sender.fail(InternalError("x"), then),
        "conclude": lambda: sender.conclude({"TEXT": b"all"}, then, lambda: False),
    }[how]()
    drained(thread)
    assert ran == [True]


def test_the_device_is_waited_for_before_an_answer_leaves(sender, triton_sender, thread):
    log = []
    sender.send({"TEXT": b"1"}, Event(log))
    sender.finish(Event(log), lambda: log.append("final"))
    drained(thread)
    assert log == ["waited", "waited", "final"]
    assert texts(triton_sender) == [b"1"]


def test_a_lost_device_still_gives_the_final_and_runs_then(sender, triton_sender, thread):
    ran = []
    sender.finish(Event(fault=RuntimeError("device lost")), lambda: ran.append(True))
    drained(thread)
    assert triton_sender.finals == 1
    assert ran == [True]


@pytest.mark.parametrize("cause", ["refused", "unwritable", "device lost"])
def test_an_answer_that_cannot_be_sent_is_told_and_harms_no_other(sender, triton_sender, thread, caplog, cause):
    told = []
    triton_sender.fault = RuntimeError("pool is full") if cause == "refused" else None
    sender.send(
        {"TEXT": object() if cause == "unwritable" else b"lost"},
        Event(fault=RuntimeError("device lost")) if cause == "device lost" else None,
        lambda: told.append(threading.current_thread().name),
    )
    drained(thread)
    triton_sender.fault = None
    sender.send({"TEXT": b"next"}, lost=lambda: told.append("nothing"))
    sender.finish()
    drained(thread)
    assert told == ["test-send"]
    assert texts(triton_sender) == [b"next"]
    assert triton_sender.finals == 1
    assert "could not be sent" in caplog.text


def test_a_lost_answer_that_nobody_asks_about_harms_no_other(sender, triton_sender, thread):
    triton_sender.fault = RuntimeError("pool is full")
    sender.send({"TEXT": b"lost"})
    drained(thread)
    triton_sender.fault = None
    sender.send({"TEXT": b"next"})
    drained(thread)
    assert texts(triton_sender) == [b"next"]


def test_a_whole_answer_is_concluded_by_its_last_response_and_the_empty_final(sender, triton_sender, thread):
    log = []
    sender.send({"TEXT": b"first"})
    sender.conclude({"TEXT": b"last"}, lambda: log.append(triton_sender.finals), lambda: log.append("lost"))
    drained(thread)
    assert texts(triton_sender) == [b"first", b"last"]
    assert log == [1]


@pytest.mark.parametrize("lost", ["first", "last"])
def test_an_answer_with_a_hole_is_not_concluded_but_left_to_who_is_told(sender, triton_sender, thread, lost):
    log = []

    def take_over():
        # From another thread, which may be quicker than the one that tells it.
        failing = threading.Thread(target=sender.fail, args=(InternalError("a hole"), lambda: log.append("failed")))
        failing.start()
        failing.join()
        return True

    triton_sender.fault = RuntimeError("pool is full") if lost == "first" else None
    sender.send({"TEXT": b"first"})
    drained(thread)
    triton_sender.fault = RuntimeError("pool is full") if lost == "last" else None
    sender.conclude({"TEXT": b"last"}, lambda: log.append("concluded"), take_over)
    drained(thread)
    drained(thread)
    assert texts(triton_sender) == ([b"first"] if lost == "last" else [])
    assert triton_sender.error.message() == "a hole [omni:internal]"
    assert triton_sender.finals == 1
    assert log == ["failed"]


def test_an_answer_with_a_hole_that_nobody_takes_over_is_failed_at_once(sender, triton_sender, thread):
    log = []
    triton_sender.fault = RuntimeError("pool is full")
    sender.conclude({"TEXT": b"last"}, lambda: log.append(triton_sender.finals), lambda: False)
    thread.close()
    assert triton_sender.error.message() == "a part of the reply could not be sent [omni:internal]"
    assert log == [1]


@pytest.fixture
def threads():
    threads = [SendingThread(f"test-{n}") for n in range(2)]
    yield threads
    for thread in threads:
        thread.close()


def test_senders_of_one_slot_leave_in_order_and_those_of_another_do_not_wait_for_them(threads):
    gate, requests = threading.Event(), [Request() for _ in range(3)]
    first, second, other = (TritonResponseSender(PbUtils(), request, threads) for request in requests)
    for sender, slot in ((first, 3), (second, 5), (other, 4)):
        sender.bind(slot)
    order = []
    first.finish(then=lambda: order.append(gate.wait(IN_TIME_S)))
    second.finish(then=lambda: order.append("second"))
    other.finish(then=lambda: order.append("other"))
    assert requests[2].sender.done.wait(IN_TIME_S), "another slot waits for the first"
    drained(threads[0])
    assert requests[1].sender.finals == 0
    gate.set()
    drained(threads[1])
    assert order == ["other", True, "second"]


def test_a_sender_that_is_bound_to_no_slot_is_answered_too(threads):
    request = Request()
    TritonResponseSender(PbUtils(), request, threads).fail(InternalError("x"))
    drained(threads[0])
    assert request.sender.finals == 1


def test_closing_sends_what_was_put_first():
    thread, request, gate = SendingThread("test"), Request(), threading.Event()
    sender = TritonResponseSender(PbUtils(), request, [thread])
    thread.put(lambda: gate.wait(IN_TIME_S))
    sender.send({"TEXT": b"1"})
    sender.finish()
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
    del job
    # No other job is put, which would take the place of the last one.
    end = time.monotonic() + IN_TIME_S
    while alive() is not None:
        assert time.monotonic() < end, "the last job is held"
        time.sleep(0.001)


def test_an_answer_is_one_response_that_is_the_final(sender, triton_sender, thread):
    sender.answer({"TEXT": b"all"})
    sender.finish()
    drained(thread)
    assert texts(triton_sender) == [b"all"]
    assert triton_sender.finals == 1


def test_an_answer_that_cannot_be_written_becomes_an_error(sender, triton_sender, thread, caplog):
    sender.answer({"TEXT": object()})
    drained(thread)
    assert triton_sender.outputs() == []
    assert triton_sender.error.message() == "the answer could not be written [omni:internal]"
    assert triton_sender.finals == 1
    assert "could not be written" in caplog.text

# SPDX-License-Identifier: Apache-2.0
"""Three real stages with fake engines: what they count, and that each request ends in exactly one way."""

import itertools
import threading
import time

import pytest

from fake_pb_utils import PbUtils, Request, text_tensor
from fakes import FakePreprocessor, FakeTalkerEngine, FakeThinkerEngine
from session_rig import finished, pipeline
from triton_omni.core import metrics
from triton_omni.core.settings import ThinkerSettings
from triton_omni.session.ledger_table import CLOSED
from triton_omni.session.outcome import RequestOutcome
from triton_omni.stub.adapter import adapt_thinker
from waiting import wait_for


def read(stage, name, **labels):
    """The sum of a stage's figures of this name with these labels."""
    return sum(f.value for f in stage.metrics() if f.name == name and labels.items() <= f.labels.items())


def outcomes(p):
    found = {
        f.labels["outcome"]: f.value for f in p.thinker.metrics() if f.name == "omni_requests_ended_total" and f.value
    }
    assert sum(found.values()) == read(p.thinker, "omni_requests_received_total")
    return found


def errors(p):
    named = (f for f in p.thinker.metrics() if f.name == "omni_errors_total")
    return {(f.labels["stage"], f.labels["code"]): f.value for f in named}


def settled(p):
    p.wait_until_empty()
    return outcomes(p)


def test_a_reply_is_finished_and_its_tokens_codes_sound_and_times_are_counted():
    thinker = FakeThinkerEngine()
    thinker.cached_tokens = 3
    with pipeline(thinker=thinker) as p:
        ensemble = p.ask("12345")
        reply = finished(ensemble)
        assert settled(p) == {"finished": 1}
        assert errors(p) == {}
        assert read(p.thinker, "omni_prompt_tokens_total") == 5
        assert read(p.thinker, "omni_cached_tokens_total") == 3
        assert read(p.thinker, "omni_reply_tokens_total") == p.engines[0].length
        assert read(p.talker, "omni_codes_total") == len(reply.samples) / 2 > 0
        assert read(p.token2wav, "omni_audio_seconds_total") == pytest.approx(len(reply.samples) / 24000)
        chunks = sum(len(response["audio_output"]) > 0 for response in reply.responses)
        assert read(p.token2wav, "omni_chunk_gap_seconds_count") == chunks - 1
        for name in ("omni_first_text_seconds", "omni_first_audio_seconds", "omni_reply_seconds"):
            assert read(p.token2wav, f"{name}_count") == 1
            assert 0 < read(p.token2wav, f"{name}_sum") < 5
        for stage in (p.thinker, p.talker, p.token2wav):
            assert read(stage, "omni_batch_size_count") == read(stage, "omni_batch_size_sum") > 0
            assert read(stage, "omni_leaked_sessions") == 0
            assert read(stage, "omni_resident_memory_bytes") > 1 << 20


def test_a_mix_of_all_endings_is_counted_once_each():
    engine = FakeThinkerEngine(length=4)
    has_sequences, goes_on = engine.has_work, threading.Event()
    engine.has_work = lambda: goes_on.is_set() and has_sequences()
    with pipeline(settings=ThinkerSettings(max_sessions=2), thinker=engine) as p:
        goes_on.set()
        for ask in ("12345", "bad"):
            finished(p.ask(ask))
        p.wait_until_empty()
        p.engines[2].fail_key = "any"
        finished(p.ask("12345"))
        p.engines[2].fail_key = None
        p.wait_until_empty()
        goes_on.clear()
        held = [p.ask("12345") for _ in range(2)]
        finished(p.ask("12345"))
        held[0].cancelled = True
        finished(held[0])
        goes_on.set()
        finished(held[1])
        ended = settled(p)
        assert ended == {"finished": 2, "refused": 2, "failed": 1, "cancelled": 1}
        assert errors(p) == {
            ("thinker", "bad_request"): 1,
            ("token2wav", "internal"): 1,
            ("thinker", "overloaded"): 1,
            ("thinker", "cancelled"): 1,
        }


def test_a_deadline_that_passes_is_timed_out_in_every_phase():
    with pipeline(
        settings=ThinkerSettings(max_sessions=4), preprocessor=FakePreprocessor(held=True, timeout_s=0.1)
    ) as p:
        finished(p.ask("12345"))
        assert settled(p) == {"timed_out": 1}
    with pipeline(settings=ThinkerSettings(max_sessions=4), preprocessor=FakePreprocessor(timeout_s=0.1)) as p:
        p.engines[0].step_s = 0.05
        finished(p.ask("12345"))
        assert settled(p) == {"timed_out": 1}
        assert errors(p) == {("thinker", "timeout"): 1}


def test_a_request_that_cannot_be_read_is_received_and_refused():
    with pipeline() as p:
        adapter_utils = PbUtils()
        adapter = adapt_thinker(adapter_utils, _NotStarted(p.thinker), p.ledgers[0])
        try:
            adapter.execute([Request([text_tensor("text_input", "a", "b")])])
            assert outcomes(p) == {"refused": 1}
        finally:
            for thread in adapter._threads:
                thread.close()
            adapter._metrics.close()


class _NotStarted:
    """The pipeline's stage, which runs already."""

    def __init__(self, stage):
        self._stage = stage

    def start(self):
        pass

    def __getattr__(self, name):
        return getattr(self._stage, name)


def test_sessions_are_told_by_state_and_their_credits(monkeypatch):
    with pipeline(talker=FakeTalkerEngine(), thinker=FakeThinkerEngine(length=6)) as p:
        has_rows, goes_on = p.engines[1].has_work, threading.Event()
        p.engines[1].has_work = lambda: goes_on.is_set() and has_rows()
        ensemble = p.ask("12345")
        states = ("preparing", "writing", "speaking", "closing")

        def now():
            return {state: read(p.thinker, "omni_sessions_by_state", state=state) for state in states}

        wait_for(lambda: now()["speaking"] == 1, message="never seen to speak")
        assert sum(now().values()) == 1
        goes_on.set()
        finished(ensemble)
        p.wait_until_empty()
        assert now() == dict.fromkeys(states, 0)
        assert read(p.thinker, "omni_credits_used") == read(p.talker, "omni_credits_used") == 0
        assert read(p.thinker, "omni_sessions_limit") == 8


def test_a_slot_without_a_session_and_a_session_that_is_over_are_leaks_after_a_while(monkeypatch):
    clock = itertools.count(0, metrics.LEAKED_AFTER_S)
    with pipeline() as p:
        finished(p.ask("12345"))
        p.wait_until_empty()
        key = p.thinker._slots.allocate()
        monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
        assert read(p.thinker, "omni_leaked_sessions") == 0
        assert read(p.thinker, "omni_leaked_sessions") == 1
        p.ledgers[0].write(key, CLOSED)
        p.thinker._slots.release(key)
        assert read(p.thinker, "omni_leaked_sessions") == 0


def test_who_answered_says_how_it_ended_and_an_earlier_session_of_the_slot_says_nothing():
    with pipeline() as p:
        thinker, _talker, token2wav = p.ledgers
        key = thinker.publish(3)
        assert thinker.outcome(key, "token2wav") is None
        token2wav.say_outcome(key, RequestOutcome("timeout", "thinker"))
        assert thinker.outcome(key, "token2wav") == RequestOutcome("timeout", "thinker")
        assert thinker.outcome(thinker.publish(3), "token2wav") is None
        thinker.set_deadline(key, time.monotonic_ns())

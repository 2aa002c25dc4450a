# SPDX-License-Identifier: Apache-2.0
"""The session protocol over real stages, threads and ledger, with engines and the ensemble replaced by doubles."""

import base64
import json
import threading
import time

import pytest
import torch

import session_rig
from fakes import (
    HIDDEN,
    FakePreprocessor,
    FakeTalkerEngine,
    FakeThinkerEngine,
    FakeWaveformEngine,
    talker_message,
    thinker_message,
)
from session_rig import DEADLINE_PASSED, finished, let_stages_wait, pass_deadlines, pipeline
from triton_omni.core.errors import BadRequest, InternalError, Overloaded
from triton_omni.core.settings import TalkerSettings, ThinkerSettings
from triton_omni.link.send_queue import CREDITS
from triton_omni.session.engine import PrefixKeys, Sampling
from triton_omni.session.ledger_table import CANCELLED, CONSUMED, DEVICE, EPOCH, PLACED, WANTED
from triton_omni.session.wire import Kind, MediaTokens, SessionKey, TalkerMessage
from triton_omni.token2wav.open_session import TextRelay
from waiting import FOREVER_S, IN_TIME_S, wait_for


@pytest.fixture(autouse=True, params=["messages", "ring"])
def way(request, monkeypatch):
    """The carrier of the reply's rows and codes from one stage to the next."""
    monkeypatch.setattr(session_rig, "BY_RING", request.param == "ring")
    let_stages_wait(monkeypatch)
    return request.param


by_messages = pytest.mark.parametrize("way", ["messages"], indirect=True)
by_ring = pytest.mark.parametrize("way", ["ring"], indirect=True)


def data_messages(ensemble):
    return [m for t in ensemble.to_talker if (m := thinker_message(t)).kind == Kind.DATA]


def wanted(p):
    """Codes that token2wav wants of the first session of all, up to the end of its next window; None = not yet open."""
    return p.ledgers[0].read(SessionKey(0, 1), WANTED, "token2wav")


def speak_window_by_window(p):
    """The talker speaks up to the end of the window that token2wav wants: codes of two never travel together."""
    talker = p.engines[1]
    has_rows = talker.has_work
    talker.has_work = lambda: has_rows() and max(state.spoken for state in talker.open_keys.values()) < (wanted(p) or 0)


def beats_behind_its_end(ensemble):
    messages = [thinker_message(tensors) for tensors in ensemble.to_talker]
    return any(message.last for message in messages) and messages[-1].kind == Kind.HEARTBEAT


def test_text_and_codes_arrive_whole_and_in_order():
    with pipeline() as p:
        reply = finished(p.ask("12345"))
        assert reply.text == "".join(f"w{i} " for i in range(10))
        expected = torch.arange(5, 14).repeat_interleave(2) / 1000  # rows of the reply tokens but the last
        assert torch.equal(reply.samples, expected)
        p.wait_until_empty()


def test_no_step_begins_while_another_stage_claims_the_device(monkeypatch):
    claimed = threading.Event()
    claimed.set()
    with pipeline() as p:
        for ledger in p.ledgers[:2]:
            monkeypatch.setattr(ledger, "device_claimed", claimed.is_set)
        ensemble = p.ask("12345")
        wait_for(lambda: bool(p.engines[0].open_keys))
        time.sleep(0.05)
        assert p.engines[0].steps == 0
        wait_for(lambda: "claim" in doings(p.thinker))
        assert "step" not in doings(p.thinker)
        claimed.clear()
        wait_for(lambda: p.engines[1].steps > 0)
        finished(ensemble)
        p.wait_until_empty()


def doings(stage):
    """Return the activities that a stage's loop has spent time on."""
    return {metric.labels["doing"] for metric in stage.metrics() if metric.name == "omni_loop_seconds_total"}


def test_a_claim_that_begins_behind_a_poll_holds_from_the_next_one_on(monkeypatch):
    with pipeline() as p:
        for stage, ledger in zip((p.thinker, p.talker), p.ledgers[:2], strict=True):
            claimed = threading.Event()

            def poll(poll=stage.poll, claimed=claimed):
                claimed.clear()
                delay = poll()
                claimed.set()
                return delay

            monkeypatch.setattr(ledger, "device_claimed", claimed.is_set)
            monkeypatch.setattr(stage, "poll", poll)
        finished(p.ask("12345"))
        assert p.engines[0].steps > 0
        p.wait_until_empty()


def test_what_was_begun_before_a_claim_is_taken_during_it(monkeypatch):
    """A row that waited for the end of a claim would be late for the window that the claim is for."""
    thinker = FakeThinkerEngine(length=300)
    thinker.step_s = 0.001
    with pipeline(thinker=thinker) as p:
        ensemble = p.ask("12345")
        wait_for(lambda: p.engines[1].steps > 0)
        for ledger in p.ledgers[:2]:
            monkeypatch.setattr(ledger, "device_claimed", lambda: True)
        wait_for(lambda: thinker.paused and p.engines[1].paused)
        steps = thinker.steps
        # One is under way: it is taken, and no other follows.
        monkeypatch.setattr(thinker, "has_work", lambda: thinker.steps == steps)
        wait_for(lambda: thinker.steps == steps + 1)
        time.sleep(0.05)
        assert thinker.steps == steps + 1
        monkeypatch.undo()
        finished(ensemble)
        p.wait_until_empty()


def test_the_thinker_rests_while_the_first_window_is_on_its_way():
    """Its rows have left and their codes have not come: it begins no step, for a while."""
    waveform, thinker, talker = FakeWaveformEngine(), FakeThinkerEngine(length=40), FakeTalkerEngine()
    waveform.window = 5
    with pipeline(thinker=thinker, talker=talker, waveform=waveform) as p:
        rested = []
        pause, writes, speaks = thinker.pause, thinker.has_work, talker.has_work
        thinker.pause = lambda paused: (rested.append(thinker.steps) if paused else None, pause(paused))
        # It writes once token2wav has said what the window takes, and the codes come once it has rested.
        thinker.has_work = lambda: writes() and wanted(p) is not None
        talker.has_work = lambda: speaks() and bool(rested)
        reply = p.ask("12345")
        finished(reply)
        p.wait_until_empty()
        assert "pause" in doings(p.thinker)
    # The first five rows are those of the prompt's step and of five more.
    assert rested
    assert min(rested) >= 6


@by_messages
def test_the_prompt_s_rows_come_with_the_first_of_the_reply():
    """The talker begins with both, and a message of rows costs the link what a word alone does not."""
    thinker = FakeThinkerEngine(length=40)
    thinker.step_s = 0.003
    with pipeline(thinker=thinker) as p:
        ensemble = p.ask("12345")
        finished(ensemble)
        p.wait_until_empty()
    sent = [m for t in ensemble.to_talker if (m := thinker_message(t)).kind in (Kind.DATA, Kind.TEXT)]
    assert [(m.kind, m.text) for m in sent[:1]] == [(Kind.TEXT, "w0 ")], "the first word waits for no row"
    rows = [len(m.rows) for m in sent if m.rows is not None]
    assert rows[0] == 6, "five of the prompt and the reply's first"
    assert sum(rows) == 5 + 39


@by_messages
def test_only_the_first_and_the_last_rows_wait_for_no_interval(monkeypatch):
    monkeypatch.setattr("triton_omni.link.send_queue.MESSAGE_APART_NS", 3600 * 10**9)
    waveform, thinker = FakeWaveformEngine(), FakeThinkerEngine(length=40)
    waveform.window, thinker.step_s = 7, 0.002
    with pipeline(thinker=thinker, waveform=waveform) as p:
        ensemble = p.ask("12345")
        finished(ensemble)
        p.wait_until_empty()
    rows = [len(m.rows) for m in data_messages(ensemble) if m.rows is not None]
    assert rows == [5 + 1, 39 - 1], "the talker begins, the reply is over"


def test_token2wav_claims_the_device_while_listeners_wait_for_sound():
    waveform = FakeWaveformEngine()
    with pipeline(waveform=waveform) as p:
        assert not p.ledgers[0].device_claimed()
        waveform.wants_claim = True
        wait_for(p.ledgers[0].device_claimed)
        # It ends by itself, so that nothing stands still.
        finished(p.ask("12345"))
        waveform.wants_claim = False
        wait_for(lambda: not p.ledgers[0].device_claimed())


def test_thinker_and_talker_are_confined_while_token2wav_makes_windows():
    waveform = FakeWaveformEngine()
    with pipeline(waveform=waveform) as p:
        engines = p.engines[:2]
        for has_windows in (True, False, True):
            waveform.has_windows = has_windows
            wait_for(lambda wanted=has_windows: all(engine.confined is wanted for engine in engines))
        finished(p.ask("12345"))


def test_stages_of_other_devices_are_not_confined():
    waveform = FakeWaveformEngine()
    waveform.has_windows = True
    with pipeline(waveform=waveform) as p:
        wait_for(lambda: all(engine.confined for engine in p.engines[:2]))
        p.ledgers[2].set_word(DEVICE, 2, "token2wav")
        wait_for(lambda: not any(engine.confined for engine in p.engines[:2]))
        finished(p.ask("12345"))


def test_an_engine_that_failed_makes_no_windows():
    waveform = FakeWaveformEngine()
    waveform.has_windows = True
    with pipeline(waveform=waveform) as p:
        wait_for(lambda: p.engines[0].confined)
        waveform.broken = RuntimeError("no more")
        p.ask("12345")
        wait_for(lambda: not p.engines[0].confined)


def test_info_tells_reasons_counts_seed_and_times():
    thinker = FakeThinkerEngine()
    thinker.cached_tokens = 2
    with pipeline(thinker=thinker) as p:
        info = json.loads(finished(p.ask("12345")).info)
        assert info["finish_reason"] == {"thinker": "stop", "talker": "stop", "token2wav": "stop"}
        assert info["usage"] == {
            "prompt_tokens": 5,
            "prompt_tokens_details": {
                "text_tokens": 5,
                "audio_tokens": 0,
                "image_tokens": 0,
                "video_tokens": 0,
                "cached_tokens": 2,
            },
            "reply_tokens": 10,
            "codes": 9,
            "samples": 18,
            "clamped_codes": 0,
            "cached_tokens": {"thinker": 2, "talker": 0},
        }
        assert info["stop_string"] is None
        assert info["seed"] == 7
        assert 0 < info["time_to_first_text_ms"] <= info["stage_ms"]["token2wav"]["done"]
        assert 0 < info["time_to_first_audio_ms"] <= info["stage_ms"]["token2wav"]["done"]


def test_info_tells_what_the_prompt_is_made_of():
    media = MediaTokens(audio=1, image=2, video=3)
    with pipeline(preprocessor=FakePreprocessor(session={"media_tokens": media})) as p:
        usage = json.loads(finished(p.ask("1234567")).info)["usage"]
    assert usage["prompt_tokens_details"] == {
        "text_tokens": 1,
        "audio_tokens": 1,
        "image_tokens": 2,
        "video_tokens": 3,
        "cached_tokens": 0,
    }


def test_info_tells_which_stop_string_ended_the_reply():
    with pipeline(thinker=FakeThinkerEngine(stop_string="\n\n")) as p:
        info = json.loads(finished(p.ask("12345")).info)
        assert (info["finish_reason"]["thinker"], info["stop_string"]) == ("stop", "\n\n")


def test_a_requests_priority_reaches_both_engines():
    with pipeline(preprocessor=FakePreprocessor(session={"priority": -7})) as p:
        finished(p.ask("12345"))
        assert [engine.priorities for engine in p.engines[:2]] == [[-7], [-7]]


@by_messages
def test_the_time_of_rows_and_codes_on_their_way_is_kept_until_they_arrived_and_until_they_were_taken():
    with pipeline() as p:
        ensemble = p.ask("12345", transit_s=0.02)
        finished(ensemble)
        p.wait_until_empty()
        rows = [thinker_message(tensors).rows for tensors in ensemble.to_talker]
        codes = [talker_message(tensors).codes for tensors in ensemble.to_token2wav]
        for stage, sent in ((p.talker, rows), (p.token2wav, codes)):
            arrived, taken = stage.link_latency["arrived"], stage.link_latency["taken"]
            count = sum(tensor is not None for tensor in sent)
            assert arrived.count == taken.count == count > 0
            assert 0.02 * count <= arrived.total <= taken.total < IN_TIME_S * count


def links(stage):
    """Bytes that came by the ring."""
    return sum(f.value for f in stage.metrics() if f.labels.get("tensor") == "ring")


@by_ring
def test_the_reply_s_rows_and_all_codes_go_by_the_ring():
    """The prompt's rows come in a message, with the first of the reply, of which the talker is told so."""
    with pipeline(thinker=FakeThinkerEngine(length=60)) as p:
        ensemble = p.ask("12345")
        reply = finished(ensemble)
        p.wait_until_empty()
        assert torch.equal(reply.samples, torch.arange(5, 64).repeat_interleave(2) / 1000)
        assert [len(m.rows) for m in data_messages(ensemble) if m.rows is not None] == [5 + 1]
        assert not any(len(tensors["CODES"]) for tensors in ensemble.to_token2wav)
        assert [links(stage) for stage in (p.talker, p.token2wav)] == [58 * HIDDEN * 4, 59 * 4]
        for stage in (p.talker, p.token2wav):
            arrived, taken = stage.link_latency["arrived"], stage.link_latency["taken"]
            assert arrived.count == taken.count > 59 // 6
            assert 0 < arrived.total <= taken.total < IN_TIME_S


@by_ring
def test_what_a_step_gave_is_told_of_before_it_ends(monkeypatch):
    """Not at the next poll, which waits for the messages of the step."""
    for places in ("ROW_PLACES", "CODE_PLACES"):
        monkeypatch.setattr(session_rig, places, 64)
    rows, codes = [], []
    with pipeline(thinker=FakeThinkerEngine(length=30)) as p:

        def see(stage, ledger, counts, sessions):
            step = stage.step

            def seen():
                step()
                for queue, key in [(session.send_queue, session.key) for session in sessions.values()]:
                    if queue.placed and queue.announced == queue.given:
                        counts.append((queue.placed, ledger.count(key, PLACED, ledger.stage)))

            monkeypatch.setattr(stage, "step", seen)

        see(p.thinker, p.ledgers[0], rows, p.thinker._open)
        see(p.talker, p.ledgers[1], codes, p.talker._sessions.open)
        finished(p.ask())
        p.wait_until_empty()
    for counts in (rows, codes):
        assert counts
        assert all(left == known for left, known in counts)


@by_ring
def test_token2wav_is_told_of_codes_that_complete_a_window_and_of_the_last(monkeypatch):
    monkeypatch.setattr(session_rig, "CODE_PLACES", 512)
    waveform, fed = FakeWaveformEngine(), []
    waveform.window, feed = 24, waveform.feed
    waveform.feed = lambda key, codes: (fed.append(len(codes)), feed(key, codes))[1]
    with pipeline(thinker=FakeThinkerEngine(length=60), waveform=waveform) as p:
        speak_window_by_window(p)
        finished(p.ask())
        p.wait_until_empty()
    assert fed == [24, 24, 11]


@by_ring
def test_codes_that_complete_no_window_leave_before_their_places_run_out():
    """A reply that is made in one piece may be longer than a ring."""
    waveform, fed = FakeWaveformEngine(), []
    waveform.window = 10**6
    feed = waveform.feed
    waveform.feed = lambda key, codes: (fed.append(len(codes)), feed(key, codes))[1]
    with pipeline(thinker=FakeThinkerEngine(length=60), waveform=waveform) as p:
        assert len(finished(p.ask()).samples) == 2 * 59
        p.wait_until_empty()
    assert sum(fed) == 59
    assert max(fed) <= session_rig.CODE_PLACES


@by_ring
def test_rows_wait_for_places_and_none_is_lost():
    talker = FakeTalkerEngine()
    with pipeline(thinker=FakeThinkerEngine(length=100), talker=talker) as p:
        talker.settle = lambda: time.sleep(0.005)
        ensembles = [p.ask(str(n) * 3) for n in range(4)]
        for ensemble in ensembles:
            assert len(finished(ensemble).samples) == 2 * 99
        p.wait_until_empty()


@by_ring
def test_a_stage_that_offers_no_ring_gets_messages():
    with pipeline(rings=True) as p:
        p.ledgers[1].set_word(EPOCH, 2, "talker")
        wait_for(lambda: not p.thinker._sender.ring.has_places(SessionKey(0, 1)))
        ensemble = p.ask("12345")
        assert len(finished(ensemble).samples) == 2 * 9
        p.wait_until_empty()
        assert sum(len(m.rows) for m in data_messages(ensemble) if m.rows is not None) == 5 + 9


@by_ring
def test_a_ring_that_is_found_late_takes_over_in_mid_reply():
    waveform = FakeWaveformEngine()
    waveform.window = 4
    with pipeline(thinker=FakeThinkerEngine(length=60), waveform=waveform) as p:
        ring, sessions = p.talker._sender.ring, p.talker._sessions.open
        has_places = ring.has_places
        ring.has_places = lambda key: sessions[key.name].send_queue.messages >= 2 and has_places(key)
        ensemble = p.ask("12345")
        reply = finished(ensemble)
        p.wait_until_empty()
        assert torch.equal(reply.samples, torch.arange(5, 64).repeat_interleave(2) / 1000)
        in_messages = [len(codes) for tensors in ensemble.to_token2wav if len(codes := tensors["CODES"])]
        assert len(in_messages) == 2
        assert links(p.token2wav) == (59 - sum(in_messages)) * 4


@by_ring
def test_what_an_engine_does_not_take_of_a_ring_ends_its_session_alone(monkeypatch):
    talker = FakeTalkerEngine()
    feed, broken = talker.feed, []

    def refuse(key, rows):
        if key == "s0g1" and not broken and len(rows) < 6:
            broken.append(key)
            raise InternalError("no such row")
        feed(key, rows)

    talker.feed = refuse
    with pipeline(thinker=FakeThinkerEngine(length=60), talker=talker) as p:
        asked = [p.ask("12345") for _ in range(2)]
        assert "no such row" in finished(asked[0]).error.message
        assert len(finished(asked[1]).samples) == 2 * 59
        p.wait_until_empty()


NAMES = PrefixKeys(2, (b"1", b"2"))


@pytest.mark.parametrize("cached", [0, 2, 4, 5])
def test_rows_begin_where_the_talker_s_cache_ends(cached):
    talker = FakeTalkerEngine(cached=cached)
    with pipeline(
        preprocessor=FakePreprocessor(prefixes=NAMES), thinker=FakeThinkerEngine(length=12), talker=talker
    ) as p:
        ensemble = p.ask("12345")
        reply = finished(ensemble)
        p.wait_until_empty()
        told = {metric.name: metric.value for metric in p.talker.metrics()}
    assert told["omni_cached_tokens_total"] == cached
    assert talker.fed == [float(position) for position in range(cached, 16)]
    assert torch.equal(reply.samples, torch.arange(5, 16).repeat_interleave(2) / 1000)
    (opened,) = [m for t in ensemble.to_talker if (m := thinker_message(t)).kind == Kind.OPEN]
    assert opened.prefixes == NAMES
    (last,) = [m for t in ensemble.to_token2wav if (m := talker_message(t)).last]
    assert last.talker.cached_tokens == cached


@pytest.mark.parametrize("names", [None, NAMES])
@pytest.mark.parametrize("want_audio", [True, False])
def test_names_travel_with_spoken_requests_that_have_some(names, want_audio):
    with pipeline(preprocessor=FakePreprocessor(prefixes=names, session={"want_audio": want_audio})) as p:
        ensemble = p.ask("12345")
        finished(ensemble)
        p.wait_until_empty()
    (opened,) = [m for t in ensemble.to_talker if (m := thinker_message(t)).kind == Kind.OPEN]
    assert opened.prefixes == (names if want_audio else None)


def test_text_does_not_wait_for_the_talker_s_word_and_rows_do():
    thinker, talker = FakeThinkerEngine(length=12), FakeTalkerEngine(cached=4)
    opens = threading.Event()
    open_sequence = talker.open

    def open_late(*arguments, **named):
        assert opens.wait(IN_TIME_S)
        return open_sequence(*arguments, **named)

    talker.open = open_late
    with pipeline(preprocessor=FakePreprocessor(prefixes=NAMES), thinker=thinker, talker=talker) as p:
        ensemble = p.ask("12345")
        wait_for(lambda: any(thinker_message(tensors).text for tensors in list(ensemble.to_talker)))
        wait_for(lambda: not thinker.open_keys)
        assert not data_messages(ensemble)
        opens.set()
        assert len(finished(ensemble).samples) == 2 * 11
        p.wait_until_empty()
    assert talker.fed == [float(position) for position in range(4, 16)]


@pytest.mark.parametrize("want_audio", [True, False])
@pytest.mark.parametrize("cached", [0, 4])
def test_a_prompt_alone_goes_through_thinker_and_talker_and_says_nothing(want_audio, cached):
    thinker, talker, waveform = FakeThinkerEngine(length=2), FakeTalkerEngine(cached=cached), FakeWaveformEngine()
    preprocessor = FakePreprocessor(prefixes=NAMES, session={"want_audio": want_audio, "prefill_only": True})
    with pipeline(preprocessor=preprocessor, thinker=thinker, talker=talker, waveform=waveform) as p:
        reply = finished(p.ask("12345"))
        p.wait_until_empty()
    assert (reply.text, len(reply.samples), waveform.steps) == ("", 0, 0)
    info = json.loads(reply.info)
    reasons = {"thinker": "prefilled", "talker": "prefilled" if want_audio else None, "token2wav": None}
    assert info["finish_reason"] == reasons
    assert (info["usage"]["reply_tokens"], info["usage"]["codes"], info["usage"]["prompt_tokens"]) == (0, 0, 5)
    assert talker.fed == [float(position) for position in range(cached, 6)] * want_audio


@pytest.mark.parametrize("want_audio", [True, False])
def test_the_thinker_pauses_for_no_prompt_alone(want_audio):
    thinker = FakeThinkerEngine(length=10**6)
    thinker.step_s = 0.01
    preprocessor = FakePreprocessor(session={"want_audio": want_audio, "prefill_only": True})
    with pipeline(preprocessor=preprocessor, thinker=thinker) as p:
        ensemble = p.ask("12345")
        wait_for(lambda: thinker.open_keys)
        (session,) = p.thinker._open.values()
        assert session.first_window_ready_ns(p.ledgers[0], 9, 1) is None
        assert not session.is_read
        ensemble.cancelled = True
        p.wait_until_empty()


def test_audio_leaves_before_the_thinker_has_finished():
    engine = FakeThinkerEngine(length=10**9)
    engine.step_s = 0.001
    with pipeline(thinker=engine) as p:
        ensemble = p.ask()
        wait_for(lambda: len(ensemble.reply.samples) > 20)
        assert not ensemble.reply.done.is_set()
        engine.length = 0
        ensemble.cancelled = True
        finished(ensemble)


def test_speech_that_must_be_longer_than_the_talker_can_hold_is_refused():
    talker = Sampling(max_tokens=4096, min_tokens=101)
    with pipeline(
        preprocessor=FakePreprocessor(session={"talker": talker}), talker_settings=TalkerSettings(max_codes=100)
    ) as p:
        reply = finished(p.ask("12345"))
        assert "talker.min_tokens: 101 is over the 100 codes" in reply.error.message
        assert reply.error.code == "too_large"
        p.wait_until_empty()


def test_text_only_request_makes_no_row_no_code_and_no_talker_sequence():
    with pipeline(preprocessor=FakePreprocessor(session={"want_audio": False})) as p:
        ensemble = p.ask()
        reply = finished(ensemble)
        assert reply.text.endswith("w9 ")
        assert len(reply.samples) == 0
        assert data_messages(ensemble) == []
        assert json.loads(reply.info)["usage"]["codes"] == 0
        p.wait_until_empty()


def test_talker_that_stops_first_still_passes_all_text_on():
    thinker = FakeThinkerEngine(length=40)
    thinker.step_s = 0.001
    with pipeline(thinker=thinker, talker=FakeTalkerEngine(stop_after=3)) as p:
        reply = finished(p.ask())
        assert reply.text.endswith("w39 ")
        assert len(reply.samples) == 6
        p.wait_until_empty()


def test_at_most_two_data_messages_are_on_the_way():
    with pipeline() as p:
        key_sent = []
        original = p.talker.submit

        def slow_submit(tensors, sender):
            message = thinker_message(tensors)
            if message.kind == Kind.DATA:
                key_sent.append(len(key_sent) + 1 - p.ledgers[0].count(message.key, CONSUMED, "talker"))
                time.sleep(0.005)
            original(tensors, sender)

        p.talker.submit = slow_submit
        finished(p.ask())
        assert max(key_sent) <= CREDITS


@by_messages
def test_codes_leave_when_they_complete_a_window_and_at_the_end():
    waveform = FakeWaveformEngine()
    waveform.window = 24
    with pipeline(thinker=FakeThinkerEngine(length=60), waveform=waveform) as p:
        speak_window_by_window(p)
        ensemble = p.ask()
        reply = finished(ensemble)
        messages = [talker_message(tensors) for tensors in ensemble.to_token2wav]
        assert [len(m.codes) for m in messages if m.codes is not None] == [24, 24, 11]
        assert len(reply.samples) == 2 * 59


@by_messages
def test_rows_that_wait_for_credit_leave_together():
    thinker = FakeThinkerEngine(length=200)
    with pipeline(thinker=thinker) as p:
        original = p.talker.submit

        def slow_submit(tensors, sender):
            if thinker_message(tensors).kind == Kind.DATA:
                wait_for(lambda: not thinker.open_keys, message="the reply is not written")
            original(tensors, sender)

        p.talker.submit = slow_submit
        ensemble = p.ask()
        finished(ensemble)
        assert sum(len(m.rows) for m in data_messages(ensemble)) == len("a prompt") + 199
        assert len(data_messages(ensemble)) <= CREDITS + 1


def test_long_prompt_is_split_into_messages_of_bounded_size():
    with pipeline(settings=ThinkerSettings(max_sessions=2, rows_per_message=16)) as p:
        ensemble = p.ask("x" * 100)
        finished(ensemble)
        rows = [len(m.rows) for m in data_messages(ensemble)]
        assert max(rows) == 16
        assert rows[:6] == [16] * 6
        assert rows[6] >= 5, "the last four of the prompt wait for the reply's first"


@pytest.mark.parametrize("later", [False, True])
def test_refusal_before_open_reaches_the_client_and_frees_the_slot(later):
    with pipeline(preprocessor=FakePreprocessor(later=later)) as p:
        ensemble = p.ask("bad")
        reply = finished(ensemble)
        assert reply.error.to_text() == "text_input: is bad [omni:bad_request;stage=thinker]"
        assert [m for m in ensemble.to_talker if thinker_message(m).kind != Kind.HEARTBEAT] == []
        p.wait_until_empty()


def test_what_is_refused_at_once_sends_nothing_however_late_its_loop_hears_of_it(monkeypatch):
    with pipeline() as p:
        # However slow the test is, no heartbeat is due.
        patient = p.thinker._settings.model_copy(update={"heartbeat_ms": round(FOREVER_S * 1000)})
        monkeypatch.setattr(p.thinker, "_settings", patient)
        admit = p.thinker._post_admission
        monkeypatch.setattr(p.thinker, "_post_admission", lambda *given: (time.sleep(0.05), admit(*given)))
        ensemble = p.ask("bad")
        assert finished(ensemble).error.code == "bad_request"
        assert ensemble.to_talker == []


@pytest.mark.parametrize(("later", "first"), [(True, Kind.HEARTBEAT), (False, Kind.OPEN)])
def test_the_talker_has_a_request_of_each_session_before_the_engine_does(later, first):
    engine, asked = FakeThinkerEngine(), threading.Event()
    told = []

    def add(*args, add=engine.add_sequence, **kwargs):
        assert asked.wait(IN_TIME_S)
        told.append([thinker_message(tensors).kind for tensors in ensemble.to_talker])
        add(*args, **kwargs)

    engine.add_sequence = add
    with pipeline(thinker=engine, preprocessor=FakePreprocessor(later=later)) as p:
        ensemble = p.ask("12345")
        asked.set()
        assert finished(ensemble).error is None
        assert told[0][:1] in ([first], []), "nothing, or the first message, had reached the ensemble"
        assert thinker_message(ensemble.to_talker[0]).kind == first
        p.wait_until_empty()


def test_what_the_engine_refuses_of_an_open_session_reaches_the_client_through_it():
    engine = FakeThinkerEngine()

    def refuse(*args, **kwargs):
        raise BadRequest("thinker.temperature: is no number")

    engine.add_sequence = refuse
    with pipeline(thinker=engine) as p:
        reply = finished(p.ask("12345"))
        assert reply.error.to_text() == "thinker.temperature: is no number [omni:bad_request;stage=thinker]"
        p.wait_until_empty()


def test_refusal_after_heartbeats_waits_until_they_are_given_back():
    settings = ThinkerSettings(max_sessions=8, heartbeat_ms=10)
    with pipeline(settings=settings, preprocessor=FakePreprocessor(delay_s=0.115)) as p:
        ensemble = p.ask("bad", transit_s=0.05)
        reply = finished(ensemble)
        assert reply.error.to_text() == "text_input: is bad [omni:bad_request;stage=thinker]"
        assert ensemble.to_talker, "no heartbeat was sent"
        p.wait_until_empty()


def test_no_free_slot_is_refused_at_once_with_a_hint():
    engine = FakeThinkerEngine(length=10**9)
    engine.step_s = 0.001
    with pipeline(thinker=engine, settings=ThinkerSettings(max_sessions=2)) as p:
        busy = [p.ask(), p.ask()]
        reply = finished(p.ask())
        assert reply.error.to_text() == "all 2 sessions are in use [omni:overloaded;stage=thinker;retry_after_ms=250]"
        for ensemble in busy:
            ensemble.cancelled = True
            finished(ensemble)
        p.wait_until_empty()
        assert finished_after_reset(p, engine).error is None


def finished_after_reset(p, engine):
    engine.length = 3
    return finished(p.ask())


@pytest.mark.parametrize("moment", ["preparing", "generating", "after the thinker's end"])
def test_cancel_ends_all_stages_and_leaves_nothing(moment):
    thinker, talker = FakeThinkerEngine(length=10**9), FakeTalkerEngine()
    thinker.step_s = 0.001
    preprocessor = FakePreprocessor(held=moment == "preparing")
    if moment == "after the thinker's end":
        thinker.length, talker.step_s = 20, 0.2
    with pipeline(thinker=thinker, talker=talker, preprocessor=preprocessor) as p:
        ensemble = p.ask()
        if moment == "generating":
            wait_for(lambda: len(ensemble.reply.samples) > 4)
        elif moment == "after the thinker's end":
            wait_for(lambda: beats_behind_its_end(ensemble))
            assert not thinker.open_keys
        ensemble.cancelled = True
        reply = finished(ensemble)
        assert reply.error is None
        p.wait_until_empty()


@pytest.mark.parametrize("stage", ["thinker", "talker", "token2wav"])
def test_failure_of_one_session_reaches_its_client_alone(stage):
    engines = {"thinker": FakeThinkerEngine(), "talker": FakeTalkerEngine(), "waveform": FakeWaveformEngine()}
    faulty = engines["waveform" if stage == "token2wav" else stage]
    with pipeline(**engines) as p:
        faulty.fail_key = "any"
        reply = finished(p.ask())
        assert reply.error.code == "internal"
        assert f"stage={stage}" in reply.error.to_text()
        p.wait_until_empty()
        faulty.fail_key = None
        assert finished(p.ask()).error is None


@pytest.mark.parametrize(("why", "code"), [("refused", "bad_request"), ("any", "internal")])
def test_a_sequence_that_its_engine_gave_up_tells_whose_fault_it_was(why, code):
    engine = FakeThinkerEngine(length=10**9)
    with pipeline(thinker=engine) as p:
        ensemble = p.ask()
        wait_for(lambda: ensemble.reply.responses)
        engine.fail_key = why
        assert finished(ensemble).error.to_text() == f"non-finite row [omni:{code};stage=thinker]"
        p.wait_until_empty()


@pytest.mark.parametrize("stage", ["thinker", "talker", "token2wav"])
def test_error_waits_for_messages_that_are_still_on_their_way(stage):
    engine = FakeThinkerEngine(length=10**9)
    engine.step_s = 0.001
    with pipeline(thinker=engine) as p:
        faulty = p.engines[("thinker", "talker", "token2wav").index(stage)]
        ensemble = p.ask(transit_s=0.03)
        wait_for(lambda: len(ensemble.to_token2wav) > 3)
        faulty.fail_key = "any"
        assert isinstance(finished(ensemble).error, InternalError)
        p.wait_until_empty()


@pytest.mark.parametrize("stage", ["thinker", "talker", "token2wav"])
def test_dead_engine_fails_open_and_later_sessions(stage):
    engines = {"thinker": FakeThinkerEngine(), "talker": FakeTalkerEngine(), "waveform": FakeWaveformEngine()}
    with pipeline(**engines) as p:
        engines["waveform" if stage == "token2wav" else stage].broken = RuntimeError("device lost")
        for _ in range(2):
            reply = finished(p.ask())
            assert reply.error.to_text().endswith(f"[omni:internal;stage={stage}]")
            assert "RuntimeError" in reply.error.message
            assert "device lost" not in reply.error.message


def test_deadline_ends_the_session_with_a_timeout():
    engine = FakeThinkerEngine(length=10**9)
    engine.step_s = 0.001
    with pipeline(thinker=engine, preprocessor=FakePreprocessor(timeout_s=0.15)) as p:
        reply = finished(p.ask())
        assert reply.error.to_text() == "timeout: 0.15 s have passed [omni:timeout;stage=thinker]"
        p.wait_until_empty()


def test_deadline_that_passes_while_only_token2wav_works_is_a_timeout(monkeypatch):
    waveform = FakeWaveformEngine()
    # It steps on, and nothing comes of it.
    monkeypatch.setattr(waveform, "step", lambda: (waveform._begin_step(), [])[1])
    waveform.step_s = 0.01
    with pipeline(waveform=waveform) as p:
        ensemble = p.ask()
        wait_for(lambda: waveform.steps and ensemble.reply.text.endswith("w9 ") and not p.engines[1].open_keys)
        pass_deadlines(p)
        assert finished(ensemble).error.to_text() == DEADLINE_PASSED
        p.wait_until_empty()


def test_error_waits_for_a_stage_that_is_in_a_long_step(monkeypatch):
    monkeypatch.setattr("triton_omni.token2wav.stage.UPSTREAM_STOP_S", 0.1)
    thinker, waveform = FakeThinkerEngine(length=10**9), FakeWaveformEngine()
    thinker.step_s = 0.001
    with pipeline(thinker=thinker, waveform=waveform) as p:
        ensemble = p.ask()
        wait_for(lambda: ensemble.reply.responses)
        thinker.step_s = 0.6
        time.sleep(0.01)
        waveform.fail_key = "any"
        assert finished(ensemble).error.message == "non-finite waveform"
        p.wait_until_empty()


def test_one_reply_token_gives_text_and_empty_audio():
    with pipeline(thinker=FakeThinkerEngine(length=1)) as p:
        reply = finished(p.ask())
        assert reply.text == "w0 "
        assert len(reply.samples) == 0
        assert reply.error is None


def test_message_out_of_sequence_fails_the_session(monkeypatch):
    with pipeline(thinker=FakeThinkerEngine(length=500)) as p:
        original, dropped = p.talker.submit, []

        def lossy_submit(tensors, sender):
            message = thinker_message(tensors)
            if message.sequence == 2 and not dropped:
                dropped.append(message)
                sender.finish()
                return
            original(tensors, sender)

        p.talker.submit = lossy_submit
        ensemble = p.ask()
        wait_for(lambda: dropped and sum(not sender.finals for sender in ensemble.senders) == 1)
        # The lost message never comes back; token2wav waits for it no longer.
        monkeypatch.setattr("triton_omni.token2wav.stage.UPSTREAM_STOP_S", 0.1)
        reply = finished(ensemble)
        assert "came where 2 was due" in reply.error.message
        p.wait_until_empty()


def test_meta_of_another_protocol_version_is_refused():
    with pipeline() as p:
        ensemble = p.ask()
        finished(ensemble)
        tensors = dict(ensemble.to_token2wav[0])
        tensors["META"] = bytes([99]) + tensors["META"][1:]
        with pytest.raises(InternalError, match="protocol version 99"):
            talker_message(tensors)


@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
def test_encoded_audio_is_the_same_samples_also_where_its_texts_are_joined(audio_format):
    waveform = FakeWaveformEngine()
    waveform.at_once = 4  # so that no delay of another thread makes one response of it all
    with pipeline(preprocessor=FakePreprocessor(session={"audio_format": audio_format}), waveform=waveform) as p:
        reply = finished(p.ask("12345"))
        texts = [r["audio_base64"] for r in reply.responses if r["audio_base64"]]
        assert len(texts) > 1
        data = base64.b64decode(b"".join(texts), validate=True)
        assert data == b"".join(base64.b64decode(text, validate=True) for text in texts)
        if audio_format == "wav":
            assert data[:4] == b"RIFF"
            data = data[44:]
        samples = torch.frombuffer(bytearray(data), dtype=torch.int16)
        expected = (torch.arange(5, 14).repeat_interleave(2) / 1000 * 32767).round()
        assert torch.equal(samples.float(), expected)
        assert len(reply.samples) == 0


class StoppedWaveformEngine(FakeWaveformEngine):
    """Steps wait for `go`, from the first code on."""

    def __init__(self):
        super().__init__()
        self.stepping, self.go = threading.Event(), threading.Event()

    def step(self):
        self.stepping.set()
        assert self.go.wait(IN_TIME_S)
        return super().step()


def test_text_leaves_while_a_step_of_token2wav_runs():
    engine = StoppedWaveformEngine()
    with pipeline(waveform=engine) as p:
        ensemble = p.ask("12345")
        whole = "".join(f"w{i} " for i in range(10))
        assert engine.stepping.wait(IN_TIME_S)
        wait_for(lambda: ensemble.reply.text == whole)
        assert not ensemble.reply.done.is_set()
        before = len(ensemble.reply.responses)
        late = p.ask("12345")  # its OPEN, too, waits for the step
        wait_for(lambda: late.reply.text == whole)
        engine.go.set()
        for reply in (finished(ensemble), finished(late)):
            assert reply.text == whole
            assert len(reply.samples) == 18
            info = json.loads(reply.info)
            assert info["time_to_first_text_ms"] < info["time_to_first_audio_ms"]
        assert not any(r["text_output"] for r in ensemble.reply.responses[before:])
        p.wait_until_empty()
        assert not p.token2wav._relays


def relayed(*messages):
    """Return a relay's answers to messages with these sequence numbers and texts."""
    sender = RecordingSender()
    relay = TextRelay(sender, lambda: None)
    for sequence, text in messages:
        relay.forward(TalkerMessage(key=SessionKey(0, 1), kind=Kind.TEXT, sequence=sequence, text=text))
    return sender.texts, relay


class RecordingSender:
    def __init__(self):
        self.texts = []

    def send(self, tensors, ready=None, lost=None):
        del ready, lost
        self.texts.append(tensors["text_output"].decode())


def test_a_relay_answers_text_in_order_and_nothing_for_messages_without():
    texts, relay = relayed((1, "a"), (2, ""), (3, "b"))
    assert texts == ["a", "b"]
    assert 0 < relay.first_ns <= time.monotonic_ns()
    assert relayed((1, ""))[1].first_ns == 0


@pytest.mark.parametrize("sequence", [1, 3, 0])
def test_a_relay_stops_at_a_message_out_of_sequence(sequence):
    texts, _ = relayed((1, "a"), (sequence, "b"), (2, "c"), (3, "d"), (4, "e"))
    assert texts == ["a"]


def test_a_closed_relay_answers_nothing():
    texts, relay = relayed((1, "a"))
    relay.close()
    relay.forward(TalkerMessage(key=SessionKey(0, 1), kind=Kind.TEXT, sequence=2, text="b"))
    assert texts == ["a"]


def test_no_text_follows_a_failure_that_token2wav_holds_back():
    """The error waits for the other stages' finals; what they send meanwhile is not answered."""
    thinker = FakeThinkerEngine(length=10**9)
    thinker.step_s = 0.001
    waveform = FakeWaveformEngine()
    with pipeline(thinker=thinker, waveform=waveform) as p:
        ensemble = p.ask()
        wait_for(lambda: len(ensemble.reply.samples) > 4)
        relay = next(iter(p.token2wav._sessions.open.values())).relay
        waveform.fail_key = "any"
        reply = finished(ensemble)
        assert reply.error.code == "internal"
        assert not relay._open
        p.wait_until_empty()


def test_many_sessions_at_once_get_what_each_gets_alone():
    with pipeline(settings=ThinkerSettings(max_sessions=8)) as p:
        ensembles = [p.ask("x" * n) for n in range(1, 9)]
        for n, ensemble in enumerate(ensembles, start=1):
            reply = finished(ensemble)
            assert torch.equal(reply.samples, torch.arange(n, n + 9).repeat_interleave(2) / 1000)
        p.wait_until_empty()


def test_closing_a_stage_ends_its_sessions_with_an_error():
    engine = FakeThinkerEngine(length=10**9)
    engine.step_s = 0.001
    with pipeline(thinker=engine) as p:
        ensemble = p.ask()
        wait_for(lambda: ensemble.reply.responses)
        p.thinker.close()
        reply = finished(ensemble)
        assert reply.error.message == "the server is shutting down"


ENGINES = {"thinker": FakeThinkerEngine, "talker": FakeTalkerEngine, "token2wav": FakeWaveformEngine}
ARGUMENTS = {"thinker": "thinker", "talker": "talker", "token2wav": "waveform"}


@pytest.mark.parametrize("stage", ENGINES)
def test_engine_that_can_do_nothing_any_more_still_lets_every_session_end(stage, monkeypatch):
    """After a lost device not only steps fail, but all calls."""
    engine = ENGINES[stage]()
    with pipeline(**{ARGUMENTS[stage]: engine}) as p:

        def lost(*args, **kwargs):
            engine.broken = RuntimeError("device lost")
            raise engine.broken

        for call in ("step", "abort", "stats"):
            monkeypatch.setattr(engine, call, lost)
        for _ in range(2):
            reply = finished(p.ask())
            assert reply.error.to_text().endswith(f"[omni:internal;stage={stage}]")
        wait_for(lambda: all(s.stats().sessions == 0 for s in (p.thinker, p.talker, p.token2wav)))


@pytest.mark.parametrize("stage", ENGINES)
def test_sequence_that_the_engine_cannot_take_fails_alone(stage, monkeypatch):
    engine = ENGINES[stage]()
    with pipeline(**{ARGUMENTS[stage]: engine}) as p:
        with monkeypatch.context() as once:
            once.setattr(engine, "add_sequence" if stage == "thinker" else "open", lambda *args, **kwargs: {}["secret"])
            reply = finished(p.ask())
        assert reply.error.message == "handling a message failed: KeyError"
        assert reply.error.to_text().endswith(f"[omni:internal;stage={stage}]")
        assert finished(p.ask()).error is None
        p.wait_until_empty()


@pytest.mark.parametrize("stage", ["talker", "token2wav"])
def test_sequence_has_the_place_of_one_whose_client_went_during_the_last_step(stage, monkeypatch):
    engine, thinker, go = ENGINES[stage](), FakeThinkerEngine(length=10**9), threading.Event()
    thinker.step_s = 0.001
    open_sequence, step = engine.open, engine.step

    def open_one(key, *args, **kwargs):
        if engine.open_keys:
            raise Overloaded("one is enough", stage=stage)
        return open_sequence(key, *args, **kwargs)

    def step_long():
        assert go.wait(IN_TIME_S)
        return step()

    monkeypatch.setattr(engine, "open", open_one)
    with pipeline(thinker=thinker, **{ARGUMENTS[stage]: engine}) as p:
        gone = p.ask()
        wait_for(lambda: engine.open_keys)
        monkeypatch.setattr(engine, "step", step_long)
        thinker.length, gone.cancelled = 1, True
        key = thinker_message(gone.to_talker[0]).key
        wait_for(lambda: p.ledgers[0].has(key, CANCELLED))
        late = p.ask()
        wait_for(lambda: len(late.to_talker if stage == "talker" else late.to_token2wav) > 1)
        go.set()
        assert finished(late).error is None
        p.wait_until_empty()


def test_request_cancelled_before_its_turn_is_not_prepared():
    preprocessed, seen = [], threading.Event()

    class RequestPreprocessor(FakePreprocessor):
        def preprocess(self, raw, accepted_ns, take_timeout, is_wanted=None):
            preprocessed.append(raw.text_input)
            assert seen.wait(IN_TIME_S)
            return super().preprocess(raw, accepted_ns, take_timeout)

    settings = ThinkerSettings(max_sessions=8, preprocess_threads=1, heartbeat_ms=10)
    with pipeline(preprocessor=RequestPreprocessor(delay_s=0.01), settings=settings) as p:
        first, second = p.ask("first"), p.ask("second")
        wait_for(lambda: preprocessed and any(one.raw for one in p.thinker._open.values()))
        (waiting,) = [one for one in p.thinker._open.values() if one.raw]
        second.cancelled = True
        wait_for(lambda: waiting.raw is None)
        seen.set()
        finished(second)
        assert finished(first).error is None
        assert finished(p.ask("third")).error is None
        assert preprocessed == [b"first", b"third"]


def test_a_deadline_passes_while_a_request_is_prepared():
    is_still_wanted = []

    class RequestPreprocessor(FakePreprocessor):
        def preprocess(self, raw, accepted_ns, take_timeout, is_wanted=None):
            is_still_wanted.append(is_wanted)
            assert is_wanted()
            return super().preprocess(raw, accepted_ns, take_timeout)

    settings = ThinkerSettings(max_sessions=8, preprocess_threads=1, heartbeat_ms=10)
    with pipeline(preprocessor=RequestPreprocessor(held=True, timeout_s=0.1), settings=settings) as p:
        error = finished(p.ask()).error
        assert not is_still_wanted[0]()
        assert error.to_text() == "timeout: 0.1 s have passed [omni:timeout;stage=thinker]"
        p.wait_until_empty()


def test_error_that_is_lost_between_stages_still_reaches_the_client(monkeypatch):
    monkeypatch.setattr("triton_omni.token2wav.stage.UPSTREAM_STOP_S", 0.1)
    engine = FakeThinkerEngine(length=10**9)
    engine.step_s = 0.001
    with pipeline(thinker=engine) as p:
        original = p.token2wav.submit

        def lossy_submit(tensors, sender):
            if talker_message(tensors).kind == Kind.ERROR:
                sender.finish()
            else:
                original(tensors, sender)

        p.token2wav.submit = lossy_submit
        ensemble = p.ask()
        wait_for(lambda: ensemble.reply.responses)
        engine.fail_key = "any"
        reply = finished(ensemble)
        assert reply.error.message == "the stages before ended the session without an answer"
        p.wait_until_empty()


@pytest.mark.parametrize("stage", ENGINES)
def test_engine_is_closed_with_its_stage_unless_a_step_of_it_hangs(stage, monkeypatch):
    idle, stuck = ENGINES[stage](), ENGINES[stage]()
    for engine in (idle, stuck):
        with pipeline(**{ARGUMENTS[stage]: engine}) as p:
            if engine is stuck:
                monkeypatch.setattr(getattr(p, stage)._loop, "stop", lambda: False)
            getattr(p, stage).close()
            assert engine.closed == (engine is idle)
            monkeypatch.undo()

# SPDX-License-Identifier: Apache-2.0
"""A response that Triton refuses, for want of memory perhaps, ends the session with an error at its client, in the
protocol's order. No stream ends as if it were whole.
"""

import logging
import time

import pytest

from fakes import FakePreprocessor, FakeThinkerEngine, FakeWaveformEngine, talker_message, thinker_message
from session_rig import finished, let_stages_wait, pipeline
from triton_omni.core.errors import InternalError
from triton_omni.core.settings import TalkerSettings, ThinkerSettings
from triton_omni.session.engine import Sampling
from triton_omni.session.ledger_table import CLOSED
from triton_omni.session.outcome import OUTCOMES
from triton_omni.session.stage import refused_error
from triton_omni.session.wire import Kind
from waiting import wait_for

MESSAGES = {"talker": thinker_message, "token2wav": talker_message}
SENDERS = {"talker": "thinker", "token2wav": "talker", "client": "token2wav"}


@pytest.fixture(autouse=True)
def _waiting_stages(monkeypatch):
    """No error is answered because another stage did not stop for long."""
    let_stages_wait(monkeypatch)


class Refusal:
    """Refuses the first response to one receiver that matches, or, if it lasts, all from that one on."""

    def __init__(self, to, matches, *, lasting=False):
        self._to, self._matches, self._lasting = to, matches, lasting
        self.count = 0

    def __call__(self, to, tensors):
        if to != self._to or (self.count and not self._lasting):
            return False
        found = MESSAGES[to](tensors) if to in MESSAGES else tensors
        refused = self.count > 0 or bool(self._matches(found))
        self.count += refused
        return refused


def failed(p, refusal, **asked):
    """The error that a client gets where something is refused; nothing stays, and the next request is served."""
    reply = finished(p.ask(refuses=refusal, **asked))
    assert refusal.count, "nothing was refused"
    assert reply.error is not None, "the stream ended as if it were whole"
    assert reply.error.code == "internal"
    assert reply.info == ""
    p.wait_until_empty()
    assert finished(p.ask()).error is None
    return reply.error


class WaveformAtTheEnd(FakeWaveformEngine):
    """Gives all sound in one chunk, which is the last."""

    def has_work(self):
        return any(state.ended for state in self.open_keys.values())


class EngineThatTakesNothing(FakeThinkerEngine):
    """Fails a session as soon as it is open."""

    def add_sequence(self, *args, **kwargs):
        raise InternalError("no place")


# To the client.


@pytest.mark.parametrize("audio_format", ["f32", "wav"])
@pytest.mark.parametrize(
    "matches",
    [
        lambda answer: answer["text_output"] == b"w0 ",
        lambda answer: len(answer["audio_output"]) or answer["audio_base64"],
        lambda answer: answer["info"],
    ],
    ids=["text", "sound", "info"],
)
@pytest.mark.parametrize("transit_s", [0.0, 0.02])
def test_a_refused_response_to_the_client_ends_its_stream_with_an_error(matches, audio_format, transit_s):
    with pipeline(preprocessor=FakePreprocessor(session={"audio_format": audio_format})) as p:
        error = failed(p, Refusal("client", matches), transit_s=transit_s)
        assert error.to_text() == refused_error("token2wav").to_text()


@pytest.mark.parametrize("output", ["text_output", "audio_output"])
def test_a_long_reply_with_a_hole_does_not_go_on(output):
    thinker = FakeThinkerEngine(length=10**9)
    thinker.step_s = 0.001
    with pipeline(thinker=thinker) as p:
        reply = finished(p.ask(refuses=Refusal("client", lambda answer: len(answer[output]))))
        assert reply.error.to_text() == refused_error("token2wav").to_text()
        p.wait_until_empty()


def test_the_refusal_of_the_last_sound_is_seen_although_the_reply_is_over():
    with pipeline(waveform=WaveformAtTheEnd()) as p:
        error = failed(p, Refusal("client", lambda answer: len(answer["audio_output"])))
        assert error.to_text() == refused_error("token2wav").to_text()


def test_the_header_of_an_empty_wav_is_a_part_of_the_reply():
    preprocessor = FakePreprocessor(session={"audio_format": "wav"})
    with pipeline(preprocessor=preprocessor, thinker=FakeThinkerEngine(length=1)) as p:
        failed(p, Refusal("client", lambda answer: answer["audio_base64"]))


def test_a_refused_text_of_a_reply_without_sound_ends_it_with_an_error():
    with pipeline(preprocessor=FakePreprocessor(session={"want_audio": False})) as p:
        failed(p, Refusal("client", lambda answer: answer["text_output"]))


def test_a_stream_of_which_nothing_more_is_taken_still_ends():
    with pipeline() as p:
        failed(p, Refusal("client", lambda answer: answer["text_output"], lasting=True))


def test_others_go_on():
    with pipeline(thinker=FakeThinkerEngine(length=50)) as p:
        others = [p.ask() for _ in range(3)]
        refused = p.ask(refuses=Refusal("client", lambda answer: len(answer["audio_output"])))
        assert finished(refused).error.code == "internal"
        for other in others:
            reply = finished(other)
            assert reply.error is None
            assert len(reply.samples) == 2 * 49


def test_a_reply_whose_end_was_refused_is_told_once_and_as_failed(caplog):
    caplog.set_level(logging.INFO, "triton_omni")
    with pipeline() as p:
        finished(p.ask(refuses=Refusal("client", lambda answer: answer["info"])))
        p.wait_until_empty()
    ends = [record for record in caplog.records if getattr(record, "event", "") in {*OUTCOMES.values(), "finished"}]
    assert {(end.stage, end.event) for end in ends} == {(stage, "failed") for stage in SENDERS.values()}
    assert len(ends) == len(SENDERS)


def test_the_first_text_of_a_reply_whose_end_was_refused_is_counted_once():
    with pipeline() as p:
        assert finished(p.ask(refuses=Refusal("client", lambda answer: answer["info"]))).error is not None
        p.wait_until_empty()
        figures = {figure.name: figure.value for figure in p.token2wav.metrics()}
        assert figures["omni_first_text_seconds_count"] == 1


# From stage to stage.


@pytest.mark.parametrize("to", MESSAGES)
@pytest.mark.parametrize(
    "matches",
    [lambda message: message.text, lambda message: message.kind == Kind.DATA],
    ids=["text", "data"],
)
@pytest.mark.parametrize("transit_s", [0.0, 0.02])
def test_a_refused_message_ends_the_session_with_an_error(to, matches, transit_s):
    with pipeline() as p:
        # By its sender, or by the receiver of the next one.
        assert failed(p, Refusal(to, matches), transit_s=transit_s).stage in (to, SENDERS[to])


@pytest.mark.parametrize("to", MESSAGES)
@pytest.mark.parametrize("want_audio", [True, False])
def test_a_refused_last_message_ends_the_session_at_once_and_not_at_its_deadline(to, want_audio):
    with pipeline(preprocessor=FakePreprocessor(session={"want_audio": want_audio})) as p:
        error = failed(p, Refusal(to, lambda message: message.last))
        assert error.to_text() == refused_error(SENDERS[to]).to_text()


@pytest.mark.parametrize("to", MESSAGES)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("transit_s", [0.0, 0.02])
def test_a_client_whose_session_could_not_be_opened_is_told(to, lasting, later, transit_s):
    """Nobody later holds a request through which an error could reach it."""
    settings = ThinkerSettings(max_sessions=8, heartbeat_ms=10)
    preprocessor = FakePreprocessor(delay_s=0.05 if later else 0.0)
    with pipeline(preprocessor=preprocessor, settings=settings) as p:
        refusal = Refusal(to, lambda message: message.kind == Kind.OPEN, lasting=lasting)
        error = failed(p, refusal, transit_s=transit_s)
        assert error.to_text() == refused_error(SENDERS[to]).to_text()


@pytest.mark.parametrize("to", MESSAGES)
@pytest.mark.parametrize("sends_after_s", [None, 0.005])
def test_a_session_of_which_no_message_is_taken_any_more_still_ends_with_an_error(to, sends_after_s):
    """At once: no error can be on its way when all that left has come back."""
    with pipeline(thinker=FakeThinkerEngine(length=50)) as p:
        refusal = Refusal(to, lambda message: message.kind == Kind.DATA, lasting=True)
        error = failed(p, refusal, sends_after_s=sends_after_s)
        assert error.message == "the stages before ended the session without an answer"


@pytest.mark.parametrize("to", MESSAGES)
@pytest.mark.parametrize("want_audio", [True, False])
@pytest.mark.parametrize("sends_after_s", [None, 0.02])
def test_a_session_that_could_not_be_opened_and_fails_by_itself_meanwhile_is_told(to, want_audio, sends_after_s):
    """Its error is on its way to where nobody has heard of it."""
    engine, preprocessor = EngineThatTakesNothing(), FakePreprocessor(session={"want_audio": want_audio})
    with pipeline(thinker=engine, preprocessor=preprocessor) as p:
        refusal = Refusal(to, lambda message: message.kind == Kind.OPEN)
        reply = finished(p.ask(refuses=refusal, transit_s=0.02, sends_after_s=sends_after_s))
        assert refusal.count == 1
        assert reply.error is not None, "the stream ended as if it were whole"
        p.wait_until_empty()


def test_a_session_that_the_talker_refuses_and_could_not_open_is_told():
    limits = TalkerSettings(max_codes=100)
    preprocessor = FakePreprocessor(session={"talker": Sampling(max_tokens=4096, min_tokens=101)})
    with pipeline(preprocessor=preprocessor, talker_settings=limits) as p:
        reply = finished(p.ask(refuses=Refusal("token2wav", lambda message: message.kind == Kind.OPEN)))
        assert reply.error.to_text() == refused_error("talker").to_text()
        p.wait_until_empty()


def test_a_stop_leaves_a_session_to_later_stages_that_were_told_of_its_end():
    with pipeline(thinker=EngineThatTakesNothing()) as p:
        p.talker._loop.stop()
        ensemble = p.ask()
        assert not ensemble.senders[0].finals, "nobody else could tell the client yet"
        p.thinker.close()
        assert ensemble.senders[0].finals == 1
        assert ensemble.reply.error is None


def test_a_session_is_left_to_later_stages_that_stand_still_for_long(monkeypatch):
    monkeypatch.setattr("triton_omni.thinker.open_session.FORGET_AFTER_S", 0.1)
    with pipeline(thinker=EngineThatTakesNothing()) as p:
        p.talker._loop.stop()
        ensemble = p.ask()
        assert not ensemble.senders[0].finals
        wait_for(lambda: ensemble.senders[0].finals)
        assert ensemble.reply.error is None


@pytest.mark.parametrize("stage", ["talker", "token2wav"])
def test_a_stage_says_how_much_it_sent_before_it_gives_its_own_request_back(stage, monkeypatch):
    """A stage that sees all its messages given back may then ask about those of that stage."""
    with pipeline() as p:
        ledger = getattr(p, stage)._ledger
        said = []

        def count_returned(key, count=ledger.count_returned):
            said.append(ledger.has(key, CLOSED, stage))
            count(key)

        monkeypatch.setattr(ledger, "count_returned", count_returned)
        finished(p.ask())
        p.wait_until_empty()
    assert said[-1]
    assert not any(said[:-1])


def test_a_client_is_no_direct_caller_because_heartbeats_were_refused(monkeypatch):
    monkeypatch.setattr("triton_omni.thinker.direct_calls.UNHEARD_FOR_S", 0.05)
    settings = ThinkerSettings(max_sessions=8, heartbeat_ms=10)
    with pipeline(preprocessor=FakePreprocessor(delay_s=0.3), settings=settings) as p:
        begun = time.monotonic()
        reply = finished(p.ask(refuses=lambda to, tensors: to == "talker" and time.monotonic() - begun < 0.25))
        assert reply.error is None
        p.wait_until_empty()


def test_a_refused_heartbeat_harms_nobody():
    settings, refusal = ThinkerSettings(max_sessions=8, heartbeat_ms=10), Refusal("talker", lambda message: True)
    with pipeline(preprocessor=FakePreprocessor(delay_s=0.05), settings=settings) as p:
        assert finished(p.ask(refuses=refusal)).error is None
        assert refusal.count == 1
        p.wait_until_empty()


def test_a_refusal_behind_a_refused_heartbeat_waits_for_those_alone_that_left():
    settings = ThinkerSettings(max_sessions=8, heartbeat_ms=10)
    with pipeline(preprocessor=FakePreprocessor(delay_s=0.05), settings=settings) as p:
        reply = finished(p.ask("bad", refuses=Refusal("talker", lambda message: True)))
        assert reply.error.message == "text_input: is bad"
        p.wait_until_empty()

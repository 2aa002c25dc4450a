# SPDX-License-Identifier: Apache-2.0
"""Sessions whose stage died: the other stages answer the client, keep nothing, and go on."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes import FakePreprocessor, FakeThinkerEngine, FakeWaveformEngine
from session_rig import DEADLINE_PASSED, finished, let_stages_wait, pass_deadlines, pipeline, stand_still
from triton_omni.core.errors import InternalError, Overloaded
from triton_omni.core.settings import ThinkerSettings
from triton_omni.session.ledger import StageFacts
from triton_omni.session.ledger_table import CLOSED, EPOCH, HELD, PID, wait_while_held
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.stage import RETRY_AFTER_RESTART_MS
from triton_omni.thinker.open_session import STILL_S
from waiting import FOREVER_S, IN_TIME_S, wait_for

STAGES = ("thinker", "talker", "token2wav")


@pytest.fixture(autouse=True)
def _waiting_stages(monkeypatch):
    """No other way than the one under test ends a session."""
    let_stages_wait(monkeypatch)


@contextlib.contextmanager
def watched(**options):
    """A pipeline and the supervisor's view of it."""
    with pipeline(**options) as p:
        board = StageBoard(p.ledgers[0].name)
        yield p, board
        board.close()


def test_faults_of_the_supervisor_are_in_the_metrics_of_every_stage():
    with watched() as (p, board):
        for _ in range(2):
            board.count_fault()
        for stage in STAGES:
            figures = {figure.name: figure.value for figure in getattr(p, stage).metrics()}
            assert figures["omni_supervisor_faults"] == 2


def kill(p, board, stage):
    """The stage does nothing more, and the others are told."""
    getattr(p, stage)._loop.stop()
    board.mark_lost(stage)


def others(stage):
    return [other for other in STAGES if other != stage]


def endless():
    engine = FakeThinkerEngine(length=1_000_000)
    engine.step_s = 0.002
    return engine


def assert_told(ensemble, stage):
    wait_for(lambda: ensemble.reply.error is not None, message="the client was told nothing")
    error = ensemble.reply.error
    assert isinstance(error, InternalError)
    assert (error.stage, error.retry_after_ms) == (stage, RETRY_AFTER_RESTART_MS)
    assert error.message.startswith(f"the process of {stage} ended unexpectedly")


@pytest.mark.parametrize("stage", STAGES)
def test_a_reply_is_failed_by_the_stages_that_are_left_and_kept_by_none(stage):
    with watched(thinker=endless()) as (p, board):
        ensembles = [p.ask("12345") for _ in range(3)]
        wait_for(lambda: all(len(ensemble.reply.responses) > 3 for ensemble in ensembles))
        assert board.open_sessions() == 3
        kill(p, board, stage)
        for ensemble in ensembles:
            assert_told(ensemble, stage)
        left = others(stage)
        wait_for(lambda: not any(getattr(p, other).stats().sessions for other in left))
        wait_for(lambda: not any(p.engines[STAGES.index(other)].open_keys for other in left))
        assert board.open_sessions() == 0


def test_a_request_that_is_being_prepared_when_the_thinker_dies_is_failed_by_the_talker():
    with watched(preprocessor=FakePreprocessor(held=True)) as (p, board):
        ensemble = p.ask("12345")
        wait_for(lambda: p.talker._unopened)
        kill(p, board, "thinker")
        assert_told(ensemble, "thinker")
        assert not p.talker._unopened


@pytest.mark.parametrize("stage", ["talker", "token2wav"])
def test_a_request_that_is_being_prepared_when_another_stage_dies_is_failed_by_the_thinker(stage):
    with watched(preprocessor=FakePreprocessor(held=True)) as (p, board):
        ensemble = p.ask("12345")
        kill(p, board, stage)
        assert_told(ensemble, stage)
        wait_for(lambda: p.thinker.stats().sessions == 0)


@pytest.mark.parametrize("stage", ["talker", "token2wav"])
def test_a_whole_reply_whose_last_request_a_stage_took_with_it_still_ends(stage):
    """The thinker's request is the last of the session to end, so that somebody is left to end the client's stream."""
    with watched() as (p, board):
        ledger = getattr(p, stage)._ledger
        write = ledger.write
        ledger.write = lambda key, field, count=0: write(key, field, count) if field is not CLOSED else None
        ensemble = p.ask("12345")
        wait_for(lambda: ensemble.reply.info, message="the reply is not whole")
        time.sleep(0.1)
        assert not ensemble.senders[0].finals
        kill(p, board, stage)
        assert_told(ensemble, stage)
        wait_for(lambda: p.thinker.stats().sessions == 0)


def hang(p, stage):
    """The stage stands still, for so long that it is taken to be in a long step, or to hang."""
    goes_on = stand_still(p, stage)
    wait_for(lambda: p.ledgers[0].silent_for(stage) > STILL_S)
    return goes_on


@pytest.mark.parametrize("stage", STAGES)
def test_a_session_that_a_hanging_stage_keeps_beyond_its_deadline_is_seen_and_told_when_that_is_ended(stage):
    with watched(thinker=endless()) as (p, board):
        ensemble = p.ask("12345")
        wait_for(lambda: ensemble.reply.responses)
        goes_on = hang(p, stage)
        assert not board.holds_overdue(stage)
        pass_deadlines(p)
        wait_for(lambda: board.holds_overdue(stage))
        time.sleep(0.1)
        assert ensemble.reply.error is None
        board.mark_lost(stage)
        assert_told(ensemble, stage)
        wait_for(lambda: not board.holds_overdue(stage))
        goes_on.set()


@pytest.mark.parametrize("stage", ["talker", "token2wav"])
def test_a_deadline_that_passes_while_a_stage_stands_still_is_told_when_it_goes_on(stage):
    with watched(thinker=endless()) as (p, board):
        ensemble = p.ask("12345")
        wait_for(lambda: ensemble.reply.responses)
        goes_on = hang(p, stage)
        pass_deadlines(p)
        wait_for(lambda: board.holds_overdue(stage))
        time.sleep(0.1)
        goes_on.set()
        assert finished(ensemble).error.to_text() == DEADLINE_PASSED
        p.wait_until_empty()
        assert not any(board.holds_overdue(other) for other in STAGES)


def test_a_thinker_that_hangs_when_a_request_comes_is_known_to_keep_it_beyond_its_own_deadline():
    with watched(preprocessor=FakePreprocessor(timeout_s=0.2)) as (p, board):
        goes_on = stand_still(p, "thinker")
        ensemble = p.ask("12345")
        wait_for(lambda: board.holds_overdue("thinker"))
        board.mark_lost("thinker")
        assert_told(ensemble, "thinker")
        goes_on.set()


def test_the_talker_holds_one_heartbeat_of_a_request_until_it_opens():
    preprocessor = FakePreprocessor(held=True)
    with watched(preprocessor=preprocessor, settings=ThinkerSettings(heartbeat_ms=20)) as (p, _):
        ensemble = p.ask("12345")
        wait_for(lambda: sum(bool(sender.finals) for sender in ensemble.senders[1:]) > 4)
        assert not ensemble.reply.done.is_set(), "heartbeats are given back before the session opens"
        assert len(p.talker._unopened) <= 1
        preprocessor.goes_on.set()
        finished(ensemble)
        assert not p.talker._unopened


def test_a_refusal_of_a_stage_that_died_meanwhile_is_told_all_the_same():
    """The talker gives the heartbeat back no more for which a refusal waits."""
    with watched(preprocessor=FakePreprocessor(later=True)) as (p, board):
        p.talker._loop.stop()
        ensemble = p.ask("bad")
        time.sleep(0.05)
        assert ensemble.reply.error is None
        board.mark_lost("talker")
        wait_for(lambda: ensemble.reply.error is not None)
        assert ensemble.reply.error.message == "text_input: is bad"


def test_while_a_stage_is_missing_requests_are_refused_and_served_when_it_is_back():
    with watched() as (p, board):
        board.mark_lost("token2wav")
        error = finished(p.ask("12345")).error
        assert isinstance(error, Overloaded)
        assert (error.stage, error.retry_after_ms) == ("token2wav", RETRY_AFTER_RESTART_MS)
        assert p.thinker.stats().sessions == 0
        p.ledgers[2]._register(StageFacts(1))
        assert finished(p.ask("12345")).error is None


def test_a_message_of_a_lost_session_that_comes_late_is_failed():
    with watched(thinker=endless()) as (p, board):
        submit, is_lost = p.talker.submit, threading.Event()
        p.talker.submit = lambda *message: (is_lost.wait(IN_TIME_S), submit(*message))
        ensemble = p.ask("12345")
        board.mark_lost("thinker")
        is_lost.set()
        assert_told(ensemble, "thinker")
        assert p.talker.stats().sessions == 0


def test_a_session_of_the_thinker_started_again_is_another_one_in_the_same_slot():
    with watched(thinker=endless()) as (p, board):
        ensemble = p.ask("12345")
        wait_for(lambda: len(ensemble.reply.responses) > 3)
        board.mark_lost("thinker")
        assert_told(ensemble, "thinker")
        p.ledgers[0]._register(StageFacts(1))
        key = p.ledgers[0].publish(0)
        assert key.generation == 2
        assert p.ledgers[1].lost_stages(key) == []
        assert board.open_sessions() == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_whose_engine_failed_says_so_once_its_sessions_know(stage):
    with watched(waveform=FakeWaveformEngine(), thinker=endless()) as (p, board):
        ensemble = p.ask("12345")
        wait_for(lambda: len(ensemble.reply.responses) > 3)
        assert not any(board.is_broken(any_stage) for any_stage in STAGES)
        p.engines[STAGES.index(stage)].broken = RuntimeError("lost")
        assert f"the engine of {stage} failed" in finished(ensemble).error.message
        wait_for(lambda: board.is_broken(stage))
        assert not any(board.is_broken(other) for other in others(stage))
        p.ledgers[STAGES.index(stage)]._register(StageFacts(1))
        assert not board.is_broken(stage)


def test_a_stop_answers_a_refusal_that_still_waits_for_the_talker():
    with watched(preprocessor=FakePreprocessor(later=True)) as (p, _):
        p.talker._loop.stop()
        ensemble = p.ask("bad")
        time.sleep(0.05)
        assert ensemble.reply.error is None
        p.thinker.close()
        assert ensemble.reply.error.message == "text_input: is bad"


def test_the_board_follows_the_table():
    with watched() as (p, board):
        assert [board.word(EPOCH, stage) for stage in STAGES] == [1, 1, 1]
        assert len({board.word(PID, stage) for stage in STAGES}) == 1
        assert board.silent_for("talker") < IN_TIME_S
        p.thinker._loop.stop()
        time.sleep(0.1)
        assert board.silent_for("thinker") >= 0.1
    with pytest.raises(FileNotFoundError):
        StageBoard("triton-omni-of-nobody")


def test_a_new_process_waits_while_it_is_held():
    with watched() as (p, board), ThreadPoolExecutor(3) as pool:
        name = p.ledgers[0].name
        board.set_word(HELD, True, "talker")
        held = pool.submit(wait_while_held, name, "talker", FOREVER_S)
        for stage, seconds in (("thinker", FOREVER_S), ("talker", 0.05)):
            pool.submit(wait_while_held, name, stage, seconds).result(IN_TIME_S)
        assert not held.done()
        board.set_word(HELD, False, "talker")
        held.result(IN_TIME_S)
    wait_while_held("triton-omni-of-nobody", "talker", FOREVER_S)

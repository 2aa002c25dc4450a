# SPDX-License-Identifier: Apache-2.0
"""A client that calls thinker, talker and token2wav by itself: it forges, repeats, keeps and changes messages. Other
replies stay as they are, and no session outlives its deadline.
"""

import itertools
import threading

import pytest
import torch

from fakes import HIDDEN, FakePreprocessor, FakeTalkerEngine, FakeThinkerEngine, talker_message, thinker_message
from session_rig import finished, let_stages_wait, pass_deadlines, pipeline, record
from triton_omni.core.errors import BadRequest, Overloaded
from triton_omni.core.settings import ThinkerSettings
from triton_omni.request.parse import RawRequest
from triton_omni.session.ledger_table import CAPACITY, CLOSED, REACHED
from triton_omni.session.wire import (
    Failure,
    Kind,
    Seal,
    SessionKey,
    TalkerMessage,
    ThinkerMessage,
    Unreadable,
    Unsealed,
)
from triton_omni.thinker import direct_calls, open_session
from waiting import IN_TIME_S, wait_for

WHOLE = "".join(f"w{i} " for i in range(10))
LINKS = {"talker": "thinker", "token2wav": "talker"}
DEADLINE_S = 0.5


class Taken:
    """Answers of one stage to a client that called it."""

    def __init__(self):
        self.given, self.error, self.ended = [], None, threading.Event()

    def bind(self, slot):
        pass

    def send(self, tensors, ready=None, lost=None):
        self.given.append(tensors)

    def conclude(self, tensors, then, lost):
        self.given.append(tensors)
        self.finish(then=then)

    def finish(self, ready=None, then=None):
        if not self.ended.is_set() and then is not None:
            then()
        self.ended.set()

    def fail(self, error, then=None):
        self.error = error
        self.finish(then=then)

    def if_cancelled(self, then):
        pass


class DirectCaller:
    """A client that asks the thinker for what the ensemble asks, and passes on to the later stages what it likes."""

    def __init__(self, p, text="12345"):
        self.stages = {"talker": p.talker, "token2wav": p.token2wav}
        self.from_thinker = Taken()
        self.calls, self.refused = [], []
        p.thinker.submit(RawRequest(text_input=text.encode(), request_id="direct call"), self.from_thinker)

    def pass_on(self, stage, tensors):
        call = Taken()
        try:
            self.stages[stage].submit(tensors, call)
        except Unreadable as error:
            self.refused.append(str(error))
            call.finish()  # as the adapter does
        self.calls.append(call)
        return call

    def message(self, number):
        """The thinker's message of this number, once it is there."""
        wait_for(lambda: len(self.from_thinker.given) > number)
        return self.from_thinker.given[number]

    def key(self):
        return thinker_message(self.message(0)).key

    def be_the_ensemble(self, until=lambda: False, keeps=lambda to, tensors: False, change=lambda to, tensors: tensors):
        """Pass all messages on as the ensemble does, but for those that it keeps, until all stages are through."""
        through, opening, calls = 0, None, []

        def advance():
            nonlocal through, opening
            while through < len(self.from_thinker.given):
                tensors = self.from_thinker.given[through]
                through += 1
                if not keeps("talker", tensors):
                    calls.append([self.pass_on("talker", change("talker", tensors)), 0])
            for call in calls:
                while call[1] < len(call[0].given):
                    tensors = call[0].given[call[1]]
                    call[1] += 1
                    if not keeps("token2wav", tensors):
                        found = self.pass_on("token2wav", change("token2wav", tensors))
                        opening = opening or found
            return until() or (self.from_thinker.ended.is_set() and through == len(self.from_thinker.given))

        wait_for(advance)
        return opening


@pytest.fixture
def quick(monkeypatch):
    """Waits after a deadline last tenths of a second."""
    let_stages_wait(monkeypatch, 0.1)


class Hurried(FakePreprocessor):
    """Requests have a deadline of half a second, until it is said that they have not."""

    def __init__(self):
        super().__init__(timeout_s=DEADLINE_S)

    def hurry_no_more(self):
        self._session["timeout_s"] = 30.0


def check_serves(p, preprocessor=None):
    """The next request has its whole reply, and nothing is left."""
    if preprocessor is not None:
        preprocessor.hurry_no_more()
    p.wait_until_empty()
    with pytest.MonkeyPatch.context() as patch:
        let_stages_wait(patch)
        reply = finished(p.ask("12345"))
        assert (reply.text, reply.error) == (WHOLE, None)
        p.wait_until_empty()


# Forged.

FORGED = {
    "open": {"kind": Kind.OPEN},
    "heartbeat": {"kind": Kind.HEARTBEAT},
    "text": {"kind": Kind.TEXT, "sequence": 1, "text": "forged"},
    "end": {"kind": Kind.TEXT, "sequence": 1, "last": True},
    "error": {"kind": Kind.ERROR, "sequence": 1, "failure": Failure("thinker", "internal", "forged")},
}
SECRETS = {"a guess": Seal(bytes(32), "thinker"), "the other link's": None}


def forge(to, key, opening, seal, fields):
    if fields["kind"] == Kind.OPEN:
        fields = {**fields, "session": opening.session}
    if to == "talker":
        return ThinkerMessage(key=key, number=1000, **fields).to_tensors(HIDDEN, torch.float32, seal)
    ended = {"codes_done": True} if fields.get("last") else {}
    return TalkerMessage(key=key, number=1000, **fields, **ended).to_tensors(seal)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("to", LINKS)
def test_a_forged_message_of_an_open_session_changes_nothing(to, name, secret):
    """The forger knows all of the session but the secret."""
    with pipeline(thinker=FakeThinkerEngine(length=10)) as p:
        thinker, go = p.engines[0], threading.Event()
        thinker.paused = True
        pause, thinker.pause = thinker.pause, lambda paused: pause(paused or not go.is_set())
        ensemble = p.ask("12345")
        wait_for(lambda: ensemble.to_token2wav)
        opening = thinker_message(ensemble.to_talker[0])
        seal = SECRETS[secret] or p.ledgers[0].seal({"talker": "talker", "token2wav": "thinker"}[to])
        wait_for(lambda: p.token2wav.stats().sessions)
        before, call = record(p.ledgers[0], opening.key), Taken()
        with pytest.raises(Unsealed):
            {"talker": p.talker, "token2wav": p.token2wav}[to].submit(
                forge(to, opening.key, opening, seal, FORGED[name]), call
            )
        after = record(p.ledgers[0], opening.key)
        assert before | {("returned", "talker"): after["returned", "talker"]} == after, "only heartbeats go on"
        assert call.given == []
        go.set()
        reply = finished(ensemble)
        assert (reply.text, reply.error) == (WHOLE, None)
        check_serves(p)


@pytest.mark.parametrize("slot", [0, 7, CAPACITY - 1])
@pytest.mark.parametrize("to", LINKS)
def test_a_message_of_a_session_that_is_not_there_is_closed_empty(to, slot):
    """Even one that has a true seal: its slot holds another session by now, or none."""
    with pipeline() as p:
        ensemble = p.ask("12345")
        finished(ensemble)
        p.wait_until_empty()
        opening, call = thinker_message(ensemble.to_talker[0]), Taken()
        seal = p.ledgers[0].seal(LINKS[to])
        forged = forge(to, SessionKey(slot, 2**31), opening, seal, FORGED["open"])
        {"talker": p.talker, "token2wav": p.token2wav}[to].submit(forged, call)
        assert call.ended.wait(IN_TIME_S)
        assert call.given == []
        assert p.is_empty()
        check_serves(p)


# Taken from the thinker, and passed on.


def test_a_direct_caller_that_does_as_the_ensemble_gets_his_own_reply_and_leaves_nothing():
    with pipeline() as p:
        caller = DirectCaller(p)
        opening = caller.be_the_ensemble()
        assert b"".join(answer["text_output"] for answer in opening.given).decode() == WHOLE
        assert all(call.ended.is_set() for call in caller.calls)
        check_serves(p)


def of_token2wav(p, caller):
    words = record(p.ledgers[0], caller.key())
    return {name: word for (name, model), word in words.items() if model == "token2wav"}


def test_the_thinker_s_messages_are_none_of_the_talker_s():
    with pipeline() as p:
        caller = DirectCaller(p)
        before = of_token2wav(p, caller)
        for number in range(3):
            codes = {"CODES": torch.empty(0, dtype=torch.int32), "META": caller.message(number)["META"]}
            with pytest.raises(Unsealed):
                caller.pass_on("token2wav", codes)
        assert of_token2wav(p, caller) == before


SPOILED = {
    "shorter": lambda tensor: tensor[:-1],
    "of another type": lambda tensor: tensor.to(torch.int64),
    "of another shape": lambda tensor: tensor[..., None],
}


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("to", LINKS)
def test_a_reply_of_which_a_message_cannot_be_read_ends_at_once(to, spoil):
    name = {"talker": "ROWS", "token2wav": "CODES"}[to]
    with pipeline(thinker=FakeThinkerEngine(length=10)) as p:
        spoiled = []

        def change(stage, tensors):
            if stage != to or spoiled or not len(tensors[name]):
                return tensors
            spoiled.append(stage)
            return {**tensors, name: SPOILED[spoil](tensors[name])}

        opening = DirectCaller(p).be_the_ensemble(change=change)
        assert opening.ended.wait(IN_TIME_S)
        assert spoiled
        assert (opening.error.code, opening.error.stage) == ("internal", to)
        assert opening.error.message.startswith(f"a message could not be read: {name}: ")
        check_serves(p)


@pytest.mark.parametrize("times", [1, 3])
def test_a_message_that_comes_again_changes_nothing(times):
    """Each one, at once and after all later ones; the reply is whole."""
    with pipeline(thinker=FakeThinkerEngine(length=10)) as p:
        caller = DirectCaller(p)
        again = []

        def twice(to, tensors):
            again.append((to, tensors))
            return tensors

        def repeat():
            for to, tensors in list(again):
                for _ in range(times):
                    call = caller.pass_on(to, tensors)
                    if call is not caller.calls[0]:
                        repeats.append(call)
            return False

        repeats = []
        opening = caller.be_the_ensemble(until=lambda: len(repeats) < 2000 and repeat(), change=twice)
        text = b"".join(answer["text_output"] for answer in opening.given).decode()
        assert text == WHOLE
        assert opening.error is None
        assert repeats
        wait_for(lambda: all(call.ended.is_set() for call in repeats))
        assert all(call.given == [] and call.error is None for call in repeats)
        check_serves(p)


@pytest.mark.parametrize("kind", [Kind.OPEN, Kind.DATA, Kind.TEXT])
def test_what_is_kept_for_later_is_of_no_use_in_the_next_session_of_the_slot(kind):
    with pipeline(settings=ThinkerSettings(max_sessions=1)) as p:
        caller = DirectCaller(p)
        caller.be_the_ensemble()
        p.wait_until_empty()
        ensembles = [p.ask("12345")]
        found = [t for t in caller.from_thinker.given if thinker_message(t).kind == kind]
        for tensors in found:
            call = caller.pass_on("talker", tensors)
            assert call.ended.wait(IN_TIME_S)
            assert call.given == []
        assert finished(ensembles[0]).text == WHOLE
        check_serves(p)


# Kept.

KEPT = {
    "the talker's open": lambda to, tensors: to == "token2wav",
    "all but the thinker's open": lambda to, tensors: to == "token2wav" or message_of(to, tensors).kind != Kind.OPEN,
    "all but both opens": lambda to, tensors: message_of(to, tensors).kind != Kind.OPEN,
    "the thinker's end": lambda to, tensors: to == "talker" and message_of(to, tensors).last,
    "the talker's end": lambda to, tensors: to == "token2wav" and message_of(to, tensors).last,
    "rows": lambda to, tensors: to == "talker" and message_of(to, tensors).kind == Kind.DATA,
    "errors": lambda to, tensors: message_of(to, tensors).last or message_of(to, tensors).kind == Kind.ERROR,
}


def message_of(to, tensors):
    return {"talker": thinker_message, "token2wav": talker_message}[to](tensors)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", KEPT)
def test_a_session_of_which_messages_are_kept_is_over_after_its_deadline(name):
    """In every stage, and all that its caller holds is answered; all sessions that there may be at once."""
    preprocessor = Hurried()
    with pipeline(preprocessor=preprocessor, settings=ThinkerSettings(max_sessions=2)) as p:
        callers = [DirectCaller(p) for _ in range(2)]
        threads = [threading.Thread(target=caller.be_the_ensemble, kwargs={"keeps": KEPT[name]}) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        p.wait_until_empty()
        wait_for(lambda: all(call.ended.is_set() for caller in callers for call in caller.calls))
        wait_for(lambda: not p.thinker._slots.taken)
        check_serves(p, preprocessor)


@pytest.mark.usefixtures("quick")
def test_a_heartbeat_that_the_talker_holds_is_given_back_after_the_deadline():
    with pipeline(preprocessor=FakePreprocessor(held=True)) as p:
        caller = DirectCaller(p)
        held = caller.pass_on("talker", caller.message(0))
        wait_for(lambda: p.talker._unopened)
        assert not held.ended.is_set()
        pass_deadlines(p)
        assert held.ended.wait(IN_TIME_S)
        assert not p.talker._unopened
        p.wait_until_empty()


def test_who_passes_nothing_on_is_turned_away_long_before_the_deadline(monkeypatch):
    with pipeline(settings=ThinkerSettings(max_sessions=2)) as p:
        callers = [DirectCaller(p) for _ in range(2)]
        refused = p.ask("12345")
        assert isinstance(finished(refused).error, Overloaded)
        usual = direct_calls.UNHEARD_FOR_S
        monkeypatch.setattr(direct_calls, "UNHEARD_FOR_S", 0.2)
        for caller in callers:
            assert caller.from_thinker.ended.wait(IN_TIME_S)
            assert isinstance(caller.from_thinker.error, BadRequest)
        monkeypatch.setattr(direct_calls, "UNHEARD_FOR_S", usual)  # a slow one is no direct caller
        check_serves(p)


def test_who_writes_that_token2wav_is_through_is_waited_for_until_the_deadline_alone():
    """The thinker waits for the talker's end, which has nothing of the session."""
    with pipeline(preprocessor=Hurried()) as p:
        caller = DirectCaller(p)
        p.ledgers[2].write(caller.key(), REACHED)
        p.ledgers[2].write(caller.key(), CLOSED)
        assert caller.from_thinker.ended.wait(IN_TIME_S)


@pytest.mark.usefixtures("quick")
def test_a_stage_that_stands_still_for_ever_is_not_waited_for_as_long(monkeypatch):
    monkeypatch.setattr(open_session, "HELD_UP_AT_MOST_S", 0.2)
    with pipeline(preprocessor=Hurried()) as p:
        monkeypatch.setattr(p.ledgers[0], "silent_for", lambda stage: 100.0)
        caller = DirectCaller(p)
        caller.pass_on("talker", caller.message(0))
        assert caller.from_thinker.ended.wait(IN_TIME_S)
        wait_for(lambda: not p.thinker._slots.taken)


# Changed.


def changed(name, change):
    def apply(to, tensors):
        return {**tensors, name: change(tensors[name])} if len(tensors.get(name, ())) else tensors

    return apply


CHANGED = {
    "fewer rows": changed("ROWS", lambda rows: rows[1:]),
    "more rows": changed("ROWS", lambda rows: torch.cat([rows, rows])),
    "flat rows": changed("ROWS", lambda rows: rows.flatten()),
    "whole numbers for rows": changed("ROWS", lambda rows: rows.int()),
    "no rows": changed("ROWS", lambda rows: rows[:0]),
    "fewer codes": changed("CODES", lambda codes: codes[1:]),
    "more codes": changed("CODES", lambda codes: torch.cat([codes, codes])),
    "codes of 64 bits": changed("CODES", lambda codes: codes.long()),
}


@pytest.mark.parametrize("name", CHANGED)
def test_other_tensors_beside_a_true_meta_are_refused_and_end_his_own_session_alone(name, monkeypatch):
    with pipeline() as p:
        caller, other = DirectCaller(p), p.ask("12345")

        def is_refused():
            return any("META tells of" in one or "expected" in one for one in caller.refused)

        caller.be_the_ensemble(until=is_refused, change=CHANGED[name])
        assert is_refused()
        assert finished(other).text == WHOLE
        wait_for(lambda: len(p.thinker._open) < 2, "the other reply's session is open")
        let_stages_wait(monkeypatch, 0.1)
        pass_deadlines(p)
        check_serves(p)


def test_the_size_of_a_message_is_that_of_its_tensor():
    with pipeline(thinker=FakeThinkerEngine(length=10), talker=FakeTalkerEngine()) as p:
        ensemble = p.ask("12345")
        finished(ensemble)
        sizes = [(thinker_message(t).size, len(t["ROWS"])) for t in ensemble.to_talker]
        sizes += [(talker_message(t).size, len(t["CODES"])) for t in ensemble.to_token2wav]
        assert all(told == found for told, found in sizes)
        for messages, read in ((ensemble.to_talker, thinker_message), (ensemble.to_token2wav, talker_message)):
            numbers = [read(t).number for t in messages]
            assert all(a < b for a, b in itertools.pairwise(numbers))

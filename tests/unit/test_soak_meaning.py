# SPDX-License-Identifier: Apache-2.0
"""The soak's verdict on what replies mean: right ones have no fault, and each kind of wrong one has one."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from client_fakes import serve_grpc
from speaking_server import VOCABULARY, VOICES, SpeakingServer, ear, tones
from triton_omni_client.evaluate.words import agreement, words_of

ROOT = Path(__file__).parents[2]
REPLIES = 40


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(importlib.import_module("soak.meaning"), "recogniser", ear)
    return lambda name: importlib.import_module(f"soak.{name}")


@pytest.fixture
def ended(soak):
    """Right replies to questions whose words the recogniser knows; every third one survived its cancel."""
    plan, asking = soak("plan"), soak("asking")
    drawn = (plan.plan(number, 0, plan.Shares(malformed=0, hurried=0, known=1)) for number in itertools.count())
    pronounced = (planned for planned in drawn if set(words_of(planned.known.reply)) <= set(VOCABULARY))
    found = []
    for planned in itertools.islice(pronounced, REPLIES):
        text, speech = planned.known.reply, tones(planned.known.reply, planned.request.voice)
        reply = (text, len(speech))
        found.append(asking.Ended(planned, "finished", 0, 1, 0.2, reply, heard=text, told=len(speech), speech=speech))
    return found


@pytest.mark.parametrize(("fault", "lost"), [("", 0), ("lost chunk", 3)])
def test_what_a_server_says_is_kept_and_held_to_its_account(soak, ended, fault, lost):
    asking, judging = soak("asking"), soak("judging")
    with serve_grpc(SpeakingServer(fault=fault)) as server:
        asker = asking.Asker(server.url, "127.0.0.1:1")
        said = [each.planned for each in ended if each.planned.request.text.startswith("Say: ")][:9]
        answered = [asker.ask(dataclasses.replace(planned, way="grpc stream", fate="whole")) for planned in said]
        asker.close()
    assert [len(each.speech) for each in answered] == [each.reply[1] for each in answered]
    soaked = judging.Soaked(9, answered, [], [], {}, stop_s=2.0, seconds=9.0)
    assert sum("samples that the server sent" in text for text in judging.faults(soaked)) == lost


def faults(soak, ended):
    return list(soak("meaning").faults_of(soak("meaning").understood(ended)))


def changed(soak, ended, **changes):
    """The faults of a run whose fifth reply is another; its request's number is left out of them."""
    ended = [*ended[:4], dataclasses.replace(ended[4], **changes), *ended[5:]]
    begin = f"request {ended[4].planned.number} ({ended[4].planned.known.ask!r}, {ended[4].planned.request.voice}) "
    found = faults(soak, ended)
    assert all(fault.startswith(begin) for fault in found)
    return [fault.removeprefix(begin).partition(":")[0] for fault in found]


def another(ended):
    """The reply to another question in the same voice."""
    asked = ended[4].planned
    return next(
        found
        for found in ended
        if found.planned.request.voice == asked.request.voice and found.planned.known != asked.known
    )


def test_known_replies_differ_in_more_words_than_may_be_wrong(soak):
    replies = [words_of(question.reply) for question in soak("known").QUESTIONS]
    for one, other in itertools.permutations(replies, 2):
        assert agreement(one, other).errors > soak("meaning").TEXT_ERRORS * len(one), (one, other)


def test_known_questions_are_a_share_of_the_plan_in_both_voices_and_all_ways(soak):
    plan = soak("plan")
    drawn = [plan.plan(number, 0, plan.Shares(known=0.5)) for number in range(2000)]
    formed = [found for found in drawn if found.fate != "malformed"]
    known = [found for found in formed if found.known is not None]
    assert abs(len(known) / len(formed) - 0.5) < 0.05
    assert {found.request.text for found in known} == {question.ask for question in soak("known").QUESTIONS}
    assert set(Counter(found.request.voice for found in known)) == set(VOICES)
    assert {found.way for found in known} == set(plan.WAYS)
    keys = {(found.request.text, found.request.voice, found.request.seed) for found in known if found.fate == "whole"}
    assert len({found.reply_key for found in known if found.fate == "whole"}) == len(keys)


def test_right_replies_have_no_fault(soak, ended):
    assert faults(soak, ended) == []
    summary = soak("meaning").understood(ended).to_json()
    assert summary == {"replies": REPLIES, "heard": REPLIES, "text_errors_percent": 0, "word_errors_percent": 0}


def test_the_whole_reply_to_another_request_is_a_fault(soak, ended):
    other = another(ended)
    assert changed(soak, ended, reply=other.reply, speech=other.speech) == ["has another text"]


def test_the_speech_of_another_request_is_a_fault(soak, ended):
    assert changed(soak, ended, speech=another(ended).speech) == ["is spoken in other words"]


def test_a_swapped_voice_is_a_fault(soak, ended):
    (other,) = VOICES.keys() - {ended[4].planned.request.voice}
    assert changed(soak, ended, speech=tones(ended[4].reply[0], other)) == ["is in another voice"]


PIECE = slice(3840, 3840 + 7680)
"""Two spoken words."""


def test_speech_without_a_piece_or_with_one_twice_is_a_fault(soak, ended):
    speech = ended[4].speech
    for wrong in (np.delete(speech, PIECE), np.insert(speech, PIECE.stop, speech[PIECE])):
        share = len(wrong) / len(speech)
        assert changed(soak, ended, speech=wrong) == [f"is {share:.2f} times as long as usual"]


def test_a_silent_piece_is_a_fault(soak, ended):
    speech = ended[4].speech.copy()
    speech[PIECE] = 0
    (fault,) = changed(soak, ended, speech=speech)
    assert fault.startswith("is silent for 0.3")


@pytest.mark.parametrize("samples", [0, 48000])
def test_a_silent_reply_is_a_fault(soak, ended, samples):
    assert changed(soak, ended, speech=np.zeros(samples, np.float32)) == ["has no speech"]


def test_speech_that_is_a_little_wrong_in_all_replies_is_a_fault(soak, ended):
    def garbled(found):
        words = words_of(found.reply[0])
        said = " ".join([*words[: -len(words) // 3], *["red"] * (len(words) // 3)])
        return dataclasses.replace(found, speech=tones(said, found.planned.request.voice))

    found = faults(soak, [garbled(each) for each in ended])
    assert any("of the words of all replies were heard wrong" in fault for fault in found)


def test_a_run_without_a_reply_to_a_known_question_is_a_fault(soak, ended):
    plan = soak("plan")
    unknown = [dataclasses.replace(each, planned=plan.plan(3, 0, plan.Shares(malformed=0))) for each in ended]
    assert faults(soak, unknown) == ["no known question got a whole reply"]


def test_so_many_replies_are_heard_and_the_others_are_read(soak, ended, monkeypatch):
    monkeypatch.setattr(soak("meaning"), "HEARD", 10)
    assert soak("meaning").understood(ended).to_json()["heard"] == 10
    other = another(ended)
    at = next(at for at, each in enumerate(ended) if at % 4 and each.planned.known != other.planned.known)
    ended[at] = dataclasses.replace(ended[at], reply=other.reply)
    (fault,) = faults(soak, ended)
    assert f"request {ended[at].planned.number} " in fault

# SPDX-License-Identifier: Apache-2.0
"""The soak's verdict and plan, without a server: each kind of fault is found, and nothing else is one."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from pathlib import Path

import pytest

from triton_omni_client import BadRequest, Internal, OmniClientError, Overloaded

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
EXPECTED = {
    "whole": "finished",
    "slow": "finished",
    "cancelled": "cancelled",
    "malformed": "refused",
    "hurried": "timed out",
}


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: importlib.import_module(f"soak.{name}")


@pytest.fixture
def soaked(soak):
    """A run of 200 requests, one a second, in which all went well."""
    plan, asking, judging, watching = (soak(name) for name in ("plan", "asking", "judging", "watching"))
    ended = []
    for number in range(200):
        planned = plan.plan(number, 0, plan.Shares())
        outcome = EXPECTED[planned.fate]
        error = BadRequest("no") if outcome == "refused" else None
        reply = (planned.reply_key, 480) if outcome == "finished" else None
        first_audio_s = 0.2 if reply else None
        ended.append(asking.Ended(planned, outcome, number, number + 0.5, first_audio_s, reply, error))
    process = watching.Watched(
        "thinker", 7, list(range(200)), [500 * MIB + n % 3 * MIB for n in range(200)], [30] * 200
    )
    return judging.Soaked(200, ended, [], [process], {}, stop_s=2.0, seconds=200.0)


@pytest.fixture
def changed(soaked):
    """The same run with one request's end changed: the first of this fate."""

    def change(fate, **changes):
        ended = list(soaked.ended)
        at = next(at for at, found in enumerate(ended) if found.planned.fate == fate)
        ended[at] = dataclasses.replace(ended[at], **changes)
        return dataclasses.replace(soaked, ended=ended)

    return change


def test_a_run_in_which_all_went_well_has_no_fault(soak, soaked):
    assert soak("judging").faults(soaked) == []


def test_the_plan_depends_on_its_seed_alone_and_has_everything(soak):
    plan = soak("plan")
    drawn = [plan.plan(number, 3, plan.Shares()) for number in range(2000)]
    assert drawn == [plan.plan(number, 3, plan.Shares()) for number in range(2000)]
    assert drawn[:50] != [plan.plan(number, 4, plan.Shares()) for number in range(50)]
    fates, ways = Counter(found.fate for found in drawn), Counter(found.way for found in drawn)
    assert set(fates) == set(EXPECTED)
    assert abs(fates["cancelled"] / 2000 - 0.2) < 0.05
    assert set(ways) == set(plan.WAYS)
    assert {found.kind for found in drawn} == set(plan.KINDS) | set(plan.MALFORMED)
    assert all(found.way in plan.CANCELLABLE for found in drawn if found.fate == "cancelled")


def test_shares_of_one_fate_alone(soak):
    plan = soak("plan")
    shares = plan.Shares(cancelled=0, malformed=1, slow=0, hurried=0)
    assert {plan.plan(number, 0, shares).fate for number in range(100)} == {"malformed"}


def test_turns_of_conversations_are_a_share_of_what_is_well_formed(soak):
    plan = soak("plan")
    drawn = [plan.plan(number, 0, plan.Shares(cancelled=0.3, turns=0.5)) for number in range(2000)]
    formed = [found for found in drawn if found.fate != "malformed"]
    turns = [found for found in formed if found.is_turn]
    assert abs(len(turns) / len(formed) - 0.5) < 0.05
    assert {found.way for found in turns} == {"grpc stream"}
    assert abs(sum(found.fate == "cancelled" for found in turns) / len(turns) - 0.3) < 0.05
    assert {len(found.request.media) for found in turns} == {0, 1}


@pytest.mark.parametrize(
    ("outcome", "heard", "kept"),
    [
        ("finished", "Hi there.", ["user", "assistant"]),
        ("cancelled", "Hi", ["user", "assistant"]),
        ("cancelled", "", ["user"]),
        ("failed", "Hi", []),
        ("refused", "", []),
        ("timed out", "Hi", []),
    ],
)
def test_a_turn_has_all_turns_before_it_and_what_was_heard_of_them(soak, outcome, heard, kept):
    plan, asking, talk = (soak(name) for name in ("plan", "asking", "talk"))
    planned = [plan.plan(number, 0, plan.Shares(malformed=0, turns=1)) for number in range(2)]
    conversation = talk.Talk()
    first = conversation.follow(planned[0])
    conversation.hear(asking.Ended(first, outcome, 0, 1, heard=heard))
    second = conversation.follow(planned[1])
    *before, asked = second.request.messages
    assert [message["role"] for message in before] == kept
    assert [message["content"] for message in before[1:]] == [heard][: len(kept) - 1]
    assert asked == planned[1].request.messages[0]
    assert len(second.request.media) == len(planned[1].request.media) + len(first.request.media) * bool(kept)
    assert first.request.cache_salt == second.request.cache_salt


def test_a_long_conversation_is_followed_by_another_with_another_salt(soak):
    plan, asking, talk = (soak(name) for name in ("plan", "asking", "talk"))
    conversation, salts, lengths = talk.Talk(), set(), []
    for number in range(3 * talk.LONGEST):
        turn = conversation.follow(plan.plan(number, 0, plan.Shares(malformed=0, turns=1)))
        conversation.hear(asking.Ended(turn, "finished", 0, 1, heard="yes"))
        salts.add(turn.request.cache_salt)
        lengths.append(len(turn.request.messages))
    assert len(salts) == 6
    assert max(lengths) == talk.LONGEST - 1


def test_what_is_no_turn_stays_out_of_the_conversation(soak):
    plan, asking, talk = (soak(name) for name in ("plan", "asking", "talk"))
    conversation = talk.Talk()
    for number in range(20):
        planned = plan.plan(number, 0, plan.Shares())
        assert conversation.follow(planned) is planned
        conversation.hear(asking.Ended(planned, "finished", 0, 1, heard="yes"))
    (asked,) = conversation.follow(plan.plan(0, 0, plan.Shares(malformed=0, turns=1))).request.messages
    assert asked["role"] == "user"


def test_longer_replies_are_of_the_same_requests(soak):
    plan = soak("plan")
    for number in range(300):
        short, long = (plan.plan(number, 0, plan.Shares(), length) for length in (1, 10))
        assert (long.kind, long.way, long.fate) == (short.kind, short.way, short.fate)
        if short.fate == "whole":
            assert long.request.thinker["max_tokens"] == 10 * short.request.thinker["max_tokens"]
        assert long.wait_s == pytest.approx(short.wait_s * (10 if short.fate == "cancelled" else 1))


def test_malformed_requests_that_are_kept_share_their_bytes(soak):
    plan = soak("plan")
    first, second = (plan.MALFORMED["too long"]() for _ in range(2))
    assert first["text"] is second["text"]


def test_an_error_that_is_kept_keeps_nothing_of_its_request(soak):
    plan, asking = soak("plan"), soak("asking")
    asker = asking.Asker("127.0.0.1:1", "127.0.0.1:1")
    shares = plan.Shares(cancelled=0, malformed=1, slow=0, hurried=0)
    for way in plan.WAYS:
        planned = dataclasses.replace(plan.plan(0, 0, shares), way=way)
        error = asker.ask(planned).error
        assert isinstance(error, OmniClientError)
        assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
    asker.close()


def test_a_request_without_an_end_or_with_two_is_a_fault(soak, soaked):
    lost = dataclasses.replace(soaked, ended=[*soaked.ended[1:], soaked.ended[5]])
    assert soak("judging").faults(lost) == ["2 requests did not end exactly once: [0, 5]"]


def test_a_server_that_ended_and_a_stage_that_nobody_killed_are_faults(soak, soaked):
    found = soak("judging").faults(dataclasses.replace(soaked, gone="the server ended with code 134", deaths=1))
    assert found == [
        "the server did not live through the run: the server ended with code 134",
        "stages died 1 times, 0 of them killed by the run",
    ]


def test_a_request_that_was_never_answered_is_a_fault(soak, changed):
    found = soak("judging").faults(changed("hurried", began=0.0, ended=101.0))
    assert [fault.partition(" within")[0] for fault in found] == ["1 requests were not answered"]


@pytest.mark.parametrize(
    ("fate", "outcome", "error"),
    [
        ("whole", "failed", Internal("broken")),
        ("whole", "refused", Overloaded("all 64 sessions are in use")),
        ("whole", "cancelled", None),
        ("whole", "timed out", None),
        ("malformed", "finished", None),
        ("malformed", "refused", Overloaded("all 64 sessions are in use")),
        ("cancelled", "failed", Internal("broken")),
        ("hurried", "failed", Internal("broken")),
    ],
)
def test_an_end_that_a_request_must_not_have_is_a_fault(soak, changed, fate, outcome, error):
    (fault,) = soak("judging").faults(changed(fate, outcome=outcome, error=error, reply=None))
    assert f" {outcome} after 0.50 s: {error!r}" in fault


def test_where_more_is_asked_than_there_is_room_for_a_refusal_is_none(soak, changed):
    refused = changed("whole", outcome="refused", error=Overloaded("all 8 sessions are in use"), reply=None)
    assert soak("judging").faults(dataclasses.replace(refused, overload_expected=True)) == []


def test_while_a_stage_is_not_there_a_failure_is_none(soak, changed):
    judging = soak("judging")
    failed = changed("whole", outcome="failed", error=Internal("the process of talker ended"), reply=None)
    at = next(ended.began for ended in failed.ended if ended.outcome == "failed")
    assert judging.faults(dataclasses.replace(failed, kills=[judging.Kill("talker", at - 1, at + 9)])) == []
    assert judging.faults(dataclasses.replace(failed, kills=[judging.Kill("talker", at + 1, at + 9)]))


def test_another_reply_to_the_same_request_is_a_fault(soak, soaked):
    asked = Counter(ended.planned.reply_key for ended in soaked.ended if ended.reply)
    key = next(key for key, count in asked.items() if count > 1)
    last = [ended for ended in soaked.ended if ended.planned.reply_key == key and ended.reply][-1]
    other = [dataclasses.replace(ended, reply=("other", 1)) if ended is last else ended for ended in soaked.ended]
    differing = dataclasses.replace(soaked, ended=other)
    (fault,) = soak("judging").faults(differing)
    assert f"request {last.planned.number} got another reply" in fault
    # In half precision it may be another one among others.
    assert soak("judging").faults(dataclasses.replace(differing, exact=False)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"left": {"omni_sessions": 1.0}}, "something is left: {'omni_sessions': 1.0}"),
        ({"stop_s": 12.0}, "the server took 12.0 s to stop"),
    ],
)
def test_what_is_left_and_a_slow_stop_are_faults(soak, soaked, change, words):
    assert soak("judging").faults(dataclasses.replace(soaked, **change)) == [words]


def test_memory_that_grows_is_a_fault_and_memory_that_scatters_is_none(soak, soaked):
    judging, watching = soak("judging"), soak("watching")
    seconds = list(range(200))
    growing = watching.Watched("talker", 8, seconds, [(500 + n) * MIB for n in seconds], [30] * 200)
    scattered = watching.Watched("talker", 9, seconds, [(500 + 400 * (n % 2)) * MIB for n in seconds], [30] * 200)
    leaking = watching.Watched("talker", 10, seconds, [500 * MIB] * 200, [30 + n for n in seconds])
    found = judging.faults(dataclasses.replace(soaked, processes=[growing, scattered, leaking]))
    assert found == ["talker grew by 159 MiB in 159 s", "talker has 159 more files open at the end"]


def test_what_a_process_grows_by_until_a_killed_stage_is_back_is_no_fault(soak, soaked):
    judging, watching = soak("judging"), soak("watching")
    seconds = list(range(200))
    restarted = watching.Watched("talker", 8, seconds, [(500 + 5 * min(n, 100)) * MIB for n in seconds], [30] * 200)
    killed = dataclasses.replace(soaked, processes=[restarted], kills=[judging.Kill("talker", 90.0, 100.0)])
    assert judging.faults(killed) == []
    assert judging.faults(dataclasses.replace(killed, kills=[]))


def test_speech_that_begins_later_and_later_is_a_fault(soak, soaked):
    late = [
        dataclasses.replace(ended, first_audio_s=ended.first_audio_s and ended.began / 100) for ended in soaked.ended
    ]
    (fault,) = soak("judging").faults(dataclasses.replace(soaked, ended=late))
    assert fault.startswith("speech began after ")


@pytest.mark.parametrize(
    ("end_s", "expected"),
    [(0.45, []), (0.55, ["speech began after 200 ms at the start and after 550 ms at the end"])],
)
def test_speech_may_begin_twice_as_late_at_the_end_and_a_moment_more(soak, soaked, end_s, expected):
    ended = [
        dataclasses.replace(found, first_audio_s=found.first_audio_s and (0.2 if found.began < 100 else end_s))
        for found in soaked.ended
    ]
    assert soak("judging").faults(dataclasses.replace(soaked, ended=ended)) == expected


def test_replies_without_speech_say_nothing_of_when_it_begins(soak, soaked):
    ended = [
        dataclasses.replace(found, first_audio_s=None) if found.began < 66 and number % 8 else found
        for number, found in enumerate(soaked.ended)
    ]
    assert soak("judging").faults(dataclasses.replace(soaked, ended=ended)) == []


def test_a_line_needs_samples(soak):
    watching = soak("watching")
    assert watching.Growth.of(watching.Watched("talker", 8, [1.0], [MIB], [3])) is None

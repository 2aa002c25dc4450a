# SPDX-License-Identifier: Apache-2.0
"""Who called the thinker: a stranger is who is not heard of by a talker that is there, for long; nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton_omni.thinker.callers import UNHEARD_FOR_S, Caller, refusal

KEY: Any = "the key"
SECOND = 1_000_000_000


@dataclass
class Ledger:
    """What the talker has said."""

    back: int = 0
    taken: int = 0
    silent: float = 0.01

    def returned(self, key: Any, stage: str) -> int:
        assert (key, stage) == (KEY, "talker")
        return self.back

    def consumed(self, key: Any, stage: str) -> int:
        assert (key, stage) == (KEY, "talker")
        return self.taken

    def silent_for(self, stage: str) -> float:
        assert stage == "talker"
        return self.silent


def strangers(caller: Caller, ledger: Any, seconds: range, sent: int = 2) -> list[int]:
    """The seconds at which the caller is taken for a stranger."""
    return [at for at in seconds if caller.is_stranger(ledger, KEY, sent, (100 + at) * SECOND)]


def test_a_session_of_which_the_talker_never_hears_is_a_stranger_s() -> None:
    assert strangers(Caller(), Ledger(), range(24)) == [21, 22, 23]
    assert UNHEARD_FOR_S == 20


def test_one_message_taken_or_given_back_is_enough() -> None:
    for ledger in (Ledger(back=1), Ledger(taken=1)):
        caller = Caller()
        assert not caller.is_stranger(ledger, KEY, 2, 100 * SECOND)  # type: ignore[arg-type]
        # The words are another session's when the slot is.
        assert strangers(caller, Ledger(), range(60)) == []


def test_while_only_one_message_has_left_nothing_can_be_told() -> None:
    assert strangers(Caller(), Ledger(), range(60), sent=1) == []


def test_a_talker_in_a_long_step_is_waited_for() -> None:
    caller, ledger = Caller(), Ledger(silent=30.0)
    assert strangers(caller, ledger, range(60)) == []
    ledger.silent = 0.01
    assert strangers(caller, ledger, range(60, 81)) == []
    assert strangers(caller, ledger, range(81, 82)) == [81]


def test_the_answer_says_whom_to_ask() -> None:
    assert refusal("r1").to_text().startswith("thinker is a part of the model qwen2_5_omni and answers nobody else")

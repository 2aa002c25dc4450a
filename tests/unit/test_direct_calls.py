# SPDX-License-Identifier: Apache-2.0
"""Callers of the thinker: one is a direct caller only if a running talker hears nothing of its session for long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton_omni.session.ledger_table import REACHED, StampedField
from triton_omni.thinker.direct_calls import UNHEARD_FOR_S, Caller, refusal

KEY: Any = "the key"
SECOND = 1_000_000_000


@dataclass
class Ledger:
    """The talker's words in the ledger."""

    reached: bool = False
    silent: float = 0.01

    def has(self, key: Any, field: StampedField, stage: str) -> bool:
        assert (key, field, stage) == (KEY, REACHED, "talker")
        return self.reached

    def silent_for(self, stage: str) -> float:
        assert stage == "talker"
        return self.silent


def judged_direct(caller: Caller, ledger: Any, seconds: range, sent: int = 1) -> list[int]:
    """The seconds at which the caller is taken for a direct caller."""
    return [at for at in seconds if caller.is_direct(ledger, KEY, sent, (100 + at) * SECOND)]


def test_a_session_of_which_the_talker_never_hears_is_a_direct_call() -> None:
    assert judged_direct(Caller(), Ledger(), range(24)) == [21, 22, 23]
    assert UNHEARD_FOR_S == 20


def test_a_session_that_has_reached_the_talker_is_none_however_late_it_did() -> None:
    caller, ledger = Caller(), Ledger()
    assert judged_direct(caller, ledger, range(20)) == []
    ledger.reached = True
    assert judged_direct(caller, ledger, range(20, 100)) == []


def test_before_a_message_has_left_nothing_can_be_told() -> None:
    assert judged_direct(Caller(), Ledger(), range(60), sent=0) == []


def test_a_talker_that_stands_still_is_waited_for() -> None:
    caller, ledger = Caller(), Ledger(silent=30.0)
    assert judged_direct(caller, ledger, range(60)) == []
    ledger.silent = 0.01
    assert judged_direct(caller, ledger, range(60, 81)) == []
    assert judged_direct(caller, ledger, range(81, 82)) == [81]


def test_the_answer_says_whom_to_ask() -> None:
    assert (
        refusal("r1").to_text().startswith("thinker is a stage of the model qwen2_5_omni and cannot be called directly")
    )

# SPDX-License-Identifier: Apache-2.0
"""A schema is tried once for the callers of one salt, and its words are not kept."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest

from triton_omni.vllm_hooks.thinker import schema_trial
from triton_omni.vllm_hooks.thinker.schema_trial import KEPT, SchemaVerdicts, Verdict

USABLE, COSTLY = Verdict(), Verdict("it takes more than 2 s of CPU time", is_too_costly=True)
REFUSED = Verdict("Unimplemented keys: secret", ".secret")
SALTS = ("one's", "another's", None)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    verdicts = {"costly": COSTLY, "refused": REFUSED}

    def try_schemas(schemas: Sequence[str]) -> Verdict:
        found.extend(schemas)
        return verdicts.get(schemas[0], USABLE)

    monkeypatch.setattr(schema_trial, "try_schemas", try_schemas)
    return found


@pytest.mark.parametrize(("schema", "verdict"), [("usable", USABLE), ("costly", COSTLY)])
def test_a_schema_is_tried_once_for_each_salt_and_once_for_all_without(
    tried: list[str], schema: str, verdict: Verdict
) -> None:
    verdicts = SchemaVerdicts()
    for _ in range(3):
        assert [verdicts.of([schema], salt) for salt in SALTS] == [verdict] * len(SALTS)
    assert tried == [schema] * len(SALTS)


def test_a_verdict_that_quotes_the_schema_is_not_kept(tried: list[str]) -> None:
    verdicts = SchemaVerdicts()
    assert verdicts.of(["refused"]) == verdicts.of(["refused"]) == REFUSED
    assert tried == ["refused"] * 2


def test_neither_schema_nor_salt_is_kept(tried: list[str]) -> None:
    verdicts = SchemaVerdicts()
    verdicts.of(["what the schema says"], "what the salt says")
    kept = vars(verdicts) | {"_lock": None}
    assert len(kept["_verdicts"]) == 1
    assert b"says" not in pickle.dumps(kept)


def test_the_schema_that_was_asked_for_last_is_kept(tried: list[str]) -> None:
    verdicts = SchemaVerdicts()
    for number in range(KEPT + 1):
        verdicts.of([str(number)])
        verdicts.of(["0"])
    tried.clear()
    verdicts.of(["0"])
    assert not tried
    verdicts.of(["1"])
    assert tried == ["1"]

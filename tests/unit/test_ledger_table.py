# SPDX-License-Identifier: Apache-2.0
"""The ledger's declared fields: each has one writer, a meaning, a place of its own, and no value of another session."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from session_rig import finished, pipeline
from triton_omni.core.errors import StageName
from triton_omni.session import ledger_table
from triton_omni.session.ledger import Placed, SessionLedger
from triton_omni.session.ledger_table import (
    BY_MESSAGE,
    CAPACITY,
    COUNT_MASK,
    DEADLINE,
    FIELDS,
    PLACED_NS,
    RECORD_WORDS,
    STAGES,
    TABLE_WORDS,
    WATCHED,
    Field,
    StampedField,
    Writer,
)
from triton_omni.session.wire import SessionKey

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
STAMPED = [field for field in FIELDS if isinstance(field, StampedField)]
WORDS = [(field, model) for field in FIELDS for model in field.models]
each_field = pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
each_stamped = pytest.mark.parametrize("field", STAMPED, ids=lambda field: field.name)
each_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture
def ledgers() -> Iterator[dict[StageName, SessionLedger]]:
    name = f"triton-omni-test-{secrets.token_hex(8)}"
    made = {stage: SessionLedger(name, stage) for stage in STAGES}
    yield made
    for ledger in made.values():
        ledger.close()


def writers(field: Field, model: StageName | None) -> str:
    return str(model) if field.writer == "model" else field.writer


@each_field
def test_a_field_is_declared_once_with_one_writer_and_a_meaning(field: Field) -> None:
    assert vars(ledger_table)[field.name.upper()] is field
    assert [other.name for other in FIELDS].count(field.name) == 1
    assert field.writer in get_args(Writer)
    assert field.meaning.endswith((".", ").")), "a sentence"
    assert list(field.at) == list(field.models)
    assert set(field.models) in ({None}, set(STAGES), set(WATCHED), {"token2wav"}, {"unary"})
    # A word of the server or the session as a whole belongs to no model that could write it.
    assert (field.writer == "model") <= (None not in field.models)
    assert (field.writer == "thinker") == (field.per_session and None in field.models)


@each_stamped
def test_a_stamped_field_is_each_stage_s_own(field: StampedField) -> None:
    assert (field.writer, field.models, field.per_session, field.words) == ("model", STAGES, True, 1)


def test_fields_fill_the_table_and_none_lies_on_another() -> None:
    taken = [
        field.at[model] + word + slot * RECORD_WORDS
        for field, model in WORDS
        for slot in (range(CAPACITY) if field.per_session else (0,))
        for word in range(field.words)
    ]
    assert sorted(taken) == list(range(TABLE_WORDS))


@pytest.mark.parametrize(("field", "model"), WORDS, ids=lambda part: getattr(part, "name", str(part)))
def test_a_field_is_one_aligned_word_of_the_file(
    ledgers: dict[StageName, SessionLedger], field: Field, model: StageName | None
) -> None:
    ledger, slot = ledgers["thinker"], CAPACITY - 1 if field.per_session else 0
    before = ledger.path.read_bytes()
    assert len(before) == 8 * TABLE_WORDS
    ledger.set_word(field, 2**64 - 1, model, slot)
    assert ledger.word(field, model, slot) == 2**64 - 1
    after = ledger.path.read_bytes()
    changed = {at // 8 for at in range(len(before)) if before[at] != after[at]}
    assert changed == {field.at[model] + slot * RECORD_WORDS}


def found(
    ledger: SessionLedger, key: SessionKey, field: StampedField, stage: StageName
) -> tuple[int | None, int, bool, bool]:
    """Everything that a key tells of a field."""
    of_stage = ledger.read(key, field, stage), ledger.count(key, field, stage), ledger.has(key, field, stage)
    return *of_stage, ledger.has(key, field)


@each_stamped
@each_stage
@pytest.mark.parametrize("slot", [0, 5, CAPACITY - 1])
def test_a_stale_key_neither_reads_nor_writes(
    ledgers: dict[StageName, SessionLedger], field: StampedField, stage: StageName, slot: int
) -> None:
    own, reader = ledgers[stage], ledgers["thinker"]
    old = reader.publish(slot)
    own.write(old, field, 3)
    new = reader.publish(slot)
    assert (reader.read(new, field, stage), reader.has(new, field, stage), reader.has(new, field)) == (
        None,
        False,
        False,
    )
    own.write(new, field, 4)
    assert (reader.read(old, field, stage), reader.has(old, field, stage), reader.has(old, field)) == (
        None,
        False,
        False,
    )
    own.write(old, field, 5)
    assert (reader.read(new, field, stage), reader.count(new, field, stage), reader.count(old, field, stage)) == (
        4,
        4,
        0,
    )


@each_stage
def test_a_stale_key_writes_no_field_that_has_no_stamp(
    ledgers: dict[StageName, SessionLedger], stage: StageName
) -> None:
    thinker, own = ledgers["thinker"], ledgers[stage]
    old, new = thinker.publish(5), thinker.publish(5)
    thinker.set_deadline(new, 11)
    own.place(new, Placed(9, 4, 77))
    thinker.set_deadline(old, 12)
    own.place(old, Placed(8, 3, 66))
    assert thinker.word(DEADLINE, slot=5) == 11
    assert (thinker.word(BY_MESSAGE, stage, 5), thinker.word(PLACED_NS, stage, 5)) == (4, 77)
    assert thinker.placing(new, stage) == Placed(9, 4, 77)
    assert thinker.placing(thinker.publish(5), stage).total == 0


@each_stamped
@pytest.mark.parametrize("count", [0, 1, COUNT_MASK, COUNT_MASK + 1, 2**63])
def test_a_count_never_reaches_its_stamp(
    ledgers: dict[StageName, SessionLedger], field: StampedField, count: int
) -> None:
    key = ledgers["thinker"].publish(0)
    ledgers["talker"].write(key, field, count)
    assert ledgers["thinker"].read(key, field, "talker") == min(count, COUNT_MASK)


class Recorded:
    """Words that note which of them were written."""

    def __init__(self, words: Any) -> None:
        self._words, self.written = words, set[int]()

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.written.add(at)
        self._words[at] = value

    def release(self) -> None:
        self._words.release()


def field_at(position: int) -> tuple[Field, StageName | None]:
    """The field of a word of slot 0, or of none."""
    return next((field, model) for field, model in WORDS if field.at[model] == position)


def test_stages_write_their_own_fields_alone() -> None:
    """Whole replies through the real stages."""
    with pipeline() as p:
        for ledger in p.ledgers:
            ledger._words = Recorded(ledger._words)
        for text in ("12345", "1", "123"):
            assert finished(p.ask(text)).error is None
        p.wait_until_empty()
        written = {ledger.stage: set(ledger._words.written) for ledger in p.ledgers}
    seen = set()
    first = min(field.at[model] for field, model in WORDS if field.per_session)
    for stage, positions in written.items():
        for at in positions:
            field, model = field_at(at if at < first else first + (at - first) % RECORD_WORDS)
            assert writers(field, model) == stage, f"{stage} wrote {field.name} of {model}"
            seen.add(field.name)
    assert {"beat", "generation", "deadline", "closed", "consumed", "returned", "reached", "wanted", "outcome"} <= seen


# The architecture document.

OWNERS = {
    (None,): "the server",
    STAGES: "each stage",
    WATCHED: "each model",
    ("token2wav",): "token2wav",
    ("unary",): "unary",
}
NAMED = {"maker": "its maker", "supervisor": "supervisor", "thinker": "thinker", "model": "that model"}


def row(field: Field) -> tuple[str, str, str]:
    """The words of a table's row that a field stands in: whose it is, its writer, and its stamp."""
    owner = OWNERS[field.models]
    if field.per_session:
        owner = "each session" if field.models == (None,) else f"each session, {owner}"
    return owner, NAMED[field.writer], "yes" if isinstance(field, StampedField) else "no"


def test_the_architecture_document_lists_every_field() -> None:
    lines = ARCHITECTURE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| one for | writer | stamped | fields |") + 2
    told = [line.strip("| ").split(" | ") for line in itertools.takewhile(str.strip, lines[start:])]
    declared: dict[tuple[str, str, str], list[str]] = {}
    for field in FIELDS:
        declared.setdefault(row(field), []).append(field.name)
    assert {tuple(cells): names.split(", ") for *cells, names in told} == declared

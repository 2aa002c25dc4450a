# SPDX-License-Identifier: Apache-2.0
"""Replies held to a JSON schema, on the tiny checkpoint: random weights write nothing of the kind by themselves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import pytest
import torch

from reference.hf import HfReference
from reference.thinker_rig import NOTHING_HELD, REPLY, ROW_TOLERANCE, Answer, ask, drain, engine_of, run
from triton_omni.core.errors import BadRequest
from triton_omni.core.metrics import LoopClock
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

QUESTION = "hello"
STEPS = 50
COLOUR = {"enum": ["red", "green", "blue"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "maximum": 99}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
    "nested": {
        "$defs": {"colour": COLOUR},
        "type": "object",
        "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/colour"}, "minItems": 2, "maxItems": 3}},
        "required": ["of"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{3}-[0-9]{2}$"},
    "choice": {"anyOf": [COLOUR, {"type": "boolean"}]},
    "special tokens as text": {"const": "a<|im_end|>\n<|im_start|><|IMAGE|>b"},
    "special tokens in a pattern": {"type": "string", "pattern": "^<\\|im_end\\|>x$"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["step by step", "scheduled ahead"])
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[Any]:
    with engine_of(tiny_checkpoint, ahead=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: Any) -> Iterator[None]:
    yield
    assert engine.stats() == NOTHING_HELD


@pytest.fixture(scope="module")
def plain(engine: Any, hf: HfReference) -> Answer:
    return run(engine, {"plain": ask(hf, QUESTION)})["plain"]


def held_to(schema: dict[str, Any], **options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 200, "json_schema": json.dumps(schema)} | options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_are_json_of_their_schemas_and_others_are_as_they_were(
    engine: Any, hf: HfReference, plain: Answer, temperature: float
) -> None:
    asked = {name: held_to(schema, temperature=temperature, seed=3) for name, schema in SCHEMAS.items()}
    asked |= {"free": REPLY, "behind": REPLY}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    for name, schema in SCHEMAS.items():
        assert answers[name].last.finish_reason == "stop", (name, answers[name].text)
        jsonschema.validate(json.loads(answers[name].text), schema)
    for name in ("free", "behind"):
        assert answers[name].token_ids == plain.token_ids
        torch.testing.assert_close(answers[name].rows, plain.rows, rtol=2e-5, atol=ROW_TOLERANCE)


def test_while_a_grammar_is_compiled_no_step_follows_the_other_at_once(
    engine: Any, hf: HfReference, monkeypatch: pytest.MonkeyPatch, clock: LoopClock
) -> None:
    from triton_omni.vllm_hooks.shared import incremental_schedule

    compiler, went_on, naps = engine._schemas.prepare(), threading.Event(), list[float]()
    compile_grammar = compiler.compile_grammar

    def compile_late(*arguments: Any, **named: Any) -> Any:
        went_on.wait()
        return compile_grammar(*arguments, **named)

    monkeypatch.setattr(compiler, "compile_grammar", compile_late)
    monkeypatch.setattr(incremental_schedule, "time", SimpleNamespace(sleep=naps.append))
    try:
        engine.add_sequence("late", engine.prepare(ask(hf, QUESTION)), held_to(COLOUR), want_rows=True)
        for _ in range(STEPS):
            assert engine.has_work()
            assert engine.step() == []
    finally:
        went_on.set()
    rested = tuple(naps)
    assert "input" in {metric.labels["doing"] for metric in clock.metrics()}
    assert json.loads(drain(engine, {"late": Answer()})["late"].text) in COLOUR["enum"]
    assert rested == (incremental_schedule.NAP_S,) * STEPS


def test_rows_are_those_of_the_tokens_that_the_schema_let_through(engine: Any, hf: HfReference) -> None:
    prompt = ask(hf, QUESTION)
    answer = run(engine, {"json": prompt}, held_to(SCHEMAS["nested"]))["json"]
    # The same tokens as a prompt, whose rows are HF's.
    written = ThinkerPrompt((*prompt.token_ids, *answer.token_ids[:-1]))
    expected = run(engine, {"prompt": written}, Sampling(max_tokens=1))["prompt"].rows
    torch.testing.assert_close(answer.rows, expected, rtol=2e-5, atol=ROW_TOLERANCE)


def test_a_seed_draws_the_same_json_alone_and_among_others(engine: Any, hf: HfReference) -> None:
    asked = {
        f"{name}/{seed}": held_to(SCHEMAS[name], temperature=1.0, seed=seed) for name in SCHEMAS for seed in (1, 2)
    }
    together = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    for key, sampling in asked.items():
        assert run(engine, {key: ask(hf, QUESTION)}, sampling)[key].token_ids == together[key].token_ids


def test_the_longest_reply_and_a_stop_string_may_cut_json(engine: Any, hf: HfReference) -> None:
    asked = {
        "whole": held_to(SCHEMAS["nested"]),
        "short": held_to(SCHEMAS["nested"], max_tokens=5),
        "stopped": held_to(SCHEMAS["nested"], stop=("[",)),
    }
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    assert [answers[key].last.finish_reason for key in asked] == ["stop", "length", "stop"]
    assert answers["short"].token_ids == answers["whole"].token_ids[:5]
    assert answers["stopped"].text == answers["whole"].text.partition("[")[0]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "bogus"}, r"\.type: .*Invalid type: bogus"),
        ({"$ref": "#/$defs/x"}, r"\.'\$ref': .*Pointer '/\$defs/x' does not exist"),
        ({"$ref": "http://example.org/x"}, r"\.'\$ref': .*is not present in a registry"),
        ({"type": "array", "contains": {"type": "string"}}, r'\.contains: .*Unimplemented keys: \["contains"\]'),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, r"\.allOf: .*Unsatisfiable schema"),
        ({"type": "string", "pattern": "("}, r"\.pattern: .*regex parse error"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_by_name_and_harms_nobody(
    engine: Any, hf: HfReference, plain: Answer, schema: dict[str, Any], said: str
) -> None:
    engine.add_sequence("free", engine.prepare(ask(hf, QUESTION)), REPLY, want_rows=True)
    answers = {"free": Answer(engine.step())}
    with pytest.raises(BadRequest, match=rf"thinker\.json_schema{said}"):
        engine.check_schema(json.dumps(schema))
    assert drain(engine, answers)["free"].token_ids == plain.token_ids


def test_a_schema_that_was_checked_is_not_checked_again_where_everybody_waits(
    engine: Any, hf: HfReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.structured_output import backend_guidance

    sampling = held_to(SCHEMAS["flat"])
    assert sampling.json_schema is not None
    engine.check_schema(sampling.json_schema)
    monkeypatch.setattr(backend_guidance, "validate_guidance_grammar", lambda *_, **__: pytest.fail("checked again"))
    answer = run(engine, {"json": ask(hf, QUESTION)}, sampling)["json"]
    jsonschema.validate(json.loads(answer.text), SCHEMAS["flat"])


def test_a_schema_that_nobody_checked_fails_its_sequence_alone(engine: Any, hf: HfReference, plain: Answer) -> None:
    asked = {"bad": held_to({"type": "bogus"}), "free": REPLY}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    assert answers["free"].token_ids == plain.token_ids
    assert answers["bad"].last.error


def test_schemas_are_checked_from_many_threads_at_once(engine: Any) -> None:
    good, bad = json.dumps(SCHEMAS["flat"]), json.dumps({"type": "bogus"})
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(engine.check_schema, bad if index % 2 else good) for index in range(64)]
    errors = [future.exception() for future in found]
    assert all(isinstance(error, BadRequest) if index % 2 else error is None for index, error in enumerate(errors))


def test_a_reply_whose_parser_gives_up_fails_alone(
    engine: Any, hf: HfReference, plain: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher: Any = llguidance.LLMatcher

    def small(*arguments: Any, **named: Any) -> Any:
        return matcher(*arguments, limits=llguidance.LLParserLimits(step_max_items=3), **named)

    small.grammar_from_json_schema = matcher.grammar_from_json_schema  # type: ignore[attr-defined]
    small.validate_grammar = matcher.validate_grammar  # type: ignore[attr-defined]
    monkeypatch.setattr(llguidance, "LLMatcher", small)
    asked = {"hard": held_to({"type": "array", "items": COLOUR, "minItems": 3}), "free": REPLY}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    assert answers["free"].token_ids == plain.token_ids
    assert answers["hard"].last.finish_reason is None
    assert "could not be held to it, give a simpler one: 'parser error: " in (answers["hard"].last.error or "")
    assert answers["hard"].last.is_refused

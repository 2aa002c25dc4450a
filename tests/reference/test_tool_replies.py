# SPDX-License-Identifier: Apache-2.0
"""Replies that call functions, on the tiny checkpoint: random weights call as soon as the grammar lets nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from reference.hf import HfReference
from reference.thinker_rig import (
    NOTHING_HELD,
    REPLY,
    ROW_TOLERANCE,
    Answer,
    ask,
    drain,
    engine_of,
    poisoned,
    run,
)
from triton_omni.core.errors import BadRequest
from triton_omni.session.engine import Function, Sampling, ThinkerPrompt, ToolRules
from triton_omni.vllm_hooks.thinker.tools import tool_grammar

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

QUESTION = "hello"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "hang_up": NOTHING}
FUNCTIONS = tuple(Function(name, json.dumps(schema)) for name, schema in SCHEMAS.items())
REQUIRED = ToolRules(FUNCTIONS, may_speak=False, max_calls=2)
MARK = "<tool_call>"


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


def calling(rules: ToolRules, **options: Any) -> Sampling:
    return Sampling(**{"max_tokens": 250, "tools": rules} | options)


def calls_of(answer: Answer) -> list[tuple[str, str]]:
    """Names and arguments; a call's first piece names it, and no other does."""
    found: list[tuple[str, str]] = []
    for piece in (piece for output in answer.outputs for piece in output.calls):
        assert (piece.id is None) == (piece.name is None) == (piece.index < len(found))
        if piece.name is not None:
            found.append((piece.name, ""))
        name, arguments = found[piece.index]
        found[piece.index] = (name, arguments + piece.arguments)
    return found


def assert_valid(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def prompt_rows(hf: HfReference) -> int:
    return len(hf.ask(QUESTION)["input_ids"][0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_calls_keep_to_their_schemas_have_no_rows_and_leave_the_others_as_they_were(
    engine: Any, hf: HfReference, plain: Answer, temperature: float
) -> None:
    rules = {
        "required": REQUIRED,
        "one": replace(REQUIRED, max_calls=1),
        "get_weather": replace(REQUIRED, max_calls=1, named="get_weather"),
        "hang_up": replace(REQUIRED, max_calls=1, named="hang_up"),
    }
    asked = {key: calling(rule, temperature=temperature, seed=5) for key, rule in rules.items()}
    answers = run(engine, dict.fromkeys([*asked, "free"], ask(hf, QUESTION)), {**asked, "free": REPLY})
    for key, rule in rules.items():
        answer, calls = answers[key], calls_of(answers[key])
        assert (answer.text, answer.last.finish_reason) == ("", "tool_calls")
        assert 1 <= len(calls) <= rule.max_calls
        assert_valid(calls)
        assert [name for name, _ in calls] == [key] or key not in SCHEMAS
        assert answer.rows.shape[0] == prompt_rows(hf)
        assert any(output.rows_done for output in answer.outputs[: len(answer.outputs) // 2])
    assert answers["free"].token_ids == plain.token_ids
    torch.testing.assert_close(answers["free"].rows, plain.rows, rtol=2e-5, atol=ROW_TOLERANCE)


SAID = "Let me see.\n"


@pytest.fixture
def spoken_first(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies under rules that let text stand before calls say `SAID`, which random weights would never."""
    # vLLM is imported with the first engine.
    from triton_omni.vllm_hooks.thinker import sequence

    def forced(rules: ToolRules, json_schema: str | None = None) -> str:
        written = tool_grammar(rules, json_schema)
        assert "start: TEXT | before " in written
        return written.replace("start: TEXT | before ", f"start: {json.dumps(SAID + MARK)} ")

    monkeypatch.setattr(sequence, "tool_grammar", forced)


@pytest.mark.usefixtures("spoken_first")
@pytest.mark.parametrize("stop", [(), ("never \u2603 there",)], ids=["", "stop"])
def test_what_precedes_a_call_is_said_and_only_its_tokens_have_rows(
    engine: Any, hf: HfReference, plain: Answer, stop: tuple[str, ...]
) -> None:
    rules = ToolRules(FUNCTIONS, max_calls=1)
    asked = {"call": calling(rules, stop=stop), "free": REPLY}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    answer = answers["call"]
    assert (answer.text, answer.last.finish_reason) == (SAID, "tool_calls")
    assert_valid(calls_of(answer))
    first_call = next(index for index, output in enumerate(answer.outputs) if output.calls)
    assert not any(output.text for output in answer.outputs[first_call:])
    decode = hf.processor.tokenizer.decode
    said = sum(len(decode(answer.token_ids[:count])) < len(SAID) for count in range(len(answer.token_ids)))
    rows = prompt_rows(hf) + said
    assert answer.rows.shape[0] == rows
    # The same tokens as a prompt, whose rows are HF's.
    written = ThinkerPrompt((*ask(hf, QUESTION).token_ids, *answer.token_ids[:said]))
    expected = run(engine, {"prompt": written}, Sampling(max_tokens=1))["prompt"].rows
    torch.testing.assert_close(answer.rows, expected, rtol=2e-5, atol=ROW_TOLERANCE)
    assert answers["free"].token_ids == plain.token_ids


@pytest.mark.usefixtures("spoken_first")
def test_rows_end_and_are_let_go_while_the_call_is_written(engine: Any, hf: HfReference) -> None:
    placed = engine.prepare(ask(hf, QUESTION))
    engine.add_sequence("call", placed, calling(ToolRules(FUNCTIONS, max_calls=1)), want_rows=True)
    answer, held_after = Answer(), []
    while engine.has_work():
        for output in engine.step():
            answer.outputs.append(output)
            if any(earlier.rows_done for earlier in answer.outputs) and output.finish_reason is None:
                assert output.rows is None or output.rows_done
                held_after.append(engine.stats().rows_used)
    assert len(held_after) > 10
    # A step may be under way.
    assert max(held_after) <= 2


def test_without_a_call_the_reply_is_the_plain_one(engine: Any, hf: HfReference, plain: Answer) -> None:
    rules = {"auto": ToolRules(FUNCTIONS), "none": ToolRules(FUNCTIONS, max_calls=0), "unnamed": ToolRules(max_calls=0)}
    asked = {key: replace(REPLY, tools=rule, max_tokens=24) for key, rule in rules.items()}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    short = run(engine, {"short": ask(hf, QUESTION)}, replace(REPLY, max_tokens=24))["short"]
    for answer in answers.values():
        assert (answer.token_ids, answer.text, calls_of(answer)) == (short.token_ids, short.text, [])
        assert answer.last.finish_reason == short.last.finish_reason
        torch.testing.assert_close(answer.rows, short.rows, rtol=2e-5, atol=ROW_TOLERANCE)


def test_a_call_that_is_cut_off_says_so(engine: Any, hf: HfReference) -> None:
    asked = {"cut": calling(REQUIRED, max_tokens=40), "stopped": calling(REQUIRED, stop=('"arguments"',))}
    answers = run(engine, dict.fromkeys(asked, ask(hf, QUESTION)), asked)
    assert [(answer.text, answer.last.finish_reason) for answer in answers.values()] == [("", "length"), ("", "stop")]
    assert answers["stopped"].last.stop_string == '"arguments"'
    (call,) = calls_of(answers["stopped"])
    assert call[1] == ""


def test_a_schema_holds_where_nothing_may_be_called(engine: Any, hf: HfReference) -> None:
    asked = calling(ToolRules(FUNCTIONS, max_calls=0), json_schema='{"const": "plain"}')
    answer = run(engine, {"json": ask(hf, QUESTION)}, asked)["json"]
    assert (json.loads(answer.text), answer.last.finish_reason) == ("plain", "stop")


def test_a_pattern_that_cannot_be_compiled_is_refused_by_its_tool(engine: Any) -> None:
    bad = Function("bad", json.dumps({"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}))
    with pytest.raises(BadRequest, match=r"^tools\[2\]\.function\.parameters\.properties\.x\.pattern: cannot be"):
        engine.check_tools(ToolRules((*FUNCTIONS, bad)))
    engine.check_tools(ToolRules(FUNCTIONS))


def test_a_strict_schema_is_held_to_whole_or_refused(engine: Any) -> None:
    text = json.dumps({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}})
    engine.check_tools(ToolRules((Function("f", text),)))
    with pytest.raises(BadRequest, match=r"^tools\[0\]\.function\.parameters\.properties\.x\.uniqueItems: cannot be"):
        engine.check_tools(ToolRules((Function("f", text, is_strict=True),)))


def test_a_call_drawn_from_values_that_are_not_finite_fails(engine: Any, hf: HfReference) -> None:
    engine.add_sequence("nan", engine.prepare(ask(hf, QUESTION)), calling(REQUIRED), want_rows=True)
    answer = Answer()
    while not any(output.rows_done for output in answer.outputs):
        answer.outputs += engine.step()
    with poisoned(engine, "nan"):
        answer.outputs += engine.step()
    error = drain(engine, {"nan": answer})["nan"].last.error
    assert error is not None
    assert "not finite" in error

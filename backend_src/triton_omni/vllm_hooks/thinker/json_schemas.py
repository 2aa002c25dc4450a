# SPDX-License-Identifier: Apache-2.0
"""Constrains replies to a JSON schema or to tools: vLLM's structured output by llguidance, with bounded work a step.

vLLM's other grammar compilers take minutes for some small schemas, and their grammars for others take seconds a token
on the stepping thread; llguidance gives such a sequence up. This module knows vLLM's manager of grammars,
neither sequences nor requests.
"""

from __future__ import annotations

import json
import secrets
import threading
from typing import Any, Final

from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.request.strict_json import shown
from triton_omni.session.engine import ToolRules
from triton_omni.vllm_hooks.shared.compat import (
    GuidanceBackend,
    SamplingParams,
    StructuredOutputGrammar,
    StructuredOutputOptions,
    VllmConfig,
)
from triton_omni.vllm_hooks.thinker.schema_trial import SchemaVerdicts, Verdict
from triton_omni.vllm_hooks.thinker.tools import held_schema, tool_grammar

GRAMMAR_BACKEND: Final = "guidance"
"""Name of the backend for `EngineArgs.structured_outputs_config`."""


class _LockedBackend(GuidanceBackend):
    """vLLM compiles on several threads, and `compile_grammar` passes the grammar on in an attribute."""

    lock = threading.Lock()

    @staticmethod
    def _build_ll_tokenizer(tokenizer: Any, vocab_size: int) -> Any:
        """Return llguidance's tokenizer, changed so that no text spells a special token.

        It also tokenises a schema's constants. A constant that spells `<|im_end|>` would otherwise allow only that
        token, which the grammar then rejects.
        """
        import llguidance

        tree = json.loads(tokenizer.backend_tokenizer.to_str())
        tree["truncation"] = tree["padding"] = None
        for token in tree["added_tokens"]:
            if token["special"]:
                token["content"] = f"<|{secrets.token_hex(16)}|>"
        size = max(vocab_size, len(tokenizer))
        return llguidance.LLTokenizer(json.dumps(tree), n_vocab=size, eos_token=tokenizer.eos_token_id)

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        with self.lock:
            return super().compile_grammar(request_type, grammar_spec, stop_token_ids)


class CheckedParams(SamplingParams):
    """vLLM's parameters of a request whose schema, if any, `JsonSchemas.check` has checked.

    vLLM would check it again on the stepping thread, when it takes the request.
    """

    def _validate_structured_outputs(self, *_: Any) -> None:
        if self.structured_outputs is not None:
            self.structured_outputs._backend = GRAMMAR_BACKEND


class JsonSchemas:
    """Checks schemas on the caller's thread; safe to call from many.

    Args:
        config: of the engine.
        manager: the engine's `StructuredOutputManager`.
    """

    def __init__(self, config: VllmConfig, manager: Any) -> None:
        self._config, self._manager = config, manager
        self._lock = threading.Lock()
        self._verdicts = SchemaVerdicts()

    def prepare(self) -> GuidanceBackend:
        """Return the engine's compiler; the first call reads the vocabulary, which would delay a step.

        Call this before a sequence with a schema is added; otherwise vLLM makes a compiler of its own.
        """
        with self._lock:
            if self._manager.backend is None:
                size = self._config.model_config.get_vocab_size()
                self._manager.backend = _LockedBackend(self._config, tokenizer=self._manager.tokenizer, vocab_size=size)
            found: GuidanceBackend = self._manager.backend
            return found

    @property
    def end_id(self) -> int:
        """The id that ends a reply once its schema allows that."""
        return int(self.prepare().ll_tokenizer.eos_token)

    def check(self, schema: str, salt: str | None = None) -> None:
        """Check that a schema can be compiled. The first time for a salt takes 0.1 s, in a process of its own.

        Raises:
            BadRequest: it is no JSON schema, or llguidance does not support a part of it, which the message names.
            TooLarge: compiling it takes too much time or memory.
        """
        self.prepare()
        _refuse(self._verdicts.of([schema], salt), _SCHEMA)

    def check_tools(self, rules: ToolRules, salt: str | None = None) -> None:
        """Check that the schemas of tools can be compiled, and the grammar with them; otherwise as `check`.

        Raises:
            BadRequest, TooLarge: as `check`.
        """
        self.prepare()
        schemas = [held_schema(function) for function in rules.functions]
        verdict = self._verdicts.of([*schemas, json.dumps(tool_grammar(rules))], salt)
        is_one = verdict.number < len(schemas)
        _refuse(verdict, f"tools[{verdict.number}].function.parameters" if is_one else _TOOLS)


_SCHEMA: Final = "thinker.json_schema"
_TOOLS: Final = "tools"


def _refuse(verdict: Verdict, path: str) -> None:
    if verdict.is_too_costly:
        cure = "give fewer or simpler patterns, ranges, counts and references"
        raise TooLarge(f"{path}: cannot be compiled: {verdict.reason}; {cure}")
    if verdict.reason:
        raise BadRequest(f"{path}{verdict.path}: cannot be compiled: {shown(verdict.reason)}")


def why_given_up(grammar: Any, *, has_tools: bool) -> str | None:
    """Return why the grammar of an ended sequence gave up before its schema allowed the end; None = it did not."""
    error = grammar.ll_matcher.get_error()
    told, path = shown(" ".join(error.split())), _TOOLS if has_tools else _SCHEMA
    return f"{path}: the reply could not be held to it, give a simpler one: {told}" if error else None

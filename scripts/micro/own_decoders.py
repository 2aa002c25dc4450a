# SPDX-License-Identifier: Apache-2.0
"""Our thinker and talker engines as decoders whose sequences do not end by themselves.

A drawn end id must not end a measurement: random weights draw any id. Plain vLLM is given no end ids either.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.core.settings import EngineSettings, TalkerEngineSettings, TalkerSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, TalkerPrompt, ThinkerPrompt
from triton_omni.vllm_hooks.shared.engine_args import resolve_dtype
from triton_omni.vllm_hooks.talker.engine import TalkerVllmEngine
from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

from .decoding import Mode
from .figures import OURS
from .plan import Plan
from .vllm_decoders import engine_facts
from .vllm_decoders import engine_settings as shared_settings

REPLY_ROWS = 4
"""Rows of a talker's reply; after them the tail is added, which costs a step the same."""


def sampling_of(mode: Mode, tokens: int, seed: int) -> Sampling:
    """A mode in our engines' terms."""
    return Sampling(
        temperature=mode.temperature,
        top_p=mode.top_p,
        top_k=mode.top_k,
        repetition_penalty=mode.repetition_penalty,
        max_tokens=tokens,
        seed=seed,
    )


def engine_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that ours and plain vLLM share, and those that only ours have."""
    return shared_settings(plan).model_dump() | {"fused_decode": "auto" if plan.fused_decode else False}


def salted(prompt: ThinkerPrompt, plan: Plan) -> ThinkerPrompt:
    """The prompt of a caller who has asked nothing before, where prompts are kept."""
    return replace(prompt, cache_salt=secrets.token_hex()) if plan.prefix_caching else prompt


EngineT = TypeVar("EngineT", bound=ThinkerVllmEngine | TalkerVllmEngine)


class OwnEngine(Generic[EngineT]):
    """Base of the measurements of our engines."""

    by = OURS

    def __init__(self, engine: EngineT) -> None:
        self._engine: EngineT = engine

    def facts(self) -> dict[str, Any]:
        """See `engine_facts`."""
        return engine_facts(self._engine._llm)

    def close(self) -> None:
        """Release the device."""
        self._engine.close()


class _OwnDecoder(OwnEngine[EngineT]):
    """Sequences that decode, in either engine."""

    def __init__(self, engine: EngineT) -> None:
        super().__init__(engine)
        self._keys: list[str] = []

    def clear(self) -> None:
        """Abort and drain."""
        for key in self._keys:
            self._engine.abort(key)
        self._keys = []
        while self._engine.has_work():
            self._engine.step()


class ThinkerDecoder(_OwnDecoder[ThinkerVllmEngine]):
    """The thinker's engine with the rows of every token wanted, as for speech."""

    def __init__(self, plan: Plan, device: torch.device, ordinary_ids: int) -> None:
        settings = ThinkerSettings(
            engine=EngineSettings(**engine_settings(plan)),
            quantization=plan.quantization,
            steady_decode=plan.steady_decode,
            prefix_caching=plan.prefix_caching,
        )
        super().__init__(ThinkerVllmEngine(Path(plan.model), settings, device))
        self._engine._end_ids = []
        self._plan, self._ordinary_ids = plan, ordinary_ids

    def begin(self, batch: int, mode: Mode, tokens: int) -> None:
        """Submit prompts of random ids."""
        numbers = random.Random(0)
        for number in range(batch):
            ids = tuple(numbers.randrange(self._ordinary_ids) for _ in range(self._plan.prompt_tokens))
            placed = self._engine.prepare(salted(ThinkerPrompt(ids), self._plan), max_tokens=tokens)
            self._engine.add_sequence(str(number), placed, sampling_of(mode, tokens, number), want_rows=True)
            self._keys.append(str(number))

    def step(self) -> int:
        """Tokens of one engine step; their rows are given out with them and dropped here."""
        return sum(len(output.token_ids) for output in self._engine.step())


class _Endless(TalkerVllmEngine):
    """A talker that goes on after a stop code."""

    def _parameters(self, sampling: Sampling) -> Any:
        parameters = super()._parameters(sampling)
        parameters.stop_token_ids = []
        parameters.ignore_eos = True
        return parameters


class TalkerDecoder(_OwnDecoder[TalkerVllmEngine]):
    """The talker's engine with all rows there, so that no step waits for the thinker."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        checkpoint = Path(plan.model)
        engine = TalkerEngineSettings(**engine_settings(plan))
        settings = TalkerSettings(engine=engine, max_sessions=engine.max_num_seqs)
        config = load_config(checkpoint)
        super().__init__(_Endless(checkpoint, settings, device))
        self._text_bos_id = load_speakers(checkpoint, config).default.text_bos_id
        # Hidden rows of any value cost the same; small ones stay finite in half precision.
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(plan.prompt_tokens + REPLY_ROWS, config.talker.embedding_size, generator=generator)
        self._rows = rows.to(device, resolve_dtype(settings.dtype, device))
        self._prompt_rows = plan.prompt_tokens

    def begin(self, batch: int, mode: Mode, tokens: int) -> None:
        """Open sequences and feed all their rows."""
        positions = torch.arange(self._prompt_rows + 2).expand(3, -1).contiguous()
        prompt = TalkerPrompt(self._prompt_rows, positions, self._text_bos_id, max_rows=len(self._rows))
        for number in range(batch):
            self._engine.open(str(number), prompt, sampling_of(mode, tokens, number))
            self._engine.feed(str(number), self._rows)
            self._engine.end(str(number))
            self._keys.append(str(number))

    def step(self) -> int:
        """Codes of one engine step."""
        return sum(len(output.codes) for output in self._engine.step() if output.codes is not None)

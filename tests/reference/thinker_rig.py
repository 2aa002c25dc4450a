# SPDX-License-Identifier: Apache-2.0
"""Helpers of the thinker engine's tests: engines of the tiny checkpoint, prompts, whole answers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from importing import more_is_imported
from reference.hf import HfReference, ThinkerResult
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.session.engine import EngineStats, Sampling, ThinkerOutput, ThinkerPlaced, ThinkerPrompt

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A GPU adds its kernels' order of summation.
ROW_TOLERANCE = 2e-5 if DEVICE.type == "cpu" else 1e-4
REPLY = Sampling(max_tokens=64)
NOTHING_HELD = EngineStats(running=0, waiting=0, kv_blocks_used=0, rows_used=0)


@dataclass
class Answer:
    """All outputs of one sequence put together."""

    outputs: list[ThinkerOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for output in self.outputs for token in output.token_ids)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def rows(self) -> torch.Tensor:
        """Rows in the order given; checks that they join without gap or overlap."""
        parts, position = [], 0
        for output in self.outputs:
            if output.rows is not None:
                assert output.row_start == position
                position += len(output.rows)
                parts.append(output.rows)
        return torch.cat(parts).cpu()

    @property
    def last(self) -> ThinkerOutput:
        return self.outputs[-1]


@functools.cache
def engine_class() -> Any:
    """Ours, imported with vLLM."""
    from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

    more_is_imported()
    return ThinkerVllmEngine


def make_engine(
    checkpoint: Path, *, ahead: bool = False, incremental: bool = True, prefix_caching: bool = False, **engine: Any
) -> Any:
    """On a GPU, scheduling ahead goes with CUDA graphs, and step by step is the plain path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes = {"max_num_seqs": 8, "max_model_len": 1024, "max_num_batched_tokens": 64} | engine
        switches = EngineSettings(**sizes, enforce_eager=not ahead, async_scheduling=ahead)
        settings = ThinkerSettings(
            dtype="float32", steady_decode=incremental, prefix_caching=prefix_caching, engine=switches
        )
        return engine_class()(checkpoint, settings, DEVICE)


class _Ordered:
    """Stream or event of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


def schedule_ahead_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, *, incremental: bool = True, prefix_caching: bool = False
) -> None:
    """vLLM schedules ahead on a GPU alone, so the streams it needs are stood in."""
    from vllm.platforms.cpu import CpuPlatform

    from triton_omni.vllm_hooks.thinker.prefix_cache import scheduler_name

    scheduler = scheduler_name(ahead=True, incremental=incremental, prefix_caching=prefix_caching)
    adjust = CpuPlatform.check_and_update_config
    # It exchanges torch's events for good once it is imported, and must not be undone with what is exchanged here.
    import_module("vllm.v1.worker.cpu.shm")

    def adjust_but_stay_async(config: Any) -> None:
        adjust(config)
        config.scheduler_config.async_scheduling = True
        config.scheduler_config.scheduler_cls = scheduler

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(adjust_but_stay_async))
    for name, stand_in in (("Stream", _Ordered), ("Event", _Ordered), ("current_stream", _Ordered)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())


@contextmanager
def engine_of(
    checkpoint: Path, *, ahead: bool, incremental: bool = True, prefix_caching: bool = False, **engine: Any
) -> Iterator[Any]:
    """An engine that schedules step by step, a step ahead, or where a step goes on hardly at all; closed at the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if ahead and DEVICE.type == "cpu":
            schedule_ahead_on_the_cpu(monkeypatch, incremental=incremental, prefix_caching=prefix_caching)
        made = make_engine(checkpoint, ahead=ahead, incremental=incremental, prefix_caching=prefix_caching, **engine)
        assert (made._core.batch_queue is not None) == ahead
        yield made
        made.close()


@contextmanager
def poisoned(engine: Any, key: str) -> Iterator[None]:
    """NaN in the embeddings of one sequence's tokens from now on, as a broken encoder would give them.

    A recorded step reads them too. It does not call the network's `forward`, so nothing can be poisoned there.
    """
    runner = engine._runner
    given = runner.get_model().embed_input_ids

    def poison(*arguments: Any, **named: Any) -> torch.Tensor:
        tokens: torch.Tensor = given(*arguments, **named).clone()
        for row, request_id in enumerate(runner.input_batch.req_ids):
            if request_id.startswith(key):
                begin, end = runner.query_start_loc.np[row : row + 2]
                tokens[begin:end] = float("nan")
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.get_model(), "embed_input_ids", poison)
        yield


def token_ids(hf: HfReference, *parts: Mapping[str, str]) -> tuple[int, ...]:
    """The chat's ids before the placeholders are expanded."""
    text = hf.render([{"role": "user", "content": list(parts)}])
    return tuple(hf.processor.tokenizer(text)["input_ids"])


def ask(hf: HfReference, text: str) -> ThinkerPrompt:
    return ThinkerPrompt(token_ids(hf, {"type": "text", "text": text}))


def run(
    engine: Any,
    prompts: Mapping[str, ThinkerPrompt | ThinkerPlaced],
    sampling: Sampling | Mapping[str, Sampling] = REPLY,
    *,
    want_rows: bool | set[str] = True,
) -> dict[str, Answer]:
    """Run the prompts together until the engine has nothing to do."""
    for key, prompt in prompts.items():
        placed = engine.prepare(prompt) if isinstance(prompt, ThinkerPrompt) else prompt
        chosen = sampling if isinstance(sampling, Sampling) else sampling[key]
        engine.add_sequence(
            key, placed, chosen, want_rows=want_rows if isinstance(want_rows, bool) else key in want_rows
        )
    return drain(engine, {key: Answer() for key in prompts})


def drain(engine: Any, answers: dict[str, Answer]) -> dict[str, Answer]:
    while engine.has_work():
        for output in engine.step():
            answers[output.key].outputs.append(output)
    return answers


def assert_equals_hf(answer: Answer, expected: ThinkerResult, tolerance: float = ROW_TOLERANCE) -> None:
    assert answer.last.error is None
    assert answer.token_ids == expected.token_ids
    # A character cut off by the end of the reply is never shown, where HF decodes it to a replacement character.
    assert answer.text.rstrip("\ufffd") == expected.text.rstrip("\ufffd")
    assert answer.rows.shape == expected.rows.shape
    torch.testing.assert_close(answer.rows, expected.rows, rtol=2e-5, atol=tolerance)

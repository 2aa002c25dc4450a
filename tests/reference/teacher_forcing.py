# SPDX-License-Identifier: Apache-2.0
"""Runs an engine along given tokens and keeps the logits of every position, so that two engines can be compared.

A free-running comparison ends at the first token on which two engines differ. Here the second engine draws the first
one's tokens, whatever its own logits say, so every position has the same history in both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from triton_omni.checkpoint import synthetic, synthetic_config
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.facts import FourBit
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.core.settings import EngineSettings, TalkerEngineSettings, TalkerSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, TalkerPrompt, ThinkerPrompt
from triton_omni.vllm_hooks.talker.rows import Column

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS = 256
"""Positions of the longest sequence that a tape holds."""


@dataclass
class Trace:
    """One run, by key: the drawn ids [N], their logits float32 [N, V], and the hidden rows [N, H] that give them."""

    ids: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    prompt_rows: dict[str, Tensor] = field(default_factory=dict)
    """[P - 1, H]: those before."""
    rows: dict[str, Tensor] = field(default_factory=dict)


class Error(NamedTuple):
    """Relative errors of single positions; NaN counts as infinite."""

    typical: float
    """The median."""
    worst: float


BFLOAT16 = Error(typical=0.02, worst=0.15)
"""Bound of bfloat16 against float32: 8 bits of mantissa round by up to 0.4 %. The worst position is one whose vector is
small against the terms of its sums."""


def relative_error(plain: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Error:
    """Return the relative error of the vectors of all positions of all sequences, by norms."""
    errors = []
    for key, expected in plain.items():
        assert other[key].shape == expected.shape, key
        errors.append((other[key] - expected).norm(dim=-1) / expected.norm(dim=-1))
    found = torch.cat(errors)
    found = torch.where(found.isfinite(), found, torch.inf)
    return Error(float(found.median()), float(found.max()))


# --- the thinker ------------------------------------------------------------------------------------------------------


@contextmanager
def thinker(
    checkpoint: Path, *, dtype: str, sequences: int, quantization: str = "none", **engine: Any
) -> Iterator[Any]:
    """An engine that prefills every prompt in one step."""
    from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

    sizes = EngineSettings(
        max_num_seqs=sequences, max_model_len=512, max_num_batched_tokens=8192, max_graph_tokens=64, threads=1, **engine
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = ThinkerVllmEngine(
            checkpoint, ThinkerSettings(dtype=dtype, quantization=quantization, engine=sizes), DEVICE
        )
    yield made
    made.close()


def run_thinker(engine: Any, prompts: Mapping[str, tuple[int, ...]], count: int, teacher: Trace | None = None) -> Trace:
    """Draw `count` tokens for each prompt, all at once: the teacher's, or without one by temperature 1."""
    trace, logits = Trace({key: [] for key in prompts}), {key: list[Tensor]() for key in prompts}
    network = engine._runner.get_model()
    plain = network.compute_logits

    def compute_logits(hidden: Tensor) -> Tensor:
        computed: Tensor = plain(hidden)
        for row, request_id in enumerate(engine._runner.input_batch.req_ids):
            key = engine._keys[request_id]
            place = len(logits[key])
            logits[key].append(computed[row].to("cpu", torch.float32, copy=True))
            if teacher is not None:
                computed[row].fill_(-torch.inf)
                computed[row, teacher.ids[key][place]] = 0
        return computed

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(network, "compute_logits", compute_logits)
        temperature = 1.0 if teacher is None else 0.0
        sampling = Sampling(max_tokens=count, min_tokens=count, temperature=temperature, seed=11)
        for key, ids in prompts.items():
            engine.add_sequence(key, engine.prepare(ThinkerPrompt(ids)), sampling, want_rows=True)
        rows = {key: list[Tensor]() for key in prompts}
        while engine.has_work():
            for output in engine.step():
                assert output.error is None, output.error
                trace.ids[output.key] += output.token_ids
                rows[output.key] += [] if output.rows is None else [output.rows.to("cpu", torch.float32, copy=True)]
    trace.logits = {key: torch.stack(found) for key, found in logits.items()}
    for key, found in rows.items():
        trace.prompt_rows[key], trace.rows[key] = torch.cat(found).tensor_split([len(prompts[key]) - 1])
    return trace


def thinker_prompts(count: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Ragged prompts of ordinary tokens."""
    generator = torch.Generator().manual_seed(count)
    lengths = [5 + (37 * number) % 120 for number in range(count)]
    return {
        f"s{number}": tuple(torch.randint(10, vocabulary, (length,), generator=generator).tolist())
        for number, length in enumerate(lengths)
    }


# --- the talker -------------------------------------------------------------------------------------------------------


class Tape:
    """Logits and forced ids by slot and position, on the device, so that a recorded step can write and read them."""

    def __init__(self, slots: int, vocabulary: int) -> None:
        self.logits = torch.zeros(slots, POSITIONS, vocabulary, device=DEVICE)
        self.forced = torch.full((slots, POSITIONS), -1, dtype=torch.int32, device=DEVICE)

    def draw(self, logits: Tensor, index: Tensor, drawn: Tensor) -> Tensor:
        """Keep the logits [N, V] of the tokens of `index`; the forced ids [N], or `drawn` where none is forced."""
        slot, place = index[:, Column.SLOT], index[:, Column.PLACE].clamp(max=POSITIONS - 1)
        self.logits[slot, place] = logits.float()
        forced = self.forced[slot, place]
        return torch.where(forced >= 0, forced, drawn.to(torch.int32))


def tape_steps(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """Have every step that is made from here on keep a tape; the latest engine's is the last of the list."""
    from triton_omni.vllm_hooks.talker.step import FusedTalkerStep, TalkerStep

    tapes: list[Tape] = []
    make, draw = TalkerStep.__init__, TalkerStep.draw

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.tape = Tape(*self.rows.used.shape)
        tapes.append(self.tape)

    def draw_prompt(self: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        return self.tape.draw(logits, self.index[tokens], draw(self, logits, tokens))  # type: ignore[no-any-return]

    def finishing(finish: Any) -> Any:
        def finish_decode(self: Any, logits: Tensor) -> None:
            finish(self, logits)
            count = logits.shape[0]
            self.drawn[:count].copy_(self.tape.draw(logits, self.index[:count], self.drawn[:count]))

        return finish_decode

    monkeypatch.setattr(TalkerStep, "__init__", init)
    monkeypatch.setattr(TalkerStep, "draw", draw_prompt)
    for kind in (TalkerStep, FusedTalkerStep):
        monkeypatch.setattr(kind, "finish_decode", finishing(kind.finish_decode))
    return tapes


@dataclass(frozen=True)
class SpokenPrompt:
    """Input of one talker sequence."""

    prompt: TalkerPrompt
    rows: Tensor
    """[P + reply rows, H]."""


def talker_prompts(checkpoint: Path, count: int, codes: int) -> dict[str, SpokenPrompt]:
    """Ragged prompts of random rows, with a reply row for each of `codes` codes."""
    config = load_config(checkpoint)
    width, voice = config.thinker.decoder.hidden_size, load_speakers(checkpoint, config).default.text_bos_id
    generator, prompts = torch.Generator().manual_seed(count), {}
    for number in range(count):
        length = 5 + (37 * number) % 120
        rows = torch.randn(length + codes + 2, width, generator=generator)
        positions = torch.arange(length + 2).expand(3, -1).contiguous()
        prompts[f"s{number}"] = SpokenPrompt(TalkerPrompt(length, positions, voice, max_rows=len(rows)), rows)
    return prompts


@dataclass(frozen=True)
class TapedTalker:
    """An engine, and the tape of its steps."""

    engine: Any
    tape: Tape


@contextmanager
def talker(checkpoint: Path, *, dtype: str, sequences: int, **engine: Any) -> Iterator[TapedTalker]:
    """An engine that prefills every prompt in one step."""
    from triton_omni.vllm_hooks.talker.engine import TalkerVllmEngine

    sizes = TalkerEngineSettings(
        max_num_seqs=sequences, max_model_len=512, max_num_batched_tokens=8192, max_graph_tokens=64, **engine
    )
    settings = TalkerSettings(dtype=dtype, max_codes=200, max_sessions=sequences, engine=sizes)
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tapes = tape_steps(monkeypatch)
        made = TalkerVllmEngine(checkpoint, settings, DEVICE)
        yield TapedTalker(made, tapes[-1])
        made.close()


def run_talker(
    taped: TapedTalker, prompts: Mapping[str, SpokenPrompt], count: int, teacher: Trace | None = None
) -> Trace:
    """Draw `count` codes for each prompt, all at once: the teacher's, or without one by HF's settings."""
    engine, tape = taped.engine, taped.tape
    trace, places = Trace({key: [] for key in prompts}), {}
    tape.forced.fill_(-1)
    for key, spoken in prompts.items():
        sampling = Sampling(temperature=0.9, top_k=40, top_p=0.8, seed=len(key), max_tokens=count, min_tokens=count)
        engine.open(key, spoken.prompt, sampling)
        first = spoken.prompt.prompt_rows + 1
        places[key] = (engine._open[key].slot, slice(first, first + count))
        if teacher is not None:
            tape.forced[places[key]] = torch.tensor(teacher.ids[key], dtype=torch.int32, device=DEVICE)
        engine.feed(key, spoken.rows.to(DEVICE, engine._rows.pool.dtype))
        engine.end(key)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            trace.ids[output.key] += [] if output.codes is None else output.codes.tolist()
    trace.logits = {key: tape.logits[place].to("cpu", copy=True) for key, place in places.items()}
    return trace


# --- checkpoints with published layers, and few of them ---------------------------------------------------------------


def make_shallow_checkpoint(
    folder: Path, size: synthetic_config.Size, layers: int, four_bit: FourBit | None = None
) -> None:
    """Thinker and talker with the layers of a published size, `layers` of each; all else as small as the tiny one's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for table in (synthetic_config._TEXT, synthetic_config._TALKER):
            monkeypatch.setitem(table, size, {**table[size], "num_hidden_layers": layers})
        for part in ("_audio", "_vision"):
            small = getattr(synthetic_config, part)
            monkeypatch.setattr(synthetic_config, part, lambda _tiny, hidden, small=small: small(True, hidden))
        token2wav, codec = synthetic_config._token2wav, synthetic_config.vocabulary(size)
        monkeypatch.setattr(synthetic_config, "_token2wav", lambda _size, _vocab: token2wav("tiny", codec))
        synthetic.make_checkpoint(folder, size, four_bit=four_bit, device=DEVICE)

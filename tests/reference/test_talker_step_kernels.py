# SPDX-License-Identifier: Apache-2.0
"""The fused ends of a talker's decode step against the plain ones; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from triton_omni.session.engine import Sampling, TalkerPrompt
from triton_omni.vllm_hooks.talker.conditioning import CodecIds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = CodecIds(mask=96, pad=97, bos=98, eos=99)
VOCABULARY, SPEAKABLE, WIDTH, SLOTS, TOKENS = 100, 90, 24, 7, 6
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.9, top_p=0.8, top_k=40, repetition_penalty=1.05, seed=3),
    Sampling(temperature=1.3, top_k=5, min_tokens=100, seed=4),
    Sampling(temperature=1.0, top_p=0.3, repetition_penalty=2.0, seed=5),
    Sampling(temperature=0.7, min_p=0.2, seed=6),
    Sampling(temperature=1.0, seed=7, presence_penalty=0.8, frequency_penalty=-0.5),
]
"""A slot each; what the published checkpoints use is the second."""


def make_step(fused: bool) -> Any:
    """A step with sequences in the middle of their replies, always the same."""
    from triton_omni.vllm_hooks.talker.rows import Column, TalkerRows
    from triton_omni.vllm_hooks.talker.step import FusedTalkerStep, TalkerStep

    random = torch.Generator().manual_seed(0)
    tail = torch.randn(2, WIDTH, generator=random).to(DEVICE)
    rows = TalkerRows(tail, 100, SLOTS, torch.zeros(VOCABULARY, dtype=torch.bool, device=DEVICE), 40)
    index = torch.zeros(TOKENS + 2, len(Column), dtype=torch.int64, device=DEVICE)
    step = (FusedTalkerStep if fused else TalkerStep)(rows, index, IDS, SPEAKABLE, TOKENS + 2)
    prompt = TalkerPrompt(2, torch.arange(4).expand(3, -1), 0, max_rows=10)
    index[:, Column.SLOT] = rows.idle_slot
    for number, sampling in enumerate(SETTINGS):
        sequence = rows.open(str(number), prompt, torch.zeros(WIDTH, device=DEVICE), None)
        rows.feed(sequence, torch.randn(8, WIDTH, generator=random).to(DEVICE))
        step.draws.choose(sequence.slot, sampling, 4)
        rows.used[sequence.slot] = (torch.rand(VOCABULARY, generator=random) * 4 - 2).clamp(min=0).ceil().to(DEVICE)
        uniform = torch.rand(1, generator=random, dtype=torch.float64)
        told = [sequence.base + number, sequence.slot, 4 + number, int(uniform.view(torch.int64)), number % 2]
        told += [50, 60, 70]
        index[number] = torch.tensor(told, device=DEVICE)
    rows.store()
    step.drawn.copy_(torch.randint(SPEAKABLE, (TOKENS + 2,), generator=random))
    step.cache_slots = torch.arange(TOKENS + 2, device=DEVICE)
    return step


def both(act: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of `act` on a plain and on a fused step, with all that a step keeps."""
    results = []
    for fused in (False, True):
        step = make_step(fused)
        kept = dict(act(step))
        kept |= {"used": step.rows.used, "faults": step.rows.faults, "drawn": step.drawn, "slots": step.cache_slots}
        results.append({name: value.clone() for name, value in kept.items()})
    return results[0], results[1]


def begin(step: Any) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (TOKENS + 2,), generator=random).to(DEVICE, torch.int32)
    ids[2] = IDS.mask
    positions = torch.arange(3 * (TOKENS + 2), device=DEVICE).view(3, -1).clone()
    table = torch.randn(VOCABULARY, WIDTH, generator=random).to(DEVICE)
    return {"inputs": step.begin_decode(ids, positions, table), "ids": ids, "positions": positions}


def test_a_step_begins_as_the_plain_one() -> None:
    plain, fused = both(begin)
    for name, expected in plain.items():
        torch.testing.assert_close(fused[name], expected, atol=0, rtol=0, msg=name)


def test_a_row_that_is_not_finite_counts_against_its_own_sequence() -> None:
    def spoilt(step: Any) -> dict[str, Tensor]:
        step.rows.pool[step.index[1, 0], 3] = float("nan")
        step.rows.pool[step.index[4, 0], 5] = float("inf")
        return begin(step)

    plain, fused = both(spoilt)
    assert fused["faults"].count_nonzero() == 2
    for name, expected in plain.items():
        torch.testing.assert_close(fused[name], expected, atol=0, rtol=0, msg=name)


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many as are shipped a draw takes the interpreter three times as long."""
    from triton_omni.vllm_hooks.kernels import talker_draw

    monkeypatch.setattr(talker_draw, "_GROUPS", 16)


@pytest.mark.parametrize(("seed", "listed"), [(0, 128), (1, 128), (2, 128), (3, 8), (4, 8), (5, 8), (6, 8), (7, 1)])
@pytest.mark.usefixtures("few_groups")
def test_ids_are_drawn_as_by_the_plain_step(seed: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among few near ids, or among all where there are more than may be listed."""
    from triton_omni.vllm_hooks.kernels import talker_draw

    monkeypatch.setattr(talker_draw, "_SHORT", listed)

    def finish(step: Any) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(seed)
        # The library gives rows of a wider matrix.
        logits = (torch.randn(TOKENS, VOCABULARY + 28, generator=random) * 4).to(DEVICE)[:, :VOCABULARY]
        step.finish_decode(logits)
        return {}

    plain, fused = both(finish)
    assert fused["drawn"].tolist() == plain["drawn"].tolist()


def test_a_sequence_with_what_is_not_finite_draws_the_mask_id_alone() -> None:
    def finish(step: Any) -> dict[str, Tensor]:
        logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        logits[0, 3], logits[2, 4] = float("nan"), float("inf")
        step.rows.faults[step.index[4, 1]] = 1
        step.finish_decode(logits)
        return {}

    plain, fused = both(finish)
    ids = fused["drawn"][:TOKENS].tolist()
    assert [place for place, code in enumerate(ids) if code == IDS.mask] == [0, 2, 4]
    assert ids == plain["drawn"][:TOKENS].tolist()


def test_what_was_drawn_before_stays_where_a_sequence_waits() -> None:
    """Its place is told the slot of nobody."""
    from triton_omni.vllm_hooks.talker.rows import Column

    def finish(step: Any) -> dict[str, Tensor]:
        step.index[1, Column.SLOT] = step.rows.idle_slot
        before = step.drawn.clone()
        step.finish_decode(torch.full((3, VOCABULARY), float("nan"), device=DEVICE))
        return {"before": before}

    for found in both(finish):
        assert found["drawn"].tolist() == [IDS.mask, int(found["before"][1]), IDS.mask, *found["before"][3:].tolist()]


@pytest.mark.usefixtures("few_groups")
def test_ids_as_likely_as_the_last_kept_are_all_kept() -> None:
    """A sort keeps some of them by their place; half-precision logits are often equal."""
    from triton_omni.vllm_hooks.talker.rows import Column

    step, draws = make_step(fused=True), 8
    assert SETTINGS[2].top_k == 5
    slot, seen = int(step.index[2, Column.SLOT]), set()
    step.rows.used[slot] = 0
    logits = torch.full((1, VOCABULARY), -20.0, device=DEVICE)
    logits[0, 10:18] = 1.0
    for place in range(draws):
        step.index[0].copy_(step.index[2])
        step.index[0, Column.UNIFORM] = torch.tensor((place + 0.5) / draws, dtype=torch.float64).view(torch.int64)
        step.finish_decode(logits)
        seen.add(int(step.drawn[0]))
    assert seen == set(range(10, 18))


@pytest.mark.usefixtures("few_groups")
@pytest.mark.parametrize("fused", [False, True])
def test_the_last_code_and_the_ids_behind_it_have_their_places_in_the_distribution(fused: bool) -> None:
    from triton_omni.vllm_hooks.talker.rows import Column

    step, wanted = make_step(fused), [0, SPEAKABLE - 1, IDS.pad, IDS.eos]
    step.rows.used.zero_()
    logits = torch.full((1, VOCABULARY), -200.0, device=DEVICE)
    logits[0, wanted] = 1.0
    logits[0, [SPEAKABLE, IDS.mask, IDS.bos]] = 9.0
    step.index[0].copy_(step.index[3])
    step.draws.choose(int(step.index[3, Column.SLOT]), Sampling(temperature=1.0), 4)
    seen = []
    for place in range(8):
        step.index[0, Column.UNIFORM] = torch.tensor((place + 0.5) / 8, dtype=torch.float64).view(torch.int64)
        step.finish_decode(logits.clone())
        seen.append(int(step.drawn[0]))
    assert seen == [code for code in wanted for _ in range(2)]

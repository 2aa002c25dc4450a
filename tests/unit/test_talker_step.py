# SPDX-License-Identifier: Apache-2.0
"""A talker step around the network: conditioning, penalty and mask, padded steps, compiled steps."""

from __future__ import annotations

import functools

import pytest
import torch

from triton_omni.session.engine import Sampling, TalkerPrompt
from triton_omni.vllm_hooks.talker.conditioning import CodecIds
from triton_omni.vllm_hooks.talker.rows import Column, TalkerRows
from triton_omni.vllm_hooks.talker.step import TalkerStep

IDS = CodecIds(mask=12, pad=10, bos=13, eos=11)
VOCABULARY, SPEAKABLE, WIDTH, SEQUENCES = 16, 8, 4, 3


class Bench:
    """A step of three open sequences, and the index that a runner would write."""

    def __init__(self):
        self.rows = TalkerRows(torch.ones(2, WIDTH), 60, 4, torch.zeros(VOCABULARY, dtype=torch.bool), 20)
        self.index = torch.zeros(8, len(Column), dtype=torch.int64)
        self.index[:, Column.SLOT] = self.rows.idle_slot
        self.step = TalkerStep(self.rows, self.index, IDS, SPEAKABLE, SEQUENCES)
        prompt = TalkerPrompt(2, torch.arange(4).expand(3, -1), 0, max_rows=8)
        self.open = [self.rows.open(str(n), prompt, torch.zeros(WIDTH), None) for n in range(SEQUENCES)]
        for number, sequence in enumerate(self.open):
            self.step.draws.choose(sequence.slot, Sampling(repetition_penalty=1.0 + number), 0)
            self.rows.feed(sequence, torch.full((4, WIDTH), 10.0 * (number + 1)))
        self.rows.store()

    def decode(self, ids, logits, padded=0):
        """One step at each sequence's first position; logits as the step gives them, and what is sound."""
        for place, sequence in enumerate(self.open[: len(ids)]):
            self.index[place, : Column.PLACE] = torch.tensor([sequence.base, sequence.slot])
        ids = torch.tensor([*ids, *[0] * padded], dtype=torch.int32)
        inputs = self.step.condition(ids, ids.unsqueeze(-1).expand(-1, WIDTH).float())
        logits = torch.cat([logits, torch.full((padded, VOCABULARY), float("nan"))])
        adjusted, sound = self.step._adjust_decode(logits)
        expected = torch.where(sound, adjusted.argmax(-1), IDS.mask)
        expected[len(ids) - padded :] = self.step.drawn[len(ids) - padded : len(ids)]
        self.step.finish_decode(logits)
        assert self.step.drawn[: len(ids)].tolist() == expected.tolist()
        return inputs, adjusted, sound


@pytest.fixture
def bench():
    return Bench()


def test_an_input_is_row_plus_code_and_the_mask_id_counts_as_zero(bench):
    inputs, _, _ = bench.decode([3, 5, IDS.mask], torch.zeros(3, VOCABULARY))
    assert inputs[:, 0].tolist() == [13.0, 25.0, 30.0]


def test_ids_that_were_read_are_penalised_in_their_own_sequence(bench):
    logits = torch.ones(3, VOCABULARY)
    logits[:, 4] = -1.0
    bench.decode([3, 4, 5], logits)
    _, adjusted, _ = bench.decode([4, 3, 3], logits)
    expected = [[1.0, -1.0, 1.0], [1 / 2, -2.0, 1.0], [1 / 3, -1.0, 1 / 3]]
    torch.testing.assert_close(adjusted[:, 3:6], torch.tensor(expected))


def test_penalties_are_vllm_s_and_stops_have_none_for_being_in_the_prompt():
    """vLLM's take what a reply has from a list of its ids; a prompt's are of no weight in two of three."""
    from vllm.model_executor.layers.utils import apply_penalties

    bench, generator = Bench(), torch.Generator().manual_seed(0)
    asked = [(1.0, 0.7, 0.3), (1.5, -0.4, 1.1), (2.0, 0.0, -0.6)]
    for sequence, values in zip(bench.open, asked, strict=True):
        repetition, presence, frequency = values
        asked_of = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
        bench.step.draws.choose(sequence.slot, asked_of, 0)
        bench.rows.used[sequence.slot, IDS.pad] = 1
    said = torch.randint(SPEAKABLE, (10, SEQUENCES), generator=generator)
    for ids in said[:-1]:
        bench.decode(ids.tolist(), torch.randn(SEQUENCES, VOCABULARY, generator=generator))
    logits = torch.randn(SEQUENCES, VOCABULARY, generator=generator)
    _, adjusted, _ = bench.decode(said[-1].tolist(), logits)
    repetition, presence, frequency = torch.tensor(asked).unbind(1)
    prompts = torch.full((SEQUENCES, 1), IDS.pad)
    expected = apply_penalties(logits.clone(), prompts, said.T.contiguous(), presence, frequency, repetition)
    drawable = [*range(SPEAKABLE), *IDS.stops]
    torch.testing.assert_close(adjusted[:, drawable], expected[:, drawable])


def test_a_sequence_that_is_computed_again_counts_anew(bench):
    logits = torch.zeros(3, VOCABULARY)
    bench.decode([3, 4, 5], logits)
    slot = bench.open[0].slot
    bench.rows.reset_used(slot)
    assert not bench.rows.used[slot].any()
    bench.decode([3, 4, 5], logits)
    assert [int(bench.rows.used[found.slot].sum()) for found in bench.open] == [1, 2, 2]


def test_only_speakable_and_stop_ids_can_be_drawn(bench):
    _, adjusted, _ = bench.decode([1, 2, 3], torch.zeros(3, VOCABULARY))
    assert set(adjusted[0].isfinite().nonzero().flatten().tolist()) == {*range(SPEAKABLE), *IDS.stops}


def test_padding_of_a_recorded_step_harms_no_sequence(bench):
    bench.rows.pool[0] = float("nan")
    logits = torch.ones(2, VOCABULARY)
    _, padded, sound = bench.decode([3, 4], logits, padded=1)
    assert sound.tolist() == [True, True, False]
    _, after, sound = bench.decode([3, 4, 5], torch.ones(3, VOCABULARY))
    assert sound.all()
    assert torch.equal(after[:2], padded[:2])


def test_a_compiled_step_gives_the_same(bench, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = Bench()
    compiled.step.compile()
    generator = torch.Generator().manual_seed(0)
    for ids in ([3], [3, 4], [1, 2, 7], [IDS.mask, 7, 2]):
        logits = torch.randn(len(ids), VOCABULARY, generator=generator)
        for plain, found in zip(bench.decode(ids, logits), compiled.decode(ids, logits), strict=True):
            assert torch.equal(plain, found)
    assert torch.equal(bench.rows.used, compiled.rows.used)


def test_only_tokens_that_follow_are_laid_out_by_the_step(bench):
    """The second of three was laid out before, as padding is."""
    step, index = bench.step, bench.index
    step.cache_slots = torch.tensor([-1, 51, -1, -1, 99])
    step.drawn[:] = torch.tensor([4, 5, 6])
    index[[0, 2], Column.FOLLOWS] = 1
    index[:3, Column.AXIS] = torch.tensor([20, 21, 22])
    index[:3, Column.CACHE] = torch.tensor([30, 31, 32])
    ids, positions = torch.tensor([1, 2, 3], dtype=torch.int32), torch.arange(9).view(3, 3)
    step.lay_out_next(ids, positions)
    assert ids.tolist() == [4, 2, 6]
    assert positions.tolist() == [[20, 1, 22], [20, 4, 22], [20, 7, 22]]
    assert step.cache_slots.tolist() == [30, 51, 32, -1, 99]

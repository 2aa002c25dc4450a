# SPDX-License-Identifier: Apache-2.0
"""Draws by slot are what vLLM's sampler draws of the same settings, alone and in a mixed batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triton_omni.session.engine import Sampling

# vLLM's import walks over every attribute of torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, STOPS, PROMPT = 40, (3, 7), 5
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, top_k=5, seed=2),
    Sampling(temperature=0.9, top_p=0.6, seed=3),
    Sampling(temperature=0.9, top_k=10, top_p=0.8, seed=4),
    Sampling(temperature=1.0, min_p=0.3, seed=5),
    Sampling(temperature=1.0, top_k=1000, seed=-1),
]


@pytest.fixture
def draws():
    from triton_omni.vllm_hooks.talker.draw import SlotDraws

    stops = torch.zeros(VOCABULARY, dtype=torch.bool)
    stops[list(STOPS)] = True
    made = SlotDraws(len(SETTINGS) + 1, stops.to(DEVICE))
    for slot, sampling in enumerate(SETTINGS):
        made.choose(slot, sampling, PROMPT)
    return made


def logits_of(count, seed):
    return (torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3).to(DEVICE)


def drawn(draws, logits, slots, positions):
    slots, positions = np.asarray(slots), np.asarray(positions)
    uniforms = torch.from_numpy(draws.uniforms(slots, positions)).to(DEVICE)
    on_device = [torch.from_numpy(values).to(DEVICE) for values in (slots, positions)]
    return draws(logits.clone(), *on_device, uniforms).tolist()


def by_vllm(logits, sampling, position):
    """Id of one row [V], of vLLM's sampler with the same uniform number."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    from triton_omni.vllm_hooks.shared.sampling import CounterTopKTopPSampler, counter_uniforms

    class Config:
        class scheduler_config:  # noqa: N801
            max_num_seqs = 1

    min_p = MinPLogitsProcessor(Config, DEVICE, is_pin_memory=False)
    min_p.update_state(BatchUpdate(1, [], [(0, SamplingParams(min_p=sampling.min_p), None, [])], []))
    uniforms = counter_uniforms(
        np.array([sampling.seed % 2**64], dtype=np.uint64), np.array([position + 1], dtype=np.uint64)
    )
    sampler = Sampler()
    sampler.topk_topp_sampler = CounterTopKTopPSampler(torch.from_numpy(uniforms).to(DEVICE))
    greedy = sampling.temperature == 0
    top_k = min(sampling.top_k or VOCABULARY, VOCABULARY)
    metadata = SamplingMetadata(
        temperature=None if greedy else torch.tensor([sampling.temperature], device=DEVICE),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=torch.tensor([sampling.top_p], device=DEVICE),
        top_k=torch.tensor([top_k], dtype=torch.int32, device=DEVICE),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(1),
        presence_penalties=torch.zeros(1),
        repetition_penalties=torch.ones(1),
        output_token_ids=[[]],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([min_p]),
    )
    return sampler(logits.clone()[None], metadata).sampled_token_ids.item()


@pytest.mark.parametrize("position", range(PROMPT - 1, PROMPT + 30))
def test_a_mixed_batch_draws_what_vllm_draws_of_each(draws, position):
    slots = list(range(len(SETTINGS)))
    logits = logits_of(len(slots), position)
    expected = [by_vllm(logits[slot], SETTINGS[slot], position) for slot in slots]
    assert drawn(draws, logits, slots, [position] * len(slots)) == expected
    assert drawn(draws, logits.flip(0), slots[::-1], [position] * len(slots)) == expected[::-1]


def test_no_stop_is_drawn_before_the_least_length(draws):
    draws.choose(0, Sampling(min_tokens=2), PROMPT)
    logits = torch.zeros(4, VOCABULARY, device=DEVICE)
    logits[:, 3], logits[:, 9] = 2.0, 1.0
    # The prompt's last position draws the first code.
    positions = [PROMPT - 1 + code for code in range(4)]
    assert drawn(draws, logits, [0] * 4, positions) == [9, 9, 3, 3]
    assert drawn(draws, logits, [len(SETTINGS)] * 4, positions) == [3] * 4


def test_a_slot_draws_by_its_latest_sequence(draws):
    logits = logits_of(40, 1)
    draws.choose(1, Sampling(), PROMPT)
    assert drawn(draws, logits, [1] * 40, range(40)) == logits.argmax(-1).tolist()


def test_ids_that_must_not_be_drawn_are_not(draws):
    logits = torch.zeros(len(SETTINGS), VOCABULARY, device=DEVICE)
    logits[:, :-1] = float("-inf")
    assert drawn(draws, logits, range(len(SETTINGS)), [9] * len(SETTINGS)) == [VOCABULARY - 1] * len(SETTINGS)

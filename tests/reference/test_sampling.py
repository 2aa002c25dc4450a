# SPDX-License-Identifier: Apache-2.0
"""Counter-based sampling: the right distribution, the same draw in any batch, one op sequence for a whole batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from triton_omni.request.parse import talker_seed

# vLLM's import walks over every attribute of torch.distributed.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device of the draws: vLLM's filters are kernels of the platform that it was built for."""
DRAWS = 40000
VOCAB = 24


@pytest.fixture(scope="module")
def sampling():
    from triton_omni.vllm_hooks.shared import sampling

    return sampling


@pytest.fixture(params=["plain", "fused"])
def draw(sampling, request):
    """`sampling.draw`, or the same in two kernels, which without a GPU run in Triton's interpreter."""
    from triton_omni.vllm_hooks.kernels.draw import fused_draw

    return sampling.draw if request.param == "plain" else fused_draw


def interpreted(sampling, draw):
    """True if a draw takes 10 ms a row or more."""
    return DEVICE.type == "cpu" and draw is not sampling.draw


def uniforms(sampling, count, seed=7):
    return sampling.counter_uniforms(np.full(count, seed, dtype=np.uint64), np.arange(count, dtype=np.uint64))


def noise_of(sampling, count):
    return torch.from_numpy(uniforms(sampling, count)).to(DEVICE)


def chi_square(counts, probabilities):
    """Statistic and the bound that it exceeds once in 30,000 (mean + 4 standard deviations)."""
    kept = probabilities > 0
    expected = probabilities[kept] * counts.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = kept.sum() - 1
    return statistic, freedom + 4 * np.sqrt(2 * freedom)


def logits_of(seed):
    return (torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2).to(DEVICE)


def test_uniforms_fill_the_interval_evenly(sampling):
    found = uniforms(sampling, DRAWS)
    assert found.min() >= 0
    assert found.max() < 1
    statistic, bound = chi_square(np.histogram(found, 64, (0, 1))[0], np.full(64, 1 / 64))
    assert statistic < bound


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbouring_seeds_and_positions_are_independent(sampling, vary):
    counter, fixed = np.arange(DRAWS, dtype=np.uint64), np.full(DRAWS, 3, dtype=np.uint64)
    first = sampling.counter_uniforms(*((counter, fixed) if vary == "seed" else (fixed, counter)))
    pairs = np.histogram2d(first[:-1], first[1:], 8, ((0, 1), (0, 1)))[0].ravel()
    statistic, bound = chi_square(pairs, np.full(64, 1 / 64))
    assert statistic < bound


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_the_talkers_numbers_are_independent_of_the_thinkers(sampling, vary):
    counter, fixed = range(DRAWS), [3] * DRAWS
    seeds, positions = (counter, fixed) if vary == "seed" else (fixed, counter)
    thinker, talker = (
        sampling.counter_uniforms(np.asarray(found, dtype=np.uint64), np.asarray(positions, dtype=np.uint64))
        for found in (seeds, [talker_seed(seed) for seed in seeds])
    )
    pairs = np.histogram2d(thinker, talker, 8, ((0, 1), (0, 1)))[0].ravel()
    statistic, bound = chi_square(pairs, np.full(64, 1 / 64))
    assert statistic < bound


def test_a_uniform_depends_on_seed_and_position_alone(sampling):
    seeds = np.array([5, 2**64 - 1, 0, 5], dtype=np.uint64)
    positions = np.array([9, 1, 0, 10], dtype=np.uint64)
    together = sampling.counter_uniforms(seeds, positions)
    alone = [sampling.counter_uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_seeds_of_any_size_and_sign_fit(sampling):
    assert sampling.seed_args(-1) == sampling.seed_args(2**64 - 1)
    assert sampling.seed_args(2**64 + 3) == sampling.seed_args(3)
    assert sampling.seed_args(4) != sampling.seed_args(3)


def test_draws_follow_the_softmax(sampling):
    logits = logits_of(0)
    found = sampling.draw(logits.expand(DRAWS, -1), noise_of(sampling, DRAWS)).cpu()
    statistic, bound = chi_square(np.bincount(found, minlength=VOCAB), logits.double().softmax(-1).cpu().numpy())
    assert statistic < bound


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (VOCAB, 0.8), (10, 0.7), (40, 0.95)])
def test_draws_follow_hf_after_top_k_and_top_p(sampling, top_k, top_p):
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = logits_of(1)
    warped = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(min(top_k, VOCAB))(None, logits[None].cpu()))
    sampler = sampling.CounterTopKTopPSampler(noise_of(sampling, DRAWS))
    found, _ = sampler(
        logits.repeat(DRAWS, 1),
        {},
        torch.full((DRAWS,), min(top_k, VOCAB), dtype=torch.int32, device=DEVICE),
        torch.full((DRAWS,), top_p, device=DEVICE),
    )
    counts, probabilities = np.bincount(found.cpu(), minlength=VOCAB), warped[0].double().softmax(-1).numpy()
    assert counts[probabilities == 0].sum() == 0
    assert (probabilities > 0).sum() > 1
    statistic, bound = chi_square(counts, probabilities)
    assert statistic < bound


def test_an_excluded_id_is_not_drawn_at_either_end(draw):
    logits = torch.zeros(2, VOCAB, device=DEVICE)
    logits[:, :4] = logits[:, -4:] = float("-inf")
    ends = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64, device=DEVICE)
    assert draw(logits, ends).tolist() == [4, VOCAB - 5]


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_the_largest_uniform_stays_inside_for_every_total(sampling, draw, scale):
    rows = 20 if interpreted(sampling, draw) else 4000
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * scale
    logits[:, -1] = float("-inf")
    found = draw(logits.to(DEVICE), torch.full((rows,), 1 - 2.0**-52, dtype=torch.float64, device=DEVICE))
    assert found.max() < VOCAB - 1


def test_a_target_that_falls_among_excluded_ids_gives_the_likeliest_id(sampling, monkeypatch):
    """Parallel sums can put one more bit on an excluded id than on the id before it."""
    logits = torch.tensor([[1.0, 2.0, float("-inf"), 0.0, float("-inf")]] * 2, device=DEVICE)
    rounded = torch.tensor([[0.2, 0.8, 0.9, 0.95, 1.0]] * 2, dtype=torch.float64, device=DEVICE)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *_, **__: rounded)
    assert sampling.draw(logits, torch.tensor([0.85, 0.99], dtype=torch.float64, device=DEVICE)).tolist() == [1, 1]


@pytest.mark.parametrize("vocabulary", [151936, 152064, 20001])
def test_a_large_vocabulary_is_inverted_exactly_too(sampling, draw, vocabulary):
    rows = 8 if interpreted(sampling, draw) else 64
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits[:, 1000:90000:2] = logits[:, -700:] = logits[:, :600] = float("-inf")
    noise = noise_of(sampling, rows)
    cumulative = logits.softmax(-1).cumsum(-1)
    exact = torch.searchsorted(cumulative, noise.cpu()[:, None], right=True).squeeze(1)
    found = draw(logits.float().to(DEVICE), noise).cpu()
    assert torch.isfinite(logits[torch.arange(rows), found]).all()
    # A float32 softmax moves every bound by about 1e-7, over which a draw of 64 may rarely step.
    assert (found == exact).sum() >= rows - 2


def test_blocks_without_weight_are_not_drawn_from_at_either_end(draw):
    logits = torch.full((2, 152064), float("-inf"), device=DEVICE)
    logits[:, 77777:77780] = 0.0
    ends = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64, device=DEVICE)
    assert draw(logits, ends).tolist() == [77777, 77779]


# NumPy, in which the interpreter computes, warns of it.
@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN):RuntimeWarning")
def test_a_row_of_nan_still_draws_a_valid_index(draw):
    for size in (VOCAB, 152064):
        logits = torch.full((1, size), float("nan"), device=DEVICE)
        found = draw(logits, torch.tensor([0.5], dtype=torch.float64, device=DEVICE))
        assert 0 <= found.item() < size


def test_a_draw_does_not_depend_on_its_neighbours(sampling, draw):
    rows = torch.stack([logits_of(seed) for seed in range(16)])
    noise = noise_of(sampling, 16)
    together = draw(rows, noise).tolist()
    assert together == [draw(rows[i : i + 1], noise[i : i + 1]).item() for i in range(16)]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    assert draw(rows[order], noise[order]).tolist() == [together[i] for i in order]


@pytest.mark.parametrize("form", ["transposed", "cut out", "bfloat16"])
def test_logits_may_lie_in_any_way(sampling, form):
    from triton_omni.vllm_hooks.kernels.draw import fused_draw

    logits = 3 * torch.randn(3, 1300, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    given = {
        "transposed": logits.t().contiguous().t(),
        "cut out": torch.cat([logits, logits], 1)[:, :1300],
        "bfloat16": logits.bfloat16(),
    }[form]
    noise = noise_of(sampling, 3)
    assert fused_draw(given, noise).tolist() == sampling.draw(given.float().contiguous(), noise).tolist()


@pytest.mark.parametrize("fused", [True, False])
def test_the_runner_draws_as_its_engine_was_told(sampling, fused):
    from triton_omni.vllm_hooks.kernels.draw import fused_draw
    from triton_omni.vllm_hooks.shared.fused_decode import FUSED_DECODE

    class Plain:
        max_num_reqs = 4

        def __init__(self, vllm_config, device):
            self.sampler = SimpleNamespace()

        def _make_buffer(self, count, dtype):
            return SimpleNamespace(gpu=torch.zeros(count, dtype=dtype, device=DEVICE))

    class Runner(sampling.CounterNoiseMixin, Plain):
        pass

    runner = Runner(SimpleNamespace(additional_config={FUSED_DECODE: fused and "auto"}), DEVICE)
    assert runner.sampler.topk_topp_sampler._draws is (fused_draw if fused else sampling.draw)


class CountOps(TorchDispatchMode):
    """Counts the tensor operations that reach the dispatcher."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_batch_does_not_cost_operations_a_sequence(sampling):
    """A loop over 32 sequences would cost 32 times as many; vLLM's kernels need one or two more for some batches."""
    counts = []
    # The largest first and uncounted: vLLM keeps a work buffer of the largest batch that it has seen.
    for batch in (256, 1, 32):
        sampler = sampling.CounterTopKTopPSampler(noise_of(sampling, batch))
        logits = torch.zeros(batch, VOCAB, device=DEVICE)
        top_k, top_p = torch.full((batch,), 5, device=DEVICE), torch.full((batch,), 0.9, device=DEVICE)
        with CountOps() as ops:
            sampler(logits, {}, top_k, top_p)
        counts.append(ops.count)
    assert 0 < counts[2] <= counts[1] + 4

# SPDX-License-Identifier: Apache-2.0
"""A talker's draw after the network, in one launch, in the Triton language.

It computes, for one token a sequence, what `TalkerStep`'s plain operations do in some fifty small launches. It knows
the step's tensors, neither vLLM nor how a step is scheduled.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_omni.core.kernel_launch import early_launch, let_next_begin, wait_for_inputs
from triton_omni.vllm_hooks.kernels.talker_step import Memory
from triton_omni.vllm_hooks.talker.draw import Setting
from triton_omni.vllm_hooks.talker.rows import Column

_GROUPS: Final = 128
"""Groups of codes, each of which gives its maximum; far more than a published talker's top-k of 40."""
_SHORT: Final = 128
"""Maximum candidates for the likeliest ids; with more, all ids are searched."""


class Rules(NamedTuple):
    """Ids that may be drawn, and the draw settings of each slot."""

    forbidden: Tensor
    """uint8 [V], 1 = never; the interpreter and the compiler agree on bytes, not on bool."""
    stops: Tensor
    """uint8 [V], 1 = not before a sequence's least length."""
    settings: Tensor
    """fp32 [settings, slots], in the order of `Setting`."""
    codes: int
    """Number of codes; they are the first ids."""
    others: Tensor
    """int32 [F], the few other ids that may be drawn, in their order."""

    @classmethod
    def of(cls, forbidden: Tensor, stops: Tensor, settings: Tensor, codes: int) -> Rules:
        """Build the rules from masks, bool [V] each."""
        others = codes + (~forbidden[codes:]).nonzero().flatten()
        return cls(forbidden.view(torch.uint8), stops.view(torch.uint8), settings, codes, others.to(torch.int32))


NO_KEY: Final = tl.constexpr(-0x80000000)
"""Key of an id that min-p leaves out."""
FIRST_KEY: Final = tl.constexpr(-0x7F800000)
"""The key of the lowest finite float."""


@triton.jit
def _ordered(values):
    """Return integer keys in the order of floats: their bits, inverted for negative numbers."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(keys):
    """The floats of which these are the keys."""
    return tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys).to(tl.float32, bitcast=True)


@triton.jit
def _added(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def _from(keys, weights, first, second, third):
    """Sums of the weights whose keys reach each of three bounds."""
    return tl.reduce(
        (
            tl.where(keys >= first, weights, 0),
            tl.where(keys >= second, weights, 0),
            tl.where(keys >= third, weights, 0),
        ),
        0,
        _added,
    )


@triton.jit
def _reached(keys, weights, other_keys, other_weights, least):
    """The largest key such that the weights of it and of all larger ones sum up to `least`; the smallest if none do.

    Found without sorting, by two bits in each round: a round waits for its sums, three of them as long as for one.
    """
    low, step = tl.full([], -0x80000000, tl.int32), tl.full([], 1 << 30, tl.int32)
    for _ in range(16):
        first, second = low + step, low + step + step
        third = second + step
        a, b, c = _from(keys, weights, first, second, third)
        other_a, other_b, other_c = _from(other_keys, other_weights, first, second, third)
        low += step * (
            (a + other_a >= least).to(tl.int32)
            + (b + other_b >= least).to(tl.int32)
            + (c + other_c >= least).to(tl.int32)
        )
        step >>= 2
    return low


@triton.jit
def _known(ids, there, used, stops, forbidden):
    """Load facts of `ids` where they are `there`: how often each was read, whether it ends a sequence, and whether it
    is never drawn.
    """
    ends, never = tl.load(stops + ids, mask=there, other=0), tl.load(forbidden + ids, mask=there, other=1)
    return tl.load(used + ids, mask=there, other=0), ends != 0, never != 0


@triton.jit
def _adjusted(values, times, ends, never, repetition, presence, frequency, early):
    """Logits after the penalties; minus infinity of ids that must not be drawn."""
    values = tl.where(times > 0, tl.where(values < 0, values * repetition, values / repetition), values)
    taken = frequency * times.to(tl.float32) + tl.where(times > 0, presence, 0.0)
    values = values - tl.where(ends, 0.0, taken)
    return tl.where(never, float("-inf"), tl.where(ends, tl.where(early, float("-inf"), values), values))


@triton.jit
def _at(numbers, number, values):
    """Return the element of `values` at a number; 0 if there is none."""
    return tl.sum(tl.where(numbers == number, values, 0), 0)


@triton.jit
def _above(keys, weights):
    """Return for each key the count of larger keys and the sum of their weights, by comparing all pairs in one wait."""
    larger = keys[:, None] > keys[None, :]
    return tl.sum(larger.to(tl.int32), 0), tl.sum(tl.where(larger, weights[:, None], 0.0), 0)


@triton.jit
def _chosen_of_few(keys, ids, highest, top_k, top_p, uniform, TILE: tl.constexpr):
    """Do as `_chosen`, if ids [TILE] are all that remain."""
    weights = tl.where(keys >= FIRST_KEY, tl.exp(_value(keys) - highest), 0.0)
    larger, before = _above(keys, weights)
    weights = tl.where(larger < top_k, weights, 0.0)
    mass = tl.where(top_p >= 1.0, float("inf"), top_p * tl.sum(weights, 0))
    weights = tl.where(before < mass, weights, 0.0)
    below = tl.cumsum(weights.to(tl.float64), 0)
    at, numbers = tl.sum((below <= uniform * tl.max(below, 0)).to(tl.int32), 0), tl.arange(0, TILE)
    return tl.where(_at(numbers, at, weights) > 0, _at(numbers, at, ids), -1)


@triton.jit
def _bound(tops, top_k, GROUPS: tl.constexpr):
    """Return the `top_k`th largest key of `tops`, a lower bound of the `top_k` largest of all; the lowest key if there
    are fewer."""
    larger = tl.sum((tops[:, None] > tops[None, :]).to(tl.int32), 0)
    bound = tl.min(tl.where(larger < top_k, tops, 0x7FFFFFFF), 0)
    return tl.where(top_k <= GROUPS, tl.maximum(bound, FIRST_KEY), FIRST_KEY)


@triton.jit
def _packed(keys, ids):
    return (keys.to(tl.int64) << 32) | ids.to(tl.int64)


@triton.jit
def _chosen(
    keys,
    values,
    ids,
    other_keys,
    other_values,
    other_ids,
    highest,
    top_k,
    top_p,
    uniform,
    TILE: tl.constexpr,
    OTHERS_TILE: tl.constexpr,
):
    """Return the id at `uniform` of the distribution that top-k and top-p leave, from `ids` [TILE] and the other ids.
    It is -1 if rounding ends between two of them.
    """
    one, other_one = tl.full([TILE], 1, tl.int32), tl.full([OTHERS_TILE], 1, tl.int32)
    reached = _reached(keys, one, other_keys, other_one, top_k)
    weights = tl.where((keys >= FIRST_KEY) & (keys >= reached), tl.exp(values - highest), 0.0)
    other_weights = tl.where((other_keys >= FIRST_KEY) & (other_keys >= reached), tl.exp(other_values - highest), 0.0)
    mass = top_p * (tl.sum(weights, 0) + tl.sum(other_weights, 0))
    reached = tl.where(top_p >= 1.0, reached, _reached(keys, weights, other_keys, other_weights, mass))
    weights = tl.where(keys >= reached, weights, 0.0)
    other_weights = tl.where(other_keys >= reached, other_weights, 0.0)

    below = tl.cumsum(weights.to(tl.float64), 0)
    other_below = tl.max(below, 0) + tl.cumsum(other_weights.to(tl.float64), 0)
    target = uniform * tl.max(other_below, 0)
    # The id in the whole tile, if it is one of the others.
    at, other_at = tl.sum((below <= target).to(tl.int32), 0), tl.sum((other_below <= target).to(tl.int32), 0)
    numbers, other_numbers = tl.arange(0, TILE), tl.arange(0, OTHERS_TILE)
    is_code = at < TILE
    chosen = tl.where(is_code, _at(numbers, at, ids), _at(other_numbers, other_at, other_ids))
    weight = tl.where(is_code, _at(numbers, at, weights), _at(other_numbers, other_at, other_weights))
    return tl.where(weight > 0, chosen, -1)


# One long function: penalties, filters and draw share a row of logits that stays in registers. The few other ids have
# a tensor of their own, since one with the codes would have to be twice as large.
@triton.jit
def _draw(
    logits,
    index,
    drawn,
    used,
    faults,
    forbidden,
    stops,
    settings,
    others,
    short,
    logits_stride,
    index_stride,
    slots,
    mask_id,
    SLOT: tl.constexpr,
    PLACE: tl.constexpr,
    UNIFORM: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOP_P: tl.constexpr,
    TOP_K: tl.constexpr,
    LOG_MIN_P: tl.constexpr,
    FIRST_STOP: tl.constexpr,
    REPETITION: tl.constexpr,
    PRESENCE: tl.constexpr,
    FREQUENCY: tl.constexpr,
    VOCABULARY: tl.constexpr,
    CODES: tl.constexpr,
    TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    OTHERS: tl.constexpr,
    OTHERS_TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    SHORT: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    token, ids, numbers = tl.program_id(0), tl.arange(0, TILE), tl.arange(0, OTHERS_TILE)
    told, row = index + token * index_stride, logits + token * logits_stride
    # Everything but the logits is known since the step's beginning, and is loaded while the head still runs.
    slot, place = tl.load(told + SLOT), tl.load(told + PLACE)
    other_ids = tl.load(others + numbers, mask=numbers < OTHERS, other=0)
    repetition = tl.load(settings + REPETITION * slots + slot)
    presence, frequency = tl.load(settings + PRESENCE * slots + slot), tl.load(settings + FREQUENCY * slots + slot)
    early = place < tl.load(settings + FIRST_STOP * slots + slot)
    own = used + slot * VOCABULARY
    times, ends, never = _known(ids, ids < CODES, own, stops, forbidden)
    other_times, other_ends, other_never = _known(other_ids, numbers < OTHERS, own, stops, forbidden)
    temperature, top_p = tl.load(settings + TEMPERATURE * slots + slot), tl.load(settings + TOP_P * slots + slot)
    top_k, log_min_p = tl.load(settings + TOP_K * slots + slot), tl.load(settings + LOG_MIN_P * slots + slot)
    uniform, faulty = tl.load(told + UNIFORM).to(tl.float64, bitcast=True), tl.load(faults + slot)

    wait_for_inputs(EARLY)
    values = tl.load(row + ids, mask=ids < CODES, other=0.0).to(tl.float32)
    other_values = tl.load(row + other_ids, mask=numbers < OTHERS, other=0.0).to(tl.float32)
    rest = CODES + tl.arange(0, REST_TILE)
    summed = tl.sum(values, 0) + tl.sum(tl.load(row + rest, mask=rest < VOCABULARY, other=0.0).to(tl.float32), 0)
    sound = tl.where(faulty == 0, tl.abs(summed) < float("inf"), False)
    values = _adjusted(tl.where(sound, values, 0.0), times, ends, never, repetition, presence, frequency, early)
    other_values = _adjusted(
        tl.where(sound, other_values, 0.0),
        other_times,
        other_ends,
        other_never,
        repetition,
        presence,
        frequency,
        early,
    )
    highest = tl.maximum(tl.max(values, 0), tl.max(other_values, 0))
    likeliest = tl.minimum(
        tl.min(tl.where(values == highest, ids, VOCABULARY), 0),
        tl.min(tl.where(other_values == highest, other_ids, VOCABULARY), 0),
    )

    divisor = tl.where(temperature == 0, 1.0, temperature)
    scaled, other_scaled, highest = values / divisor, other_values / divisor, highest / divisor
    lowest = highest + log_min_p
    keys = tl.where(scaled >= lowest, _ordered(scaled), NO_KEY)
    other_keys = tl.where(other_scaled >= lowest, _ordered(other_scaled), NO_KEY)
    # The k largest maxima of the groups give a lower bound of the top k; hardly any other ids reach it.
    tops = tl.max(tl.reshape(keys, [GROUPS, TILE // GROUPS]), 1)
    bound = _bound(tops, top_k, GROUPS)
    near, other_near = keys >= bound, other_keys >= bound
    codes_near = tl.sum(near.to(tl.int32), 0)
    count = codes_near + tl.sum(other_near.to(tl.int32), 0)
    chosen = likeliest
    if (count <= SHORT) & (temperature != 0):
        # The few candidates are compared in pairs; they pass through memory in order.
        places = short + token * SHORT - 1
        tl.store(places + tl.cumsum(near.to(tl.int32), 0), _packed(keys, ids), mask=near)
        other_places = places + codes_near + tl.cumsum(other_near.to(tl.int32), 0)
        tl.store(other_places, _packed(other_keys, other_ids), mask=other_near)
        tl.debug_barrier()
        listed = tl.arange(0, SHORT)
        packed = tl.load(short + token * SHORT + listed, mask=listed < count, other=0)
        short_keys = tl.where(listed < count, (packed >> 32).to(tl.int32), NO_KEY)
        short_ids = (packed & 0x7FFFFFFF).to(tl.int32)
        chosen = _chosen_of_few(short_keys, short_ids, highest, top_k, top_p, uniform, SHORT)
    elif temperature != 0:
        chosen = _chosen(
            keys, scaled, ids, other_keys, other_scaled, other_ids, highest, top_k, top_p, uniform, TILE, OTHERS_TILE
        )
    # Rounding may end between two ids, or after the last.
    chosen = tl.where(chosen < 0, likeliest, chosen)
    # A waiting sequence keeps its place with the idle slot, and its last draw stays there.
    tl.store(drawn + token, tl.where(sound, chosen, mask_id).to(tl.int32), mask=slot != slots - 1)


def draw(logits: Tensor, index: Tensor, memory: Memory, rules: Rules, mask_id: int) -> None:
    """`TalkerStep.finish_decode`: draw from `logits` [N, V] into `memory.drawn`, except for the idle (last) slot.

    In the order of HF's and vLLM's steps: penalties, forbidden ids, least length, temperature, min-p, top-k, top-p;
    then the cumulative distribution is inverted. All equally likely ids at a bound stay, whereas a sort keeps some.
    Everything but the logits is read while the kernel before still runs, as `decode_attention` reads lengths.
    """
    (count, vocabulary), slots, others = logits.shape, memory.used.shape[0], len(rules.others)
    tile = triton.next_power_of_2(rules.codes)
    listed = min(_SHORT, tile)
    short = torch.empty(count, listed, dtype=torch.int64, device=logits.device)
    _draw[(count,)](
        logits,
        index,
        memory.drawn,
        memory.used,
        memory.faults,
        rules.forbidden,
        rules.stops,
        rules.settings,
        rules.others,
        short,
        logits.stride(0),
        index.stride(0),
        slots,
        mask_id,
        SLOT=Column.SLOT.value,
        PLACE=Column.PLACE.value,
        UNIFORM=Column.UNIFORM.value,
        **{setting.name: setting.value for setting in Setting},
        VOCABULARY=vocabulary,
        CODES=rules.codes,
        TILE=tile,
        REST_TILE=triton.next_power_of_2(vocabulary - rules.codes),
        OTHERS=others,
        OTHERS_TILE=triton.next_power_of_2(others),
        GROUPS=min(_GROUPS, tile),
        SHORT=listed,
        num_warps=16,
        **early_launch(logits.device),
    )

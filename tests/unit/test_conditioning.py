# SPDX-License-Identifier: Apache-2.0
"""Rows and ids of talker positions against a plain reading of HF's `generate`."""

import numpy as np
import pytest

from triton_omni.vllm_hooks.talker.conditioning import (
    CodecIds,
    can_speak,
    pool_rows,
    prompt_ids,
    split_at_text_bos,
    stored_rows,
)

IDS = CodecIds(mask=216, pad=212, bos=213, eos=214)
EOS, PAD = 0, 1


def rows_as_hf_writes_them(prompt_rows, reply_rows, positions):
    """Names of rows: HF concatenates prompt, bos, first reply row; then one reply row a step, eos, pad for ever."""
    prompt = [f"prompt{i}" for i in range(prompt_rows)] + ["bos", "reply0"]
    steps = [f"reply{i}" for i in range(1, reply_rows)] + ["eos"] + ["pad"] * positions
    return (prompt + steps)[:positions]


def rows_of_a_pool(prompt_rows, reply_rows, positions, base):
    names = {EOS: "eos", PAD: "pad"}
    stored = stored_rows(prompt_rows, prompt_rows + reply_rows)
    layout = [f"prompt{i}" for i in range(prompt_rows)] + ["bos"] + [f"reply{i}" for i in range(reply_rows)]
    names.update({base + place: name for place, name in enumerate(layout)})
    place = np.arange(positions)
    found = pool_rows(place, np.full(positions, base), np.full(positions, stored), text_eos=EOS, text_pad=PAD)
    return [names[int(index)] for index in found]


@pytest.mark.parametrize(("prompt", "reply"), [(1, 1), (5, 1), (5, 2), (40, 7)])
def test_every_position_takes_the_row_hf_gives_it(prompt, reply):
    length = prompt + reply + 6
    assert rows_of_a_pool(prompt, reply, length, base=17) == rows_as_hf_writes_them(prompt, reply, length)


def test_sequences_of_one_batch_do_not_mix():
    found = pool_rows(np.array([3, 3, 9]), np.array([10, 50, 90]), np.array([4, 3, 5]), text_eos=EOS, text_pad=PAD)
    assert found.tolist() == [13, EOS, PAD]


def test_prompt_ids_are_those_the_repetition_penalty_counts():
    assert prompt_ids(3, IDS) == [216, 216, 216, 212, 213]


def test_the_pad_and_eos_ids_stop_and_bos_does_not():
    assert IDS.stops == (212, 214)


@pytest.mark.parametrize("sizes", [[1] * 9, [5, 4], [9], [4, 1, 4], [6, 3]])
def test_rows_split_over_messages_land_where_one_message_puts_them(sizes):
    prompt, placed, fed = 5, {}, 0
    for size in sizes:
        first, second, at_first, at_second = split_at_text_bos(prompt, fed, size)
        names = list(range(fed, fed + size))
        placed.update({at_first + i: name for i, name in enumerate(names[first])})
        placed.update({at_second + i: name for i, name in enumerate(names[second])})
        fed += size
    assert placed == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 5, 7: 6, 8: 7, 9: 8}


@pytest.mark.parametrize(("fed", "stored"), [(0, 0), (4, 4), (5, 6), (6, 7)])
def test_text_bos_counts_as_soon_as_the_prompt_is_whole(fed, stored):
    assert stored_rows(5, fed) == stored


def test_nothing_is_spoken_without_a_reply_row():
    assert not can_speak(5, 5)
    assert can_speak(5, 6)

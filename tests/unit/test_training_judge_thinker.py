# SPDX-License-Identifier: Apache-2.0
"""The thinker's judge counts right replies, and its media have as many placeholders as HF's processors give tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from training import judge_thinker
from training.judge_thinker import Figure, Item, Reply, judge, scene_items, text_items
from training.tokens import END_OF_TEXT, IM_END, encode, encode_prompt
from training.world.chats import Chat

CPU = torch.device("cpu")


class Knowing:
    """Replies what is wanted, or always the same."""

    def __init__(self, items: list[Item], fixed: str | None = None) -> None:
        self._replies = {tuple(encode_prompt(item.chat, item.media)): fixed or item.wanted for item in items}

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        rows = [
            [*encode(self._replies[tuple(ids[mask == 1].tolist())]), IM_END]
            for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        longest = max(map(len, rows))
        return torch.cat([input_ids, torch.tensor([row + [END_OF_TEXT] * (longest - len(row)) for row in rows])], 1)


def test_right_replies_get_full_marks_and_wrong_ones_none() -> None:
    items = [item for item in text_items(random.Random(1), 20) if item.group != "story"]
    for group, figure in judge(Knowing(items), items, CPU).items():
        assert figure.right == figure.count > 0, (group, figure.mistakes)
    wrong = judge(Knowing(items, "Umbrella violin"), items, CPU)
    assert all(figure.right < 0.1 * figure.count for figure in wrong.values())
    assert len(wrong["facts"].mistakes) == 20


@pytest.mark.parametrize(
    ("group", "wanted", "got", "right", "count"),
    [
        ("say sentences", "The red ball is here.", "The blue ball is here.", 4, 5),
        ("spoken words awb", "One two three.", "One two.", 2, 3),
        ("sums", "One plus one is two.", "One plus one is three.", 0, 1),
        ("story", "", "A fox ran. A fox ran. It was late. It slept.", 0, 1),
    ],
)
def test_figures_count_words_or_replies(group: str, wanted: str, got: str, right: int, count: int) -> None:
    figure = Figure()
    figure.add(Reply(Item(Chat("x", (("Tell me a story", wanted),)), group), got, ended=True))
    assert (figure.right, figure.count) == (right, count)
    assert len(figure.mistakes) == 1


@pytest.mark.parametrize("videos", [False, True])
def test_media_have_as_many_placeholders_as_tokens(videos: bool) -> None:
    for item in scene_items(random.Random(2), 6, videos=videos):
        grid = item.tensors["video_grid_thw" if videos else "image_grid_thw"][0]
        pixels = item.tensors["pixel_values_videos" if videos else "pixel_values"]
        assert len(pixels) == int(grid.prod())
        assert item.media[0].tokens == int(grid.prod()) // 4
        assert item.wanted


def test_examples_are_asked_once_each() -> None:
    class Silent:
        def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.cat([input_ids, torch.full((len(input_ids), 1), IM_END)], 1)

    lines = judge_thinker.examples(Silent(), CPU)
    assert len(set(lines)) == len(lines) > 4

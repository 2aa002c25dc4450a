# SPDX-License-Identifier: Apache-2.0
"""Media that go through their encoders again, and errors that are left; by a stand-in for vLLM's runner."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from triton_omni.vllm_hooks.thinker.media_memory import MediaMemoryMixin

HIDDEN = 4
TOKENS = {"small": 3, "large": 9}


@dataclass
class Step:
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)


class Vllm:
    """The part of vLLM's runner that the mixin knows; requests have a medium of the size of their name."""

    dtype, device, inputs_embeds_size = torch.float32, torch.device("cpu"), HIDDEN

    def __init__(self, room: int, ranks: int = 1) -> None:
        self.parallel_config = SimpleNamespace(world_size=ranks)
        self.room, self.passes = room, list[list[str]]()
        self.encoder_cache: dict[str, Tensor] = {}
        self.requests = {name: state(name) for name in TOKENS}
        self._held: list[weakref.ref[Tensor]] = []

    def _execute_mm_encoder(self, step: Step) -> list[Tensor]:
        assert all(held() is None for held in self._held)
        names = list(step.scheduled_encoder_inputs)
        self.passes.append(names)
        made = [torch.ones(TOKENS[name], HIDDEN) for name in names]
        self._held = [weakref.ref(embedding) for embedding in made]
        if sum(map(len, made)) > self.room:
            raise torch.OutOfMemoryError("tried to allocate too much")
        self.encoder_cache.update(zip((f"of {name}" for name in names), (each.clone() for each in made), strict=True))
        return [each.clone() for each in made]


def state(name: str, computed: int = 0) -> Any:
    return SimpleNamespace(mm_features=[medium(name)], num_computed_tokens=computed)


def medium(name: str) -> Any:
    place = SimpleNamespace(get_num_embeds=lambda: TOKENS[name], offset=5, length=TOKENS[name])
    return SimpleNamespace(modality="image", identifier=f"of {name}", mm_position=place)


class Runner(MediaMemoryMixin, Vllm):
    pass


STEP: Any = Step({"small": [0], "large": [0]}, {"small": 20, "large": 20})


@pytest.mark.parametrize(
    ("room", "passes"), [(12, [["small", "large"]]), (9, [["small", "large"], ["small"], ["large"]])]
)
def test_media_go_one_by_one_where_there_is_no_memory_for_all(room: int, passes: list[list[str]]) -> None:
    runner = Runner(room)
    assert [len(embedding) for embedding in runner._execute_mm_encoder(STEP)] == [3, 9]
    assert runner.passes == passes
    assert not runner.without_memory


def test_nobody_can_take_for_a_medium_what_stands_in_for_one_that_does_not_fit() -> None:
    runner = Runner(room=3)
    assert [len(embedding) for embedding in runner._execute_mm_encoder(STEP)] == [3, 9]
    assert runner.without_memory == {"large": "image"}
    assert bool(runner.encoder_cache["of small"].isfinite().all())
    nothing = runner.encoder_cache["of large"]
    assert nothing.shape == (9, HIDDEN)
    assert bool(nothing.isnan().all())
    assert nothing.untyped_storage().nbytes() == runner.dtype.itemsize
    assert STEP.scheduled_encoder_inputs == {"small": [0], "large": [0]}


@pytest.mark.parametrize(
    ("computed", "tokens", "reads"), [(0, 20, True), (0, 5, False), (0, 6, True), (13, 1, True), (14, 6, False)]
)
def test_whoever_reads_the_medium_in_this_step_is_told_of_too(computed: int, tokens: int, reads: bool) -> None:
    runner = Runner(room=3)
    runner.requests["sharer"] = state("large", computed)
    runner._execute_mm_encoder(replace(STEP, num_scheduled_tokens={**STEP.num_scheduled_tokens, "sharer": tokens}))
    assert set(runner.without_memory) == ({"large", "sharer"} if reads else {"large"})


def test_with_several_ranks_the_error_is_left() -> None:
    runner = Runner(room=9, ranks=2)
    with pytest.raises(torch.OutOfMemoryError):
        runner._execute_mm_encoder(STEP)
    assert runner.passes == [["small", "large"]]

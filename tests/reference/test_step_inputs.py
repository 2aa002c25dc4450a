# SPDX-License-Identifier: Apache-2.0
"""A prompt's first step has the layout that vLLM would give it: positions and places in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from media_samples import tone
from reference.hf import HfReference
from reference.thinker_rig import REPLY, ask, make_engine, token_ids
from triton_omni.session.engine import ThinkerPlaced, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Any]:
    made = make_engine(tiny_checkpoint)
    yield made
    made.close()


def heard(engine: Any, hf: HfReference) -> ThinkerPlaced:
    ids = token_ids(hf, {"type": "audio"}, {"type": "text", "text": "what is it?"})
    placed: ThinkerPlaced = engine.prepare(ThinkerPrompt(ids, {"audio": [tone(0.4)]}))
    return placed


@pytest.mark.parametrize("kind", ["text", "sound"])
def test_a_prompt_lies_where_vllm_would_lay_it(engine: Any, hf: HfReference, kind: str) -> None:
    placed = engine.prepare(ask(hf, "hello there")) if kind == "text" else heard(engine, hf)
    runner = engine._runner
    found = {}
    for key, knows in (("ours", True), ("vllm's", False)):
        engine.add_sequence(key, placed, REPLY, want_rows=True)
        request_id = engine._sequences[key].request_id
        if not knows:
            runner.forget_place(request_id)
        engine.step()
        state = runner.requests[request_id]
        found[key] = state.mrope_positions, state.mrope_position_delta
        assert not runner._placed
        engine.abort(key)
        engine.step()
    assert torch.equal(found["ours"][0], found["vllm's"][0])
    assert found["ours"][1] == found["vllm's"][1]


def laid_out(runner: Any, count: int) -> dict[str, Any]:
    """Return the values of one sequence of `count` tokens that a step and all after it read."""
    table = runner.input_batch.block_table[0]
    blocks, size = table.block_table.gpu[0].tolist(), table.block_size
    places = [blocks[place // size] * size + place % size for place in range(count)]
    assert table.slot_mapping.gpu[:count].tolist() == places
    return {
        "ids": runner.input_ids.gpu[:count].tolist(),
        "places": runner.positions[:count].tolist(),
        "M-RoPE": runner.mrope_positions.gpu[:, :count].tolist(),
        "starts": runner.query_start_loc.gpu.tolist(),
        "starts on the host": runner.query_start_loc.np.tolist(),
        "lengths": runner.seq_lens.tolist(),
        "bounds of lengths": runner.optimistic_seq_lens_cpu.tolist(),
        "thrown away": runner.discard_request_mask.np[:1].tolist(),
        "before": runner.prev_positions.np[:1].tolist(),
    }


def test_a_lone_prompt_is_laid_out_as_vllm_lays_it(
    engine: Any, hf: HfReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine._runner
    placed = engine.prepare(ask(hf, "hello there"))
    count = len(placed.prompt_token_ids)
    alone = runner._is_lone_prompt
    found, indices = [], []
    prepare = runner._prepare_inputs

    def watched(*given: Any) -> Any:
        prepared = prepare(*given)
        found.append(laid_out(runner, count))
        indices.append(prepared[0].tolist())
        assert prepared[1:] == (None, 1)
        return prepared

    monkeypatch.setattr(runner, "_prepare_inputs", watched)
    for is_lone in (alone, lambda tokens: False):
        monkeypatch.setattr(runner, "_is_lone_prompt", is_lone)
        # Leftovers of an earlier step must not matter.
        for buffer in (runner.positions, runner.seq_lens, runner.optimistic_seq_lens_cpu, runner.prev_positions.cpu):
            buffer.fill_(7)
        runner.query_start_loc.np[:] = 7
        runner.discard_request_mask.np[:] = True
        engine.add_sequence("it", placed, REPLY, want_rows=True)
        engine.step()
        engine.abort("it")
        engine.step()
    assert found[0] == found[1]
    assert indices == [[count - 1], [count - 1]]


def test_what_is_no_lone_prompt_is_left_to_vllm(engine: Any, hf: HfReference, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, laid = engine._runner, []
    monkeypatch.setattr(runner, "_lay_prompt_out", lambda count: laid.append(count) or lay(count))
    lay = type(runner)._lay_prompt_out.__get__(runner)
    placed = engine.prepare(ask(hf, "hello"))
    engine.add_sequence("alone", placed, REPLY, want_rows=True)
    engine.step()
    assert laid == [len(placed.prompt_token_ids)]
    # Decode steps, a prompt beside another sequence, one in two parts, and a medium.
    engine.step()
    engine.add_sequence("beside", placed, REPLY, want_rows=True)
    engine.step()
    for key in ("alone", "beside"):
        engine.abort(key)
    for key, other in (("long", engine.prepare(ask(hf, "x" * 100))), ("sound", heard(engine, hf))):
        engine.add_sequence(key, other, REPLY, want_rows=True)
        for _ in range(4):
            engine.step()
        engine.abort(key)
        engine.step()
    assert len(laid) == 1


def test_a_prompt_that_is_given_up_before_its_first_step_leaves_no_positions(engine: Any, hf: HfReference) -> None:
    engine.add_sequence("given up", engine.prepare(ask(hf, "hello")), REPLY, want_rows=True)
    assert engine._runner._placed
    engine.abort("given up")
    assert not engine._runner._placed


def test_tokens_go_where_vllms_own_launch_sends_them(engine: Any) -> None:
    (table,) = engine._runner.input_batch.block_table.block_tables
    table.add_row([3, 5], 0)
    table.add_row([2], 1)
    table.commit_block_table(2)
    device = table.slot_mapping.gpu.device
    bounds = torch.tensor([0, 6, 9], dtype=torch.int32, device=device)
    # A sequence that goes on in its second block, and one that begins.
    positions = torch.tensor([*range(table.block_size - 3, table.block_size + 3), 0, 1, 2], device=device)
    slots = []
    for launch in (table.compute_slot_mapping, lambda *given: type(table).compute_slot_mapping(table, *given)):
        table.slot_mapping.gpu.fill_(-7)
        launch(2, bounds, positions)
        slots.append(table.slot_mapping.gpu[: len(positions)].tolist())
    size = table.block_size
    expected = [3 * size + size - 3 + n for n in range(3)] + [5 * size + n for n in range(3)]
    assert slots[0] == slots[1] == [*expected, *(2 * size + n for n in range(3))]
    table.clear_row(0)
    table.clear_row(1)

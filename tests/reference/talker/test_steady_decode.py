# SPDX-License-Identifier: Apache-2.0
"""Inputs of a decode step that are counted up are those that vLLM lays out from the host's state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rig import GREEDY, SAMPLED, Spoken, make_engine

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")


def device_inputs(runner, count):
    """All that vLLM's `_prepare_inputs` writes and a decode step reads."""
    table = runner.input_batch.block_table[0]
    named = {
        "computed": runner.num_computed_tokens[:count],
        "positions": runner.positions[:count],
        "M-RoPE": runner.mrope_positions.gpu[:, :count],
        "lengths": runner.seq_lens,
        "bound of lengths": runner.optimistic_seq_lens_cpu,
        "starts": runner.query_start_loc.gpu,
        "ids": runner.input_ids.gpu[:count],
        "cache slots": table.slot_mapping.gpu[:count],
        "cache blocks": table.block_table.gpu[:count],
        "thrown away": runner.discard_request_mask.gpu[:count],
        "owners": runner.req_indices.gpu[:count],
        "places": runner.query_pos.gpu[:count],
        "scheduled": runner.num_scheduled_tokens.gpu[:count],
        "rows before": torch.from_numpy(runner.prev_positions.np[:count]),
    }
    return {name: value.clone() for name, value in named.items()}


@pytest.mark.parametrize("ahead", [False, True])
def test_inputs_counted_up_are_vllms(tiny_checkpoint, cases, monkeypatch, ahead):
    from triton_omni.vllm_hooks.compat import GPUModelRunner
    from triton_omni.vllm_hooks.steady_decode import SteadyDecodeMixin

    compared = []
    count_up = SteadyDecodeMixin._count_up

    def count_up_and_compare(runner, step, count, computed):
        count_up(runner, step, count, computed)
        found = device_inputs(runner, count)
        last_tokens, _, most = GPUModelRunner._prepare_inputs(runner, step, np.ones(count, dtype=np.int32))
        assert most == 1
        assert last_tokens.tolist() == runner._last_step.last_tokens.tolist()
        expected = device_inputs(runner, count)
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
        compared.append(count)

    monkeypatch.setattr(SteadyDecodeMixin, "_count_up", count_up_and_compare)
    engine, spoken = make_engine(tiny_checkpoint, ahead=ahead), Spoken()
    for number, case in enumerate(cases[:5]):
        # Each begins while the others decode, waits for rows in between, and ends when it will.
        engine.open(str(number), case.prompt, SAMPLED if number % 2 else GREEDY)
        engine.feed(str(number), case.rows[: case.prompt_rows + 1])
        for _ in range(4):
            spoken.step(engine)
        engine.feed(str(number), case.rows[case.prompt_rows + 1 :])
        engine.end(str(number))
        for _ in range(6):
            spoken.step(engine)
    engine.abort("1")
    spoken.drain(engine)
    engine.close()
    assert len(set(compared)) > 2
    assert len(compared) > 20

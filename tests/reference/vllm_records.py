# SPDX-License-Identifier: Apache-2.0
"""What vLLM knows of its sequences between two steps, of two engines that are told the same; and whom it preempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def different_records(one: Any, other: Any) -> list[str]:
    """Names of what the vLLM of two engines knows differently, on the host and on the device."""
    first, second = _records(one), _records(other)
    return [name for name in first | second if first.get(name) != second.get(name)]


def _records(engine: Any) -> dict[str, Any]:
    return {**_of_scheduler(engine._core), **_of_runner(engine._runner), **_of_decode_step(engine._runner)}


def _name_of(request_id: str) -> str:
    """The key of a sequence; vLLM appends something of its own to it."""
    return request_id.rsplit("-", 1)[0]


def _of_scheduler(core: Any) -> dict[str, Any]:
    scheduler = core.scheduler
    manager = scheduler.kv_cache_manager
    return {
        "scheduled": [
            (
                _name_of(request.request_id),
                request.status,
                request.num_computed_tokens,
                request.num_in_flight_tokens,
                request.num_output_placeholders,
                request.is_prefill_chunk,
                list(request.all_token_ids),
                list(request.output_token_ids),
                manager.get_block_ids(request.request_id),
            )
            for request in scheduler.running
        ],
        "free blocks": manager.block_pool.get_num_free_blocks(),
        "step": scheduler.current_step,
        "scheduled before": sorted(map(_name_of, scheduler.prev_step_scheduled_req_ids)),
        "in flight": [sorted(map(_name_of, step.num_scheduled_tokens)) for _, step, _ in core.batch_queue],
        "media": [sorted(scheduler.encoder_cache_manager.get_cached_input_ids(found)) for found in scheduler.running],
    }


def _of_runner(runner: Any) -> dict[str, Any]:
    batch = runner.input_batch
    rows = range(batch.num_reqs)
    table = batch.block_table[0]
    before = batch.prev_req_id_to_index or {}
    return {
        "order": [_name_of(request_id) for request_id in batch.req_ids],
        "computed": batch.num_computed_tokens_cpu[: batch.num_reqs].tolist(),
        "ends": batch.num_tokens_no_spec[: batch.num_reqs].tolist(),
        "tokens": [batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist() for row in rows],
        "known": [batch.is_token_ids[row, : batch.num_tokens_no_spec[row]].tolist() for row in rows],
        "blocks": [table.get_numpy_array()[row, : table.num_blocks_per_row[row]].tolist() for row in rows],
        "rows before": {_name_of(request_id): row for request_id, row in before.items()},
        "states": {
            _name_of(request_id): (state.num_computed_tokens, list(state.output_token_ids), state.block_ids)
            for request_id, state in runner.requests.items()
        },
        "media embeddings": len(runner.encoder_cache),
    }


def _of_decode_step(runner: Any) -> dict[str, Any]:
    """All that a decode step reads of its inputs, as it left them, and what it drew."""
    batch = runner.input_batch
    count, table = batch.num_reqs, batch.block_table[0]
    if not (runner.optimistic_seq_lens_cpu[:count].numpy() > batch.num_prompt_tokens[:count]).all():
        return {}
    read = runner.inputs_embeds if runner.supports_mm_inputs else runner.input_ids
    tensors = {
        "M-RoPE": runner.mrope_positions.gpu[:, :count],
        "lengths": runner.seq_lens,
        "bound of lengths": runner.optimistic_seq_lens_cpu,
        "starts": runner.query_start_loc.gpu,
        "inputs": read.gpu[:count],
        "cache slots": table.slot_mapping.gpu[:count],
        "cache blocks": table.block_table.gpu[:count],
        "drawn": batch.prev_sampled_token_ids,
    }
    # As text: what is not a number is never equal to itself.
    return {name: str(tensor.tolist()) for name, tensor in tensors.items() if tensor is not None}


@contextmanager
def preemptions(engine: Any, when: Callable[[str], None]) -> Iterator[list[str]]:
    """vLLM's ids of the sequences that are preempted within; `when` is told each at the moment."""
    preempted: list[str] = []
    preempt = engine._core.scheduler._preempt_request

    def watched(request: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(request.request_id)
        when(request.request_id)
        preempt(request, *arguments, **named)

    with mock.patch.object(engine._core.scheduler, "_preempt_request", watched):
        yield preempted

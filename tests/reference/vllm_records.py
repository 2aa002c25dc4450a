# SPDX-License-Identifier: Apache-2.0
"""vLLM's records of its sequences between two steps, of two engines with equal input; and the sequences it preempts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def different_records(one: Any, other: Any) -> list[str]:
    """Names of what the vLLM of two engines knows differently, on the host and on the device.

    If the runners note in `taking_part` the sequences of the last step, others may keep a place in one batch. So
    only records of the others are compared, whatever their rows. In replies an id that one runner does not know is no
    difference.
    """
    first, second = _records(one), _records(other)
    places_are_kept = hasattr(one._runner, "taking_part")
    alike = dict.fromkeys(("tokens", "states"), _alike) if places_are_kept else {}
    names = (first | second).keys() - (_OF_ROWS if places_are_kept else ())
    return [name for name in sorted(names) if not alike.get(name, operator.eq)(first.get(name), second.get(name))]


_OF_ROWS = {"order", "rows before", "all lengths", "all bounds of lengths", "all starts"}
"""Records that tell the sequence of each row, or describe rows after the batch."""


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other) or (type(one) is type(other) is int and -1 in (one, other))


def _records(engine: Any) -> dict[str, Any]:
    rows = _rows_of_last_step(engine)
    return {
        **_of_scheduler(engine._core, rows),
        **_of_runner(engine._runner, rows),
        **_of_decode_step(engine._runner, rows),
    }


def _rows_of_last_step(engine: Any) -> dict[str, int]:
    """Rows of the runner's batch by name; of those that take part, where it is noted who does."""
    batch = engine._runner.input_batch
    shares = getattr(engine._runner, "taking_part", batch.req_id_to_index)
    return {_name_of(found): row for found, row in batch.req_id_to_index.items() if found in shares}


def _name_of(request_id: str) -> str:
    """The key of a sequence; vLLM appends something of its own to it."""
    return request_id.rsplit("-", 1)[0]


def _of_scheduler(core: Any, rows: dict[str, int]) -> dict[str, Any]:
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
        "scheduled before": sorted(rows.keys() & {*map(_name_of, scheduler.prev_step_scheduled_req_ids)}),
        "in flight": [sorted(map(_name_of, step.num_scheduled_tokens)) for _, step, _ in core.batch_queue],
        "media": [sorted(scheduler.encoder_cache_manager.get_cached_input_ids(found)) for found in scheduler.running],
    }


def _of_runner(runner: Any, rows: dict[str, int]) -> dict[str, Any]:
    batch = runner.input_batch
    table, ends = batch.block_table[0], batch.num_tokens_no_spec
    before = batch.prev_req_id_to_index or {}
    return {
        "sequences": sorted(rows),
        "order": list(map(_name_of, batch.req_ids)),
        "computed": {name: batch.num_computed_tokens_cpu[row] for name, row in rows.items()},
        "ends": {name: ends[row] for name, row in rows.items()},
        "tokens": {name: batch.token_ids_cpu[row, : ends[row]].tolist() for name, row in rows.items()},
        "known": {name: batch.is_token_ids[row, : ends[row]].tolist() for name, row in rows.items()},
        "blocks": {
            name: table.get_numpy_array()[row, : table.num_blocks_per_row[row]].tolist() for name, row in rows.items()
        },
        "in the step before": sorted(rows.keys() & {*map(_name_of, before)}),
        "rows before": {_name_of(request_id): row for request_id, row in before.items()},
        "states": {
            name: (state.num_computed_tokens, list(state.output_token_ids), state.block_ids)
            for request_id, state in runner.requests.items()
            if (name := _name_of(request_id)) in rows or not hasattr(runner, "taking_part")
        },
        "media embeddings": len(runner.encoder_cache),
    }


def _of_decode_step(runner: Any, rows: dict[str, int]) -> dict[str, Any]:
    """All that a decode step reads of its inputs, as it left them, and what it drew."""
    batch = runner.input_batch
    count, table = batch.num_reqs, batch.block_table[0]
    lengths, prompts = runner.optimistic_seq_lens_cpu.numpy(), batch.num_prompt_tokens
    if any(lengths[row] <= prompts[row] for row in rows.values()):
        return {}
    read = runner.inputs_embeds if runner.supports_mm_inputs else runner.input_ids
    starts, blocks = runner.query_start_loc.gpu[: count + 1], table.num_blocks_per_row
    of_rows = {
        "M-RoPE": lambda row: runner.mrope_positions.gpu[:, row],
        "lengths": lambda row: runner.seq_lens[row],
        "bound of lengths": lambda row: runner.optimistic_seq_lens_cpu[row],
        "inputs": lambda row: read.gpu[row],
        "cache slots": lambda row: table.slot_mapping.gpu[row],
        "cache blocks": lambda row: table.block_table.gpu[row, : blocks[row]],
    }
    before = {_name_of(request_id): row for request_id, row in (batch.prev_req_id_to_index or {}).items()}
    drawn = batch.prev_sampled_token_ids
    # Compared as text, since NaN is never equal to itself.
    return {
        **{name: {key: str(read(row).tolist()) for key, row in rows.items()} for name, read in of_rows.items()},
        "starts": starts.tolist() == list(range(count + 1)),
        "all lengths": runner.seq_lens.tolist(),
        "all bounds of lengths": runner.optimistic_seq_lens_cpu.tolist(),
        "all starts": runner.query_start_loc.gpu.tolist(),
        "drawn": None if drawn is None else {key: drawn[before[key]].tolist() for key in rows if key in before},
    }


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

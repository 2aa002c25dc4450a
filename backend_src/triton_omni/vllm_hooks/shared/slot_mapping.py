# SPDX-License-Identifier: Apache-2.0
"""Where a step's tokens go in the key-value cache: vLLM's kernel, launched without its search for the arguments.

vLLM matches what its block tables give with the kernel's names at every launch, by Python's inspection of signatures.
Here they are matched once; every step of both engines launches the kernel. It knows vLLM's block tables, no runner.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from triton_omni.vllm_hooks.shared.compat import PAD_SLOT_ID, SLOT_MAPPING_KERNEL, BlockTable, MultiGroupBlockTable


def launch_directly(tables: MultiGroupBlockTable) -> None:
    """Have these tables, which are to stay, launch the kernel by themselves."""
    for table in tables.block_tables:
        table.compute_slot_mapping = functools.partial(_launch, _fixed_arguments(table))  # type: ignore[method-assign]


def _fixed_arguments(table: BlockTable) -> dict[str, Any]:
    """Arguments of one table that all launches share."""
    blocks = table.block_table.gpu
    return {
        "max_num_tokens": table.max_num_batched_tokens,
        "block_table_ptr": blocks,
        "block_table_stride": blocks.stride(0),
        "slot_mapping_ptr": table.slot_mapping.gpu,
        "KV_CACHE_BLOCK_SIZE": table.block_size,
        "TOTAL_CP_WORLD_SIZE": table.dcp_world_size,
        "TOTAL_CP_RANK": table.dcp_rank,
        "CP_KV_CACHE_INTERLEAVE_SIZE": table.cp_kv_cache_interleave_size,
        "PAD_ID": PAD_SLOT_ID,
        "BLOCK_SIZE": SLOT_MAPPING_KERNEL.triton_block_size,
    }


def _launch(fixed: dict[str, Any], num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
    # One program a sequence, and one for the padding.
    SLOT_MAPPING_KERNEL.kernel[(num_reqs + 1,)](
        num_tokens=positions.shape[0], query_start_loc_ptr=query_start_loc, positions_ptr=positions, **fixed
    )

# SPDX-License-Identifier: Apache-2.0
"""How much device memory Triton needs for the tensors that travel between stages.

A pure figure of the settings; nothing is allocated here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from triton_omni.core.settings import Dtype, SettingsError, TalkerSettings, ThinkerSettings, load_settings
from triton_omni.supervisor.machine import ServerError

# At most two unconsumed messages a session (credits), on each of the two links.
_UNCONSUMED = 2
# Triton's own small allocations and the pool's rounding of every block.
_MARGIN_BYTES = 64 << 20
_INT32_BYTES = 4
_DTYPE_BYTES: dict[Dtype, int] = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def pool_bytes(thinker: ThinkerSettings, talker: TalkerSettings, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of Triton's CUDA memory pool that no load can exhaust.

    Sessions x unconsumed messages x (largest message of hidden rows + largest message of codec codes) + a margin.

    Args:
        thinker: gives `max_sessions` and `rows_per_message`, the rows of the largest message.
        talker: gives `max_codes`; waiting codes go out together, so one message may hold a whole reply.
        hidden_size: H of a row.
        dtype_bytes: bytes of one element of a row.
    """
    rows = thinker.rows_per_message * hidden_size * dtype_bytes
    codes = talker.max_codes * _INT32_BYTES
    return thinker.max_sessions * _UNCONSUMED * (rows + codes) + _MARGIN_BYTES


def memory_pool_bytes(repository: Path, model: Path) -> int:
    """`pool_bytes` of a model repository's settings and a checkpoint's hidden size, for a GPU.

    Raises:
        ServerError: a `stage.yaml` cannot be used, or the checkpoint's config has no hidden size.
    """
    try:
        thinker = load_settings(repository / "thinker" / "1" / "stage.yaml", ThinkerSettings)
        talker = load_settings(repository / "talker" / "1" / "stage.yaml", TalkerSettings)
    except SettingsError as error:
        raise ServerError(str(error)) from error
    return pool_bytes(thinker, talker, _hidden_size(model / "config.json"), _DTYPE_BYTES[thinker.dtype])


def _hidden_size(path: Path) -> int:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        return int(config["thinker_config"]["text_config"]["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{path}: thinker_config.text_config.hidden_size cannot be read: {error!r}") from error

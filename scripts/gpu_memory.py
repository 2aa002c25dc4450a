# SPDX-License-Identifier: Apache-2.0
"""Computes what a server's weights, caches and rows take on one GPU: the table in README.md.

    python scripts/gpu_memory.py

Weights are the tensors of the synthetic checkpoints, which have the published sizes; caches follow from the settings.
token2wav's share is a measured input. `scripts/benchmarks.sh out memory` measures a whole server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from markdown_table import table

from triton_omni.checkpoint.synthetic import planned_tensors
from triton_omni.checkpoint.synthetic_config import omni_config, split_name
from triton_omni.core.profile import NO_PROFILE, load_profile
from triton_omni.supervisor.served_repository import StageSettings, stage_settings

REPOSITORY: Final = Path(__file__).resolve().parents[1] / "model_repository"
TOKEN2WAV: Final = 6_100_000_000 - 22 * 8 * 1024**2 * 4
"""Bytes, with `SHIPPED_STREAMS`. Measured once on 2026-11-26, on an H200, by `scripts/benchmarks.sh out served`. Since
then the float32 products of the DiT's 22 layers are freed, each of 8 x 1024 x 1024 weights."""
SHIPPED_STREAMS: Final = 64
WINDOW_CACHE: Final = 72 * 196_608
"""Bytes of a stream's pages (docs/architecture.md)."""
COLUMNS: Final = {
    "7B": ("7b", None),
    "3B": ("3b", None),
    "`small`, 7B-AWQ": ("7b-awq", "small"),
    "`small`, 3B": ("3b", "small"),
}
"""Checkpoint and profile by title. AWQ and GPTQ differ by 5 MB."""
_VALUE_BYTES: Final = 2  # half precision
_GIB: Final = 2**30


@dataclass(frozen=True)
class Needs:
    """Bytes that a checkpoint takes: weights of a stage, and a cached token of a stage."""

    thinker_weights: int
    talker_weights: int
    thinker_token: int
    """Keys, values and the hidden row."""
    talker_token: int
    """The same."""

    @classmethod
    def of(cls, name: str) -> Needs:
        """By the synthetic checkpoint of that name; none is written."""
        weights = {"thinker": 0, "talker": 0, "token2wav": 0}
        for tensor in planned_tensors(name):
            weights[tensor.name.partition(".")[0]] += tensor.nbytes
        size, _ = split_name(name)
        config = cast(Any, omni_config(size))
        thinker, talker = config.thinker_config.text_config, config.talker_config
        return cls(weights["thinker"], weights["talker"], *(_token_bytes(part) for part in (thinker, talker)))


def _token_bytes(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = getattr(config, "embedding_size", None) or config.hidden_size
    return int((2 * config.num_hidden_layers * config.num_key_value_heads * head_dim + row) * _VALUE_BYTES)


def settings(profile: str | None) -> StageSettings:
    """The shipped settings under a profile."""
    return stage_settings(REPOSITORY, load_profile(profile) if profile else NO_PROFILE)


def parts(name: str, stages: StageSettings) -> dict[str, int]:
    """Bytes by part of a server with that synthetic checkpoint."""
    need, thinker, talker = Needs.of(name), stages.thinker.engine, stages.talker.engine
    return {
        "thinker's weights": need.thinker_weights,
        "talker's weights": need.talker_weights,
        "thinker's KV cache and rows": need.thinker_token * thinker.cached_tokens,
        "talker's KV cache and rows": need.talker_token * talker.cached_tokens,
        "token2wav with its CUDA graphs": TOKEN2WAV - (SHIPPED_STREAMS - stages.token2wav.max_streams) * WINDOW_CACHE,
    }


def document() -> str:
    """The table, and a sentence on tokens."""
    columns = [parts(name, settings(profile)) for name, profile in COLUMNS.values()]
    rows = [(part, *(f"{column[part] / _GIB:.1f}" for column in columns)) for part in columns[0]]
    together = ("**together**", *(f"**{sum(column.values()) / _GIB:.1f}**" for column in columns))
    seven, three = (
        f"{need.thinker_token / 1000:.0f} and {need.talker_token / 1000:.0f} KB" for need in map(Needs.of, ("7b", "3b"))
    )
    lines = "\n".join(table(("GiB", *COLUMNS), (*rows, together)))
    return f"{lines}\n\nA token takes, in thinker and talker: 7B {seven}, 3B {three}.\n"


if __name__ == "__main__":
    print(document(), end="")

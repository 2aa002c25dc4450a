# SPDX-License-Identifier: Apache-2.0
"""Computes what a server's weights, caches and rows take on one GPU: the table in README.md.

    python scripts/gpu_memory.py

Weights are the tensors of the synthetic checkpoints, which have the published sizes; caches follow from the settings.
token2wav's share is a measured input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from triton_omni.checkpoint.synthetic import planned_tensors
from triton_omni.checkpoint.synthetic_config import omni_config, split_name
from triton_omni.core.settings import EngineSettings, TalkerSettings, ThinkerSettings

TOKEN2WAV_GB = 6.1
"""Measured once on 2026-11-26, on an H200 with one stream, by `scripts/benchmarks.sh out served`."""
COLUMNS = {"7b": "7B", "7b-awq": "7B-AWQ", "3b": "3B"}
"""Title by the synthetic checkpoint's name. AWQ and GPTQ differ by 5 MB."""
SMALL_SEQUENCES = 4
"""`engine.max_num_seqs` of thinker and talker in the last row."""
_VALUE_BYTES = 2  # half precision


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


def document() -> str:
    """The table, and a sentence on tokens."""
    needs = list(map(Needs.of, COLUMNS))
    thinker, talker = ThinkerSettings().engine, TalkerSettings().engine
    rows = {
        "thinker's weights": [_gb(need.thinker_weights) for need in needs],
        "talker's weights": [_gb(need.talker_weights) for need in needs],
        f"thinker's KV cache and rows, {thinker.cached_tokens:,} tokens": [
            _gb(need.thinker_token * thinker.cached_tokens) for need in needs
        ],
        f"talker's KV cache and rows, {talker.cached_tokens:,} tokens": [
            _gb(need.talker_token * talker.cached_tokens) for need in needs
        ],
        "token2wav with its CUDA graphs": [f"{TOKEN2WAV_GB}"] * len(needs),
        "**together**": [f"**{_together(need, thinker, talker):.0f}**" for need in needs],
        f"together with `engine.max_num_seqs: {SMALL_SEQUENCES}` in both": [
            f"{_together(need, *(_small(engine) for engine in (thinker, talker))):.0f}" for need in needs
        ],
    }
    header = f"| GB | {' | '.join(COLUMNS.values())} |\n|{'---|' * (1 + len(COLUMNS))}"
    table = "\n".join([header, *(f"| {' | '.join((name, *cells))} |" for name, cells in rows.items())])
    seven, three = (
        f"{need.thinker_token / 1000:.0f} and {need.talker_token / 1000:.0f} KB" for need in (needs[0], needs[-1])
    )
    return f"{table}\n\nA token takes, in thinker and talker: 7B {seven}, 3B {three}.\n"


def _together(need: Needs, thinker: EngineSettings, talker: EngineSettings) -> float:
    weights = need.thinker_weights + need.talker_weights
    caches = need.thinker_token * thinker.cached_tokens + need.talker_token * talker.cached_tokens
    return (weights + caches) / 1e9 + TOKEN2WAV_GB


def _small(engine: EngineSettings) -> EngineSettings:
    return engine.model_copy(update={"max_num_seqs": SMALL_SEQUENCES})


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"


if __name__ == "__main__":
    print(document(), end="")

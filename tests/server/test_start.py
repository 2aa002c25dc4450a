# SPDX-License-Identifier: Apache-2.0
"""A server that cannot serve says why in one sentence and does not start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from server.serving import TINY, server_config
from triton_omni.checkpoint.weights import weight_map
from triton_omni.serving.machine import ServerError, ServerNotReady
from triton_omni.serving.supervisor import Supervisor


def test_unknown_setting_stops_the_start_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = {**TINY, "talker": {**TINY["talker"], "max_code": 5}}
    # By the stage, or before the start where a GPU's memory pool is sized by the settings.
    with pytest.raises(ServerError, match=r"stage\.yaml: max_code: unknown key \(did you mean max_codes\?\)") as caught:
        Supervisor(server_config(tmp_path, tiny_checkpoint, settings)).__enter__()
    assert "\n" not in str(caught.value)


def test_a_tensor_of_another_shape_stops_the_start_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """That one is missing or its file cut off is told before the start: `tests/unit/test_start_faults.py`."""
    checkpoint, name = tmp_path / "checkpoint", "thinker.model.layers.0.self_attn.q_proj.weight"
    shutil.copytree(tiny_checkpoint, checkpoint)
    shard = checkpoint / weight_map(checkpoint)[name]
    tensors = load_file(shard)
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, shard)
    with pytest.raises(ServerNotReady) as caught:
        Supervisor(server_config(tmp_path, checkpoint)).__enter__()
    assert f"model thinker cannot be loaded: Internal: CheckpointError: {shard}: {name} has shape [63, " in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_missing_checkpoint_is_told_before_anything_starts(tmp_path: Path) -> None:
    supervisor = Supervisor(server_config(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(ServerError, match="nowhere"):
        supervisor.start()
    assert supervisor.stop() == 0.0

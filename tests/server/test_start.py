# SPDX-License-Identifier: Apache-2.0
"""A server that cannot serve says why in one sentence and does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.serving import TINY, server_config
from triton_omni.serving.machine import ServerError
from triton_omni.serving.supervisor import Supervisor


def test_unknown_setting_stops_the_start_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = {**TINY, "talker": {**TINY["talker"], "max_code": 5}}
    # By the stage, or before the start where a GPU's memory pool is sized by the settings.
    with pytest.raises(ServerError, match=r"stage\.yaml: max_code: unknown key \(did you mean max_codes\?\)") as caught:
        Supervisor(server_config(tmp_path, tiny_checkpoint, settings)).__enter__()
    assert "\n" not in str(caught.value)


def test_missing_checkpoint_is_told_before_anything_starts(tmp_path: Path) -> None:
    supervisor = Supervisor(server_config(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(ServerError, match="nowhere"):
        supervisor.start()
    assert supervisor.stop() == 0.0

# SPDX-License-Identifier: Apache-2.0
"""A server that cannot serve says why in one sentence and does not start."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from server.serving import TINY, server_config, wait_for
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.serve import Supervisor


def test_unknown_setting_stops_the_start_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = {**TINY, "talker": {**TINY["talker"], "max_code": 5}}
    # By the stage, or before the start where a GPU's memory pool is sized by the settings.
    with pytest.raises(ServerError, match=r"stage\.yaml: max_code: unknown key \(did you mean max_codes\?\)") as caught:
        Supervisor(server_config(tmp_path, tiny_checkpoint, settings)).__enter__()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_ends_while_it_starts_leaves_no_folder(
    tiny_checkpoint: Path, tmp_path: Path, told: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    server = Supervisor(server_config(tmp_path, tiny_checkpoint))
    server.start()
    wait_for(lambda: bool(list(folders.glob("*/python_env_*"))), lambda: list(folders.glob("*/*")))
    os.kill(server.pid, told)
    server.stop()
    assert list(folders.iterdir()) == []


def test_missing_checkpoint_is_told_before_anything_starts(tmp_path: Path) -> None:
    supervisor = Supervisor(server_config(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(ServerError, match="nowhere"):
        supervisor.start()
    assert supervisor.stop() == 0.0

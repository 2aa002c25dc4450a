# SPDX-License-Identifier: Apache-2.0
"""`triton-omni bench --conversation` against a server: every turn is whole, and its prompt has all turns before it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from media_samples import audio_file, image_file
from server.serving import Served
from triton_omni_client import cli


def test_conversations_with_a_photo_and_a_sound_are_whole(server: Served, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(image_file("jpeg"))
    (tmp_path / "q.wav").write_bytes(audio_file("wav", seconds=0.5))
    turns = [{"text": "what is it?", "image": ["a.jpg"]}, {"audio": ["q.wav"]}, {"text": "thanks"}]
    (tmp_path / "s.json").write_text(json.dumps(turns))
    output = tmp_path / "r.json"
    result = CliRunner().invoke(
        cli.app,
        ["bench", "--url", server.supervisor.grpc_url, "-o", str(output), "--no-plots", "--concurrency", "2",
         "--requests", "3", "--warm-up", "1", "--conversation", "3", "--script", str(tmp_path / "s.json"),
         "--max-tokens", "8", "--talker-max-tokens", "40"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (run,) = json.loads(output.read_text())["runs"]
    assert [(turn["completed"], turn["errors"]) for turn in run["turns"]] == [(3, {})] * 3
    by_index = {request["index"]: request["prompt_tokens"] for request in run["requests"]}
    for first in range(0, 12, 3):
        assert by_index[first] < by_index[first + 1] < by_index[first + 2]

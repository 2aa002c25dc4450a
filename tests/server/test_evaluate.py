# SPDX-License-Identifier: Apache-2.0
"""An evaluation of the real server: its questions are taken, and settings of one seed speak the same codes."""

from __future__ import annotations

import json
from pathlib import Path

from evaluations import evaluate, report_of
from server.serving import Served

SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 40, "min_tokens": 40}}


def setting(name: str, **token2wav: object) -> list[str]:
    return ["--setting", f"{name}={json.dumps(SHORT | {'token2wav': token2wav})}"]


def test_settings_of_the_real_server_are_compared_code_by_code(server: Served, tmp_path: Path) -> None:
    asked = ["--sentences", "2", "--prompts", "1", "--pictures", "1", "--sounds", "1", "--concurrency", "2"]
    settings = [
        *setting("offline", mode="offline"),
        *setting("again", mode="offline"),
        *setting("euler", solver="euler"),
    ]
    result = evaluate(server.supervisor.grpc_url, tmp_path / "out", *asked, *settings)
    assert result.exit_code == 0, result.output
    offline, again, euler = report_of(tmp_path / "out")["settings"]
    assert [len(reply["boundaries"]) > 0 for reply in euler["replies"][:3]] == [True] * 3
    assert [reply["boundaries"] for reply in offline["replies"][:3]] == [[]] * 3
    assert [reply["text"] for reply in euler["replies"]] == [reply["text"] for reply in offline["replies"]]
    assert again["figures"]["snr"]["count"] == euler["figures"]["snr"]["count"] == 3
    assert again["figures"]["snr"]["value"] > 60 > euler["figures"]["snr"]["value"]
    assert again["figures"]["mel_distance"]["value"] < euler["figures"]["mel_distance"]["value"]
    assert {"pictures", "sounds", "right_voices", "word_errors", "clicks"} <= euler["figures"].keys()
    assert report_of(tmp_path / "out")["environment"]["server"]["checkpoint"]

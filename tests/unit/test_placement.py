# SPDX-License-Identifier: Apache-2.0
"""The GPU of each stage: placements that are allowed, and those that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.options import ServerConfig, parse_options
from triton_omni.supervisor.serve import Supervisor
from triton_omni.supervisor.served_repository import check_placement, parse_placement


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", [0, 0, 0]), ("token2wav=1", [0, 0, 1]), (" talker=2, thinker=1 ,", [1, 2, 0]), ("thinker=10", [10, 0, 0])],
)
def test_stages_that_are_not_named_are_on_gpu_0(text: str, numbers: list[int]) -> None:
    assert list(parse_placement(text).values()) == numbers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vocoder=1", "'vocoder=1' is not STAGE=N; the stages are thinker, talker, token2wav"),
        ("talker", "talker: '' is no number of a GPU"),
        ("talker=-1", "talker: '-1' is no number of a GPU"),
        ("talker=²", "talker: '²' is no number of a GPU"),
        ("talker=0,talker=1", "talker is named twice"),
    ],
)
def test_what_is_no_placement_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match="^" + reason.replace("(", "\\(") + "$"):
        parse_placement(text)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    check_placement(parse_placement("token2wav=1"), 2)
    check_placement(parse_placement(""), 0)
    with pytest.raises(ServerError, match="token2wav was placed on GPU 2, but this process sees 2 of them, 0 to 1"):
        check_placement(parse_placement("token2wav=2"), 2)
    with pytest.raises(ServerError, match="talker was placed on GPU 1, but this process sees none"):
        check_placement(parse_placement("talker=1"), 0)


def test_the_command_line_says_it_and_a_variable_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "OMNI_GPUS", "talker=1")
    given = ["--model-repository", "model_repository"]
    assert parse_options(given).placement == {"thinker": 0, "talker": 1, "token2wav": 0}
    assert parse_options([*given, "--gpus", "thinker=3"]).placement == {"thinker": 3, "talker": 0, "token2wav": 0}
    with pytest.raises(SystemExit) as ended:
        parse_options([*given, "--gpus", "0,1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: --gpus (or OMNI_GPUS): '0' is not STAGE=N; the stages are thinker, talker, token2wav\n"
    )


def test_a_server_with_a_stage_on_a_gpu_that_is_not_there_does_not_start(tmp_path: Path, tiny_checkpoint: Path) -> None:
    config = ServerConfig(
        Path("model_repository"), model=str(tiny_checkpoint), placement=parse_placement("token2wav=99")
    )
    with pytest.raises(ServerError, match="token2wav was placed on GPU 99"):
        Supervisor(config).start()

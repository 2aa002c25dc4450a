# SPDX-License-Identifier: Apache-2.0
"""The supervisor's options: what is refused, and that `build.sh serve --help` tells of each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from triton_omni.core.profile import load_profile
from triton_omni.supervisor.options import ServerConfig, parse_options

BUILD = Path(__file__).parents[2] / "build.sh"
GIVEN_BY_BUILD = {"--help", "--model-repository", "--model"}


def options_of(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


def test_build_s_help_tells_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    known = options_of(capsys.readouterr().out)
    told = subprocess.run([BUILD, "serve", "--help"], check=True, capture_output=True, text=True).stdout
    switches = {option for option in known if option.replace("--", "--no-", 1) in known}  # told by the one that acts
    assert options_of(told) <= known
    assert known - options_of(told) <= GIVEN_BY_BUILD | switches | {"--no-mps"}
    assert {"--log-file", "--mps", "--no-warm-up"} <= options_of(told)


def test_what_is_left_out_is_as_the_settings_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OMNI_MODEL", "OMNI_PROFILE", "OMNI_MPS", "OMNI_GPUS"):
        monkeypatch.delenv(variable, raising=False)
    ports = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
    assert parse_options(["--model-repository", "models"]) == ServerConfig(Path("models"), **ports)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--log-verbose", "-1", "-1 is no whole number from 0 on"),
        ("--exit-timeout", "1.5", "1.5 is no whole number from 0 on"),
        ("--ready-timeout", "nan", "nan is no number of seconds from 0 on"),
        ("--grpc-port", "70000", "70000 is not in 0..65535"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_a_line(
    option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(["--model-repository", "models", option, value])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: argument {option}: {says}\n"


def test_a_profile_is_named_by_option_or_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_PROFILE", "small")
    assert parse_options(["--model-repository", "models"]).profile == load_profile("small")
    own = tmp_path / "own.yaml"
    own.write_text("talker: {max_sessions: 3}")
    given = parse_options(["--model-repository", "models", "--profile", str(own)]).profile
    assert (given.source, given.changes) == (str(own), {"talker": {"max_sessions": 3}})


def test_a_profile_that_is_none_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNI_PROFILE", "smal")
    with pytest.raises(SystemExit) as ended:
        parse_options(["--model-repository", "models"])
    assert ended.value.code == 2
    said = "error: --profile (or OMNI_PROFILE): 'smal' is neither a profile (small) nor a file\n"
    assert capsys.readouterr().err == said


def test_an_option_given_to_the_demo_is_refused_before_a_server_starts() -> None:
    done = subprocess.run([BUILD, "demo", "--voice"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "build.sh: demo takes one TEXT and no option (got '--voice')\n"


def test_help_of_the_demo_names_the_default_checkpoint() -> None:
    done = subprocess.run([BUILD, "demo", "--help"], capture_output=True, text=True, check=True)
    assert "Without OMNI_MODEL it is training/mini" in " ".join(done.stdout.split())


@pytest.mark.skipif(Path(sys.prefix) != BUILD.parent / ".venv", reason="build.sh would set up an environment")
@pytest.mark.parametrize(("text", "says"), [("hi", "reply.wav: is a folder"), ("  ", "the request is empty")])
def test_what_the_demo_cannot_do_is_told_before_a_server_starts(tmp_path: Path, text: str, says: str) -> None:
    if text.strip():
        (tmp_path / "reply.wav").mkdir()
    done = subprocess.run([BUILD, "demo", text], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "starting:" not in done.stderr


def test_an_evaluation_without_its_checkpoint_is_refused() -> None:
    done = subprocess.run([BUILD, "evaluate", "--model"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "build.sh: --model needs a checkpoint\n")


@pytest.mark.skipif(Path(sys.prefix) != BUILD.parent / ".venv", reason="build.sh would set up an environment")
def test_what_cannot_be_evaluated_is_told_before_a_server_starts(tmp_path: Path) -> None:
    command = [BUILD, "evaluate", "--model=random:tiny", "--seeds", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "whole number from 1 to 100" in " ".join(done.stderr.replace("│", " ").split())
    assert "starting:" not in done.stderr

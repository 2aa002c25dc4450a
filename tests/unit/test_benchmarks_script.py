# SPDX-License-Identifier: Apache-2.0
"""The script behind docs/benchmarks.md, with a recorder in the place of what it runs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from triton_omni_client import cli

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks.sh"
PICTURE = ROOT / "docs" / "images" / "soak.png"
RECORDER = """#!/bin/sh
{ printf '%s\\037' "$@"; echo; } >> "$RECORDED"
for word; do case $word in random:3b) exit 1 ;; esac; done
"""


class Recorded:
    """What the script runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.python = folder, folder / "log", folder / "python"
        self.python.write_text(RECORDER)
        self.python.chmod(0o700)

    def run(self, *arguments: str) -> tuple[int, str, list[list[str]]]:
        """Exit code, what is said, and the commands that were run."""
        environment = os.environ | {"PYTHON": str(self.python), "RECORDED": str(self.log)}
        done = subprocess.run(
            [SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=60
        )
        lines = self.log.read_text().rstrip("\n").split("\n") if self.log.exists() else []
        return done.returncode, done.stdout + done.stderr, [line.split("\037")[:-1] for line in lines]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def parsed(app: typer.Typer, arguments: list[str]) -> dict[str, Any]:
    """The parameters by which a command would be run."""
    context = typer.main.get_command(app).make_context("command", arguments)
    return context.params


def test_every_command_is_one_that_its_program_takes(recorded: Recorded, script: Any) -> None:
    code, said, commands = recorded.run(str(recorded.folder / "out"))
    assert (code, said.splitlines()[-1]) == (1, "not all measured: small")
    programs = {"compare": typer.Typer(), "micro": script("micro.__main__").app}
    programs["compare"].command()(script("compare.__main__").main)
    found = [
        (name, parsed(programs[name], command[1:]))
        for command in commands
        if (name := Path(command[0]).name) in programs
    ]
    assert [name for name, _ in found] == ["compare"] * 6 + ["micro"] * 6 + ["compare", "micro"] + ["compare"] * 4
    assert len({str(parameters["out"]) for _, parameters in found}) == len(found)
    compared = [parameters for name, parameters in found if name == "compare"]
    for options in {options for parameters in compared for options in loads(script("compare.variants"), parameters)}:
        checked = CliRunner().invoke(cli.app, ["bench", "--check", *options])
        assert checked.exit_code == 0, checked.output


def loads(variants: Any, parameters: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """As `scripts/compare` puts them together; the recorder has made no photo."""
    for variant in map(variants.parse_variant, parameters["variant"]):
        for load in map(variants.parse_load, parameters["load"]):
            options = load.beside(parameters["options"], variant.options).options
            yield tuple(str(PICTURE) if option.endswith("photo.jpg") else option for option in options)


def test_crowds_have_replies_of_6_s(recorded: Recorded, script: Any) -> None:
    _, _, (command,) = recorded.run(str(recorded.folder / "out"), "crowds")
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    bench = typer.main.get_command(cli.app).get_command(None, "bench")
    for options in loads(script("compare.variants"), parsed(app, command[1:])):
        asked = bench.make_context("bench", list(options)).params
        assert (asked["crowds"], asked["talker_max_tokens"]) == (True, 300)


def test_prompts_and_listeners_are_of_every_count(recorded: Recorded, script: Any) -> None:
    _, _, commands = recorded.run(str(recorded.folder / "out"), "prompts", "listeners")
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    bench = typer.main.get_command(cli.app).get_command(None, "bench")
    prompts, listeners = (
        [bench.make_context("bench", list(options)).params for options in loads(script("compare.variants"), parameters)]
        for parameters in (parsed(app, command[1:]) for command in commands)
    )
    assert [asked["prompt_tokens"] for asked in prompts] == [100, 1000, 8000, 16000]
    assert [(asked["concurrency"], asked["listen"]) for asked in listeners] == [("1,2,4,8,16,32,48,64", True)]


def test_a_part_alone_and_none_that_is_not_there_or_was_measured(recorded: Recorded) -> None:
    out = recorded.folder / "out"
    code, _, commands = recorded.run(str(out), "whole")
    assert (code, len(commands)) == (0, 1)
    for part, sentence in (("whole", f"{out}/whole exists already"), ("wohle", "no part is named 'wohle': served")):
        code, said, commands = recorded.run(str(out), "windows", part)
        assert (code, len(commands)) == (2, 1)
        assert said.startswith(sentence)
    assert recorded.run()[0] == 0


def test_the_docs_name_every_part(recorded: Recorded) -> None:
    _, said, _ = recorded.run()
    parts = said.splitlines()[-1].removeprefix("Parts: ").split()
    table = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n| part |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == parts

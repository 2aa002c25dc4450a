# SPDX-License-Identifier: Apache-2.0
"""The script of docs/benchmarks.md, with a recorder in place of its programs; photos and sounds are made."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from checkouts import make_checkout
from triton_omni.core.profile import load_profile
from triton_omni_client import cli
from triton_omni_client.evaluate.options import OFFLINE, parse_setting

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks.sh"
PRESETS = ("reference", "fast")
RECORDER = f"""#!/bin/sh
{{ printf '%s\\037' "$@"; echo; }} >> "$RECORDED"
case $1 in -c) exec {sys.executable} "$@" ;; esac
for word; do case $word in random:3b) exit 1 ;; esac; done
"""


class Recorded:
    """Programs that the script runs."""

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
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another checkout, to measure beside this one."""
    monkeypatch.setenv("BEFORE", str(tmp_path / "before"))
    return make_checkout(tmp_path / "before")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module


def parsed(app: typer.Typer, arguments: list[str]) -> dict[str, Any]:
    """The parameters by which a command would be run."""
    context = typer.main.get_command(app).make_context("command", arguments)
    return context.params


@pytest.mark.usefixtures("before")
def test_every_command_is_one_that_its_program_takes(recorded: Recorded, script: Any) -> None:
    code, said, commands = recorded.run(str(recorded.folder / "out"))
    assert (code, said.splitlines()[-1]) == (1, "not all measured: numbers fp8 small memory")
    programs = {"compare": typer.Typer(), "micro": script("micro.__main__").app}
    programs["compare"].command()(script("compare.__main__").main)
    found = [
        (name, parsed(programs[name], command[1:]))
        for command in commands
        if (name := Path(command[0]).name) in programs
    ]
    assert [(name, len(list(same))) for name, same in itertools.groupby(name for name, _ in found)] == [
        ("compare", 1),
        ("micro", 6),
        ("compare", 8),
        ("micro", 22),
        ("compare", 1),
        ("micro", 3),
        ("compare", 11),
        ("micro", 9),
        ("compare", 5),
    ]
    assert len({str(parameters["out"]) for _, parameters in found}) == len(found)
    asked = {
        ("evaluate" if parameters["evaluate"] else "bench", *options)
        for name, parameters in found
        if name == "compare"
        for options in loads(script("compare.variants"), parameters)
    }
    assert sum(command == "evaluate" for command, *_ in asked) == 2
    for command, *options in asked:
        checked = CliRunner().invoke(cli.app, [command, "--check", *options])
        assert checked.exit_code == 0, checked.output


def loads(variants: Any, parameters: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the loads as `scripts/compare` combines them."""
    for variant in map(variants.parse_variant, parameters["variant"]):
        for load in map(variants.parse_load, parameters["load"] or ["all"]):
            yield load.beside(parameters["options"], variant.options).options


def asked_of(command: list[str], script: Any) -> dict[str, list[dict[str, Any]]]:
    """By variant of a command of `scripts/compare` the parameters of its loads."""
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    parameters = parsed(app, command[1:])
    bench = typer.main.get_command(cli.app).get_command(None, "bench")
    return {
        text.partition("=")[0]: [
            bench.make_context("bench", list(options)).params
            for options in loads(script("compare.variants"), parameters | {"variant": [text]})
        ]
        for text in parameters["variant"]
    }


def test_crowds_have_replies_of_6_s(recorded: Recorded, script: Any) -> None:
    _, _, (command,) = recorded.run(str(recorded.folder / "out"), "crowds")
    for asked in asked_of(command, script).values():
        assert [(one["crowds"], one["talker_max_tokens"]) for one in asked] == [(True, 300), (True, 300)]


def test_quality_is_of_every_plan_solver_and_precision(recorded: Recorded, script: Any) -> None:
    _, _, (command,) = recorded.run(str(recorded.folder / "out"), "quality")
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    parameters = parsed(app, command[1:])
    served = [
        script("compare.variants").parse_variant(text).profile.changes["token2wav"] for text in parameters["variant"]
    ]
    assert [(each["plan"], each["dtype"]) for each in served] == [
        ("balanced", "float32"),
        ("low_latency", "float32"),
        ("balanced", "float16"),
    ]
    assert all(each["diffusion"] == {"solver": "rk4", "num_steps": 10} for each in served)
    (options,) = {*loads(script("compare.variants"), parameters)}
    evaluate = typer.main.get_command(cli.app).get_command(None, "evaluate")
    settings = list(map(parse_setting, evaluate.make_context("evaluate", list(options)).params["setting"]))
    assert settings[0] == OFFLINE
    asked = [each.options["token2wav"] for each in settings[1:]]
    assert [each["preset"] for each in asked if "preset" in each] == ["reference", "fast"]
    assert {each.get("num_steps") for each in asked} == {None, 6, 10, 21}


def test_prompts_are_of_every_length_and_together_of_220_tokens(recorded: Recorded, script: Any) -> None:
    _, _, (command, _) = recorded.run(str(recorded.folder / "out"), "prompts")
    (asked,) = asked_of(command, script).values()
    alone, together = ([one for one in asked if one["concurrency"] == places] for places in ("1", "32"))
    assert [one["prompt_tokens"] for one in alone] == 3 * [100, 1000, 8000, 16000]
    assert [(one["prompt_tokens"], one["requests"], one["listen"]) for one in together] == 5 * [(220, 96, False)]
    assert len(alone) + len(together) == len(asked)


def test_conversations_have_photos_and_a_sound_with_the_caches_and_without(recorded: Recorded, script: Any) -> None:
    _, _, (made, command) = recorded.run(str(recorded.folder / "out"), "conversations")
    words = [word for word in command if word.startswith(("plain=", "cached="))]
    variants = [script("compare.variants").parse_variant(word).profile.changes for word in words]
    room = {"engine": {"kv_cache_tokens": 294912}}
    plain = {"prefix_caching": False, **room}
    assert variants == [{"thinker": plain, "talker": plain}, {"thinker": room, "talker": room}]
    asked = [one for asked in asked_of(command, script).values() for one in asked if one["conversation"]]
    assert [(one["conversation"], one["concurrency"], one["prompt_tokens"]) for one in asked] == [
        (10, places, 570) for _ in variants for places in ("1", "32")
    ]
    assert {(len(one["image"]), len(one["audio"])) for one in asked} == {(2, 1)}
    shown = {path for option in command for path in re.findall(r"'(/[^']+)'", option)}
    assert len(shown) == 3
    assert all(f"'{path}'" in made[-1] for path in shown)


def test_speech_of_2_and_30_s_is_sent_whole_and_while_it_is_spoken(recorded: Recorded, script: Any) -> None:
    _, _, (*made, command) = recorded.run(str(recorded.folder / "out"), "speech")
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    asked = [shlex.split(option) for option in parsed(app, command[1:])["load"]]
    scripts = [options[options.index("--script") + 1] for options in asked]
    assert [("--speak" in options, Path(path).stem) for options, path in zip(asked, scripts, strict=True)] == [
        (speaks, length) for length in ("2s", "30s") for speaks in (False, True)
    ]
    turns = [json.loads(Path(path).read_text()) for path in scripts[::2]]
    assert turns == [[{"audio": ["2s.wav"]}, {"audio": ["30s.wav"]}], [{"audio": ["30s.wav"]}, {"audio": ["2s.wav"]}]]
    assert len(made) == 2


def test_small_is_measured_where_no_more_memory_is_free(recorded: Recorded, script: Any) -> None:
    code, _, (made, *commands, together) = recorded.run(str(recorded.folder / "out"), "memory")
    assert code == 1, "3B cannot be measured here, and 7B was"
    assert Path(together[0]).name == "over_starts.py"
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    served = [parsed(app, command[1:]) for command in commands]
    assert [(each["model"], each["memory"], each["mps"]) for each in served] == [
        ("random:7b", 70, True),
        ("random:7b-awq", 22, True),
        ("random:3b", 20, True),
    ]
    variants = [[script("compare.variants").parse_variant(text) for text in each["variant"]] for each in served]
    small = load_profile("small").changes
    for name, changes, starts in zip(("shipped-7b", "small-7b", "small-3b"), ({}, small, small), variants, strict=True):
        assert [(each.name, each.profile.changes) for each in starts] == [
            (f"{name}.{start}", changes) for start in (1, 2, 3)
        ]
    for asked in asked_of(commands[0], script).values():
        assert [(one["concurrency"], len(one["image"])) for one in asked] == [("1", 0), ("8", 0), ("1", 1)]
        assert str(asked[-1]["image"][0]) in made[-1]


@pytest.mark.parametrize("part", ["media", "memory"])
def test_a_photo_fits_in_the_prompt_that_shows_it(recorded: Recorded, script: Any, part: str) -> None:
    _, _, commands = recorded.run(str(recorded.folder / "out"), part)
    made = next(" ".join(command) for command in commands if "effect_noise" in " ".join(command))
    width, height = map(int, re.findall(r"effect_noise\(\((\d+), (\d+)\)", made)[0])
    served = [command for command in commands if Path(command[0]).name == "compare"]
    loads = [one for command in served for asked in asked_of(command, script).values() for one in asked if one["image"]]
    assert loads
    for load in loads:
        assert 0 <= load["prompt_tokens"] - width * height // 28**2 < 200


def test_caches_are_served_several_times_by_turns(
    recorded: Recorded, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", "2")
    _, _, (command, together) = recorded.run(str(recorded.folder / "out"), "caches")
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    parameters = parsed(app, command[1:])
    variants = [script("compare.variants").parse_variant(text) for text in parameters["variant"]]
    off = {"prefix_caching": False}
    assert [(each.name, each.profile.changes) for each in variants] == [
        (f"{name}.{start}", settings)
        for start in (1, 2)
        for name, settings in (("plain", {"thinker": off, "talker": off}), ("shipped", {}))
    ]
    out = parameters["out"]
    assert together == [str(ROOT / "scripts" / "over_starts.py"), str(out), "-o", f"{out}.json"]


def test_two_checkouts_are_served_by_turns(
    recorded: Recorded, script: Any, before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", "2")
    _, _, (command, together) = recorded.run(str(recorded.folder / "out"), "turns")
    app = typer.Typer()
    app.command()(script("compare.__main__").main)
    parameters = parsed(app, command[1:])
    variants = [script("compare.variants").parse_variant(text) for text in parameters["variant"]]
    assert [(each.name, each.checkout.root) for each in variants] == [
        ("before.1", before),
        ("now.1", ROOT),
        ("before.2", before),
        ("now.2", ROOT),
    ]
    asked = asked_of(command, script)["now.1"]
    assert [(one["concurrency"], one["listen"], one["crowds"]) for one in asked] == [
        ("1", False, False),
        ("32", False, False),
        ("32", True, False),
        ("32", False, True),
    ]
    out = parameters["out"]
    assert together == [str(ROOT / "scripts" / "over_starts.py"), str(out), "-o", f"{out}.json"]


def test_turns_without_another_checkout_are_refused(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEFORE", raising=False)
    code, said, commands = recorded.run(str(recorded.folder / "out"), "turns")
    assert (code, commands) == (1, [])
    assert said.startswith("turns: BEFORE is not set: set it to another checkout, after ./build.sh setup there\n")


def test_presets_are_heard_by_1_to_128_listeners_of_20_s_replies(recorded: Recorded, script: Any) -> None:
    _, _, commands = recorded.run(str(recorded.folder / "out"), "listeners", "presets", "many")
    heard: dict[str, list[tuple[int, int]]] = {}
    for command in commands[::2]:
        variants = [script("compare.variants").parse_variant(word) for word in command if word.startswith(PRESETS)]
        room = variants[0].profile.changes["token2wav"].get("max_streams", 64)
        assert [each.profile.changes["token2wav"]["preset"] for each in variants] == list(PRESETS)
        for preset, asked in asked_of(command, script).items():
            assert all(int(each["concurrency"]) <= room for each in asked)
            listening = [one for one in asked if one["listen"]]
            assert {(one["talker_max_tokens"], one["ramp_up"]) for one in listening} == {(1000, 20)}
            heard.setdefault(preset, []).extend((int(one["concurrency"]), one["requests"]) for one in listening)
    few, some, many = (
        [(1, 3), (4, 12), (8, 24), (16, 48)],
        [(32, 96), (48, 128), (64, 128)],
        [(96, 192), (128, 256)],
    )
    assert heard == dict.fromkeys(PRESETS, 3 * few + 3 * some + 3 * many)


@pytest.mark.parametrize("part", ["numbers", "fp8"])
@pytest.mark.parametrize("size", ["7b", "3b"])
def test_a_share_has_the_size_that_is_named(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, part: str, size: str
) -> None:
    monkeypatch.setenv("SIZES", size)
    code, _, commands = recorded.run(str(recorded.folder / "out"), part)
    assert code == (size == "3b"), "3B cannot be measured here"
    words = {word.removeprefix("random:") for command in commands for word in command}
    assert words & {"7b", "3b"} == {size}


def test_a_share_of_apart_has_the_variants_presets_and_runs_that_are_named(
    recorded: Recorded, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = script("compare.variants").parse_variant
    _, _, (whole, _) = recorded.run(str(recorded.folder / "whole"), "apart")
    assert list(asked_of(whole, script)) == [
        f"{variant}-{preset}" for variant in ("shipped", "with-envoy", "apart", "replicas") for preset in PRESETS
    ]
    recorded.log.unlink()
    for name, value in {"VARIANTS": "with-envoy apart", "PRESETS": "fast", "RUNS": "1"}.items():
        monkeypatch.setenv(name, value)
    _, _, (share, _) = recorded.run(str(recorded.folder / "share"), "apart")
    asked = asked_of(share, script)
    listening = [one["concurrency"] for one in asked["apart-fast"] if one["listen"]]
    assert (list(asked), listening) == (["with-envoy-fast", "apart-fast"], ["32", "48", "64", "96", "128"])
    texts = [word for word in share if word.startswith(("with-envoy", "apart"))]
    balanced, apart = map(parse, texts)
    assert (balanced.balancer, balanced.placement, apart.balancer, apart.placement["token2wav"]) == (True, {}, False, 1)
    assert {each.profile.changes["token2wav"]["preset"] for each in (balanced, apart)} == {"fast"}


@pytest.mark.parametrize(
    ("share", "code", "sentence"),
    [
        ("RUNS=0", 2, "RUNS: '0' is no number of runs, such as 3"),
        ("RUNS=1 2", 2, "RUNS: '1 2' is no number of runs, such as 3"),
        ("VARIANTS=envoy", 1, "VARIANTS: 'envoy' is none of apart's: shipped with-envoy apart replicas"),
    ],
)
def test_a_share_that_says_nothing_sensible_is_refused(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, share: str, code: int, sentence: str
) -> None:
    name, _, value = share.partition("=")
    monkeypatch.setenv(name, value)
    found, said, commands = recorded.run(str(recorded.folder / "out"), "apart")
    assert (found, said.splitlines()[0], commands) == (code, sentence, [])


def test_each_rule_is_switched_off_for_one_stream_a_crowd_and_listeners(
    recorded: Recorded, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VARIANTS", "no-pause not-confined")
    monkeypatch.setenv("RUNS", "1")
    _, _, (command, _) = recorded.run(str(recorded.folder / "out"), "rules")
    found = [
        script("compare.variants").parse_variant(word) for word in command if word.startswith(("no-pause=", "not-conf"))
    ]
    unconfined = {"engine": {"partition_percent": 0}}
    assert {each.name: each.profile.changes for each in found} == {
        "no-pause": {"thinker": {"policy": {"pause_ms": 0, "pause_text_ms": 0}}},
        "not-confined": {"thinker": unconfined, "talker": unconfined},
    }
    asked = asked_of(command, script)["not-confined"]
    assert [(one["concurrency"], one["listen"]) for one in asked] == [
        ("1", False),
        ("32", False),
        ("48", True),
    ]


def test_plans_have_the_loads_of_rules(recorded: Recorded, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "1")
    monkeypatch.setenv("VARIANTS", "steady more-context")
    _, _, (plans, _) = recorded.run(str(recorded.folder / "out"), "plans")
    asked = asked_of(plans, script)
    assert list(asked) == ["steady", "more-context"]
    monkeypatch.setenv("VARIANTS", "shipped")
    _, _, (*_, rules, _) = recorded.run(str(recorded.folder / "other"), "rules")
    assert asked["steady"] == asked["more-context"] == asked_of(rules, script)["shipped"]


def test_windows_of_several_look_aheads_and_contexts_are_judged_by_whole_replies(
    recorded: Recorded, script: Any
) -> None:
    _, _, (command,) = recorded.run(str(recorded.folder / "out"), "look_ahead")
    found = {
        each.name: each.profile.changes["token2wav"]["plans"]["balanced"]
        for word in command
        if "look_ahead_codes" in word and (each := script("compare.variants").parse_variant(word))
    }
    assert found == {
        f"{codes}-{frames}": {"look_ahead_codes": codes, "vocoder_context_frames": frames}
        for codes, frames in [(7, 12), (9, 12), (6, 12), (7, 14), (12, 24)]
    }
    assert "--setting" not in command, "evaluate compares streams with whole replies where it is told nothing else"


@pytest.mark.parametrize(("part", "first"), [("rules", "shipped no-claim "), ("plans", "shipped steady ")])
def test_a_variant_that_a_part_has_not_is_refused(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, part: str, first: str
) -> None:
    monkeypatch.setenv("VARIANTS", "shipped no-gaps")
    code, said, commands = recorded.run(str(recorded.folder / "out"), part)
    assert (code, commands) == (1, [])
    assert said.startswith(f"VARIANTS: 'no-gaps' is none of those of {part}: {first}")


def test_stages_alone_are_timed_as_often_as_is_asked(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "2")
    out = recorded.folder / "out"
    _, _, commands = recorded.run(str(out), "windows", "steps")
    written = [Path(command[command.index("-o") + 1]).relative_to(out) for command in commands]
    runs = [
        *("windows/7b/windows.1.json", "windows/7b/windows.2.json", "windows.json", "windows/7b/others.1.json"),
        *(f"steps/{name}.{run}.json" for name in ("7b/steady", "3b/steady", "7b/anew", "7b/fp8") for run in (1, 2)),
        "steps.json",
    ]
    assert list(map(str, written)) == runs


def test_a_crowd_s_time_is_told_of_its_reports(recorded: Recorded, script: Any) -> None:
    out = recorded.folder / "out"
    _, _, (command, told) = recorded.run(str(out), "crowd_time")
    served = Path(command[command.index("--out") + 1])
    assert told[1:] == [str(served / "shipped" / f"listeners-{places}.json") for places in (32, 48)]
    (asked,) = asked_of(command, script).values()
    assert [(one["concurrency"], one["talker_max_tokens"]) for one in asked] == [("32", 1000), ("48", 1000)]
    assert (out / "crowd_time" / "stage_time.md").exists()


def test_realtime_sessions_are_measured_with_options_that_are_taken(recorded: Recorded, script: Any) -> None:
    _, _, (command,) = recorded.run(str(recorded.folder / "out"), "realtime")
    app = typer.Typer()
    app.command()(script("realtime_served").main)
    parameters = parsed(app, command[1:])
    assert (parameters["model"], parameters["mps"], parameters["runs"]) == ("random:7b", True, 3)
    assert parameters["output"].parent.is_dir()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sessions", "0"], "'--sessions': Input should be greater than or equal to 1"),
        (["--sessions", "1,32"], "'--sessions': Input should be a valid integer"),
        (["-o", "missing/realtime.json"], "missing/realtime.json: its folder does not exist"),
    ],
)
def test_realtime_sessions_that_cannot_be_measured_are_refused_before_a_server_starts(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(script("realtime_served").main)
    ended = CliRunner().invoke(app, ["-o", "realtime.json", *arguments])
    assert (ended.exit_code, sentence in " ".join(ended.output.replace("│", " ").split())) == (2, True), ended.output


def test_a_part_alone_and_none_that_is_not_there_or_was_measured(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", "1")
    out = recorded.folder / "out"
    code, _, commands = recorded.run(str(out), "whole")
    assert (code, len(commands)) == (0, 1)
    for part, sentence in (("whole", f"{out}/whole exists already"), ("wohle", "no part is named 'wohle': numbers")):
        code, said, commands = recorded.run(str(out), "windows", part)
        assert (code, len(commands)) == (2, 1)
        assert said.startswith(sentence)
    assert recorded.run()[0] == 0


def test_the_docs_name_every_part(recorded: Recorded) -> None:
    _, said, _ = recorded.run()
    parts = said.splitlines()[-1].removeprefix("Parts: ").split()
    told = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## Measure it again")[2].partition("\n###")[0]
    assert re.findall(r"^- `(\w+)`: ", told, re.MULTILINE) == parts

# SPDX-License-Identifier: Apache-2.0
"""Servers of a comparison, by a checkout whose server program is a few lines: started, ready, and gone."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkouts import make_checkout
from processes import is_running
from triton_omni.supervisor.machine import ServerError
from waiting import wait_for

ROOT = Path(__file__).parents[2]
PROGRAM = """
    import os, signal, sys
    option = dict(zip(sys.argv, sys.argv[1:]))
    if option["--model"] == "refused":
        sys.exit("error: no such model")
    with open(option["--log-file"], "w") as log:
        print(__file__, os.getpid(), "OMNI_PROFILE" in os.environ, *sys.argv[1:], sep="\\n", file=log)
    if option["--model"] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("a line of a library\\nREADY http=host:1 grpc=127.0.0.1:2 metrics=host:3", flush=True)
    if option["--model"] != "dying":
        while True:
            signal.pause()
"""


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: importlib.import_module(f"compare.{name}")


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with an environment of its own; the caller's names other code."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "backend_src"))
    monkeypatch.setenv("OMNI_PROFILE", "small")
    return make_checkout(tmp_path / "before", textwrap.dedent(PROGRAM))


def variant_of(compare: Any, checkout: Path, **more: Any) -> Any:
    return compare("variants").parse_variant(f"before={json.dumps({'checkout': str(checkout), **more})}")


class Started:
    """What a server program wrote to its log."""

    def __init__(self, log: Path) -> None:
        self.program, pid, self.profile_of_caller, *arguments = log.read_text().splitlines()
        self.pid = int(pid)
        self.options = dict(pairwise(arguments))


def test_a_checkout_s_own_program_serves_its_own_models(compare: Any, before: Path, tmp_path: Path) -> None:
    with compare("running").serving(variant_of(compare, before), Path("model"), tmp_path, mps=False) as served:
        assert (served.grpc_url, served.metrics_url) == ("127.0.0.1:2", "http://host:3/metrics")
        started = Started(tmp_path / "server-0.log")
        assert is_running(started.pid)
    assert not is_running(started.pid)
    assert started.program == str(before / "backend_src" / "triton_omni" / "old.py")
    assert started.options["--model-repository"] == str(before / "model_repository")
    assert started.profile_of_caller == "False"
    assert "--no-mps" in started.options
    assert "--profile" not in started.options, "an old program may not know it"
    assert started.options["--gpus"] == "thinker=0,talker=0,token2wav=0"


def test_what_a_variant_changes_reaches_the_program_and_lies_beside_its_log(
    compare: Any, before: Path, tmp_path: Path
) -> None:
    changes = {"talker": {"engine": {"max_num_seqs": 8}}}
    variant = variant_of(compare, before, gpus="token2wav=1", **changes)
    with compare("running").serving(variant, Path("model"), tmp_path, mps=True):
        started = Started(tmp_path / "server-0.log")
    assert yaml.safe_load(Path(started.options["--profile"]).read_text()) == changes
    assert Path(started.options["--profile"]) == tmp_path / "profile.yaml"
    assert started.options["--gpus"] == "thinker=0,talker=0,token2wav=1"
    assert "--mps" in started.options


def test_each_replica_is_on_a_gpu_of_its_own_and_envoy_before_them(
    compare: Any, before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def envoy(_configuration: Any, _folder: Path) -> Iterator[tuple[str, str]]:
        yield "envoy:1", ""

    monkeypatch.setattr(compare("running"), "run_envoy", envoy)
    monkeypatch.setattr(compare("running"), "visible_gpus", lambda _: 2)
    variant = variant_of(compare, before, replicas=2)
    with compare("running").serving(variant, Path("model"), tmp_path, mps=False) as served:
        started = [Started(tmp_path / f"server-{number}.log") for number in (0, 1)]
        assert served.grpc_url == "envoy:1"
    assert [each.options["--gpus"][:9] for each in started] == ["thinker=0", "thinker=1"]
    assert not any(is_running(each.pid) for each in started)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("refused", "the server was not ready: exit code 1, its reason on standard error; log: "),
        ("dying", "the server ended by itself: exit code 0, its reason on standard error; log: "),
        ("deaf", "the server did not stop within 0.2 s, and was killed; log: "),
    ],
)
def test_a_server_that_ends_early_or_never_is_told_with_its_log(
    compare: Any, before: Path, monkeypatch: pytest.MonkeyPatch, model: str, sentence: str
) -> None:
    monkeypatch.setattr(compare("server"), "_STOPS_WITHIN_S", 0.2)
    log = before.parent / "server-0.log"

    def serve() -> None:
        with compare("running").serving(variant_of(compare, before), Path(model), log.parent, mps=False):
            if model == "dying":
                wait_for(lambda: not is_running(Started(log).pid))

    with pytest.raises(ServerError, match=f"^{re.escape(sentence + str(log))}$"):
        serve()
    assert model == "refused" or not is_running(Started(log).pid)


def test_other_variants_are_measured_where_one_does_not_start(compare: Any, before: Path, tmp_path: Path) -> None:
    measured = compare("__main__").Measured("bench")
    measured.add("x", [], compare("running").serving(variant_of(compare, before), Path("refused"), tmp_path, mps=False))
    assert [failure.partition(":")[0] for failure in measured.failures] == ["x"]


def test_a_comparison_that_is_killed_leaves_no_server(compare: Any, before: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from compare import server; "
        "checkout, log = server.parse_checkout(sys.argv[1]), Path(sys.argv[2])\n"
        "with server.server(checkout, ['--model', 'model'], log) as process:\n"
        "    server.wait_ready(process, log); print('ready', flush=True); process.wait()"
    )
    code = os.pathsep.join(str(ROOT / folder) for folder in ("scripts", "backend_src"))
    log = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", script, before, log], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": code}
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"ready\n"
        run.kill()
    wait_for(lambda: not is_running(Started(log).pid))


def test_a_folder_that_serves_no_code_of_its_own_is_refused_with_the_cure(
    compare: Any, before: Path, tmp_path: Path
) -> None:
    parse = compare("server").parse_checkout
    assert parse(str(before)).root == before
    (code,) = before.glob(".venv/lib/python3*/site-packages/code.pth")
    for elsewhere, found in ((str(ROOT / "backend_src"), str(ROOT / "backend_src")), ("", "nowhere")):
        code.write_text(elsewhere)
        with pytest.raises(ValueError, match=f"imports triton_omni from {found}: give it one of its own by ./build.sh"):
            parse(str(before))
    (before / ".venv" / "bin" / "python").unlink()
    with pytest.raises(ValueError, match=r"before has no \.venv/bin/python: run \./build\.sh setup there$"):
        parse(str(before))
    (before / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"names no triton-omni-serve; make one by `git worktree add`$"):
        parse(str(before))
    with pytest.raises(ValueError, match="is no checkout of this repository"):
        parse(str(tmp_path / "missing"))

# SPDX-License-Identifier: Apache-2.0
"""A server's messages while it starts: a line a step, none twice, and a reminder now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_omni.supervisor.start import StartReport, stages_of

STAGES = ("thinker", "talker", "token2wav")


class Start:
    """A start whose time and loaded stages a test sets."""

    def __init__(self, *stages: str, log: Path | None = Path("server.log")) -> None:
        self.now, self.loaded = 100.0, set[str]()
        self.report = StartReport(4711, log, stages, lambda pid: {4711: self.loaded}[pid], lambda: self.now)

    def at(self, seconds: float, *loaded: str) -> None:
        self.now, self.loaded = 100.0 + seconds, self.loaded | set(loaded)
        self.report.look()


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]):
    return lambda: [line.removeprefix("starting: ") for line in capsys.readouterr().err.splitlines()]


def test_each_step_is_a_line_and_none_comes_twice(told) -> None:
    start = Start(*STAGES)
    assert told() == [
        "tritonserver is process 4711, its log server.log",
        "thinker, talker and token2wav load; the first start on a machine compiles, which can take minutes",
    ]
    for _ in range(50):
        start.at(9)
    assert told() == []
    start.at(14, "token2wav")
    start.at(20)
    assert told() == ["token2wav is loaded after 14 s"]
    start.at(31, "thinker", "talker")
    assert sorted(told()) == ["talker is loaded after 31 s", "thinker is loaded after 31 s"]
    start.at(500)
    assert told() == []
    start.report.warms_up()
    assert told() == [
        "all models are loaded; a first reply is spoken, so that callers need not wait for what it prepares"
    ]


def test_it_is_looked_at_twice_a_second_at_most() -> None:
    start = Start(*STAGES)
    start.report._loaded = lambda pid: pytest.fail("looked at too soon")
    start.at(0.4)


def test_what_takes_long_is_told_ever_more_rarely(told) -> None:
    start = Start(*STAGES)
    start.at(1, "talker")
    told()
    for seconds in range(2, 1000):
        start.at(seconds)
    assert told() == [f"thinker and token2wav still load after {seconds} s" for seconds in (60, 120, 240, 480, 960)]
    start.at(1920, "token2wav")
    assert told() == ["token2wav is loaded after 1920 s", "thinker still loads after 1920 s"]


def test_a_server_without_stages_has_no_step(told) -> None:
    Start(log=None).at(100)
    assert told() == ["tritonserver is process 4711, its log is here"]


def test_the_stages_of_a_repository_are_its_folders(tmp_path: Path) -> None:
    for name in ("talker", "thinker", "other"):
        (tmp_path / name).mkdir()
    assert stages_of(tmp_path) == ["thinker", "talker"]

# SPDX-License-Identifier: Apache-2.0
"""A server's text reaches a terminal in printable characters alone: no escape moves the cursor or hides a text."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from client_fakes import FakeHttp, FakeTriton, failure, serve_grpc, serve_http, tell
from triton_omni_client import TextDelta, Timings, cli, terminal

HOSTILE = "red \x1b[31m title \x1b]0;x\x07 c1 \x9b31m back \x08\r turned \u202e \u2066 half \ud800 [/red] end"
UNSAFE = set("\x1b\x07\x9b\x08\r\u202e\u2066\ud800")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_reply_and_a_pipe_gets_the_text(
    monkeypatch: pytest.MonkeyPatch, is_drawn: bool
) -> None:
    for out in (Terminal(), io.StringIO()):
        err = Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        console = Console(file=err, force_terminal=is_drawn, width=400)
        monkeypatch.setattr(terminal, "Console", lambda stderr, console=console: console)
        screen = terminal.Screen(text_to_stderr=False, silent=False)
        with screen.open():
            screen.show(TextDelta(HOSTILE), Timings(0.1, None, 0.1, 0))
        if out.isatty():
            assert not UNSAFE & set(out.getvalue())
            assert "\x1b[31m" not in err.getvalue()
            assert "\\u001b[31m" in out.getvalue()
        else:
            assert out.getvalue() == f"{HOSTILE}\n"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not UNSAFE & set(result.output), result.output
    return result.output


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_a_server_says_is_told_in_printable_characters(options: tuple[str, ...]) -> None:
    said = HOSTILE.replace("\ud800", "")
    with serve_grpc(FakeTriton(lambda *_: iter([failure(f"{said}\nsecond line")]))) as fake:
        told = run("say", "hi", "--url", fake.url, *options)
        assert "\\u001b[31m" in told
        assert [line for line in told.splitlines() if line.startswith("second")] == []
        config = next(iter(fake.configs.values()))
        tell(config, voices=[HOSTILE], limits={HOSTILE: [HOSTILE], "many": 1e308}, checkpoint=HOSTILE)
        fake.configs[said] = config
        assert "\\u202e" in run("models", "--url", fake.url, *options)
    with serve_http(FakeHttp(lambda: (400, {}, json.dumps({"error": HOSTILE}).encode()))) as http:
        assert "\\ud800" in run("say", "hi", "--url", http.url, *options)

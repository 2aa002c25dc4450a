# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints where, what it writes, how it exits."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import triton_omni_client
from client_fakes import (
    INFO,
    FakeHttp,
    FakeTriton,
    chunk,
    failure,
    final,
    floats,
    http_answer,
    inputs_of,
    parameters_of,
    serve_grpc,
    serve_http,
)
from command_line import unframed
from triton_omni_client import Timings, cli, terminal
from triton_omni_client.answer import NOT_KEPT
from triton_omni_client.audio import WavDecoder, wav_header
from triton_omni_client.messages import AudioDelta, TextDelta
from waiting import IN_TIME_S

LAST_LINE = re.compile(
    r"first text \d+\.\d\d s · first audio \d+\.\d\d s · audio 0\.0 s · real-time factor \d+\.\d\d\n$"
)


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def _run(*arguments: str | Path, url: str) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(cli.app, [str(command), "--url", url, *map(str, rest)])


def _samples(path: Path) -> list[int]:
    with wave.open(str(path)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24_000, 1, 2)
        return list(np.frombuffer(reader.readframes(reader.getnframes()), "<i2"))


def test_say_prints_the_text_and_writes_the_wav(server: FakeTriton, tmp_path: Path) -> None:
    result = _run("say", "hi", "-o", tmp_path / "reply.wav", url=server.url)
    assert (result.exit_code, result.stdout) == (0, "Hello, sea.\n")
    times, *speech = result.stderr.splitlines(keepends=True)
    assert LAST_LINE.fullmatch(times), times
    assert speech == [f"wrote {tmp_path / 'reply.wav'}\n"]
    assert _samples(tmp_path / "reply.wav") == [8192] * 480 + [-16384] * 480
    assert "sampling_parameters" not in inputs_of(server.requests[0])


@pytest.mark.parametrize("command", ["say", "ask"])
def test_speech_that_is_not_kept_is_told_with_what_would_keep_it(server: FakeTriton, command: str) -> None:
    result = _run(command, "hi", url=server.url)
    assert result.exit_code == 0
    assert result.stderr.splitlines()[1:] == [NOT_KEPT]
    assert all(cure in NOT_KEPT for cure in ("-o FILE.wav", "triton-omni play", "--text-only"))


@pytest.mark.parametrize("options", [["--json"], ["--text-only"], ["-o", "-"]])
def test_where_there_is_no_speech_to_keep_or_it_is_kept_nothing_is_said(server: FakeTriton, options: list[str]) -> None:
    if options == ["--text-only"]:
        server.script = lambda *_: iter([chunk(text="Hi"), chunk(info=INFO), final()])
    assert NOT_KEPT not in _run("say", "hi", *options, url=server.url).stderr
    assert "wrote" not in _run("say", "hi", *options, url=server.url).stderr


def test_the_version_is_the_package_s() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"triton-omni {version('triton-omni-client')}\n")


def test_help_lists_what_asks_the_model_then_what_asks_about_the_server() -> None:
    listed = re.findall(r"^│ (\w+)  +\w", CliRunner().invoke(cli.app, ["--help"]).stdout, re.MULTILINE)
    assert listed == ["say", "ask", "chat", "play", "models", "ready", "bench", "evaluate", "capacity"]


def test_say_to_stdout_is_a_wav_and_the_text_moves_to_stderr(server: FakeTriton) -> None:
    result = _run("say", "hi", "-o", "-", url=server.url)
    assert result.exit_code == 0
    samples = WavDecoder().feed(result.stdout_bytes)
    np.testing.assert_array_equal(np.rint(samples * 32767), np.repeat([8192, -16384], 480))
    assert result.stderr.startswith("Hello, sea.\n")


def test_every_option_reaches_the_server(server: FakeTriton, tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.ogg", "d.mp4"):
        (tmp_path / name).write_bytes(name.encode())
    arguments = ["what?", "--voice", "Ethan", "--seed", "3", "--text-only", "--timeout", "9", "--audio-format", "pcm16"]
    arguments += ["--thinker-json", '{"top_k": 1}', "--talker-json", '{"top_k": 2}', "--token2wav-json", '{"x": 3}']
    arguments += [f"--video={tmp_path}/d.mp4", f"--image={tmp_path}/a.png", f"--image={tmp_path}/b.png"]
    arguments += [f"--audio={tmp_path}/c.ogg", "--model", "other"]
    assert _run("say", *arguments, url=server.url).exit_code == 0
    (request,) = server.requests
    assert request.model_name == "other"
    assert inputs_of(request)["media"] == [b"a.png", b"b.png", b"c.ogg", b"d.mp4"]
    (message,) = json.loads(inputs_of(request)["messages"][0])
    assert [part["type"] for part in message["content"]] == ["image", "image", "audio", "video", "text"]
    assert parameters_of(request) == {
        "modalities": ["text"],
        "voice": "Ethan",
        "seed": 3,
        "audio_format": "pcm16",
        "timeout": 9,
        "thinker": {"top_k": 1},
        "talker": {"top_k": 2},
        "token2wav": {"x": 3},
    }


def test_json_is_one_object_and_nothing_else_on_stdout(server: FakeTriton) -> None:
    result = _run("say", "hi", "--json", url=server.url)
    found = json.loads(result.stdout)
    assert (found["text"], found["samples"], found["output"], found["info"]) == ("Hello, sea.", 960, None, INFO)
    assert found["timings"]["audio"] == 0.04
    assert found["timings"]["first_text"] <= found["timings"]["first_audio"] <= found["timings"]["total"]
    assert result.stderr == ""


def test_a_text_reply_s_last_line_says_nothing_of_speech_that_never_came(server: FakeTriton) -> None:
    server.script = lambda *_: iter([chunk(text="Hi"), chunk(info=INFO), final()])
    assert re.fullmatch(r"first text \d+\.\d\d s · audio 0\.0 s\n", _run("say", "hi", url=server.url).stderr)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "no free session [omni:overloaded;stage=thinker;retry_after_ms=250]",
            "error: overloaded: no free session (in the thinker); try again in 0.25 s",
        ),
        ("voice: 'Bob' is none of [Ethan] [omni:bad_request]", "error: bad_request: voice: 'Bob' is none of [Ethan]"),
    ],
)
def test_a_failure_is_one_sentence_and_keeps_what_came(
    server: FakeTriton, tmp_path: Path, text: str, sentence: str
) -> None:
    server.script = lambda *_: iter([chunk(text="so far", audio=floats([0.5])), failure(text)])
    result = _run("say", "hi", "-o", tmp_path / "reply.wav", url=server.url)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "so far\n", sentence + "\n")
    assert _samples(tmp_path / "reply.wav") == [16384]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Files of this process take the header of a WAV file and two samples, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(wav_header(2)) + 4, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("pieces", [[[0.5], [0.5] * 9], [[0.5], [0.5], [0.5]]])
def test_a_disk_that_is_full_is_one_sentence_and_keeps_what_came(
    server: FakeTriton, tmp_path: Path, pieces: list[list[float]]
) -> None:
    server.script = lambda *_: iter([*(chunk(audio=floats(piece)) for piece in pieces), chunk(info=INFO), final()])
    path = tmp_path / "reply.wav"
    result = _run("say", "hi", "-o", path, url=server.url)
    said = f"error: not_written: {path}: cannot be written: File too large\n"
    assert (result.exit_code, result.stderr) == (1, said)
    with path.open("rb") as file:
        assert len(WavDecoder().feed(file.read())) == len(pieces) - 1


def test_a_file_that_takes_nothing_is_wrong_usage_and_nobody_is_asked(server: FakeTriton) -> None:
    result = _run("say", "hi", "-o", "/dev/full", url=server.url)
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed("/dev/full: cannot be written: No space left on device") in unframed(result.stderr)


@pytest.mark.parametrize("options", [(), ("--json",), ("-o", "-")])
def test_a_stdout_that_takes_nothing_is_one_sentence(server: FakeTriton, options: tuple[str, ...]) -> None:
    server.script = lambda *_: iter([chunk(text="Hi", audio=floats([0.5])), chunk(info=INFO), final()])
    command = [sys.executable, "-m", "triton_omni_client", "say", "hi", "--url", server.url, *options]
    environment = os.environ | {"PYTHONPATH": str(Path(triton_omni_client.__file__).parents[1])}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: stdout cannot be written: No space left on device"
    assert "Traceback" not in done.stderr


def test_an_unreachable_server_is_named() -> None:
    result = _run("say", "hi", url="127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no connection to 127.0.0.1:1: ")
    assert result.stderr.endswith(f"; {terminal.HOW_TO_START}\n")
    assert "./build.sh serve" in terminal.HOW_TO_START
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["hi", "--json", "-o", "-"],
        ["hi", "--audio-format", "mp3"],
        ["hi", "--thinker-json", "{"],
        ["hi", "--talker-json", "[1]"],
        ["hi", "--seed", "many"],
        ["hi", "--no-such-option"],
    ],
)
def test_wrong_usage_exits_with_2_and_asks_nobody(server: FakeTriton, arguments: list[str]) -> None:
    assert _run("say", *arguments, url=server.url).exit_code == 2
    assert server.requests == []


def test_files_that_cannot_be_used_are_named(server: FakeTriton, tmp_path: Path) -> None:
    missing = _run("say", "hi", "--image", tmp_path / "none.png", url=server.url)
    assert missing.exit_code == 2
    said = f"Invalid value for '--image': file '{tmp_path}/none.png' does not exist."
    assert unframed(said) in unframed(missing.stderr)
    refused = _run("say", "hi", "-o", tmp_path / "no" / "reply.wav", url=server.url)
    assert refused.exit_code == 2
    assert unframed("reply.wav: its folder does not exist") in unframed(refused.stderr)
    assert server.requests == []


@pytest.mark.parametrize("check", [[], ["--check"]])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("there", "is a folder; give a file in it"),
        ("nowhere/reply.wav", "its folder does not exist"),
        ("a" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_wav_file_that_could_not_be_written_is_refused_before_anybody_is_asked(
    server: FakeTriton, tmp_path: Path, name: str, says: str, check: list[str]
) -> None:
    (tmp_path / "there").mkdir()
    result = _run("say", "hi", "-o", tmp_path / name, *check, url=server.url)
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed(f"{name}: {says}") in unframed(result.stderr)


@pytest.mark.parametrize("command", ["say", "ask"])
def test_a_check_asks_nobody_and_writes_nothing(server: FakeTriton, tmp_path: Path, command: str) -> None:
    result = _run(command, "hi", "-o", tmp_path / "reply.wav", "--check", url=server.url)
    assert (result.exit_code, result.output, server.requests) == (0, "", [])
    assert list(tmp_path.iterdir()) == []
    assert _run(command, " ", "--check", url=server.url).exit_code == 2


def test_a_url_of_http_gets_the_reply_in_one_answer(tmp_path: Path) -> None:
    fake = FakeHttp(lambda: http_answer(text="Hello.", audio=floats([0.5]), info=INFO))
    with serve_http(fake):
        result = _run("say", "hi", "-o", tmp_path / "reply.wav", url=fake.url)
        assert (result.exit_code, result.stdout) == (0, "Hello.\n")
        assert _samples(tmp_path / "reply.wav") == [16384]
        assert _run("ready", url=fake.url).exit_code == 0
        fake.answer = lambda: http_answer(text="Hello.")
        assert json.loads(_run("say", "hi", "--json", url=fake.url).stdout)["info"] is None


def test_a_url_of_no_known_kind_is_wrong_usage() -> None:
    result = _run("ready", url="ftp://x")
    assert result.exit_code == 2
    assert unframed("'TRITON_OMNI_URL'): 'ftp://x' is no address of gRPC") in unframed(result.stderr)


def test_ready_says_so_and_waits(server: FakeTriton) -> None:
    assert (_run("ready", url=server.url).exit_code, _run("ready", url=server.url).stdout) == (0, "ready\n")
    server.is_ready = False
    started = time.monotonic()
    result = _run("ready", "--wait", "0.3", url=server.url)
    assert time.monotonic() - started >= 0.3
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "",
        f"not ready: {server.url}: the server has no model 'qwen2_5_omni', or has not loaded it\n",
    )


def test_interrupt_cancels_on_the_server_keeps_the_audio_and_exits_with_130(server: FakeTriton, tmp_path: Path) -> None:
    server.script = server.endless
    path = tmp_path / "reply.wav"
    command = [sys.executable, "-c", "from triton_omni_client.cli import main; main()", "say", "hi", "-o", str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(triton_omni_client.__file__).parents[1])}
    environment |= {"TRITON_OMNI_URL": server.url}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"Hello"
        while not path.exists() or path.stat().st_size < 44 + 960:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=IN_TIME_S)
    assert process.returncode == 130
    assert b"audio 0.0 s" in stderr
    assert b"Traceback" not in stderr
    assert server.cancelled.wait(IN_TIME_S)
    assert _samples(path) == [8192] * 480


def test_interrupt_prints_the_times_of_what_was_received(server: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(_self: terminal.Screen, delta: object, _timings: Timings) -> None:
        if isinstance(delta, AudioDelta):
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal.Screen, "show", show)
    server.script = server.endless
    result = _run("say", "hi", url=server.url)
    assert result.exit_code == 130
    times, speech = result.stderr.splitlines(keepends=True)
    assert LAST_LINE.fullmatch(times), times
    assert speech == f"{NOT_KEPT}\n"
    assert server.cancelled.wait(IN_TIME_S)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out_is_terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_and_the_text_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, out_is_terminal: bool
) -> None:
    out, err = _Terminal() if out_is_terminal else io.StringIO(), _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(terminal, "Console", lambda stderr: Console(file=err, force_terminal=True, width=80))
    screen = terminal.Screen(text_to_stderr=False, silent=False)
    with screen.open():
        screen.show(TextDelta("Hello"), Timings(0.1, None, 0.1, 0))
        shown = out.getvalue()
        screen.show(AudioDelta(np.zeros(24_000, np.float32)), Timings(0.1, 0.2, 0.2, 1.0))
    assert shown == ("" if out_is_terminal else "Hello")
    assert out.getvalue() == "Hello\n"
    assert "audio 1.0 s" in err.getvalue()
    assert ("Hello" in err.getvalue()) is out_is_terminal


def test_main_is_the_console_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["triton-omni", "--help"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 0
    assert "say" in capsys.readouterr().out


def test_ctrl_c_while_the_commands_are_made_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", press)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 130

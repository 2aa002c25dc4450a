# SPDX-License-Identifier: Apache-2.0
"""Options of the command line: which commands have which; a refusal has the name, the value and what is allowed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from client_fakes import FakeTriton, failure, inputs_of, parameters_of, serve_grpc
from command_line import unframed
from media_samples import audio_file, image_file, video_file
from triton_omni.request.parse import MAX_SEED, Priority
from triton_omni_client import cli
from triton_omni_client.commands import options
from triton_omni_client.option_groups import grouped
from triton_omni_gateway.settings import PRIORITIES

CALLBACKS: dict[str, Any] = {
    command.name or command.callback.__name__: command.callback for command in cli.app.registered_commands
}


@dataclass(frozen=True, kw_only=True)
class Taste:
    sugar: Annotated[int, typer.Option(help="Spoons.")] = 1
    milk: Annotated[bool, typer.Option("--milk")] = False


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def film(tmp_path: Path) -> Path:
    path = tmp_path / "film.mp4"
    path.write_bytes(video_file("mp4", seconds=0.25))
    return path


def run(*arguments: str | Path, url: str, stdin: bytes | None = None) -> Result:
    command, *rest = map(str, arguments)
    return CliRunner().invoke(cli.app, [command, "--url", url, *rest], input=stdin)


def refused(result: Result, says: str) -> bool:
    """Return True if it was refused as wrong usage with these words."""
    return result.exit_code == 2 and unframed(says) in unframed(result.stderr)


# Options by command.


def names_of(command: str) -> set[str]:
    return set(inspect.signature(CALLBACKS[command]).parameters)


def test_say_and_ask_have_the_same_options_but_for_how_media_are_given() -> None:
    say, ask = names_of("say"), names_of("ask")
    assert say - ask == {"image", "audio", "video"}
    assert ask - say == {"files"}
    assert names_of("play") == ask - {"text_only"} | {"device"}
    assert names_of("chat") == ask - {"text", "files", "check", "spectrogram"} | {"device", "play"}


def test_say_has_what_ask_has(server: FakeTriton, film: Path) -> None:
    arguments = ["--system", "Be brief.", "--max-tokens", "5", "--video-sound", "--video", film]
    assert run("say", "-", *arguments, url=server.url, stdin=b"What happens?\n").exit_code == 0
    (request,) = server.requests
    assert parameters_of(request) == {"use_audio_in_video": True, "thinker": {"max_tokens": 5}}
    assert b"Be brief." in inputs_of(request)["messages"][0]
    assert b"What happens?" in inputs_of(request)["messages"][0]


def test_ask_has_what_say_has(server: FakeTriton) -> None:
    arguments = ["--audio-format", "pcm16", "--thinker-json", '{"top_k": 1}', "--max-tokens", "5"]
    arguments += ["--talker-json", '{"top_k": 2}', "--token2wav-json", '{"mode": "offline"}']
    assert run("ask", "hi", *arguments, url=server.url).exit_code == 0
    assert parameters_of(server.requests[0]) == {
        "audio_format": "pcm16",
        "thinker": {"top_k": 1, "max_tokens": 5},
        "talker": {"top_k": 2},
        "token2wav": {"mode": "offline"},
    }


def test_a_dataclass_is_an_option_for_each_of_its_fields() -> None:
    drunk = []
    app = typer.Typer()

    @app.command()
    @grouped
    def drink(what: Annotated[str, typer.Argument()], *, taste: Taste, hot: bool = True) -> None:
        """Drink."""
        drunk.append((what, taste, hot))

    runner = CliRunner()
    assert runner.invoke(app, ["tea", "--sugar", "3", "--milk", "--no-hot"]).exit_code == 0
    assert runner.invoke(app, ["water"]).exit_code == 0
    assert drunk == [("tea", Taste(sugar=3, milk=True), False), ("water", Taste(), True)]
    assert "Spoons." in runner.invoke(app, ["--help"]).stdout


# Values.


@pytest.mark.parametrize(
    ("command", "option", "value", "allowed"),
    [
        ("ask", "--max-tokens", "0", "a whole number from 1 on"),
        ("say", "--max-tokens", "1.5", "a whole number from 1 on"),
        ("say", "--seed", "abc", "a whole number from 0 to 9223372036854775807"),
        ("ask", "--seed", "-1", "a whole number from 0 to 9223372036854775807"),
        ("chat", "--seed", "9223372036854775808", "a whole number from 0 to 9223372036854775807"),
        ("bench", "--seed", "x", "a whole number from 0 to 4611686018427387904"),
        ("bench", "--requests", "0", "a whole number from 1 on"),
        ("bench", "--ramp-up", "-1", "a number of seconds from 0 on"),
        ("models", "--timeout", "0", "a number of seconds above 0"),
        ("ready", "--wait", "nan", "a number of seconds from 0 on"),
        *(("say", "--timeout", value, "a number of seconds above 0") for value in ("0", "-1", "soon", "nan", "inf")),
    ],
)
def test_a_value_that_cannot_be_is_told_with_what_can(
    server: FakeTriton, command: str, option: str, value: str, allowed: str
) -> None:
    text = ["hi"] if command in ("say", "ask") else []
    result = run(command, *text, option, value, url=server.url)
    assert refused(result, f"Invalid value for '{option}': '{value}' is not {allowed}"), result.stderr
    assert server.requests == []


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--audio-format", "mp3", "'mp3' is none of f32, pcm16, wav"),
        ("--thinker-json", "{", "'{' is not JSON"),
        ("--thinker-json", '{"temperature": NaN}', """'{"temperature": NaN}' is not JSON"""),
        ("--token2wav-json", '{"speed": 1e400}', """'{"speed": 1e400}' is not JSON"""),
        ("--talker-json", "[" * 100_000, "'" + "[" * 40),
        ("--talker-json", "[1]", "'[1]' is not a JSON object"),
    ],
)
def test_a_word_that_cannot_be_is_told_with_what_can(server: FakeTriton, option: str, value: str, says: str) -> None:
    assert refused(run("ask", "hi", option, value, url=server.url), f"'{option}': {says}")


def test_ranges_are_the_server_s() -> None:
    assert options.MAX_SEED == MAX_SEED
    (bounds,) = Priority.__metadata__
    least, most = (found for found in bounds.metadata)
    assert (PRIORITIES[0], PRIORITIES[-1]) == (least.ge, most.le)


# Options that do not go together.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["say", "hi", "--text-only", "-o", "out.wav"], "-o: out.wav: not with --text-only, whose reply has no speech"),
        (["ask", "hi", "--text-only", "-o", "-"], "-o: -: not with --text-only"),
        (["chat", "--text-only", "-o", "out.wav"], "-o: out.wav: not with --text-only"),
        (["chat", "--text-only", "--play"], "--play: not with --text-only"),
        (["chat", "--device", "3"], "--device: '3': only with --play"),
        (["say", "hi", "--json", "-o", "-"], "-o: not - with --json: both want stdout"),
        (["say", "hi", "--video-sound"], "--video-sound: there is no video"),
        (["ask", "hi", "--video-sound"], "--video-sound: there is no video"),
        (["play", "hi", "--video-sound"], "--video-sound: there is no video"),
        (
            ["ask", "hi", "--max-tokens", "3", "--thinker-json", '{"max_tokens": 4}'],
            "--thinker-json: max_tokens is there",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(run(*arguments, url=server.url, stdin=b"hi\n"), f"Invalid value for {says}")
    assert (server.requests, list(tmp_path.iterdir())) == ([], [])


def test_a_picture_is_no_video_whose_sound_could_be_heard(server: FakeTriton, tmp_path: Path, film: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_file("png"))
    assert refused(run("ask", "What?", tmp_path / "a.png", "--video-sound", url=server.url), "there is no video")
    assert run("ask", "What?", tmp_path / "a.png", film, "--video-sound", url=server.url).exit_code == 0


# Typed text.


@pytest.mark.parametrize("command", ["say", "ask"])
def test_a_medium_in_the_place_of_the_text_is_told_with_where_it_goes(server: FakeTriton, command: str) -> None:
    result = run(command, "-", url=server.url, stdin=audio_file("wav"))
    assert refused(result, 'stdin is audio, not text; it goes after one, which may be empty: ask "" -')
    assert server.requests == []


@pytest.mark.parametrize(("stdin", "byte"), [(b"a\xff", "0xff at 1"), (b"a\0b", "0x00 at 1")])
def test_stdin_that_is_no_text_is_told_with_its_place(server: FakeTriton, stdin: bytes, byte: str) -> None:
    said = f"Invalid value for text: stdin is not text in UTF-8: byte {byte}"
    assert refused(run("ask", "-", url=server.url, stdin=stdin), said)
    assert server.requests == []


@pytest.mark.parametrize("arguments", [["say", "a\udcff"], ["ask", "a\udcff"], ["ask", "hi", "--system", "\udcff"]])
def test_a_text_that_is_no_unicode_is_wrong_usage(server: FakeTriton, arguments: list[str]) -> None:
    """The command line decodes bytes that are no UTF-8 to such characters."""
    assert refused(run(*arguments, url=server.url), "not valid Unicode text")
    assert server.requests == []


@pytest.mark.parametrize("command", ["say", "ask", "play"])
@pytest.mark.parametrize(("text", "stdin"), [("", None), (" \t\n", None), ("-", b" \n")])
def test_a_text_that_says_nothing_is_refused_without_a_medium(
    server: FakeTriton, command: str, text: str, stdin: bytes | None
) -> None:
    result = run(command, text, url=server.url, stdin=stdin)
    assert refused(result, "Invalid value for text: the request is empty; give a text, or files, or both")
    assert server.requests == []


def test_a_text_may_be_too_long_for_a_file_s_name(server: FakeTriton) -> None:
    assert run("ask", "why? " * 1000, url=server.url).exit_code == 0


# Exit codes.


@pytest.mark.parametrize(
    "arguments",
    [
        ["say", "hi", "--image", "nowhere.png"],
        ["ask", "hi", "nowhere.png"],
        ["play", "hi", "nowhere.png"],
        ["say", "hi", "-o", "nowhere/reply.wav"],
        ["ask", "hi", "-o", "nowhere/reply.wav"],
        ["say", "hi", "--spectrogram", "nowhere/reply.png"],
        ["chat", "-o", "nowhere/reply.wav"],
        ["bench", "-o", "nowhere/bench.json"],
        ["bench", "--write-perf-analyzer-input", "nowhere/in.json"],
    ],
)
def test_a_file_that_cannot_be_used_is_wrong_usage(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, url=server.url, stdin=b"hi\n")
    assert (result.exit_code, result.stdout, server.requests) == (2, "", [])
    assert "nowhere" in unframed(result.stderr)


def test_a_report_that_is_not_written_need_not_be_writable(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.json").mkdir()
    assert run("bench", "--write-perf-analyzer-input", "in.json", url=server.url).exit_code == 0
    assert (tmp_path / "in.json").is_file()
    assert refused(run("bench", "--check", url=server.url), "-o: bench.json: is a folder")


def test_what_the_server_refuses_or_does_not_answer_is_a_failure(server: FakeTriton) -> None:
    server.script = lambda *_: iter([failure("voice: 'Bob' is unknown [omni:bad_request;stage=thinker]")])
    for command in ("say", "ask"):
        assert run(command, "hi", "--voice", "Bob", url=server.url).exit_code == 1
        assert run(command, "hi", url="127.0.0.1:1").exit_code == 1
    for command in ("models", "ready", "bench"):
        assert run(command, url="127.0.0.1:1").exit_code == 1

# SPDX-License-Identifier: Apache-2.0
"""`ask`, `play` and `models`: what they send, print and write, and how they exit."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from client_fakes import (
    INFO,
    FakeHttp,
    FakeTriton,
    chunk,
    failure,
    final,
    http_answer,
    inputs_of,
    parameters_of,
    serve_grpc,
    serve_http,
    tell,
)
from command_line import unframed
from fake_sound import SoundDevice, plug_in
from media_samples import audio_file, image_file, video_file
from triton_omni_client import (
    AsyncOmniClient,
    ConnectionFailed,
    HttpClient,
    Internal,
    OmniClient,
    Timings,
    cli,
    terminal,
)
from triton_omni_client.audio import WavDecoder
from triton_omni_client.messages import TextDelta


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def run(*arguments: str | Path, url: str, stdin: bytes | str | None = None) -> Result:
    command, *rest = map(str, arguments)
    return CliRunner().invoke(cli.app, [command, "--url", url, *rest], input=stdin)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A picture, a sound and a film whose names say nothing."""
    made = {"image": image_file("png"), "audio": audio_file("flac"), "video": video_file("mp4", seconds=0.25)}
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return {name: tmp_path / name for name in made}


def test_ask_sends_text_and_files_in_their_order(server: FakeTriton, files: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "reply.wav"
    paths = [files["video"], files["image"], files["audio"], files["image"]]
    result = run("ask", "What?", *paths, "-o", output, url=server.url)
    assert (result.exit_code, result.stdout) == (0, "Hello, sea.\n")
    (message,) = json.loads(inputs_of(server.requests[0])["messages"][0])
    assert [part["type"] for part in message["content"]] == ["video", "image", "audio", "image", "text"]
    assert inputs_of(server.requests[0])["media"] == [path.read_bytes() for path in paths]
    assert len(WavDecoder().feed(output.read_bytes())) == 960


@pytest.mark.parametrize("command", ["say", "ask"])
def test_a_spectrogram_of_the_speech_is_written_beside_it(server: FakeTriton, tmp_path: Path, command: str) -> None:
    sound, picture = tmp_path / "reply.wav", tmp_path / "reply.png"
    result = run(command, "What?", "-o", sound, "--spectrogram", picture, url=server.url)
    assert result.exit_code == 0, result.output
    assert result.stderr.endswith(f"wrote {sound} and {picture}\n")
    with Image.open(picture) as drawn:
        assert (drawn.format, drawn.size) == ("PNG", (1350, 390))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--spectrogram", "reply.jpg"], "reply.jpg: a picture is written as PNG; give a name in .png"),
        (["--spectrogram", "reply.png", "--text-only"], "--spectrogram: reply.png: not with --text-only"),
    ],
)
def test_a_spectrogram_that_cannot_be_is_refused(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("say", "What?", *options, url=server.url)
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed(says) in unframed(result.stderr)


def test_a_spectrogram_without_matplotlib_is_refused_before_anything_is_asked(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("say", "What?", "--spectrogram", tmp_path / "reply.png", url=server.url)
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed("a spectrogram needs matplotlib: pip install matplotlib") in unframed(result.stderr)


def test_ask_s_options_reach_the_server(server: FakeTriton, files: dict[str, Path]) -> None:
    options = ["--system", "Be brief.", "--voice", "Ethan", "--seed", "3", "--text-only", "--timeout", "9"]
    result = run("ask", "What?", files["video"], *options, "--video-sound", "--max-tokens", "5", url=server.url)
    assert result.exit_code == 0
    assert [message["role"] for message in json.loads(inputs_of(server.requests[0])["messages"][0])] == [
        "system",
        "user",
    ]
    assert parameters_of(server.requests[0]) == {
        "modalities": ["text"],
        "voice": "Ethan",
        "seed": 3,
        "use_audio_in_video": True,
        "timeout": 9,
        "thinker": {"max_tokens": 5},
    }


def test_ask_takes_a_file_from_stdin(server: FakeTriton, files: dict[str, Path]) -> None:
    sound = files["audio"].read_bytes()
    assert run("ask", "", files["image"], "-", url=server.url, stdin=sound).exit_code == 0
    (message,) = json.loads(inputs_of(server.requests[0])["messages"][0])
    assert [part["type"] for part in message["content"]] == ["image", "audio"]
    assert inputs_of(server.requests[0])["media"] == [files["image"].read_bytes(), sound]


def test_ask_takes_its_text_from_stdin(server: FakeTriton) -> None:
    assert run("ask", "-", url=server.url, stdin="What is\nthe sea?\n").exit_code == 0
    assert inputs_of(server.requests[0])["text_input"] == [b"What is\nthe sea?"]


@pytest.mark.parametrize("arguments", [[], ["-", "-"], ["x", "-", "-"], ["--json", "-o", "-", "hi"], [""]])
def test_wrong_usage_of_ask_exits_with_2_and_asks_nobody(server: FakeTriton, arguments: list[str]) -> None:
    assert run("ask", *arguments, url=server.url, stdin="").exit_code == 2
    assert server.requests == []


def test_a_file_that_is_no_medium_is_named(server: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("milk")
    result = run("ask", "What?", tmp_path / "notes.txt", url=server.url)
    assert result.exit_code == 2
    said = "Invalid value for files: notes.txt: neither an image nor a sound nor a video, by content and by name"
    assert unframed(said) in unframed(result.stderr)
    assert server.requests == []


def test_a_file_in_the_place_of_the_text_is_not_sent_as_text(server: FakeTriton, files: dict[str, Path]) -> None:
    result = run("ask", files["image"], url=server.url)
    assert result.exit_code == 2
    assert "give the text before it" in " ".join(result.stderr.split())
    assert server.requests == []


def test_an_error_under_json_is_an_object_too(server: FakeTriton) -> None:
    server.script = lambda *_: iter([failure("voice: 'x' is unknown [omni:bad_request;stage=thinker]")])
    result = run("ask", "hi", "--json", url=server.url)
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "error": {
            "code": "bad_request",
            "message": "voice: 'x' is unknown",
            "stage": "thinker",
            "retry_after_ms": None,
        }
    }
    assert result.stderr == "error: bad_request: voice: 'x' is unknown (in the thinker)\n"


def test_ask_over_http(files: dict[str, Path]) -> None:
    with serve_http(FakeHttp(lambda: http_answer(text="Hello.", info=INFO))) as fake:
        result = run("ask", "What?", files["image"], "--json", url=fake.url)
        assert json.loads(result.stdout)["text"] == "Hello."
        assert fake.inputs["media"] == [files["image"].read_bytes()]


def test_a_large_upload_is_shown_until_the_reply_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    console = Console(file=err, force_terminal=True, width=80)
    monkeypatch.setattr(terminal, "Console", lambda stderr: console)
    screen = terminal.Screen(text_to_stderr=False, silent=True)
    with screen.open():
        screen.sending(1000)
        screen.sent(500, 1000)
        assert "sen" not in err.getvalue()
        screen.sending(40_000_000)
        screen._live.refresh()
        assert "sending 40.0 MB" in err.getvalue()
        screen.sent(10_000_000, 40_000_000)
        screen._live.refresh()
        assert "sent 10.0 MB of 40.0 MB" in err.getvalue()
        screen.show(TextDelta("Hello"), Timings(0.1, None, 0.1, 2.0))
        screen._live.refresh()
    assert err.getvalue().rindex("audio 2.0 s") > err.getvalue().rindex("sent 10.0 MB")


def test_play_plays_what_comes_and_writes_it_too(
    server: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = plug_in(monkeypatch, SoundDevice())
    result = run("play", "hi", "--device", "2", "-o", tmp_path / "reply.wav", url=server.url)
    assert (result.exit_code, result.stdout) == (0, "Hello, sea.\n")
    np.testing.assert_array_equal(device.played, np.repeat(np.float32([0.25, -0.5]), 480))
    assert device.opened["device"] == 2
    assert device.closed
    assert len(WavDecoder().feed((tmp_path / "reply.wav").read_bytes())) == 960


def test_ctrl_c_ends_the_playing_of_a_reply_that_has_come(server: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    class Listener(SoundDevice):
        def write(self, data: Any) -> None:
            super().write(data)
            if len(self.played) == 6_000:
                signal.raise_signal(signal.SIGINT)
                self.speed = 0.1

    device = plug_in(monkeypatch, Listener())
    server.script = lambda *_: iter([chunk(text="Long", audio=np.ones(240_000, np.float32)), chunk(info=INFO), final()])
    result = run("play", "hi", url=server.url)
    assert (result.exit_code, result.stdout) == (130, "Long\n")
    assert 6_000 <= len(device.played) < 240_000, "which would have taken 97 s"
    assert device.closed


def test_play_without_a_device_refuses_before_it_asks(server: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    result = run("play", "hi", url=server.url)
    assert result.exit_code == 1
    assert result.stderr == "error: no_sound_device: playing needs the package sounddevice: pip install sounddevice\n"
    assert server.requests == []


def test_models_lists_what_the_server_serves(server: FakeTriton) -> None:
    result = run("models", url=server.url)
    assert result.exit_code == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in result.stdout.splitlines() if line}
    assert rows == {
        "model": "version state answers",
        "qwen2_5_omni": "1 ready a stream",
        "qwen2_5_omni_unary": "1 ready at once",
        "talker": "1 ready a stage",
        "thinker": "1 ready a stage",
        "token2wav": "1 ready a stage",
        "broken": "not ready",
        "checkpoint:": "this server does not tell",
        "sample": "rate: this server does not tell",
        "voices:": "this server does not tell",
        "limits": "of a request: this server does not tell",
    }


def test_models_tells_what_the_server_tells_of_itself(server: FakeTriton) -> None:
    told = {"voices": ["Ethan", "Chelsie"], "sample_rate": 24000, "checkpoint": "Qwen/Omni [7B]"}
    tell(server.configs["qwen2_5_omni"], limits={"max_media_items": 16}, **told)
    tell(server.configs["qwen2_5_omni_unary"], **told)
    result = run("models", url=server.url)
    assert result.stdout.endswith(
        "checkpoint: Qwen/Omni [7B]\nsample rate: 24000 Hz\nvoices: Ethan, Chelsie\n"
        "limits of a request:\n  max_media_items  16\n"
    )
    found = [json.loads(line) for line in run("models", "--json", url=server.url).stdout.splitlines()]
    assert [model["name"] for model in found][:2] == ["qwen2_5_omni", "qwen2_5_omni_unary"]
    assert found[0] == {
        "name": "qwen2_5_omni",
        "version": "1",
        "ready": True,
        "public": True,
        "streams": True,
        "parts": ["thinker", "talker", "token2wav"],
        "voices": ["Ethan", "Chelsie"],
        "limits": {"max_media_items": 16},
        "sample_rate": 24000,
        "checkpoint": "Qwen/Omni [7B]",
    }
    assert (found[1]["streams"], found[1]["voices"], found[1]["limits"]) == (False, ["Ethan", "Chelsie"], None)
    assert (found[2]["voices"], found[2]["sample_rate"], found[2]["checkpoint"]) == (None, None, None)


def test_models_tells_each_limit_once_and_in_words(server: FakeTriton) -> None:
    limits = {"max_media_bytes": 67108864, "max_audio_seconds": 300.0, "allowed_url_schemes": ["data"]}
    tell(server.configs["qwen2_5_omni"], limits=limits | {"max_sessions": 64, "none": []})
    tell(server.configs["qwen2_5_omni_unary"], limits=limits | {"max_sessions": 8, "none": []})
    assert run("models", url=server.url).stdout.partition("limits of a request:\n")[2] == (
        "  max_media_bytes      67,108,864 bytes\n"
        "  max_audio_seconds    300 seconds\n"
        "  allowed_url_schemes  data\n"
        "  max_sessions         64 (qwen2_5_omni), 8 (qwen2_5_omni_unary)\n"
        "  none                 none\n"
    )


def test_models_have_no_column_of_versions_that_nobody_tells(server: FakeTriton) -> None:
    server.tells_index = False
    head, *rows = run("models", url=server.url).stdout.splitlines()[:3]
    assert head.split() == ["model", "state", "answers"]
    assert [row.split()[1] for row in rows] == ["ready", "ready"]


async def test_every_client_tells_the_same_models(server: FakeTriton) -> None:
    tell(server.configs["qwen2_5_omni"], voices=["Ethan"])
    with OmniClient(server.url) as client:
        blocking = client.models()
    async with AsyncOmniClient(server.url) as awaiting:
        assert await awaiting.models() == blocking
    with serve_http(FakeHttp(http_answer, configs=server.configs)) as fake:
        assert HttpClient(fake.url).models() == blocking[:-1]  # it has no broken one


async def test_a_server_that_keeps_its_index_to_itself_tells_the_public_models(server: FakeTriton) -> None:
    server.tells_index = False
    with OmniClient(server.url) as client:
        found = client.models()
    assert [(model.name, model.ready, model.public) for model in found] == [
        ("qwen2_5_omni", True, True),
        ("qwen2_5_omni_unary", True, True),
    ]
    async with AsyncOmniClient(server.url) as awaiting:
        assert await awaiting.models() == found


async def test_models_of_nobody_are_a_connection_error() -> None:
    result = run("models", url="127.0.0.1:1")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    async with AsyncOmniClient("127.0.0.1:1") as nobody:
        with pytest.raises(ConnectionFailed):
            await nobody.models()


def test_a_parameter_that_is_no_json_is_not_told(server: FakeTriton) -> None:
    server.configs["qwen2_5_omni"].parameters["voices"].string_value = "Ethan, Chelsie"
    tell(server.configs["qwen2_5_omni"], limits=[1], sample_rate="24000", checkpoint=7)
    with OmniClient(server.url) as client:
        model = client.models()[0]
    assert (model.voices, model.limits, model.sample_rate, model.checkpoint) == (None, None, None, None)


def test_an_answer_that_is_no_json_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_http(FakeHttp(http_answer)) as fake:
        monkeypatch.setattr(fake, "facts", lambda _path: b"<html>")
        with pytest.raises(Internal, match="not JSON"):
            HttpClient(fake.url).models()


def test_ready_under_json(server: FakeTriton) -> None:
    assert json.loads(run("ready", "--json", url=server.url).stdout) == {"ready": True}
    server.is_ready = False
    result = run("ready", "--json", url=server.url)
    missing = "the server has no model 'qwen2_5_omni', or has not loaded it"
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"ready": False, "message": missing})


@pytest.mark.parametrize("known", cli.app.registered_commands, ids=lambda known: known.callback.__name__)
def test_every_command_s_help_has_examples_that_parse_and_the_exit_codes(
    known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = known
    lines = found.epilog.split("\n\n")
    assert lines[0] == "Examples:"
    assert re.match(
        r"Exit codes: 0 done, 1 .+, 2 wrong usage.*, 130 interrupted \((what was received|nothing) is kept\)\.$",
        lines[-1],
    )
    assert lines[1:-1]
    for line in lines[1:-1]:
        _parse(line)


def _parse(line: str) -> None:
    """Fails where the words of an example are no call of the command."""
    words = shlex.split(line.partition(" | ")[0].partition(" < ")[0])
    for name in (word for word in words if Path(word).suffix):
        Path(name).touch()
    assert words.pop(0) == "triton-omni"
    group: Any = typer.main.get_command(cli.app)
    command = group.commands[words[0]]
    command.make_context(words[0], words[1:], resilient_parsing=False).close()

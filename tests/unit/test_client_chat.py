# SPDX-License-Identifier: Apache-2.0
"""`triton-omni chat`: turns, commands, Ctrl-C, and what the next turn is told of a reply that was cut off."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import triton_omni_client
from client_fakes import FakeTriton, chosen_of, chunk, failure, greeting, inputs_of, serve_grpc
from fake_sound import SoundDevice, plug_in
from media_samples import audio_file, image_file
from triton_omni_client import Player, cli
from triton_omni_client.audio import WavDecoder
from waiting import IN_TIME_S

WORDS = "one two three four five six seven eight nine ten"


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def chat(*lines: str, url: str, options: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(cli.app, ["chat", "--url", url, *options], input="".join(f"{line}\n" for line in lines))


def contents(request: Any) -> list[Any]:
    """The messages' contents; of parts, their types or texts."""
    messages = json.loads(inputs_of(request)["messages"][0])
    return [
        content if isinstance(content, str) else [part.get("text", part["type"]) for part in content]
        for content in (message["content"] for message in messages)
    ]


def test_each_line_is_a_turn_and_the_next_one_knows_it(server: FakeTriton, tmp_path: Path) -> None:
    output = tmp_path / "talk.wav"
    result = chat("What is the sea?", "And?", url=server.url, options=("--system", "Brief.", "-o", str(output)))
    assert (result.exit_code, result.stdout) == (0, "Hello, sea.\n" * 2)
    assert contents(server.requests[1]) == ["Brief.", ["What is the sea?"], "Hello, sea.", ["And?"]]
    assert len(WavDecoder().feed(output.read_bytes())) == 2 * 960
    assert result.stderr.count("first text ") == 2


def test_commands_attach_files_choose_a_voice_and_forget(server: FakeTriton, tmp_path: Path) -> None:
    picture, sound = tmp_path / "a picture.png", tmp_path / "sound"
    picture.write_bytes(image_file("png"))
    sound.write_bytes(audio_file("ogg"))
    lines = [f"/image {picture}", f"/audio {sound}", "What?", "/voice Ethan", f"/audio {sound}", "", "/voice", "/reset"]
    result = chat(*lines, "Anew", "/quit", "Never", url=server.url)
    assert result.exit_code == 0
    first, second, third = server.requests
    assert contents(first) == [["image", "audio", "What?"]]
    assert inputs_of(first)["media"] == [picture.read_bytes(), sound.read_bytes()]
    assert contents(second) == [["image", "audio", "What?"], "Hello, sea.", ["audio"]]
    assert chosen_of(second) == {"voice": "Ethan"}
    assert contents(third) == [["Anew"]]
    assert chosen_of(third) == {}


def test_an_unknown_command_and_empty_lines_ask_nobody(server: FakeTriton) -> None:
    result = chat("", "/sing", "/help", url=server.url)
    assert (result.exit_code, result.stdout) == (1, "")  # as after a turn that failed
    assert "error: bad_request: /sing is none of /image, /audio, /video, /voice, /reset, /help, /quit" in result.stderr
    assert "/reset" in result.stderr
    assert server.requests == []


def test_an_unknown_command_is_an_object_under_json(server: FakeTriton) -> None:
    result = chat("/sing", "Hi", url=server.url, options=("--json",))
    refused, turn = map(json.loads, result.stdout.splitlines())
    assert (refused["error"]["code"], turn["text"], result.exit_code) == ("bad_request", "Hello, sea.", 1)


def test_an_error_ends_the_turn_and_not_the_conversation(server: FakeTriton, tmp_path: Path) -> None:
    def script(request: Any, context: Any) -> Iterator[Any]:
        if len(server.requests) == 1:
            yield failure("image: too big [omni:too_large]")
        else:
            yield from greeting(request, context)

    server.script = script
    (tmp_path / "a.png").write_bytes(image_file("png"))
    result = chat(f"/image {tmp_path}/a.png", "What?", "/image none.png", "Hi", url=server.url)
    assert "error: too_large: image: too big\n" in result.stderr
    assert "error: bad_request: none.png: cannot be read" in result.stderr
    assert result.stdout == "Hello, sea.\n"
    assert contents(server.requests[1]) == [["Hi"]]  # the file that was refused is not sent again
    assert result.exit_code == 1  # a script that drives it must see that a turn failed


def test_json_is_one_object_a_turn(server: FakeTriton) -> None:
    result = chat("a", "b", url=server.url, options=("--json", "--text-only", "--seed", "3"))
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(turn["text"], turn["heard"], turn["stopped"]) for turn in found] == [("Hello, sea.",) * 2 + (False,)] * 2
    assert chosen_of(server.requests[1]) == {"modalities": ["text"], "seed": 3}


@pytest.mark.parametrize(
    "options", [("-o", "-"), ("--url", "http://localhost:1"), ("--max-tokens", "0"), ("--play", "--text-only")]
)
def test_wrong_usage_exits_with_2(server: FakeTriton, options: tuple[str, ...]) -> None:
    assert chat("hi", url=server.url, options=options).exit_code == 2
    assert server.requests == []


def test_replies_are_played_one_after_another(server: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    device = plug_in(monkeypatch, SoundDevice())
    assert chat("a", "b", url=server.url, options=("--play",)).exit_code == 0
    np.testing.assert_array_equal(device.played, np.tile(np.repeat(np.float32([0.25, -0.5]), 480), 2))
    assert device.closed


def test_a_reply_stopped_while_it_is_played_is_kept_as_far_as_it_was_heard(
    server: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    class Listener(SoundDevice):
        def write(self, data: Any) -> None:
            super().write(data)
            if len(self.played) == 24_000:
                signal.raise_signal(signal.SIGINT)
                stopped.wait(IN_TIME_S)

    class Stopped(Player):
        def stop(self) -> float:
            heard = super().stop()
            stopped.set()
            return heard

    monkeypatch.setattr("triton_omni_client.commands.chat.Player", Stopped)
    device = plug_in(monkeypatch, Listener())
    device.latency = 0.0

    def script(request: Any, context: Any) -> Iterator[Any]:
        if len(server.requests) > 1:
            yield from greeting(request, context)
            return
        gone = threading.Event()
        context.add_callback(gone.set)
        yield chunk(text=WORDS, audio=np.zeros(10 * 24_000, np.float32))
        gone.wait(IN_TIME_S)

    server.script = script
    result = chat("Count", "Go on", url=server.url, options=("--play", "--json"))
    first = json.loads(result.stdout.splitlines()[0])
    assert (first["text"], first["stopped"]) == (WORDS, True)
    assert first["heard"] in {"one two", "one two three"}  # a second of ten
    assert contents(server.requests[1]) == [["Count"], first["heard"], ["Go on"]]


class Terminal:
    """A chat in a pseudo-terminal of its own."""

    def __init__(self, url: str) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(triton_omni_client.__file__).parents[1]), *sys.path]),
            "TRITON_OMNI_URL": url,
            "TERM": "xterm",
        }
        self._end, end = pty.openpty()
        command = [sys.executable, "-m", "triton_omni_client", "chat"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True, close_fds=True
        )
        os.close(end)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str, seconds: float = IN_TIME_S) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.seen!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                self.seen += os.read(self._end, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]

    def leave(self) -> int:
        """Press Ctrl-C; the exit code of the process.

        Readline sees one that comes while it starts at the end of the line, and one more while Python ends would cut
        that short.
        """
        self.process.send_signal(signal.SIGINT)
        self.type("\n")
        return self.process.wait(IN_TIME_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(server: FakeTriton) -> Iterator[Terminal]:
    found = Terminal(server.url)
    yield found
    found.close()


def test_ctrl_c_stops_the_reply_and_again_leaves(server: FakeTriton, terminal: Terminal) -> None:
    server.script = server.endless
    terminal.wait_for("> ")
    terminal.type("Count\n")
    terminal.wait_for("Hello")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("stopped · first text")
    assert server.cancelled.wait(IN_TIME_S)
    terminal.wait_for("> ")
    server.script = greeting
    terminal.type("Go on\n")
    terminal.wait_for("Hello, sea.")
    terminal.wait_for("> ")
    assert contents(server.requests[1]) == [["Count"], "Hello", ["Go on"]]
    assert terminal.leave() == 130


def test_ctrl_d_leaves_with_success(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(IN_TIME_S) == 0

# SPDX-License-Identifier: Apache-2.0
"""Every example and the commands that need no terminal, as a user runs them, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway_fakes import RunningGateway
from media_samples import audio_file, image_file, video_file
from server.serving import REPLY_S, ROOT, Served
from triton_omni_client import Conversation, OmniClient, load_media
from triton_omni_client.audio import WavDecoder

EXAMPLES = ROOT / "examples"
Run = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of an example, with one file of each kind."""
    made = {
        "a.png": image_file("png"),
        "a.wav": audio_file("wav"),
        "b.mp3": audio_file("mp3"),
        "a.mp4": video_file("mp4", audio=True),
        "prompts.txt": b"hello\nwhy\n1 2 3\n",
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def run(server: Served, shared_gateway: RunningGateway, folder: Path) -> Run:
    """Run a command in `folder`; its stdout. `GRPC`, `HTTP`, `GATEWAY` and `OPENAI` among its words are addresses."""
    addresses = {"GRPC": server.supervisor.grpc_url, "HTTP": f"http://{server.supervisor.http_url}"}
    addresses |= {"GATEWAY": shared_gateway.base, "OPENAI": f"{shared_gateway.base}/v1"}
    environment = os.environ | {"PYTHONPATH": str(ROOT / "client"), "TRITON_OMNI_URL": server.supervisor.grpc_url}

    def call(*words: str, stdin: bytes = b"") -> str:
        command = [addresses.get(word, word) for word in words]
        if command[0].endswith(".py"):
            command.insert(0, sys.executable)
        result = subprocess.run(
            command, cwd=folder, env=environment, check=False, input=stdin, capture_output=True, timeout=REPLY_S
        )
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout.decode()

    return call


def seconds(path: Path) -> float:
    with wave.open(str(path)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24_000, 1, 2)
        return reader.getnframes() / 24_000


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "triton_omni_client", *words]


def test_stream_text_and_audio(run: Run, folder: Path) -> None:
    assert "seed 7" in run(f"{EXAMPLES}/stream_text_and_audio.py", "hello", "story.wav", "GRPC")
    assert seconds(folder / "story.wav") > 0.1


def test_ask_about_an_image(run: Run, folder: Path) -> None:
    assert "in one word: " in run(f"{EXAMPLES}/ask_about_an_image.py", "a.png", "GRPC")
    assert seconds(folder / "answer.wav") > 0.1


def test_transcribe_and_answer(run: Run, folder: Path) -> None:
    out = run(f"{EXAMPLES}/transcribe_and_answer.py", "b.mp3", "spoken.wav", "GRPC")
    assert out.startswith("said: ")
    assert "answer: " in out
    assert seconds(folder / "spoken.wav") > 0.1


def test_watch_a_video(run: Run) -> None:
    out = run(f"{EXAMPLES}/watch_a_video.py", "a.mp4", "GRPC")
    heard, silent = (int(line.split("(")[1].split(" ")[0]) for line in out.splitlines() if "prompt tokens" in line)
    assert heard > silent  # its second of sound


def test_voice_loop(run: Run, folder: Path) -> None:
    run(f"{EXAMPLES}/voice_loop.py", "GRPC", "a.wav", "b.mp3")
    assert seconds(folder / "a.answer.wav") > 0.1
    assert seconds(folder / "b.answer.wav") > 0.1


def test_batch_of_prompts(run: Run, folder: Path) -> None:
    run(f"{EXAMPLES}/batch_of_prompts.py", "prompts.txt", "replies.jsonl", "GRPC")
    found = [json.loads(line) for line in (folder / "replies.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [reply["prompt"] for reply in found] == ["hello", "why", "1 2 3"]
    assert all(reply["reply"] for reply in found)


def test_curl(run: Run, folder: Path) -> None:
    assert len(run(f"{EXAMPLES}/curl_speech.sh", "sea.wav", "HTTP").splitlines()) >= 2
    assert seconds(folder / "sea.wav") > 0.1
    events = [line for line in run(f"{EXAMPLES}/curl.sh", "a.png", "HTTP").splitlines() if line.startswith("data: ")]
    assert "".join(json.loads(event.removeprefix("data: "))["text_output"] for event in events)


def test_openai_client(run: Run, folder: Path) -> None:
    *text, told = run(f"{EXAMPLES}/openai_client.py", "a.png", "sea.wav", "OPENAI").splitlines()
    assert "".join(text)
    assert seconds(folder / "sea.wav") > 0.1
    assert told == f"sea.wav: {seconds(folder / 'sea.wav'):.1f} s"


def test_curl_openai(run: Run, folder: Path) -> None:
    lines = run(f"{EXAMPLES}/curl_openai.sh", "a.png", "sea.wav", "GATEWAY").splitlines()
    *events, done = [line.removeprefix("data: ") for line in lines if line]
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)
    assert done == "[DONE]"
    # A file that is sent while it is made begins with a header of unknown length.
    assert len(WavDecoder().feed((folder / "sea.wav").read_bytes())) > 2400


def test_ask_with_every_kind_of_file_over_grpc_and_http(run: Run, folder: Path) -> None:
    options = ["--seed", "7", "--max-tokens", "20", "--json"]
    files = ["a.png", "a.wav", "a.mp4", "-"]
    stdin = (folder / "b.mp3").read_bytes()
    streamed, whole = (
        json.loads(run(*command("ask", "What?", *files, "--url", url, *options), stdin=stdin))
        for url in ("GRPC", "HTTP")
    )
    assert streamed["text"] == whole["text"] != ""
    assert streamed["samples"] == whole["samples"] > 0
    assert streamed["info"]["seed"] == 7


def test_chat_reads_a_conversation_from_stdin(run: Run, folder: Path) -> None:
    lines = "/image a.png\nWhat is it?\nWhy?\n/reset\nWhat is it?\n"
    out = run(*command("chat", "--json", "--text-only", "--max-tokens", "20"), stdin=lines.encode())
    first, second, third = (json.loads(line) for line in out.splitlines())
    tokens = [turn["info"]["usage"]["prompt_tokens"] for turn in (first, second, third)]
    assert tokens[1] > tokens[0] > tokens[2]  # all of the chat; and without the picture, once it was forgotten
    assert not any(turn["stopped"] for turn in (first, second, third))


def test_models_are_the_public_ones(server: Served, run: Run) -> None:
    """The server keeps its index, in which the stages stand too, to its supervisor."""
    found = [json.loads(line) for line in run(*command("models", "--json")).splitlines()]
    assert {model["name"]: (model["ready"], model["public"], model["streams"]) for model in found} == {
        "qwen2_5_omni": (True, True, True),
        "qwen2_5_omni_unary": (True, True, False),
    }
    over_http = [json.loads(line) for line in run(*command("models", "--json", "--url", "HTTP")).splitlines()]
    assert sorted(over_http, key=lambda model: model["name"]) == sorted(found, key=lambda model: model["name"])


def test_a_conversation_cut_off_goes_on(server: Served, folder: Path) -> None:
    chat = Conversation(seed=3, thinker={"max_tokens": 60})
    with OmniClient(server.supervisor.grpc_url) as client:
        turn = chat.ask(client, "hello", [load_media(folder / "a.png")])
        for _ in turn.waveforms():
            break
        turn.close(heard=0.2)
        assert len(chat.turns[0].reply) < len(turn.reply().text)
        assert chat.ask(client, "go on").collect().info is not None
    assert len(chat.turns) == 2

# SPDX-License-Identifier: Apache-2.0
"""Every example runs as it stands, against a scripted server: what it asks, prints and writes.

`server/test_examples.py` runs the same files against a real one.
"""

from __future__ import annotations

import base64
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_fakes import FakeHttp, FakeTriton, failure, greeting, inputs_of, parameters_of, serve_grpc, serve_http
from gateway_fakes import run_gateway
from media_samples import audio_file, video_file
from triton_omni_client.audio import WavDecoder, pcm16_from_waveform, wav_header

EXAMPLES = Path(__file__).parents[2] / "examples"
SPOKEN = np.repeat(np.float32([0.25, -0.5]), 480)


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with one file of each kind."""
    made = {"a.png": (EXAMPLES / "red_circle.png").read_bytes(), "a.wav": audio_file("wav"), "b.mp3": audio_file("mp3")}
    for name, data in (made | {"a.mp4": video_file("mp4", seconds=0.25, audio=True)}).items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example with these arguments; its stdout."""

    def call(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.[ps][yh]")))
def test_without_its_arguments_an_example_says_how_it_is_used(name: str) -> None:
    if name == "stream_text_and_audio.py":  # needs none
        return
    command = ["bash"] if name.endswith(".sh") else [sys.executable]
    told = subprocess.run([*command, EXAMPLES / name], check=False, capture_output=True, text=True)
    assert told.returncode == 1
    assert "usage: " in told.stderr.lower()
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("name", ["curl.sh", "curl_openai.sh"])
def test_a_file_that_is_not_there_is_told_before_anybody_is_asked(name: str, tmp_path: Path) -> None:
    told = subprocess.run(
        ["bash", EXAMPLES / name, tmp_path / "none", tmp_path / "none"], check=False, capture_output=True, text=True
    )
    assert (told.returncode, told.stderr) == (1, f"{tmp_path / 'none'}: cannot be read\n")


def is_speech(path: Path, samples: np.ndarray = SPOKEN) -> bool:
    return path.read_bytes() == wav_header(len(samples)) + pcm16_from_waveform(samples)


def asked(request: Any) -> list[Any]:
    """The messages' contents; of parts, their types or texts."""
    messages = json.loads(inputs_of(request)["messages"][0])
    return [
        content if isinstance(content, str) else [part.get("text", part["type"]) for part in content]
        for content in (message["content"] for message in messages)
    ]


def shown(request: Any) -> bytes:
    """The picture in the first message's first part."""
    (message,) = json.loads(inputs_of(request)["messages"][0])
    return base64.b64decode(message["content"][0]["image_url"]["url"].removeprefix("data:image/png;base64,"))


def test_stream_text_and_audio(server: FakeTriton, folder: Path, run: Any) -> None:
    out = run("stream_text_and_audio.py", "hi", "story.wav", server.url)
    assert out.startswith("Hello, sea.\n2 codes")
    assert is_speech(folder / "story.wav")


def test_ask_about_an_image(server: FakeTriton, folder: Path, run: Any) -> None:
    out = run("ask_about_an_image.py", "a.png", server.url)
    assert out == "Hello, sea.\nin one word: Hello, sea. (0.0 s in answer.wav)\n"
    assert asked(server.requests[1]) == [["image", "Describe the picture."], "Hello, sea.", ["Say it in one word."]]
    assert [inputs_of(request)["media"] for request in server.requests] == [[(folder / "a.png").read_bytes()]] * 2
    assert parameters_of(server.requests[0])["modalities"] == ["text"]
    assert "modalities" not in parameters_of(server.requests[1])
    assert is_speech(folder / "answer.wav")


def test_transcribe_and_answer(server: FakeTriton, folder: Path, run: Any) -> None:
    out = run("transcribe_and_answer.py", "b.mp3", "spoken.wav", server.url)
    assert out == "said: Hello, sea.\nanswer: Hello, sea. (0.0 s in spoken.wav)\n"
    assert [asked(request) for request in server.requests] == [
        [["audio", "Write down what is said, word by word."]],
        [["audio"]],
    ]
    assert is_speech(folder / "spoken.wav")


def test_watch_a_video(server: FakeTriton, run: Any) -> None:
    out = run("watch_a_video.py", "a.mp4", server.url)
    assert out == "".join(f"{how} its sound (9 prompt tokens): Hello, sea.\n" for how in ("with", "without"))
    assert [parameters_of(request)["use_audio_in_video"] for request in server.requests] == [True, False]
    assert asked(server.requests[0]) == [["video", "What happens here?"]]


def test_voice_loop(server: FakeTriton, folder: Path, run: Any) -> None:
    out = run("voice_loop.py", server.url, "a.wav", "b.mp3")
    assert out == "Hello, sea.\na.answer.wav: 0.0 s\nHello, sea.\nb.answer.wav: 0.0 s\n"
    assert asked(server.requests[1]) == [["audio"], "Hello, sea.", ["audio"]]
    assert is_speech(folder / "a.answer.wav")
    assert is_speech(folder / "b.answer.wav")


def test_batch_of_prompts(server: FakeTriton, folder: Path, run: Any) -> None:
    def script(request: Any, context: Any) -> Iterator[Any]:
        if inputs_of(request)["text_input"] == [b"bad"]:
            yield failure("no [omni:bad_request]")
        else:
            yield from greeting(request, context)

    server.script = script
    (folder / "prompts.txt").write_text("\n".join([*"abcdefghij", "", "bad"]) + "\n")
    assert "100%" in run("batch_of_prompts.py", "prompts.txt", "replies.jsonl", server.url)
    found = [json.loads(line) for line in (folder / "replies.jsonl").read_text().splitlines()]
    assert [reply["prompt"] for reply in found] == [*"abcdefghij", "bad"]
    assert [reply.get("reply") for reply in found] == ["Hello, sea."] * 10 + [None]
    assert (found[-1]["error"], found[-1]["message"]) == ("bad_request", "no")


def events(*texts: str) -> tuple[int, dict[str, str], bytes]:
    """An answer of `/generate_stream`."""
    lines = [f"data: {json.dumps({'model_name': 'qwen2_5_omni', 'text_output': text})}\n\n" for text in texts]
    return 200, {"Content-Type": "text/event-stream"}, "".join(lines).encode()


def test_curl_speech(folder: Path) -> None:
    wav = wav_header(960) + pcm16_from_waveform(SPOKEN)
    whole = {"text_output": "All of it.", "audio_base64": base64.b64encode(wav).decode()}
    answers = [events("Hello", ", sea.", ""), (200, {}, json.dumps(whole).encode())]
    with serve_http(FakeHttp(lambda: answers.pop(0))) as fake:
        result = subprocess.run(
            [EXAMPLES / "curl_speech.sh", "sea.wav", fake.url], check=False, capture_output=True, text=True
        )
    assert (result.returncode, result.stdout) == (0, "Hello, sea.\nAll of it.\n"), result.stderr
    assert is_speech(folder / "sea.wav")
    assert fake.paths == ["/v2/models/qwen2_5_omni/generate_stream", "/v2/models/qwen2_5_omni_unary/generate"]
    assert json.loads(fake.head["sampling_parameters"]) == {"audio_format": "wav", "seed": 7}


def test_curl_with_an_image(folder: Path) -> None:
    with serve_http(FakeHttp(lambda: events("A beach."))) as fake:
        result = subprocess.run([EXAMPLES / "curl.sh", "a.png", fake.url], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert '"A beach."' in result.stdout
    (message,) = json.loads(fake.head["messages"])
    url = message["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == (folder / "a.png").read_bytes()


def test_openai_client(server: FakeTriton, folder: Path, run: Any) -> None:
    with run_gateway(server.url) as gateway:
        out = run("openai_client.py", "a.png", "answer.wav", f"{gateway.base}/v1")
    ready, _, said = out.partition("\n")  # the gateway is of this process, too
    assert ready.startswith("READY ")
    assert said == "Hello, sea.\nanswer.wav: 0.0 s\n"
    assert is_speech(folder / "answer.wav")
    (request,) = server.requests
    assert asked(request) == [["image_url", "Describe the picture."]]
    assert shown(request) == (folder / "a.png").read_bytes()
    assert {**parameters_of(request), "seed": 7, "voice": "Chelsie"} == parameters_of(request)


def test_curl_openai(server: FakeTriton, folder: Path) -> None:
    with run_gateway(server.url) as gateway:
        command = [EXAMPLES / "curl_openai.sh", "a.png", "sea.wav", gateway.base]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert '"content":"Hello"' in result.stdout
    assert WavDecoder().feed((folder / "sea.wav").read_bytes()).tolist() == pytest.approx(SPOKEN.tolist(), abs=1e-4)
    pictured, spoken = server.requests
    assert shown(pictured) == (folder / "a.png").read_bytes()
    assert (parameters_of(spoken)["voice"], parameters_of(spoken)["seed"]) == ("Ethan", 7)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ask_about_an_image.py", ["a.png", "localhost:1"]),
        ("batch_of_prompts.py", ["prompts.txt", "replies.jsonl", "localhost:1"]),
        ("curl.sh", ["a.png", "http://localhost:1"]),
        ("curl_openai.sh", ["a.png", "sea.wav", "http://localhost:1"]),
        ("curl_speech.sh", ["sea.wav", "http://localhost:1"]),
        ("openai_client.py", ["a.png", "sea.wav", "http://localhost:1/v1"]),
        ("stream_text_and_audio.py", ["Hi", "sea.wav", "localhost:1"]),
        ("transcribe_and_answer.py", ["b.mp3", "sea.wav", "localhost:1"]),
        ("voice_loop.py", ["localhost:1", "a.wav"]),
        ("watch_a_video.py", ["a.mp4", "localhost:1"]),
    ],
)
def test_without_a_server_an_example_says_so_in_a_line(folder: Path, name: str, arguments: list[str]) -> None:
    (folder / "prompts.txt").write_text("one\ntwo\n")
    command = ["bash"] if name.endswith(".sh") else [sys.executable]
    ended = subprocess.run([*command, EXAMPLES / name, *arguments], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(r"(error|curl): .*(refused|connect to).*\n", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "answered"),
    [
        ("curl.sh", ["a.png"], 0),
        ("curl_openai.sh", ["a.png", "sea.wav"], 0),
        ("curl_openai.sh", ["a.png", "sea.wav"], 1),
        ("curl_speech.sh", ["sea.wav"], 0),
        ("curl_speech.sh", ["sea.wav"], 1),
    ],
)
def test_a_refusal_is_shown_with_its_cause(name: str, arguments: list[str], answered: int) -> None:
    answers = [*[events("Hello")] * answered, (400, {}, b'{"error": "no such voice"}')]
    with serve_http(FakeHttp(lambda: answers.pop(0))) as fake:
        command = ["bash", EXAMPLES / name, *arguments, fake.url]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "no such voice" in ended.stdout + ended.stderr
    assert "400" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_stream_that_breaks_off_is_told_by_its_error() -> None:
    broken = 200, {"Content-Type": "text/event-stream"}, b'data: {"error": "the stage died"}\n\n'
    with serve_http(FakeHttp(lambda: broken)) as fake:
        command = ["bash", EXAMPLES / "curl_speech.sh", "sea.wav", fake.url]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "the stage died\n")


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.iterdir() if path.is_file() and f'"{path.name}"' not in here] == []

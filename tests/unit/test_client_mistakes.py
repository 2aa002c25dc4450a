# SPDX-License-Identifier: Apache-2.0
"""Users' mistakes at the command line and in Python: a message at once names the mistake and the cure."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from client_fakes import FakeHttp, FakeTriton, chosen_of, failure, serve_grpc, serve_http, tell
from command_line import unframed
from media_samples import image_file
from triton_omni_client import AsyncOmniClient, BadRequest, Conversation, HttpClient, Media, OmniClient, Request, cli
from triton_omni_client.address import grpc_address

BROKEN = "in ensemble 'qwen2_5_omni', medium {} (image): unreadable image [omni:bad_request;stage=thinker]"


@pytest.fixture
def server() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def run(*arguments: str | Path, url: str, stdin: str | None = None) -> Result:
    command, *rest = arguments
    return CliRunner().invoke(cli.app, [str(command), "--url", url, *map(str, rest)], input=stdin)


@contextmanager
def answering(data: bytes) -> Iterator[str]:
    """A port that answers every connection with these bytes and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            try:
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(data)
            except OSError:
                return

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


# Addresses.


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://localhost:8000", "is no address of gRPC, which is HOST:PORT without a scheme, such as localhost:8001"),
        ("grpc://localhost:8001", "HOST:PORT without a scheme"),
        ("localhost", "'localhost' has no port"),
        ("", "'' has no port"),
        ("localhost:", "'' is no port"),
        ("localhost:grpc", "'grpc' is no port from 1 to 65535"),
        ("localhost:99999", "'99999' is no port"),
        ("localhost:0", "'0' is no port"),
        (":8001", "has no host"),
        ("::1:8001", r"such as localhost:8001 or \[::1\]:8001"),
    ],
)
def test_a_wrong_address_of_grpc_is_refused_before_anything_is_asked(url: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        OmniClient(url)
    with pytest.raises(BadRequest, match=says):
        AsyncOmniClient(url)


@pytest.mark.parametrize(
    "url",
    ["localhost:8001", "[::1]:8001", "dns:8001", "dns:///a:8001", "unix:/run/t", "ipv4:10.0.0.1:1,10.0.0.2:1"],
)
def test_addresses_that_grpc_takes_pass(url: str) -> None:
    assert grpc_address(url) == url


@pytest.mark.parametrize("command", ["say", "ask", "play", "chat", "models", "ready", "bench"])
def test_commands_tell_a_wrong_address_as_wrong_usage(command: str) -> None:
    said = ["hi"] if command in ("say", "ask", "play") else []
    result = run(command, *said, url="grpc://localhost:8001")
    assert result.exit_code == 2
    assert unframed("'TRITON_OMNI_URL'): 'grpc://localhost:8001' is no address of gRPC") in unframed(result.stderr)


def test_a_port_of_http_asked_by_grpc_is_told() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        for arguments in (["say", "hi"], ["ready"], ["models"]):
            result = run(*arguments, url=url)
            assert result.exit_code == 1
            assert "what listens there is not gRPC; Triton's HTTP port is asked as http://HOST:PORT" in result.stderr


def test_a_port_of_grpc_asked_by_http_is_told() -> None:
    with answering(b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x05\x00\x00\x40\x00\n") as address:
        for arguments in (["say", "hi"], ["ready"]):
            result = run(*arguments, url=f"http://{address}")
            assert result.exit_code == 1
            assert "what answers there is not HTTP; Triton's gRPC port is asked as HOST:PORT" in result.stderr
        assert "no TLS" in run("say", "hi", url=f"https://{address}").stderr


@pytest.mark.parametrize(("status", "text"), [(404, "Not Found"), (405, "Method Not Allowed")])
def test_a_url_of_http_without_triton_is_told(status: int, text: str) -> None:
    with serve_http(FakeHttp(lambda: (status, {}, f'{{"error":"{text}"}}'.encode()))) as fake:
        result = run("say", "hi", url=fake.url)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"there is no Triton at this URL (HTTP status {status})" in result.stderr


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_ready_says_why_not(scheme: str) -> None:
    result = run("ready", url=f"{scheme}127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"not ready: {scheme}127.0.0.1:1: ")
    assert "127.0.0.1:1: " in result.stderr.removeprefix(f"not ready: {scheme}127.0.0.1:1: ")
    assert "Connection refused" in result.stderr
    assert "failed to connect to all addresses" not in result.stderr
    assert "./build.sh serve starts a server" in result.stderr


# Models.

UNKNOWN = "Request for unknown model: 'nope' is not found"
KNOWN = "the server has no model 'nope'; qwen2_5_omni streams, qwen2_5_omni_unary answers once"


def test_an_unknown_model_is_named_with_those_there_are(server: FakeTriton) -> None:
    server.script = lambda *_: iter([failure(UNKNOWN)])
    assert run("say", "hi", "--model", "nope", url=server.url).stderr == f"error: bad_request: {KNOWN}\n"
    with serve_http(FakeHttp(lambda: (404, {}, b'{"error": "' + UNKNOWN.encode() + b'"}'))) as fake:
        assert run("say", "hi", "--model", "nope", url=fake.url).stderr == f"error: bad_request: {KNOWN}\n"


def test_a_model_of_streams_asked_for_one_answer_is_told() -> None:
    said = b'{"error": "HTTP end point doesn\'t support models with decoupled transaction policy"}'
    with serve_http(FakeHttp(lambda: (500, {}, said))) as fake:
        result = run("say", "hi", "--model", "qwen2_5_omni", url=fake.url)
    assert "bad_request: this model answers in streams" in result.stderr
    assert "qwen2_5_omni_unary answers once" in result.stderr


def test_a_public_model_that_is_missing_for_a_while_stays_a_fault_of_the_server(server: FakeTriton) -> None:
    server.script = lambda *_: iter([failure("Request for unknown model: 'qwen2_5_omni' is not found")])
    assert run("say", "hi", url=server.url).stderr.startswith("error: internal: ")


# Media.


def test_errors_name_media_by_their_files(server: FakeTriton, tmp_path: Path) -> None:
    server.script = lambda *_: iter([failure(BROKEN.format(1))])
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in paths:
        path.write_bytes(image_file("png"))
    said = f"error: bad_request: {paths[1]}: unreadable image (in the thinker)\n"
    assert run("ask", "What?", *paths, url=server.url).stderr == said
    assert run("say", "--image", paths[0], "--image", paths[1], url=server.url).stderr == said
    assert run("ask", "What?", "--system", "Be brief.", *paths, url=server.url).stderr == said
    lines = f"/image {paths[0]}\n/image {paths[1]}\nWhat?\n"
    assert said in run("chat", url=server.url, stdin=lines).stderr


def test_a_medium_that_is_refused_unread_is_named_by_its_file_too(server: FakeTriton, tmp_path: Path) -> None:
    server.script = lambda *_: iter([failure("media[1]: is empty [omni:bad_request;stage=thinker]")])
    paths = [tmp_path / "one.wav", tmp_path / "two.wav"]
    for path in paths:
        path.write_bytes(b"?")
    said = f"error: bad_request: {paths[1]}: is empty (in the thinker)\n"
    assert run("ask", "What?", *paths, url=server.url).stderr == said


def test_errors_of_http_name_media_by_their_files(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(image_file("png"))
    answer = b'{"error": "' + BROKEN.format(0).encode() + b'"}'
    with serve_http(FakeHttp(lambda: (400, {}, answer))) as fake:
        assert f"{path}: unreadable image" in run("ask", "What?", path, url=fake.url).stderr
    with serve_http(FakeHttp(lambda: (200, {}, b"data: " + answer + b"\n\n"))) as fake:
        request = Request.ask("What?", [Media.from_file("image", path)])
        with pytest.raises(BadRequest, match=str(path)):
            HttpClient(fake.url).stream(request).collect()


@pytest.mark.parametrize("number", [1, 7])
def test_media_without_a_name_keep_their_number(server: FakeTriton, number: int) -> None:
    server.script = lambda *_: iter([failure(BROKEN.format(number))])
    media = [Media("image", b"a"), Media("image", b"b")]
    with OmniClient(server.url) as client:
        for request in (Request.ask("What?", media), Conversation().request("What?", media)):
            with pytest.raises(BadRequest, match=rf"^medium {number} \(image\): unreadable image$"):
                client.stream(request).collect()


# Voices and files.


def test_chat_refuses_an_unknown_voice_at_once(server: FakeTriton) -> None:
    tell(server.configs["qwen2_5_omni"], voices=["Ethan", "Chelsie"])
    result = run("chat", url=server.url, stdin="/voice Bob\nhi\n")
    assert "error: bad_request: voice 'Bob' is not one of: Chelsie, Ethan\n" in result.stderr
    [asked] = server.requests
    assert chosen_of(asked) == {}
    result = run("chat", "--voice", "Bob", url=server.url, stdin="hi\n")
    assert (result.exit_code, len(server.requests)) == (1, 1)
    assert run("chat", "--voice", "Ethan", url=server.url, stdin="hi\n").exit_code == 0


@pytest.mark.parametrize("command", ["say", "ask", "play", "chat"])
@pytest.mark.parametrize("name", ["out.mp3", "out.OGG", "out.pcm"])
def test_a_name_that_promises_another_format_than_wav_is_refused(
    server: FakeTriton, tmp_path: Path, command: str, name: str
) -> None:
    said = [] if command == "chat" else ["hi"]
    result = run(command, *said, "-o", tmp_path / name, url=server.url, stdin="hi\n")
    assert result.exit_code == 2
    assert unframed("speech is written as WAV") in unframed(result.stderr)
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.wav", "out", "out.WAVE"])
def test_other_names_are_written(server: FakeTriton, tmp_path: Path, name: str) -> None:
    assert run("say", "hi", "-o", tmp_path / name, url=server.url).exit_code == 0
    assert (tmp_path / name).read_bytes()[:4] == b"RIFF"

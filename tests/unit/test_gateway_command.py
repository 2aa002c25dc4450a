# SPDX-License-Identifier: Apache-2.0
"""The gateway's command: its settings, keys and refusals, and a process from READY to a signal."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from client_fakes import FakeTriton, chunk, final, serve_grpc
from gateway_command import started
from gateway_fakes import TIMEOUT_S
from triton_omni_gateway.keys import ApiKeys, read_keys
from triton_omni_gateway.request_log import LONGEST_PATH
from triton_omni_gateway.server import bind, main, parse_command
from triton_omni_gateway.settings import OPENAI_VOICES, GatewaySettings, SettingsError


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_API_KEYS", raising=False)


def test_defaults_are_loopback_and_open() -> None:
    command = parse_command([])
    assert (command.host, command.port, command.settings) == ("127.0.0.1", 8080, GatewaySettings())
    assert not command.keys


def test_options_become_settings(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\n  one  \ntwo\n")
    options = "--port 0 --url triton:9001 --url other:9001 --model-name a --model-name b-* --max-requests 3"
    options += " --max-body-mib 2 --grace 4 --min-priority -100 --max-connections 5 --max-peer-connections 4"
    options += " --allow-host Omni.lan --allow-host gateway --voice nova=Ethan --voice robot=Chelsie"
    options += " --allow-origin https://app.example --allow-origin http://localhost:3000"
    options += " --max-recording-seconds 600 --transcription-prompt Words! --translation-prompt English!"
    options += " --log-format json --window-seconds 5"
    command = parse_command([*options.split(), "--speech-prompt", "Say {input}", "--api-keys", str(keys)])
    assert command.settings == GatewaySettings(
        triton_urls=("triton:9001", "other:9001"),
        models=("a", "b-*"),
        min_priority=-100,
        max_requests=3,
        max_body_bytes=2 << 20,
        max_connections=5,
        max_peer_connections=4,
        host_names=("omni.lan", "gateway"),
        origins=("https://app.example", "http://localhost:3000"),
        voices={**dict.fromkeys(OPENAI_VOICES), "nova": "Ethan", "robot": "Chelsie"},
        speech_prompt="Say {input}",
        transcription_prompt="Words!",
        translation_prompt="English!",
        max_recording_seconds=600,
        window_seconds=5,
    )
    assert (command.port, command.grace_s, command.log_format) == (0, 4, "json")
    callers = [command.keys.caller(f"Bearer {key}") for key in ("one", "two", "# ours", "")]
    assert [caller is not None for caller in callers] == [True, True, False, False]
    assert callers[0] != callers[1]
    assert "one" not in callers[0]


@pytest.mark.parametrize("text", ["nova", "nova=", "=Ethan"])
def test_a_voice_without_its_name_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(["--voice", text])
    assert f"{text!r} is not NAME=VOICE" in capsys.readouterr().err


def test_keys_come_from_the_environment_too() -> None:
    keys = read_keys({"OMNI_API_KEYS": "one, two"})
    assert keys.caller("bearer two") == keys.caller("Bearer two") is not None
    assert keys.caller("two") is None
    assert keys.caller("Bearer one, two") is None


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "señà", "鍵"])
def test_a_key_of_any_letters_lets_in_however_its_sender_encodes_it(key: str) -> None:
    keys = read_keys({"OMNI_API_KEYS": key})
    assert keys.caller(f"Bearer {key.encode().decode('latin-1')}") == keys.caller(f"Bearer {key}") is not None
    assert keys.caller(f"Bearer {key.encode().decode('latin-1')}x") is None


def test_without_keys_everybody_is_let_in() -> None:
    assert ApiKeys().caller("") == ""


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_source_of_keys_does_not_open_the_gateway(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="OMNI_API_KEYS holds no key"):
        read_keys({"OMNI_API_KEYS": text})
    file = tmp_path / "keys"
    file.write_text("# none\n")
    with pytest.raises(SettingsError, match="holds no key"):
        read_keys({}, file)
    file.write_bytes(b"one\n\xff")
    with pytest.raises(SettingsError, match=r"^--api-keys .*/keys: not text in UTF-8 at byte 4$"):
        read_keys({}, file)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--url", "http://localhost:8000"], "HOST:PORT of Triton's gRPC endpoint"),
        (["--url", "localhost"], "HOST:PORT"),
        (["--url", "a:1", "--url", "b"], "got 'b'"),
        (["--url", "a:1", "--url", "a:1"], "--url names a:1 more than once"),
        (["--speech-prompt", "Say it"], "has no {input}"),
        (["--allow-origin", "app.example"], "--allow-origin must be SCHEME://HOST"),
        (["--allow-origin", "https://app.example/"], "got 'https://app.example/'"),
        (["--model-name", ""], "--model-name"),
        (["--model-name", "gpt-*", "--model-name", "omni"], "it must be a whole name (got 'gpt-*')"),
        (["--transcription-prompt", ""], "--transcription-prompt and --translation-prompt must not be empty"),
        (["--api-keys", "/nowhere/keys"], "/nowhere/keys: cannot be read: No such file or directory\n"),
    ],
)
def test_a_setting_that_cannot_be_served_with_is_refused_in_a_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr().err
    assert what in found
    assert re.fullmatch(r"error: .*\n", found)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--port", "x"], "argument --port: 'x' is not a whole number from 0 to 65535"),
        (["--port", "70000"], "argument --port: '70000' is not a whole number from 0 to 65535"),
        (["--min-priority", "200"], "argument --min-priority: '200' is not a whole number from -100 to 100"),
        (["--min-priority", "-101"], "argument --min-priority: '-101' is not a whole number from -100 to 100"),
        (["--max-requests", "0"], "argument --max-requests: '0' is not a whole number from 1 on"),
        (["--max-body-mib", "0"], "argument --max-body-mib: '0' is not a whole number from 1 on"),
        (["--wait", "nan"], "argument --wait: 'nan' is not a number of seconds from 0 on"),
        (["--wait", "-1"], "argument --wait: '-1' is not a number of seconds from 0 on"),
        (["--grace", "-1"], "argument --grace: '-1' is not a whole number from 0 on"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_wrong_command_line_is_refused_in_a_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {what}\n"


@pytest.mark.parametrize("field", ["max_requests", "max_body_bytes", "transcript_seconds"])
def test_settings_that_are_no_options_are_checked_too(field: str) -> None:
    with pytest.raises(SettingsError, match=rf"{field} must be positive \(got 0\)"):
        GatewaySettings(**{field: 0})
    with pytest.raises(SettingsError, match=r"--min-priority must be -100 to 100 \(got 101\)"):
        GatewaySettings(min_priority=101)
    with pytest.raises(SettingsError, match=r"--window-seconds must be at least 1 \(got 0.5\)"):
        GatewaySettings(window_seconds=0.5)


def test_a_taken_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err


def test_a_check_ends_before_a_server_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--port", "0", "--url", "127.0.0.1:1"]) == 0
    with bind("127.0.0.1", 0) as taken:
        assert main(["--check", "--port", str(taken.getsockname()[1])]) == 1
    assert re.fullmatch(r"error: cannot listen on .*\n", capsys.readouterr().err)


def test_an_address_that_is_not_ours_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "host.invalid", "--port", "0"]) == 1
    assert re.fullmatch(r"error: cannot listen on host\.invalid:0 \(.+\)\n", capsys.readouterr().err)


def test_without_a_triton_server_nothing_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", "--url", "127.0.0.1:1", "--wait", "0"]) == 1
    waiting, refusal = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting for the triton-omni server at 127.0.0.1:1")
    assert refusal == "error: no triton-omni server is ready at 127.0.0.1:1 (waited 0 s); ./build.sh serve starts one"


def test_a_triton_server_that_loads_is_waited_for() -> None:
    loading = FakeTriton(is_ready=False)
    with serve_grpc(loading), started(loading, "--wait", "600") as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline().startswith("waiting for ")
        loading.is_ready = True
        assert process.stdout.readline().startswith("READY ")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_says_ready_once_serves_and_ends_on_a_signal(number: signal.Signals, code: int) -> None:
    with serve_grpc(FakeTriton()) as triton, started(triton) as process:
        assert process.stdout is not None
        found = re.fullmatch(
            rf"READY openai=(http://127\.0\.0\.1:\d+)/v1 grpc={triton.url}\n", process.stdout.readline()
        )
        assert found
        assert httpx.get(f"{found[1]}/v1/models", timeout=TIMEOUT_S).status_code == 200
        process.send_signal(number)
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, output) == (code, "")
        assert "Traceback" not in errors


POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_answers_under_way_end(number: signal.Signals) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        begun.set()
        assert stopped.wait(TIMEOUT_S)
        yield chunk(text="whole")
        yield final()

    with serve_grpc(FakeTriton(script=script)) as triton, started(triton, "--grace", "600") as process:
        assert process.stdout is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        body = {"model": "qwen2_5_omni", "messages": [{"role": "user", "content": "hi"}]}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{base}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
            assert begun.wait(TIMEOUT_S)
            process.send_signal(number)
            while not refuses(base):
                time.sleep(0.05)  # without it the tries fill the queue of connections
            stopped.set()
            assert answer.result().json()["choices"][0]["message"]["content"] == "whole"
        assert "Traceback" not in process.communicate(timeout=TIMEOUT_S)[1]


def refuses(base: str) -> bool:
    host, port = base.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (ConnectionResetError, TimeoutError):  # the socket closed with the connection in its queue
        return False
    return False


@pytest.mark.parametrize("body", ["Content-Length: 9\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_a_stop_ends_a_request_whose_body_does_not_come(body: str) -> None:
    with serve_grpc(FakeTriton()) as triton, started(triton, "--grace", "0") as process:
        assert process.stdout is not None
        host, port = process.stdout.readline().split("/v1")[0].split("//")[1].split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall((POST + "Expect: 100-continue\r\n" + body).encode())
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 100 ")
            process.send_signal(signal.SIGTERM)
            while part := connection.recv(4096):
                answer += part
        assert b"HTTP/1.1 503 " in answer
        assert process.wait(TIMEOUT_S) == 143
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(("method", "path"), [("GET", "/" + "a" * 9000), ("A" * 9000, "/"), ("GET", "/?" + "a" * 9000)])
def test_a_caller_writes_little_of_the_log_and_of_a_refusal(method: str, path: str) -> None:
    with serve_grpc(FakeTriton()) as triton, started(triton) as process:
        assert process.stdout is not None
        base = process.stdout.readline().split("=")[1].split("/v1")[0]
        answer = httpx.request(method, base + path, timeout=TIMEOUT_S)
        assert (len(answer.content) < 600) == (answer.status_code >= 400)
        process.send_signal(signal.SIGTERM)
        lines = process.communicate(timeout=TIMEOUT_S)[1].splitlines()
    assert max(map(len, lines)) < 400
    asked = f"method={method[:LONGEST_PATH]} path={path.partition('?')[0][:LONGEST_PATH]} status={answer.status_code}"
    assert any(asked in line for line in lines)


def test_others_are_warned_of_when_no_key_is_set() -> None:
    with (
        serve_grpc(FakeTriton()) as triton,
        started(triton, "--host", "0.0.0.0", "--allow-host", "omni.lan") as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY ")
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=TIMEOUT_S)[1]
        assert "warning: 0.0.0.0 is open to others and no API key is set" in told
        assert "from no web pages of other origins, and by these hosts: an IP address, localhost, omni.lan" in told


def test_an_ipv6_address_is_written_in_brackets() -> None:
    try:
        with bind("::1", 0):
            pass
    except SettingsError:
        pytest.skip("no IPv6 here")
    with serve_grpc(FakeTriton()) as triton, started(triton, "--host", "::1") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("READY openai=http://[::1]:")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


def test_a_bound_socket_listens() -> None:
    with bind("localhost", 0) as listening, socket.create_connection(listening.getsockname()[:2], timeout=TIMEOUT_S):
        pass

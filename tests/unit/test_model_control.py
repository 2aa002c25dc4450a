# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading over HTTP, before a stand-in for tritonserver that wants the key of its command line."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from triton_omni.serving.model_control import HEADER, KEY_VARIABLE, ModelControl, ModelControlError, operator_key


class Triton(http.server.ThreadingHTTPServer):
    """Answers what the test says to whoever has the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.key = ""
        self.paths: list[str] = []
        self.status, self.body = 200, b""


class Answer(http.server.BaseHTTPRequestHandler):
    server: Triton

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        allowed = self.headers[HEADER] == self.server.key
        self.send_response(self.server.status if allowed else 403)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def triton() -> Iterator[Triton]:
    with Triton() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def control(triton: Triton) -> ModelControl:
    made = ModelControl("127.0.0.1", triton.server_port, 10.0)
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in made.flags)
    assert flags["model-control-mode"] == "explicit"
    assert flags["load-model"] == "*"
    apis, _, triton.key = flags["http-restricted-api"].partition(f":{HEADER}=")
    protocols, _, key = flags["grpc-restricted-protocol"].partition(f":{HEADER}=")
    assert key == triton.key
    assert protocols == "model-repository,statistics,trace,logging"
    assert apis == f"{protocols},shared-memory"
    return made


def test_models_are_loaded_and_unloaded_with_the_key(triton: Triton, control: ModelControl) -> None:
    control.unload("talker")
    control.load("talker")
    assert triton.paths == ["/v2/repository/models/talker/unload", "/v2/repository/models/talker/load"]


def test_every_server_has_a_key_of_its_own(triton: Triton, control: ModelControl) -> None:
    del control
    other = ModelControl("127.0.0.1", triton.server_port, 10.0)
    with pytest.raises(ModelControlError):
        other.load("talker")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (json.dumps({"error": "load failed: no memory\n\nAt:\n  model.py"}), "^load failed: no memory$"),
        ("<html>", "^<html>$"),
        ("[]", r"^\[\]$"),
        (json.dumps({"error": ""}), "^no reason was given$"),
        ("", "^no reason was given$"),
    ],
)
def test_a_refusal_is_told_in_one_line(triton: Triton, control: ModelControl, body: str, reason: str) -> None:
    triton.status, triton.body = 400, body.encode()
    with pytest.raises(ModelControlError, match=reason):
        control.load("talker")


def test_a_server_that_is_gone_is_told(triton: Triton, control: ModelControl) -> None:
    triton.shutdown()
    triton.server_close()
    with pytest.raises(ModelControlError, match="ConnectionRefusedError"):
        control.load("talker")


def test_an_operator_may_set_the_key() -> None:
    key = "a-key_of-16-more"
    made = ModelControl("127.0.0.1", 1, 10.0, operator_key({KEY_VARIABLE: key}))
    assert [flag.endswith(f":{HEADER}={key}") for flag in made.flags[2:]] == [True, True]
    assert operator_key({}) is operator_key({KEY_VARIABLE: ""}) is None


@pytest.mark.parametrize("key", ["short", "of spaces and more of them", "x" * 129, "ends-the-flag:a=b"])
def test_a_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match=f"{KEY_VARIABLE} must be 16 to 128 letters") as caught:
        operator_key({KEY_VARIABLE: key})
    assert key not in str(caught.value)

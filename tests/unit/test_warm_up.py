# SPDX-License-Identifier: Apache-2.0
"""The server's own first request: a spoken reply, or one line on standard error."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from triton_omni.core.settings import TalkerSettings, ThinkerSettings
from triton_omni.request.parse import TalkerOptions, ThinkerOptions, Token2WavOptions
from triton_omni.supervisor.machine import choose_ports
from triton_omni.supervisor.probe import _REQUEST, warm_up

HOST = "127.0.0.1"


@pytest.fixture
def answered():
    """A server that answers every request with `answer`, and keeps what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        answer, asked = (200, ""), []

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            Handler.asked.append((self.path, json.loads(body)))
            status, text = Handler.answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with HTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Handler, server.server_port
        server.shutdown()
        thread.join()


def never():
    return False


def test_a_reply_is_had_in_silence(answered, capsys):
    handler, port = answered
    handler.answer = 200, 'data: {"text_output":"It says \\"error\\": no."}\n\n'
    warm_up(HOST, port, never)
    ((path, fields),) = handler.asked
    assert path == "/v2/models/qwen2_5_omni/generate_stream"
    assert fields["id"] == "warm-up"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "answer", [(200, 'data: {"error":"[internal] token2wav: gone"}\n\n'), (400, '{"error":"[bad_request] no"}')]
)
def test_why_there_is_none_is_told(answered, capsys, answer):
    handler, port = answered
    handler.answer = answer
    warm_up("0.0.0.0", port, never)
    told = capsys.readouterr().err
    assert told == f"warning: the server's own first request failed: status {answer[0]}: {answer[1].strip()}\n"


def test_a_server_that_is_gone_is_told(capsys):
    warm_up(HOST, choose_ports(HOST, {"http": 0})["http"], never)
    assert "first request failed: [Errno 111]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "begun", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b'HTTP/1.1 200 OK\r\n\r\ndata: {"text_output":"a"}\n\n']
)
def test_a_reply_that_does_not_come_is_not_awaited_after_a_stop(capsys, begun):
    """A stop during it took as long as the reply: minutes, where kernels compile."""
    with socket.create_server((HOST, 0)) as listening:
        taken = []

        def is_stopped():
            if not taken:
                taken.append(listening.accept()[0])
                taken[0].sendall(begun)
            return bool(taken[0].recv(1))

        warm_up(HOST, listening.getsockname()[1], is_stopped)
        taken[0].close()
    assert capsys.readouterr() == ("", "")


def test_the_request_is_one_that_a_stage_takes():
    parameters = json.loads(_REQUEST["sampling_parameters"])
    thinker, talker = ThinkerOptions(**parameters["thinker"]), TalkerOptions(**parameters["talker"])
    assert thinker.temperature > 0
    assert (thinker.max_tokens, talker.max_tokens) < (ThinkerSettings().max_new_tokens, TalkerSettings().max_codes)
    assert Token2WavOptions(**parameters["token2wav"]).mode == "streaming"
    assert parameters.keys() == {"seed", "thinker", "talker", "token2wav"}

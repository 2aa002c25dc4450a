# SPDX-License-Identifier: Apache-2.0
"""The server's own first request: a spoken reply, or one line on standard error."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from triton_omni.request import RawRequest, RequestDefaults, parse_request
from triton_omni.serving.machine import choose_ports
from triton_omni.serving.warm_up import _REQUEST, warm_up
from triton_omni.settings import RequestLimits

HOST = "127.0.0.1"
DEFAULTS = RequestDefaults(
    timeout_s=60.0,
    max_timeout_s=100.0,
    max_thinker_tokens=512,
    max_codes=1024,
    vocabulary=300,
    voice="Chelsie",
    voices=frozenset({"Chelsie"}),
)


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


def test_a_reply_is_had_in_silence(answered, capsys):
    handler, port = answered
    handler.answer = 200, 'data: {"text_output":"It says \\"error\\": no."}\n\n'
    warm_up(HOST, port)
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
    warm_up("0.0.0.0", port)
    told = capsys.readouterr().err
    assert told == f"warning: the server's own first request failed: status {answer[0]}: {answer[1].strip()}\n"


def test_a_server_that_is_gone_is_told(capsys):
    warm_up(HOST, choose_ports(HOST, {"http": 0})["http"])
    assert "first request failed: [Errno 111]" in capsys.readouterr().err


def test_the_request_is_one_that_a_deployment_takes():
    text, parameters = (_REQUEST[name].encode() for name in ("text_input", "sampling_parameters"))
    request = parse_request(RawRequest(text_input=text, sampling_parameters=parameters), RequestLimits(), DEFAULTS)
    assert request.wants_audio
    assert request.thinker.temperature > 0

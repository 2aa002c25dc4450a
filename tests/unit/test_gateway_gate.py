# SPDX-License-Identifier: Apache-2.0
"""What holds before a request is read: keys, sizes, numbers; and what operators ask: models, health, metrics."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from client_fakes import FakeTriton, chunk, final, parameters_of, serve_grpc, tell
from gateway_fakes import MODEL, TIMEOUT_S, USER, RunningGateway, run_gateway
from triton_omni_gateway import gate
from triton_omni_gateway.keys import ApiKeys

BODY = {"model": MODEL, "messages": USER}
SPEECH_BODY = {"model": MODEL, "input": "hi"}
KEYS = ApiKeys(["first", "second"])
JSON = "Content-Type: application/json\r\n"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def locked(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url, keys=KEYS) as running:
        yield running


def with_key(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.mark.parametrize("key", ["first", "second"])
def test_a_key_lets_in(locked: RunningGateway, key: str) -> None:
    assert locked.post(BODY, **with_key(key)).status_code == 200
    assert locked.openai.with_options(api_key=key).models.list().data[0].id == MODEL


def test_a_key_and_a_cache_key_are_one_salt_that_shows_neither(triton: FakeTriton, locked: RunningGateway) -> None:
    for key, more in (("first", {}), ("first", {}), ("second", {}), ("first", {"prompt_cache_key": "talk"})):
        assert locked.post(BODY | more, **with_key(key)).status_code == 200
    salts = [parameters_of(request)["cache_salt"] for request in triton.requests]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert not any(word in salt for salt in salts for word in ("first", "second", "talk"))


def test_without_keys_strangers_share_nothing(triton: FakeTriton, gateway: RunningGateway) -> None:
    for key in ("EMPTY", "another"):
        assert gateway.post(BODY, **with_key(key)).status_code == 200
    assert not any("cache_salt" in parameters_of(request) for request in triton.requests)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer third"}, {"Authorization": "Basic first"}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech", "/v1/nowhere"])
def test_without_a_key_nothing_is_asked(
    triton: FakeTriton, locked: RunningGateway, headers: dict[str, str], path: str
) -> None:
    answer = locked.post(BODY, path, headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert triton.requests == []


def test_the_official_client_sees_a_wrong_key_as_its_error(locked: RunningGateway) -> None:
    with pytest.raises(openai.AuthenticationError):
        locked.chat()
    with pytest.raises(openai.AuthenticationError):
        locked.openai.models.list()


def test_operators_need_no_key(locked: RunningGateway) -> None:
    assert locked.http.get("/health").status_code == 200
    assert locked.http.get("/metrics").status_code == 200


def test_models_are_listed_and_found_by_name(triton: FakeTriton) -> None:
    with run_gateway(triton.url, models=("omni", "org/omni-7b")) as gateway:
        assert [model.id for model in gateway.openai.models.list()] == ["omni", "org/omni-7b"]
        assert gateway.openai.models.retrieve("org/omni-7b").owned_by == "triton-omni"
        with pytest.raises(openai.NotFoundError):
            gateway.openai.models.retrieve("other")
        assert gateway.chat(model="org/omni-7b").model == "org/omni-7b"


def test_models_tell_their_voices_where_the_server_does(triton: FakeTriton, gateway: RunningGateway) -> None:
    assert "voices" not in gateway.http.get(f"/v1/models/{MODEL}").json()
    tell(triton.configs[MODEL], voices=["Ethan", "Chelsie"])
    assert gateway.http.get(f"/v1/models/{MODEL}").json()["voices"] == ["Ethan", "Chelsie"]
    listed = gateway.openai.models.list().data[0]
    assert (listed.id, listed.model_extra) == (MODEL, {"voices": ["Ethan", "Chelsie"]})


def test_models_of_a_server_that_is_gone_are_listed_without_voices() -> None:
    with run_gateway("127.0.0.1:1") as gateway:
        assert set(gateway.http.get("/v1/models").json()["data"][0]) == {"id", "object", "created", "owned_by"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
def test_an_unknown_model_is_not_found(triton: FakeTriton, gateway: RunningGateway, path: str) -> None:
    for name in ("llama-3", "gpt", "my-gpt-4o"):
        answer = gateway.post({**(SPEECH_BODY if path.endswith("speech") else BODY), "model": name}, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert f"this gateway serves: {MODEL}, gpt-*, tts-*, whisper-*." in answer.json()["error"]["message"]
    assert triton.requests == []


def test_openai_s_names_mean_the_served_model_which_answers_tell(gateway: RunningGateway) -> None:
    assert gateway.chat(model="gpt-4.1").model == MODEL
    assert {chunk.model for chunk in gateway.chat(model="gpt-audio-mini", stream=True)} == {MODEL}
    assert gateway.post({**SPEECH_BODY, "model": "tts-1"}, "/v1/audio/speech").status_code == 200
    assert gateway.transcribe(model="whisper-1").status_code == 200
    assert gateway.openai.models.retrieve("gpt-4.1").id == MODEL
    assert [model.id for model in gateway.openai.models.list()] == [MODEL]


def test_a_gateway_that_is_given_names_knows_no_others(triton: FakeTriton) -> None:
    with run_gateway(triton.url, models=("omni", "gpt-4.1")) as gateway:
        assert gateway.chat(model="gpt-4.1").model == "gpt-4.1"
        for name in ("gpt-4o", "gpt-4.1-mini", MODEL):
            with pytest.raises(openai.NotFoundError, match=r"serves: omni, gpt-4\.1\."):
                gateway.chat(model=name)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nowhere", 404), ("GET", "/v1/audio/speech", 405)])
def test_a_wrong_url_is_an_error_in_openai_s_form(gateway: RunningGateway, method: str, path: str, status: int) -> None:
    answer = gateway.http.request(method, path)
    assert answer.status_code == status
    said = answer.json()["error"]["message"]
    assert said.startswith(f"Invalid URL ({method} {path})")
    assert "this gateway has POST /v1/chat/completions, POST /v1/audio/speech, POST /v1/audio/transcriptions" in said
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/audio/voices", "/health", "/metrics", "/", "/page/app.js"]
)
def test_head_is_get_without_a_body(gateway: RunningGateway, path: str) -> None:
    got, head = gateway.http.get(path), gateway.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert gateway.http.head("/v1/nowhere").status_code == 404


def test_health_is_the_triton_server_s(triton: FakeTriton, gateway: RunningGateway) -> None:
    assert [gateway.http.get(path).status_code for path in ("/health", "/health/ready", "/health/live")] == [200] * 3
    triton.is_ready = False
    assert [gateway.http.get(path).status_code for path in ("/health", "/health/ready", "/health/live")] == [
        503,
        503,
        200,
    ]


def test_a_body_that_says_it_is_too_long_is_not_read(triton: FakeTriton) -> None:
    with run_gateway(triton.url, max_body_bytes=1000) as gateway, gateway.connect() as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 1001\r\n\r\n"
        connection.sendall(head.encode())  # and no byte of the body
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert triton.requests == []


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_also_while_its_sender_still_sends(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    monkeypatch.setattr(gate, "_LINGER_S", TIMEOUT_S)  # a sender that is slower may lose the answer
    content = json.dumps({**BODY, "user": "x" * (16 << 20)}).encode()
    parts = (content[at : at + 65536] for at in range(0, len(content), 65536))
    with run_gateway(triton.url, max_body_bytes=1 << 20) as gateway:
        answer = gateway.post(content if declared else parts)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        assert str(1 << 20) in answer.json()["error"]["message"]
        assert gateway.post(BODY).status_code == 200
    assert len(triton.requests) == 1


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_may_be_as_long_as_the_limit(triton: FakeTriton, declared: bool) -> None:
    content = json.dumps(BODY).encode()
    with run_gateway(triton.url, max_body_bytes=len(content)) as gateway:
        for sent, status in ((content, 200), (content + b" ", 413)):
            answer = gateway.post(sent if declared else iter([sent]))
            assert answer.status_code == status


def test_a_refused_sender_that_goes_on_for_ever_is_cut_off(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_LINGER_S", 0.2)
    with run_gateway(triton.url, max_body_bytes=1000) as gateway, gateway.connect() as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 9999\r\n\r\n"
        connection.sendall(head.encode())
        answer = b""
        while part := connection.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_sender_that_leaves_within_its_body_is_counted_as_gone(triton: FakeTriton, gateway: RunningGateway) -> None:
    with gateway.connect() as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        gateway.wait_for_metric("omni_gateway_requests_in_flight", 1)
    gateway.wait_for_metric('omni_gateway_requests_total{endpoint="/v1/chat/completions",status="499"}', 1)
    assert triton.requests == []


def test_a_body_that_does_not_come_is_given_up(triton: FakeTriton) -> None:
    with run_gateway(triton.url, body_timeout_s=0.2) as gateway, gateway.connect() as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_caller_that_takes_nothing_loses_its_place_and_its_request(triton: FakeTriton) -> None:
    gone = threading.Event()

    def script(_request: Any, context: Any) -> Iterator[Any]:
        context.add_callback(gone.set)
        while not gone.is_set():
            yield chunk(text="x" * 100_000)

    triton.script = script
    body = json.dumps({"model": MODEL, "messages": USER, "stream": True})
    with run_gateway(triton.url, send_timeout_s=0.3) as gateway, gateway.connect(receive_bytes=4096) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        assert gone.wait(TIMEOUT_S)
        gateway.wait_for_metric("omni_gateway_requests_in_flight", 0)
        gateway.wait_for_metric('omni_gateway_requests_total{endpoint="/v1/chat/completions",status="499"}', 1)


def test_a_list_of_millions_is_refused_by_its_length(gateway: RunningGateway) -> None:
    answer = gateway.post({"model": MODEL, "messages": [1] * 20_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0]")
    answer = gateway.post({"model": MODEL, "messages": USER * 1025})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_requests_over_the_limit_are_refused_until_one_ends(triton: FakeTriton) -> None:
    go_on = threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="first")
        assert go_on.wait(TIMEOUT_S)
        yield final()

    triton.script = script
    with run_gateway(triton.url, max_requests=2) as gateway, ThreadPoolExecutor(2) as pool:
        running = [pool.submit(gateway.chat) for _ in range(2)]
        gateway.wait_for_metric("omni_gateway_requests_in_flight", 2)
        answer = gateway.post(BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert gateway.http.get("/health").status_code == 200
        go_on.set()
        assert [found.result().choices[0].message.content for found in running] == ["first", "first"]
        assert gateway.post(BODY).status_code == 200


def test_metrics_count_answers_times_and_sound(gateway: RunningGateway) -> None:
    gateway.chat(modalities=["text", "audio"])
    gateway.post({"model": MODEL})
    gateway.http.get("/v1/nowhere/at/all")
    answered = "omni_gateway_requests_total"
    gateway.wait_for_metric(f'{answered}{{endpoint="/v1/chat/completions",status="200"}}', 1)
    gateway.wait_for_metric(f'{answered}{{endpoint="/v1/chat/completions",status="400"}}', 1)
    gateway.wait_for_metric(f'{answered}{{endpoint="other",status="404"}}', 1)
    gateway.wait_for_metric("omni_gateway_audio_seconds_total", 0.04)
    gateway.wait_for_metric("omni_gateway_first_text_seconds_count", 1)
    gateway.wait_for_metric("omni_gateway_first_audio_seconds_count", 1)
    gateway.wait_for_metric("omni_gateway_requests_in_flight", 0)


def test_openapi_describes_the_bodies(gateway: RunningGateway) -> None:
    described = gateway.http.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "modalities", "stream"} <= schemas["ChatRequest"]["properties"].keys()
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described)))
    assert named <= schemas.keys()


def test_a_fault_of_the_gateway_is_an_error_in_openai_s_form(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("triton_omni_gateway.service.completion", broken)
    answer = gateway.post(BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


def test_the_request_s_id_goes_on_to_the_server(triton: FakeTriton, gateway: RunningGateway) -> None:
    assert gateway.post(BODY).headers["x-request-id"] == triton.requests[0].id


def test_openapi_is_described_once(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may ask for it, and 16 callers who did made a request wait for six seconds."""
    first = gateway.http.get("/openapi.json").json()

    def describe(*_: Any, **__: Any) -> Any:
        raise AssertionError("described again")

    monkeypatch.setattr("triton_omni_gateway.app.models_json_schema", describe)
    assert [gateway.http.get("/openapi.json").json() for _ in range(3)] == [first] * 3

# SPDX-License-Identifier: Apache-2.0
"""A gateway without keys, which every browser of its network reaches: what a web page may send it, and by what name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from client_fakes import FakeTriton, serve_grpc
from gateway_fakes import MODEL, USER, RunningGateway, run_gateway
from triton_omni_gateway.keys import ApiKeys

BODY = {"model": MODEL, "messages": USER}
FORM = "application/x-www-form-urlencoded"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url, host_names=("omni.lan",)) as running:
        yield running


def refused(
    triton: FakeTriton, gateway: RunningGateway, headers: dict[str, str], path: str = "chat/completions"
) -> Any:
    answer = gateway.post(BODY, f"/v1/{path}", headers=headers)
    assert triton.requests == []
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "audio/speech"])
@pytest.mark.parametrize("kind", ["text/plain", FORM, "multipart/form-data; boundary=x", "", "application/jsonp"])
def test_a_body_that_any_page_may_send_is_refused(
    triton: FakeTriton, gateway: RunningGateway, kind: str, path: str
) -> None:
    status, code, said = refused(triton, gateway, {"Content-Type": kind}, path)
    assert (status, code) == (415, "unsupported_media_type")
    assert "application/json" in said


def test_a_body_of_no_type_is_refused(triton: FakeTriton, gateway: RunningGateway) -> None:
    assert gateway.http.post("/v1/chat/completions", content=json.dumps(BODY)).status_code == 415
    assert triton.requests == []


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken(gateway: RunningGateway, kind: str) -> None:
    assert gateway.post(BODY, headers={"Content-Type": kind}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", "[", ""]
)
def test_a_name_of_somebody_else_s_is_refused(triton: FakeTriton, gateway: RunningGateway, host: str) -> None:
    status, code, said = refused(triton, gateway, {"Host": host})
    assert (status, code) == (403, "forbidden_origin")
    assert "--allow-host" in said
    assert gateway.http.get("/v1/models", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3:8080", "[::1]:8080", "localhost:8080", "LOCALHOST", "Omni.lan:80"]
)
def test_addresses_and_names_of_ours_are_taken(gateway: RunningGateway, host: str) -> None:
    assert gateway.post(BODY, headers={"Host": host}).status_code == 200
    scheme_and_host = f"http://{host.lower()}"
    assert gateway.post(BODY, headers={"Host": host, "Origin": scheme_and_host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["null", "https://evil.example", "http://localhost:3000", "http://127.0.0.1", "file://", "http://[", ""]
)
def test_pages_of_other_origins_are_refused(triton: FakeTriton, gateway: RunningGateway, origin: str) -> None:
    status, code, said = refused(triton, gateway, {"Origin": origin})
    assert (status, code) == (403, "forbidden_origin")
    assert "Origin" in said


def test_a_page_of_an_allowed_name_is_taken_also_where_a_proxy_changed_the_host(gateway: RunningGateway) -> None:
    assert gateway.post(BODY, headers={"Origin": "https://omni.lan"}).status_code == 200


def test_operators_and_the_page_are_answered_by_any_name(gateway: RunningGateway) -> None:
    for path in ("/", "/page/app.js", "/health", "/metrics"):
        assert gateway.http.get(path, headers={"Host": "gateway"}).status_code == 200


@pytest.mark.parametrize("headers", [{"Host": "any"}, {"Origin": "https://other.example"}, {"Content-Type": FORM}])
def test_a_key_is_enough(triton: FakeTriton, headers: dict[str, str]) -> None:
    with run_gateway(triton.url, keys=ApiKeys(["first"])) as gateway:
        assert gateway.post(BODY, headers={"Authorization": "Bearer first", **headers}).status_code == 200
        assert gateway.post(BODY, headers=headers).status_code == 401


PAGE = "https://app.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


@pytest.mark.parametrize("keys", [None, ApiKeys(["first"])])
@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_a_page_of_an_allowed_origin_asks_first_without_a_key(
    triton: FakeTriton, keys: ApiKeys | None, origins: tuple[str, ...]
) -> None:
    with run_gateway(triton.url, keys=keys, origins=origins) as gateway:
        headers = {"Origin": PAGE, **PREFLIGHT}
        asked = gateway.http.options("/v1/chat/completions", headers=headers)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in {PAGE, "*"}
        assert "authorization" in asked.headers["access-control-allow-headers"].lower()
        key = {"Authorization": "Bearer first"} if keys else {}
        answer = gateway.post(BODY, headers={"Origin": PAGE, **key})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origins[0])
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        if keys:
            assert gateway.post(BODY, headers={"Origin": PAGE}).status_code == 401


def test_a_page_of_another_origin_is_not_let_in(triton: FakeTriton) -> None:
    with run_gateway(triton.url, origins=(PAGE,)) as gateway:
        headers = {"Origin": "https://evil.example", **PREFLIGHT}
        assert "access-control-allow-origin" not in gateway.http.options("/v1/models", headers=headers).headers
        assert refused(triton, gateway, {"Origin": "https://evil.example"})[:2] == (403, "forbidden_origin")
        assert gateway.post(BODY, headers={"Origin": f"{PAGE}:444"}).status_code == 403


def test_without_allowed_origins_no_page_may_ask(gateway: RunningGateway) -> None:
    asked = gateway.http.options("/v1/chat/completions", headers={"Origin": PAGE, **PREFLIGHT})
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in asked.headers

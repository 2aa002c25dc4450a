# SPDX-License-Identifier: Apache-2.0
"""What the gateway serves of its page: files with strict headers, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_fakes import FakeTriton, serve_grpc
from gateway_fakes import RunningGateway, run_gateway
from triton_omni_gateway.browser_page import FOLDER, HEADERS
from triton_omni_gateway.keys import ApiKeys

VENDORED = ("markdown-it.min.js", "markdown-it.license.txt")
FILES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {".js": ("text/javascript", "application/javascript"), ".css": ("text/css",), ".svg": ("image/svg+xml",),
         ".html": ("text/html",), ".txt": ("text/plain",)}  # fmt: skip


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with serve_grpc(FakeTriton()) as triton, run_gateway(triton.url) as running:
        yield running


def test_the_page_is_at_the_root(gateway: RunningGateway) -> None:
    answer = gateway.http.get("/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.content == (FOLDER / "index.html").read_bytes()
    assert answer.headers["x-request-id"].startswith("req_")
    head = gateway.http.head("/")
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_every_file_has_its_type_and_strict_headers(gateway: RunningGateway, path: str) -> None:
    answer = gateway.http.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].split(";")[0] in TYPES[Path(path).suffix or ".html"]
    assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)
    again = gateway.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_policy_lets_nothing_in_from_elsewhere_and_no_script_but_the_page_s() -> None:
    policy = dict(rule.split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["style-src"], policy["connect-src"]) == ("'self'",) * 3
    assert not re.search(r"unsafe|https?:|\*", HEADERS["Content-Security-Policy"])


def test_the_page_keeps_to_its_policy() -> None:
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", html)
    for name in sorted({*FILES} - {*VENDORED}):
        text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name


def test_every_file_that_the_page_names_is_there() -> None:
    named = {"index.html", "tap.js", "markdown-it.license.txt"}
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        named |= set(re.findall(r'from "\./([\w.]+)"', text)) | set(re.findall(r'(?:src|href)="page/([\w.-]+)"', text))
    assert named == set(FILES)


@pytest.mark.parametrize(
    "path",
    [
        "/page/nowhere.js",
        "/page/",
        "/page",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e%2fapp.py",
        "/page/..%5capp.py",
        "/page//etc/passwd",
        "/page/%00",
        "/index.html",
        "/favicon.ico",
    ],
)
def test_nothing_else_is_served(gateway: RunningGateway, path: str) -> None:
    # By hand: a client would tidy these paths up.
    with gateway.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 307 ")), answer[:200]
    assert b"invalid_request_error" in answer or path == "/page"
    assert b"def create_app" not in answer


@pytest.mark.parametrize("path", ["/", "/page/app.js"])
def test_the_page_is_only_read(gateway: RunningGateway, path: str) -> None:
    answer = gateway.http.post(path, content=b"x")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")


def test_the_page_needs_no_key_and_tells_none_of_what_does() -> None:
    with serve_grpc(FakeTriton()) as triton, run_gateway(triton.url, keys=ApiKeys(["secret"])) as gateway:
        assert gateway.http.get("/").status_code == 200
        assert gateway.http.get("/page/app.js").status_code == 200
        assert gateway.http.get("/v1/models").status_code == 401

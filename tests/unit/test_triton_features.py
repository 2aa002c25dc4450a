# SPDX-License-Identifier: Apache-2.0
"""A tritonserver's features, by its `--help` and by the version that it answers with."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triton_omni.supervisor.machine import (
    CLIENT_SHARED_MEMORY,
    HTTP_BODY_LIMIT,
    ServerError,
    TritonInstall,
    Version,
    errors_wait,
    find_triton,
    guard_warning,
    known_options,
    server_version,
    stub_environment,
)

HELP = """Usage: tritonserver [options]
  --help
\tPrint usage

HTTP:
  --http-port <integer>
\tThe port for the server to listen on; see --http-address.
  --http-max-input-size <integer>
\tMaximum allowed HTTP request input size in bytes.

Shared Memory:
  --allow-client-shm <boolean>
\tAllow clients to register.
"""


def program(folder: Path, text: str) -> TritonInstall:
    """A tritonserver that says this for `--help`, as they do: on standard error, with 1 as its exit code."""
    binary = folder / "tritonserver"
    (folder / "help").write_text(text)
    binary.write_text(f'#!/bin/sh\n[ "$*" = --help ] && cat {folder}/help >&2\nexit 1\n')
    binary.chmod(0o755)
    return TritonInstall(binary)


def test_options_are_those_that_begin_a_line_of_the_help(tmp_path: Path) -> None:
    assert known_options(program(tmp_path, HELP), {"PATH": "/usr/bin:/bin"}) == {
        "help",
        "http-port",
        HTTP_BODY_LIMIT,
        CLIENT_SHARED_MEMORY,
    }


def test_of_a_program_that_says_nothing_no_option_is_known(tmp_path: Path) -> None:
    assert known_options(program(tmp_path, ""), {"PATH": "/usr/bin:/bin"}) == frozenset()


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"nowhere/tritonserver cannot be started: No such file or directory"):
        known_options(TritonInstall(tmp_path / "nowhere" / "tritonserver"), {})


def test_the_tritonserver_of_this_machine_is_asked_with_its_libraries(tmp_path: Path) -> None:
    install = find_triton()
    options = known_options(install, stub_environment({"PATH": "/usr/bin:/bin"}, install, tmp_path))
    assert {"model-repository", "http-port", "grpc-port", "strict-readiness", "exit-timeout-secs"} <= options


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that answers `/v2` so; its address."""
    listening: list[http.server.HTTPServer] = []

    def start(body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/v2" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        listening.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=listening[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{listening[-1].server_address[1]}"

    yield start
    for server in listening:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("told", "version"),
    [("2.51.0", (2, 51)), ("2.66.0", (2, 66)), ("2.73.0dev", (2, 73)), ("3.1.0", (3, 1)), ("new", None), (7, None)],
)
def test_the_version_is_that_which_the_server_answers_with(
    answering: Callable[[bytes], str], told: object, version: Version | None
) -> None:
    assert server_version(answering(json.dumps({"name": "triton", "version": told}).encode())) == version


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"no JSON", b"\xff"])
def test_an_answer_without_a_version_is_none(answering: Callable[[bytes], str], body: bytes) -> None:
    assert server_version(answering(body)) is None


def test_a_server_that_does_not_answer_has_no_version() -> None:
    assert server_version("127.0.0.1:9") is None


@pytest.mark.parametrize(
    ("version", "waits"),
    [((2, 51), False), ((2, 65), False), ((2, 66), True), ((2, 71), True), ((3, 0), True), (None, True)],
)
def test_errors_wait_for_steps_from_26_02_on_and_where_the_version_is_unknown(
    version: Version | None, waits: bool
) -> None:
    assert errors_wait(version) is waits


@pytest.mark.parametrize(
    ("version", "named"),
    [((2, 51), None), ((2, 71), None), ((2, 50), "2.50"), ((2, 72), "2.72"), ((3, 0), "3.0"), (None, "unknown")],
)
def test_a_version_with_which_the_stall_guard_was_not_tried_is_told_with_the_cure(
    version: Version | None, named: str | None
) -> None:
    warning = guard_warning(version)
    assert (warning is None) is (named is None)
    if warning is not None:
        assert f"with Triton 2.51 to 2.71, this is {named}; if the server ends" in warning
        assert warning.endswith("--no-stall-guard")

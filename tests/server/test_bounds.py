# SPDX-License-Identifier: Apache-2.0
"""Requests that once ended tritonserver in its own front ends are refused, at the limit and above it, each way in."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from media_samples import audio_file
from processes import family
from server.serving import REPLY_S, TINY, Served, resident_bytes, serve
from server.test_contract import infer_request
from triton_omni.supervisor.model_control import HEADER
from triton_omni_client import BadRequest, HttpClient, Media, OmniClient, Request, TooLarge
from triton_omni_client.messages import MODEL, UNARY_MODEL

BODY_BYTES = 8 << 20
"""Largest body of this server; the shipped one takes eleven times that."""
LIMITS = {"max_body_bytes": BODY_BYTES, "max_media_bytes": 6 << 20, "max_audio_seconds": 30}
GOOD: Mapping[str, Any] = {"seed": 7, "modalities": ["text"], "thinker": {"max_tokens": 6}}
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
WAYS = ("generate", "generate_stream", "infer")
BRACKETS = BODY_BYTES // 64 + (1 << 20)
UNPACKED_MIB = 96.0
"""Most MiB that a refused compressed body may leave in tritonserver; unpacked it would be 160. The test has
several copies of it."""


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {**TINY, "thinker": {**TINY["thinker"], "limits": {**TINY["thinker"]["limits"], **LIMITS}}}
    with serve(tmp_path_factory.mktemp("server"), tiny_checkpoint, settings) as served:
        yield served


@pytest.fixture
def serves(server: Served) -> Iterator[Served]:
    """The server; after the test it lives, and gives the reply of before."""
    pid, before = server.supervisor.pid, server.ask("before", "hello", **GOOD).text
    yield server
    assert server.supervisor.exit_code is None, server.log()[-2000:]
    assert (server.supervisor.pid, server.ask("after", "hello", **GOOD).text) == (pid, before)


def post(server: Served, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.supervisor.http_url, timeout=REPLY_S)
    with closing(connection):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", f"/v2/models/{path}", body, {"Content-Type": JSON, **names})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def grpc_error(server: Served, message: Any, compression: grpc.Compression = grpc.Compression.NoCompression) -> str:
    """Return the refusal of a message, streamed or not."""
    with grpc.insecure_channel(server.supervisor.grpc_url, compression=compression) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if message.model_name == MODEL:
                return str(next(stub.ModelStreamInfer(iter([message]), timeout=REPLY_S)).error_message)
            stub.ModelInfer(message, timeout=REPLY_S)
        except grpc.RpcError as error:
            return str(error.details())
    raise AssertionError("it was not refused")


def path_of(way: str) -> str:
    return f"{MODEL if way == 'generate_stream' else UNARY_MODEL}/{way}"


def body_of(way: str, fields: Mapping[str, str]) -> bytes:
    if way != "infer":
        return json.dumps(fields).encode()
    inputs = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]} for name, text in fields.items()]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "text_output"}]}).encode()


def asking(medium: bytes) -> dict[str, str]:
    """Fields that ask about a sound in a data URI."""
    uri = f"data:audio/wav;base64,{base64.b64encode(medium).decode()}"
    content = [{"type": "audio_url", "audio_url": {"url": uri}}, {"type": "text", "text": "what is this?"}]
    return {"messages": json.dumps([{"role": "user", "content": content}]), "sampling_parameters": json.dumps(GOOD)}


def sound(size: int) -> bytes:
    """A wav of about so many bytes."""
    return audio_file("wav", seconds=size / 4 / 2 / 48000, rate=48000, channels=2, subtype="FLOAT")


def text_in(answer: str) -> str:
    """The text of an answer of any way, whole."""
    parts = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.strip()]
    if "outputs" in parts[0]:
        return str(parts[0]["outputs"][0]["data"][0])
    return "".join(part["text_output"] for part in parts)


@pytest.mark.parametrize("kind", [JSON, FORM])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [3_100_000, 5_800_000])
def test_a_large_medium_in_json_is_heard_as_over_grpc(serves: Served, size: int, way: str, kind: str) -> None:
    """A form is what curl calls its body; 4.1 MB of it filled the stack of Triton's HTTP thread."""
    medium = sound(size)
    wanted = serves.client.stream(Request.ask("what is this?", [Media("audio", medium)], **GOOD)).collect().text
    body = body_of(way, asking(medium))
    assert 4_100_000 < len(body) < BODY_BYTES
    status, answer = post(serves, path_of(way), body, Content_Type=kind)
    assert (status, text_in(answer)) == (200, wanted)


@pytest.mark.parametrize("kind", [JSON, FORM])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("times", [1.1, 30.0])
def test_a_body_above_the_limit_is_refused(serves: Served, times: float, way: str, kind: str) -> None:
    body = body_of(way, {"text_input": "a" * int(times * BODY_BYTES)})
    status, answer = post(serves, path_of(way), body, Content_Type=kind)
    assert status == 413
    assert f"limits.max_body_bytes {BODY_BYTES}" in json.loads(answer)["error"]


def test_the_client_tells_of_it_as_of_every_limit(serves: Served) -> None:
    client = HttpClient(f"http://{serves.supervisor.http_url}")
    with pytest.raises(TooLarge, match=r"limits\.max_body_bytes.*gRPC"):
        client.say("what is this?", [Media("audio", bytes(5 << 20))] * 2)


def test_requests_on_one_connection_are_counted_one_by_one(serves: Served) -> None:
    body = body_of("generate", {"text_input": "a" * (BODY_BYTES // 2)})
    connection = http.client.HTTPConnection(serves.supervisor.http_url, timeout=REPLY_S)
    with closing(connection):
        for _ in range(5):
            connection.request("POST", f"/v2/models/{path_of('generate')}", body, {"Content-Type": JSON})
            answer = connection.getresponse()
            assert (answer.status, "too_large;stage=thinker" in answer.read().decode()) == (400, True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_nested_json_is_refused_however_deep(serves: Served, opening: str, way: str) -> None:
    """Triton's parser recurses: 100,000 brackets filled its stack."""
    brackets = sum(map(opening.count, "[{"))
    for times, statuses in ((0.1, (400, 500)), (0.99, (400, 500)), (1.1, (413,)), (3.0, (413,))):
        status, answer = post(serves, path_of(way), (opening * int(times * BRACKETS / brackets)).encode())
        assert status in statuses
        assert json.loads(answer.removeprefix("data: "))["error"]


@pytest.mark.parametrize(("chunks", "status"), [(100_000, 400), (600_000, 413), (2_000_000, 413)])
def test_a_body_of_many_chunks_is_refused(serves: Served, chunks: int, status: int) -> None:
    """Each took 16 bytes of the thread's stack, and a KiB of memory."""
    head = f"POST /v2/models/{path_of('generate')} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    body = b'{"text_input":"' + b"a" * chunks + b'"}'
    host, port = serves.supervisor.http_url.split(":")
    with socket.create_connection((host, int(port)), timeout=REPLY_S) as connection:
        connection.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert connection.recv(12) == f"HTTP/1.1 {status}".encode()


@pytest.mark.parametrize("path", ["health/live", "models/none/ready", "models/qwen2_5_omni/config"])
def test_a_caller_that_sends_requests_ahead_is_closed_upon(serves: Served, path: str) -> None:
    """On one connection they took 50 MiB of memory and 2 MB of the log a second."""
    before, logged = resident_bytes(serves.supervisor.pid), len(serves.log())
    ahead = f"GET /v2/{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    host, port = serves.supervisor.http_url.split(":")
    with socket.create_connection((host, int(port)), timeout=REPLY_S) as connection:
        reading = threading.Thread(target=read_all, args=(connection,))
        reading.start()
        with pytest.raises(ConnectionError):
            connection.sendall(ahead * 2_000_000)
        reading.join()
    assert resident_bytes(serves.supervisor.pid) - before < 64 << 20
    assert len(serves.log()) - logged < 100_000


def read_all(connection: socket.socket) -> None:
    with suppress(ConnectionError):
        while connection.recv(1 << 20):
            pass


def test_requests_one_after_the_other_keep_their_connection(serves: Served) -> None:
    connection = http.client.HTTPConnection(serves.supervisor.http_url, timeout=REPLY_S)
    with closing(connection):
        connection.connect()
        opened = connection.sock
        for _ in range(500):
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read() == b""
        assert connection.sock is opened


OUTPUTS = ("text_output", "audio_output", "audio_base64", "info")


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("model", [MODEL, UNARY_MODEL])
def test_classification_is_refused_over_grpc(serves: Served, model: str, output: str) -> None:
    """It divided by the size of a string, and sorted what has no order."""
    message = infer_request({"text_input": [b"hello"]}, model)
    message.outputs.add(name=output).parameters["classification"].int64_param = 2
    told = grpc_error(serves, message)
    assert "parameter classification" in told
    assert "[omni:bad_request" in told


@pytest.mark.parametrize("output", OUTPUTS)
def test_classification_is_refused_over_http(serves: Served, output: str) -> None:
    asked = json.loads(body_of("infer", {"text_input": "hello"}))
    asked["outputs"] = [{"name": output, "parameters": {"classification": 2}}]
    status, answer = post(serves, path_of("infer"), json.dumps(asked).encode())
    assert (status, "parameter classification" in json.loads(answer)["error"]) == (400, True)


MANY: Mapping[str, tuple[str, str]] = {
    "generate": ("generate", '{"text_input": "a", %s}'),
    "generate_stream": ("generate_stream", '{"text_input": "a", %s}'),
    "parameters of infer": (
        "infer",
        '{"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}], "parameters": {%s}}',
    ),
    "inputs of infer": ("infer", '{"inputs": [%s]}'),
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("count", [1025, 100_000])
def test_a_request_of_many_parts_is_refused_over_http(serves: Served, count: int, name: str) -> None:
    """Each was looked up among all: 40,000 took an HTTP thread 13 s, and time grew by the square."""
    way, body = MANY[name]
    part = '{"name": "%s", "shape": [1], "datatype": "BYTES", "data": ["a"]}' if "inputs" in name else '"%s": 1'
    status, answer = post(
        serves, path_of(way), (body % ",".join(part % f"k{number}" for number in range(count))).encode()
    )
    assert status == 400
    assert "over 1024 inputs, outputs and parameters" in json.loads(answer.removeprefix("data: "))["error"]


@pytest.mark.parametrize("model", [MODEL, UNARY_MODEL])
@pytest.mark.parametrize("count", [1025, 100_000])
def test_a_request_of_many_parts_is_refused_over_grpc(serves: Served, count: int, model: str) -> None:
    message = infer_request({"text_input": [b"hello"]}, model)
    for number in range(count):
        message.parameters[f"k{number}"].int64_param = 1
    assert "over 1024 inputs, outputs and parameters" in grpc_error(serves, message)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize(("times", "refused"), [(0.5, False), (1.1, True), (20, True)])
def test_a_compressed_body_is_unpacked_up_to_the_limit(
    serves: Served, times: float, refused: bool, encoding: str
) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if encoding == "gzip" else zlib.compress
    before = resident_bytes(serves.supervisor.pid)
    body = pack(body_of("infer", {"text_input": "a" * int(times * BODY_BYTES)}))
    status, answer = post(serves, path_of("infer"), body, Content_Encoding=encoding)
    assert ("decompression" if refused else "[omni:too_large;stage=thinker]") in json.loads(answer)["error"]
    assert status == (500 if refused else 400)
    assert resident_bytes(serves.supervisor.pid) - before < UNPACKED_MIB * 2**20


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_nested_json_is_refused_when_it_comes_packed(serves: Served, encoding: str) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if encoding == "gzip" else zlib.compress
    for depth in (BRACKETS // 10, 2 * BRACKETS, 6 * BRACKETS):
        status, answer = post(serves, path_of("infer"), pack(b"[" * depth), Content_Encoding=encoding)
        assert (status in (400, 500), json.loads(answer)["error"] != "") == (True, True)


@pytest.mark.parametrize("model", [MODEL, UNARY_MODEL])
@pytest.mark.parametrize("encoding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize(("times", "refused"), [(0.5, False), (1.1, True), (20, True)])
def test_a_compressed_message_is_unpacked_up_to_the_limit(
    serves: Served, times: float, refused: bool, encoding: grpc.Compression, model: str
) -> None:
    message = infer_request({"text_input": [b"a" * int(times * BODY_BYTES)]}, model)
    before = resident_bytes(serves.supervisor.pid)
    told = grpc_error(serves, message, encoding)
    assert ("decompressing" if refused else "[omni:too_large;stage=thinker]") in told
    assert resident_bytes(serves.supervisor.pid) - before < UNPACKED_MIB * 2**20


def mapped(server: Served) -> set[Path]:
    """Files of /dev/shm that processes of the server use."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in family(server.supervisor.pid)]
    lines = [line for text in maps for line in text.splitlines() if "/dev/shm/" in line and "(deleted)" not in line]
    return {Path(line[line.index("/dev/shm/") :]) for line in lines}


def refuse_foreign_files(server: Served, metadata: Any = None) -> None:
    """Triton maps no file that is the server's own, by any spelling of its name, and takes no request that needs it."""
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for path in sorted(mapped(server)):
            for key in (path.name, f"/{path.name}", f"//{path.name}"):
                asked = service_pb2.SystemSharedMemoryRegisterRequest(name="x", key=key, byte_size=16)
                with pytest.raises(grpc.RpcError) as caught:
                    stub.SystemSharedMemoryRegister(asked, metadata=metadata)
                assert "Unable to open shared memory region" in str(caught.value.details())


READING = """
import json, os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
opened = []
for path in json.loads(sys.argv[1]):
    for how in (os.O_RDONLY, os.O_RDWR):
        try:
            opened.append((path, os.open(path, how)))
        except PermissionError:
            pass
print(json.dumps(opened))
"""


def test_no_file_in_shared_memory_is_for_another_user(serves: Served) -> None:
    found = mapped(serves)
    regions = [path for path in found if path.name.startswith(serves.supervisor.regions)]
    assert len(regions) >= 4, "one of each Python model"
    assert {path: oct(path.stat().st_mode & 0o777) for path in found} == dict.fromkeys(found, "0o600")


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_user_opens_no_file_in_shared_memory(serves: Served) -> None:
    command = [sys.executable, "-c", READING, json.dumps(sorted(map(str, mapped(serves))))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []


SHARING: Mapping[str, Callable[[Any, Any], Any]] = {
    "status": lambda stub, key: stub.SystemSharedMemoryStatus(
        service_pb2.SystemSharedMemoryStatusRequest(), metadata=key
    ),
    "register": lambda stub, key: stub.SystemSharedMemoryRegister(
        service_pb2.SystemSharedMemoryRegisterRequest(name="x", key="x", byte_size=16), metadata=key
    ),
    "unregister": lambda stub, key: stub.SystemSharedMemoryUnregister(
        service_pb2.SystemSharedMemoryUnregisterRequest(), metadata=key
    ),
    "register of a GPU": lambda stub, key: stub.CudaSharedMemoryRegister(
        service_pb2.CudaSharedMemoryRegisterRequest(name="x"), metadata=key
    ),
}


@pytest.mark.parametrize("call", SHARING)
def test_shared_memory_is_the_operator_s_over_grpc(serves: Served, call: str) -> None:
    with grpc.insecure_channel(serves.supervisor.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        SHARING[call](service_pb2_grpc.GRPCInferenceServiceStub(channel), None)
    assert caught.value.details() == f"This protocol is restricted, expecting header 'triton-grpc-protocol-{HEADER}'"


def test_the_client_tells_how_its_media_could_be_shared(serves: Served) -> None:
    url = serves.supervisor.grpc_url
    with (
        OmniClient(url, shared_memory=True) as client,
        pytest.raises(BadRequest, match="start it with --client-shared-memory, or make the client with"),
    ):
        client.say("what is this?", [Media("audio", sound(1000))])


def test_not_even_an_operator_has_triton_map_files_that_are_no_client_s(serves: Served) -> None:
    control = serves.supervisor._running().launch.control
    refuse_foreign_files(serves, [(f"triton-grpc-protocol-{HEADER}", control._key)])

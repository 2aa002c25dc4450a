# SPDX-License-Identifier: Apache-2.0
"""A Triton server in this process, for the client's tests: real gRPC and HTTP on the loopback, scripted replies.

Bodies are built with tritonclient's own serialisers, not with the code under test.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

import grpc  # type: ignore[import-untyped]
import numpy as np
from google.protobuf import text_format  # type: ignore[import-untyped]
from google.protobuf.json_format import MessageToJson  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc  # type: ignore[import-untyped]
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor  # type: ignore[import-untyped]

from waiting import IN_TIME_S

TIMEOUTS = (0.5, 4.0, 32.0)
"""Timeouts, in seconds, of requests that are to run out of time at the server. One that does so on its way there is
tried again with the next timeout."""
Response: TypeAlias = Any  # service_pb2.ModelStreamInferResponse; the package is untyped
Samples = NDArray[np.float32]
INFO = {
    "request_id": "r1",
    "finish_reason": {"thinker": "stop", "talker": "length", "token2wav": None},
    "usage": {
        "prompt_tokens": 9,
        "prompt_tokens_details": {
            "text_tokens": 4,
            "audio_tokens": 0,
            "image_tokens": 5,
            "video_tokens": 0,
            "cached_tokens": 3,
        },
        "reply_tokens": 3,
        "codes": 2,
        "samples": 960,
    },
    "sample_rate": 24000,
    "seed": 7,
    "time_to_first_text_ms": 1.5,
    "time_to_first_audio_ms": 4,
    "stage_ms": {"thinker": {"first": 1.5, "done": 2}, "talker": {}, "token2wav": {"first": None, "done": 4}},
}


def floats(values: Sequence[float]) -> Samples:
    return np.array(values, dtype=np.float32)


def bytes_tensor(*elements: bytes) -> bytes:
    return serialize_byte_tensor(np.array(elements, dtype=np.object_)).item() if elements else b""


def raw_outputs(
    text: str = "", audio: Samples | None = None, encoded: bytes = b"", info: dict[str, Any] | None = None
) -> list[tuple[str, str, list[int], bytes]]:
    samples = np.zeros(0, np.float32) if audio is None else audio
    return [
        ("text_output", "BYTES", [1], bytes_tensor(text.encode())),
        ("audio_output", "FP32", [len(samples)], samples.astype("<f4").tobytes()),
        ("audio_base64", "BYTES", [1], bytes_tensor(base64.b64encode(encoded))),
        ("info", "BYTES", [1], bytes_tensor(json.dumps(info).encode() if info else b"")),
    ]


def chunk(text: str = "", audio: Samples | None = None, encoded: bytes = b"", info: Any = None) -> Response:
    response = service_pb2.ModelStreamInferResponse()
    for name, datatype, shape, data in raw_outputs(text, audio, encoded, info):
        response.infer_response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.infer_response.raw_output_contents.append(data)
    return response


def final() -> Response:
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response


def failure(text: str) -> Response:
    return service_pb2.ModelStreamInferResponse(error_message=text)


def inputs_of(request: Any) -> dict[str, list[bytes]]:
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {tensor.name: list(deserialize_bytes_tensor(data)) for tensor, data in pairs}


def parameters_of(request: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inputs_of(request)["sampling_parameters"][0])
    return found


def chosen_of(request: Any) -> dict[str, Any]:
    """The parameters without the salt, which a conversation draws."""
    return {name: value for name, value in parameters_of(request).items() if name != "cache_salt"}


Script = Callable[[Any, grpc.ServicerContext], Iterator[Response]]


def greeting(_request: Any, _context: grpc.ServicerContext) -> Iterator[Response]:
    yield chunk(text="Hello")
    yield chunk(text=", sea.", audio=np.full(480, 0.25, np.float32))
    yield chunk(audio=np.full(480, -0.5, np.float32))
    yield chunk(info=INFO)
    yield final()


def model_configs() -> dict[str, Any]:
    """The configurations of the project's own models, by name."""
    files = sorted((Path(__file__).parents[1] / "model_repository").glob("*/config.pbtxt"))
    return {file.parent.name: text_format.Parse(file.read_text(), model_config_pb2.ModelConfig()) for file in files}


def tell(config: Any, **parameters: object) -> None:
    """Put parameters into a model's configuration, as JSON."""
    for name, value in parameters.items():
        config.parameters[name].string_value = json.dumps(value)


@dataclass
class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers every stream with `script`; notes what it was asked and whether a client went away."""

    script: Script = greeting
    is_ready: bool = True
    configs: dict[str, Any] = field(default_factory=model_configs)
    tells_index: bool = True
    requests: list[Any] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=self.is_ready and request.name == "qwen2_5_omni")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self.tells_index:
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'key'")
        answer = service_pb2.RepositoryIndexResponse()
        for name in self.configs:
            answer.models.add(name=name, version="1", state="READY")
        answer.models.add(name="broken", state="UNAVAILABLE", reason="unloaded")
        return answer

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in self.configs:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        return service_pb2.ModelConfigResponse(config=self.configs[request.name])

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Response]:  # noqa: N802
        is_whole = threading.Event()

        def note_end() -> None:
            if not is_whole.is_set():
                self.cancelled.set()

        context.add_callback(note_end)
        for request in request_iterator:
            self.requests.append(request)
            yield from self.script(request, context)
        is_whole.set()
        self.finished.set()

    def endless(self, _request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        """A script that sends one chunk and then nothing, until the client goes away."""
        yield chunk(text="Hello", audio=np.full(480, 0.25, np.float32))
        self.cancelled.wait(IN_TIME_S)

    def unending(self, _request: Any, _context: grpc.ServicerContext) -> Iterator[Response]:
        """A script that sends a whole reply and never its end, as Triton does when a stage dies in between."""
        yield from (chunk(text="Hello"), chunk(info=INFO))
        self.cancelled.wait(IN_TIME_S)


@contextmanager
def serve_grpc(fake: FakeTriton, address: str = "127.0.0.1:0", workers: int = 40) -> Iterator[FakeTriton]:
    pool = ThreadPoolExecutor(workers)
    server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(address)
    fake.url = f"127.0.0.1:{port}"
    server.start()
    try:
        yield fake
    finally:
        server.stop(None).wait(IN_TIME_S)
        pool.shutdown()


@dataclass
class FakeHttp:
    """Answers every POST with `answer` (status, headers, body or pieces of one), every GET with 200 or 400.

    The repository's index and the models' configurations it has from `configs`.
    """

    answer: Callable[[], tuple[int, dict[str, str], bytes | Iterator[bytes]]]
    is_ready: bool = True
    configs: dict[str, Any] = field(default_factory=model_configs)
    paths: list[str] = field(default_factory=list)
    inputs: dict[str, list[bytes]] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    left: threading.Event = field(default_factory=threading.Event)
    """A client went away before all pieces were sent."""
    url: str = ""

    def facts(self, path: str) -> bytes | None:
        """The answer to a question about the server's models; None where `path` is another."""
        if path == "/v2/repository/index":
            return json.dumps([{"name": name, "version": "1", "state": "READY"} for name in self.configs]).encode()
        name = path.removeprefix("/v2/models/").removesuffix("/config")
        if not path.endswith("/config") or name not in self.configs:
            return None
        return MessageToJson(self.configs[name], preserving_proto_field_name=True).encode()

    def take(self, length: int, body: bytes) -> None:
        self.head, at = json.loads(body[:length]), length
        if length == len(body):  # of `/generate`, which is JSON alone
            return
        for tensor in self.head["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            self.inputs[tensor["name"]] = list(deserialize_bytes_tensor(body[at : at + size]))
            at += size
        assert at == len(body)


CHUNKED = {"Transfer-Encoding": "chunked"}


def event(text: str = "", audio: Sequence[float] = (), encoded: bytes = b"", info: Any = None) -> bytes:
    """A server-sent event as Triton writes one: a tensor of one element is that element."""
    fields = {
        "model_name": "qwen2_5_omni",
        "text_output": text,
        "audio_output": audio[0] if len(audio) == 1 else list(audio),
        "audio_base64": base64.b64encode(encoded).decode(),
        "info": json.dumps(info) if info else "",
    }
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def http_answer(**outputs: Any) -> tuple[int, dict[str, str], bytes]:
    tensors = raw_outputs(**outputs)
    head = json.dumps(
        {
            "model_name": "qwen2_5_omni_unary",
            "outputs": [
                {"name": n, "datatype": d, "shape": s, "parameters": {"binary_data_size": len(b)}}
                for n, d, s, b in tensors
            ],
        }
    ).encode()
    return 200, {"Inference-Header-Content-Length": str(len(head))}, head + b"".join(b for *_, b in tensors)


@contextmanager
def serve_http(fake: FakeHttp) -> Iterator[FakeHttp]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            fake.paths.append(self.path)
            body = fake.facts(self.path) or b""
            self.send_response(200 if fake.is_ready else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            fake.paths.append(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            facts = fake.facts(self.path)
            if facts is None:
                fake.take(int(self.headers.get("Inference-Header-Content-Length", len(body))), body)
            status, headers, answer = fake.answer() if facts is None else (200, {}, facts)
            self.send_response(status)
            length = {"Content-Length": str(len(answer))} if isinstance(answer, bytes) else CHUNKED
            for name, value in (headers | length).items():
                self.send_header(name, value)
            try:
                self.end_headers()
                self.send(answer)
            except ConnectionError:  # a client that gave up
                fake.left.set()

        def send(self, answer: bytes | Iterator[bytes]) -> None:
            if isinstance(answer, bytes):
                self.wfile.write(answer)
                return
            for piece in answer:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

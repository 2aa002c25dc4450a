# SPDX-License-Identifier: Apache-2.0
"""The unary model over a stand-in gRPC endpoint: whole replies, many at once, cancellation, true error codes."""

import base64
import io
import json
import os
import subprocess
import sys
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from fake_pb_utils import PbUtils, Request, TritonError, text_tensor
from triton_omni.core.errors import BadRequest, InternalError, Overloaded, TooLarge
from triton_omni.core.settings import UnarySettings
from triton_omni.session import server_folder
from triton_omni.session.answer import Answer, call_pieces, to_base64, wav_header
from triton_omni.session.engine import CallPiece
from triton_omni.session.ledger_table import EPOCH, HELD, PID, create_table
from triton_omni.session.ledger_view import StageBoard
from triton_omni.stub import unary
from triton_omni.stub.unary import UnaryModel, asked_timeout_s, to_message
from triton_omni.token2wav.open_session import to_pcm16
from waiting import IN_TIME_S, wait_for

INFO = json.dumps({"sample_rate": 24000, "seed": 1})


class Ensemble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Triton's gRPC endpoint: answers each message with `infer(message)` and notes streams that were cancelled."""

    def __init__(self, infer):
        self.infer, self.messages, self.cancelled = infer, [], []

    def ModelStreamInfer(self, request_iterator, context):  # noqa: N802 - the service's name
        message = next(request_iterator)
        self.messages.append(message)
        finished = []
        context.add_callback(lambda: finished or self.cancelled.append(message.id))
        yield from self.infer(message)
        finished.append(True)


@pytest.fixture
def over():
    """Streams that wait for it end with the test, also where that fails: `serve` sets it then."""
    return threading.Event()


@pytest.fixture
def serve(over):
    """Start a unary model whose ensemble answers with `infer(message)`."""
    started = []

    def start(infer, max_requests=8, table=""):
        server, ensemble = grpc.server(ThreadPoolExecutor(20)), Ensemble(infer)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(ensemble, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        settings = UnarySettings(max_requests=max_requests)
        started.append((UnaryModel(PbUtils(), settings, f"127.0.0.1:{port}", table), server))
        return started[-1][0], ensemble

    yield start
    over.set()
    for model, server in started:
        model.close()
        assert not model._running
        server.stop(None).wait()


def responses(*answers):
    return [service_pb2.ModelStreamInferResponse(infer_response=as_response(answer)) for answer in answers]


def as_response(answer):
    response = service_pb2.ModelInferResponse(model_name="qwen2_5_omni")
    for name, value in answer.to_tensors().items():
        if isinstance(value, bytes):
            raw, datatype, shape = serialize_byte_tensor(np.array([value], dtype=object)).item(), "BYTES", [1]
        else:
            raw, datatype, shape = np.asarray(value).tobytes(), "FP32", list(value.shape)
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(raw)
    return response


EMPTY_FINAL = service_pb2.ModelStreamInferResponse(
    infer_response=service_pb2.ModelInferResponse(model_name="qwen2_5_omni")
)


def speaking(message):
    """A stream: text, two chunks of sound, info, and the empty final that Triton's stream may end with."""
    del message
    return [
        *responses(
            Answer(text="Hel"),
            Answer(text="lo", audio=torch.tensor([0.1, 0.2])),
            Answer(audio=torch.tensor([0.3])),
            Answer(info=INFO),
        ),
        EMPTY_FINAL,
    ]


def ask(model, *inputs, **fields):
    request = Request(inputs or [text_tensor("text_input", "hi")], **fields)
    model.execute([request])
    return request


def answered(request):
    assert request.sender.done.wait(IN_TIME_S), "no final"
    assert request.sender.finals == 1
    assert request.sender.violations == []
    return request.sender


def reply(request):
    [outputs] = answered(request).outputs()
    return {name: value(tensor) for name, tensor in outputs.items()}


def value(tensor):
    array = tensor.as_numpy()
    return bytes(array[0]) if array.dtype == object else array.tolist()


def test_the_stream_becomes_one_response(serve):
    model, _ = serve(speaking)
    found = reply(ask(model))
    assert found["text_output"] == b"Hello"
    assert found["audio_output"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["audio_base64"] == b""
    assert found["info"].decode() == INFO


def test_a_reply_without_sound_is_whole(serve):
    model, _ = serve(lambda message: responses(Answer(text="hi"), Answer(info=INFO)))
    found = reply(ask(model))
    assert (found["text_output"], found["audio_output"], found["audio_base64"]) == (b"hi", [], b"")


def test_pieces_of_calls_are_no_end_and_the_account_has_them_whole(serve):
    pieces = call_pieces([CallPiece(0, "call-a", "hang_up", "{}")])
    failure = service_pb2.ModelStreamInferResponse(error_message="gone [omni:internal;stage=talker]")
    model, _ = serve(lambda message: responses(Answer(text="hi"), Answer(info=pieces), Answer(info=INFO)))
    assert reply(ask(model))["info"].decode() == INFO
    model, _ = serve(lambda message: [*responses(Answer(info=pieces)), failure])
    assert "gone" in answered(ask(model)).error.message()


def test_wav_chunks_become_one_file_of_true_length(serve):
    samples = torch.linspace(-1, 1, 48)
    chunks = [wav_header(24000) + to_pcm16(samples[:10]), to_pcm16(samples[10:]), b""]
    model, _ = serve(lambda message: responses(*[Answer(audio_base64=to_base64(c)) for c in chunks], Answer(info=INFO)))
    data = base64.b64decode(reply(ask(model))["audio_base64"])
    with wave.open(io.BytesIO(data)) as file:
        assert file.getparams()[:4] == (1, 2, 24000, 48)
        assert file.readframes(48) == to_pcm16(samples)
    assert len(data) == 44 + 96


@pytest.mark.parametrize("start", [b"\x01\x02", b"RIFF\x00\x00 loud from the first sample on" + bytes(40)])
def test_pcm_chunks_are_joined_as_they_are(serve, start):
    chunks = [Answer(audio_base64=to_base64(c)) for c in (start, b"\x03\x04")]
    model, _ = serve(lambda message: responses(*chunks, Answer(info=INFO)))
    assert base64.b64decode(reply(ask(model))["audio_base64"]) == start + b"\x03\x04"


def test_a_large_array_is_read_without_loss(serve):
    sound = torch.rand(2_000_000) * 2 - 1
    model, _ = serve(lambda message: responses(Answer(audio=sound), Answer(info=INFO)))
    assert reply(ask(model))["audio_output"] == sound.tolist()


def test_the_stream_s_request_is_the_client_s(serve):
    model, ensemble = serve(speaking)
    media = text_tensor("media", b"\x00\x01")
    parameters = text_tensor("sampling_parameters", '{"seed": 3, "modalities": ["text"]}')
    request = ask(model, media, parameters, request_id="r-7", parameters='{"a": 2, "b": "x", "c": true, "d": 0.5}')
    answered(request)
    [message] = ensemble.messages
    assert (message.model_name, message.id) == ("qwen2_5_omni", "r-7")
    sent = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in message.parameters.items()}
    assert sent == {"a": 2, "b": "x", "c": True, "d": 0.5}
    assert [(one.name, one.datatype, list(one.shape)) for one in message.inputs] == [
        ("media", "BYTES", [1]),
        ("sampling_parameters", "BYTES", [1]),
    ]
    assert [deserialize_bytes_tensor(raw).tolist() for raw in message.raw_input_contents] == [
        [b"\x00\x01"],
        [b'{"seed": 3, "modalities": ["text"]}'],
    ]


@pytest.mark.parametrize(
    ("inputs", "fields", "says"),
    [
        ([text_tensor("media", *[b""] * 4097)], {}, "media: 4097 elements, the limit of any deployment is 4096"),
        ([], {"parameters": json.dumps({f"p{n}": 1 for n in range(65)})}, "parameters: 65 are given, the limit is 64"),
        (
            [],
            {"parameters": '{"x": "' + "a" * 70_000 + '"}'},
            "parameters: 70009 characters of JSON, the limit is 65536",
        ),
    ],
    ids=["media", "parameters", "a long one"],
)
def test_what_is_too_much_is_refused_before_it_is_copied_and_costs_no_place(serve, inputs, fields, says):
    model, ensemble = serve(speaking, max_requests=1)
    for _ in range(3):
        error = answered(ask(model, *inputs, **fields)).error
        assert error.message() == f"{says} [omni:too_large;stage=unary]"
        assert error.code() == TritonError.INVALID_ARG
    assert ensemble.messages == []
    assert reply(ask(model))["text_output"] == b"Hello"


@pytest.mark.parametrize(("given", "passed_on"), [(0, None), (1_500_000, 1_500_000), (2**64 - 1, 2**63 - 1)])
def test_triton_s_own_timeout_is_passed_on(serve, given, passed_on):
    model, ensemble = serve(speaking)
    answered(ask(model, timeout=given))
    [message] = ensemble.messages
    assert message.parameters["timeout"].int64_param == (passed_on or 0)
    assert ("timeout" in message.parameters) or passed_on is None


def test_an_input_without_elements_is_passed_on(serve):
    model, ensemble = serve(speaking)
    answered(ask(model, text_tensor("text_input", "hi"), empty_tensor("media")))
    [message] = ensemble.messages
    assert (list(message.inputs[1].shape), message.raw_input_contents[1]) == ([0], b"")


def empty_tensor(name):
    return PbUtils().Tensor(name, np.empty(0, dtype=object))


def refusal(error):
    return service_pb2.ModelStreamInferResponse(error_message=f"in ensemble 'qwen2_5_omni', {error.to_text()}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("voice: unknown", stage="thinker"), TritonError.INVALID_ARG),
        (TooLarge("text_input: too long", stage="thinker"), TritonError.INVALID_ARG),
        (Overloaded("no session", stage="thinker", retry_after_ms=250), TritonError.UNAVAILABLE),
    ],
    ids=lambda value: getattr(value, "message", None),
)
def test_an_error_of_the_stream_keeps_its_code_which_triton_lost(serve, error, code):
    model, _ = serve(lambda message: [*responses(Answer(text="Hel")), refusal(error)])
    sender = answered(ask(model))
    assert sender.outputs() == []
    assert sender.error.code() == code
    assert sender.error.message().endswith(error.to_text())


def test_a_request_that_lost_a_stage_and_is_not_told_is_failed(serve, over, monkeypatch, tmp_path):
    monkeypatch.setattr(unary, "TOLD_WITHIN_S", 0.2)
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", tmp_path)

    def infer(message):
        yield from responses(Answer(text="hi"))
        over.wait()

    model, ensemble = serve(infer, table="table")
    board = StageBoard("table")
    board.set_word(EPOCH, 3, "talker")
    request = ask(model)
    wait_for(lambda: ensemble.messages)
    time.sleep(0.3)
    assert not request.sender.done.is_set()
    board.mark_lost("talker")
    assert "the process of talker ended unexpectedly" in answered(request).error.message()
    wait_for(lambda: len(ensemble.cancelled) == 1)
    board.close()


def test_the_ledger_has_its_process_and_the_requests_that_only_it_can_end(serve, over, monkeypatch, tmp_path):
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", tmp_path)

    def infer(message):
        over.wait()
        yield from speaking(message)

    model, _ = serve(infer, max_requests=2, table="table")
    board = StageBoard("table")
    assert (board.word(PID, "unary"), board.leaves_open("unary")) == (os.getpid(), False)
    running = [ask(model) for _ in range(2)]
    assert board.leaves_open("unary")
    assert isinstance(answered(ask(model)).error, TritonError), "one too many"
    assert board.leaves_open("unary")
    over.set()
    for request in running:
        answered(request)
    wait_for(lambda: not board.leaves_open("unary"))
    board.close()


@pytest.fixture
def _own_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", tmp_path)


@pytest.mark.usefixtures("_own_tables")
@pytest.mark.parametrize("asked", ["sampling_parameters", "Triton's timeout", "the default"])
@pytest.mark.parametrize(
    "answers", [(), (Answer(text="Hel"),), (Answer(text="Hel"), Answer(audio=torch.tensor([0.1])))]
)
def test_a_stream_that_nobody_ends_is_ended_after_the_deadline(serve, over, monkeypatch, asked, answers):
    monkeypatch.setattr("triton_omni.stub.unary.LATE_TIMEOUT_S", 0.0)

    def infer(message):
        yield from responses(*answers)
        over.wait()

    model, ensemble = serve(infer, max_requests=1, table="table")
    board = StageBoard("table")
    usual_s = model._timeout_s
    if asked == "the default":
        model._timeout_s = 0.3
    inputs = [text_tensor("sampling_parameters", '{"timeout": 0.3}')] if asked == "sampling_parameters" else []
    error = answered(ask(model, *inputs, timeout=300_000 if asked == "Triton's timeout" else 0)).error
    assert error.message() == "timeout: 0.3 s have passed [omni:timeout;stage=unary]"
    wait_for(lambda: len(ensemble.cancelled) == 1)
    wait_for(lambda: not board.leaves_open("unary"))
    ensemble.infer, model._timeout_s = speaking, usual_s
    assert reply(ask(model))["text_output"] == b"Hello", "the only place is free"
    board.close()


@pytest.mark.parametrize(
    ("parameters", "timeout_us", "seconds"),
    [
        (None, 0, 120.0),
        ("", 0, 120.0),
        ('{"timeout": 3}', 0, 3.0),
        ('{"timeout": 3}', 2_000_000, 2.0),
        ('{"timeout": 3}', 2**63, 3.0),
        ('{"timeout": 3600}', 0, 3600.0),
        ('{"timeout": 3601}', 0, 120.0),
        ('{"timeout": -1}', 0, 120.0),
        ('{"timeout": "3"}', 0, 120.0),
        ("[" * 40_000, 0, 120.0),
        ("[3]", 0, 120.0),
        ("{", 5_000_000, 5.0),
    ],
)
def test_the_deadline_is_the_one_that_the_thinker_keeps(parameters, timeout_us, seconds):
    inputs = [text_tensor("text_input", "hi")]
    if parameters is not None:
        inputs.append(text_tensor("sampling_parameters", parameters))
    assert asked_timeout_s(to_message(Request(inputs, timeout=timeout_us)), 120.0) == seconds


def test_a_table_that_a_stage_has_made_is_left_as_it_is(serve, monkeypatch, tmp_path):
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", tmp_path)
    create_table("table")
    board = StageBoard("table")
    board.set_word(HELD, True, "unary")
    serve(speaking, table="table")
    assert board.word(PID, "unary") == os.getpid()
    board.close()


def test_a_whole_reply_whose_stream_does_not_end_is_answered(serve, over, monkeypatch):
    monkeypatch.setattr("triton_omni.stub.unary.LATE_END_S", 0.2)

    def infer(message):
        yield from responses(Answer(text="hi"), Answer(info=INFO))
        over.wait()

    model, ensemble = serve(infer)
    begin = time.monotonic()
    assert reply(ask(model))["text_output"] == b"hi"
    assert time.monotonic() - begin >= 0.2
    wait_for(lambda: len(ensemble.cancelled) == 1)


def test_an_error_after_the_last_response_takes_nothing_from_a_whole_reply(serve):
    lost = refusal(InternalError("the process of talker ended unexpectedly", stage="talker"))
    model, _ = serve(lambda message: [*responses(Answer(text="Hel"), Answer(info=INFO)), lost])
    found = reply(ask(model))
    assert (found["text_output"], found["info"].decode()) == (b"Hel", INFO)


def test_a_fault_of_triton_is_internal(serve):
    fault = service_pb2.ModelStreamInferResponse(error_message="Failed to open shared memory")
    model, _ = serve(lambda message: [fault])
    error = answered(ask(model)).error
    assert error.code() == TritonError.INTERNAL
    assert error.message() == "Failed to open shared memory [omni:internal]"


def test_a_stream_that_breaks_is_internal_and_says_where(serve):
    def broken(message):
        raise RuntimeError(message.id)

    model, _ = serve(broken)
    error = answered(ask(model)).error
    assert error.code() == TritonError.INTERNAL
    assert "the stream from 127.0.0.1:" in error.message()
    assert "UNKNOWN" in error.message()


def test_a_fault_of_ours_is_internal_and_tells_nothing_of_itself(serve, caplog):
    model, ensemble = serve(lambda message: responses(Answer(text="hi"), Answer(info="{no JSON")))
    error = answered(ask(model, request_id="r-9")).error
    assert error.message() == "the reply could not be collected [omni:internal;stage=unary]"
    assert "r-9" in caplog.text
    ensemble.infer = speaking
    reply(ask(model))


def test_a_stream_that_ends_without_info_is_an_error_of_ours(serve):
    model, _ = serve(lambda message: responses(Answer(text="Hel")))
    error = answered(ask(model)).error
    assert error.code() == TritonError.INTERNAL
    assert "without its last response" in error.message()


class Gate:
    """A stream that says "Hel" and waits until it is let go."""

    def __init__(self):
        self.open, self.entered = threading.Event(), threading.Semaphore(0)

    def __call__(self, message):
        yield from responses(Answer(text="Hel"))
        self.entered.release()
        self.open.wait(IN_TIME_S)
        yield from responses(Answer(text="lo"), Answer(info=INFO))

    def wait(self, count=1):
        for _ in range(count):
            assert self.entered.acquire(timeout=IN_TIME_S)


def test_many_requests_run_at_once(serve):
    gate = Gate()
    model, _ = serve(gate, max_requests=16)
    requests = [Request([text_tensor("text_input", "hi")]) for _ in range(16)]
    model.execute(requests)
    gate.wait(16)
    gate.open.set()
    assert all(reply(request)["text_output"] == b"Hello" for request in requests)


def test_one_request_too_many_is_refused_at_once_and_later_ones_are_taken_again(serve):
    gate = Gate()
    model, _ = serve(gate, max_requests=2)
    busy = [ask(model), ask(model)]
    error = answered(ask(model)).error
    assert error.code() == TritonError.UNAVAILABLE
    assert error.message() == "all 2 unary requests are in use [omni:overloaded;stage=unary;retry_after_ms=250]"
    gate.open.set()
    for request in busy:
        reply(request)
    wait_for(lambda: not model._running)
    assert reply(ask(model))["text_output"] == b"Hello"


def test_a_cancelled_request_cancels_its_stream_alone(serve):
    gate = Gate()
    model, ensemble = serve(gate)
    request, other = ask(model, request_id="gone"), ask(model, request_id="other")
    gate.wait(2)
    request.sender.cancelled = True
    error = answered(request).error
    assert error.code() == TritonError.CANCELLED
    assert error.message() == "the request was cancelled [omni:cancelled;stage=unary]"
    wait_for(lambda: ensemble.cancelled == ["gone"])
    assert not other.sender.done.is_set()
    gate.open.set()
    assert reply(other)["text_output"] == b"Hello"


def test_a_request_that_ends_while_its_cancel_is_seen_leaves_nothing(serve):
    """The fixture asserts that nothing is left; places are free again, or the last requests would be refused."""
    model, _ = serve(speaking, max_requests=2)
    for _ in range(20):
        request = Request([text_tensor("text_input", "hi")])
        request.sender.cancelled = True
        model.execute([request])
        answered(request)
        wait_for(lambda: not model._running)


def test_close_waits_for_running_requests_and_sends_their_answers(serve):
    gate = Gate()
    model, _ = serve(gate)
    request = ask(model)
    gate.wait()
    wait_for(lambda: model._running)
    threading.Timer(0.05, gate.open.set).start()
    other = UnaryModel(PbUtils(), UnarySettings(), model._grpc_url)
    second = ask(other)
    other.close()
    assert reply(second)["text_output"] == b"Hello"
    assert reply(request)["text_output"] == b"Hello"


def test_an_environment_s_proxy_is_not_asked(serve, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    model, _ = serve(speaking)
    assert reply(ask(model))["text_output"] == b"Hello"


class Undecodable(Request):
    """A request of Triton's HTTP frontend with bytes in its id that are not UTF-8."""

    def request_id(self):
        return b"\xff".decode()


def test_an_id_that_is_no_text_is_refused_and_costs_no_place(serve):
    model, _ = serve(speaking, max_requests=1)
    for _ in range(3):
        request = Undecodable([text_tensor("text_input", "hi")])
        model.execute([request])
        assert answered(request).error.message() == "id: not UTF-8 [omni:bad_request;stage=unary]"
    assert reply(ask(model))["text_output"] == b"Hello"


def test_it_is_served_without_torch_which_is_most_of_its_start_and_memory():
    code = "import sys, triton_omni.stub.unary; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

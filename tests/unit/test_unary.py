# SPDX-License-Identifier: Apache-2.0
"""The unary model over a stand-in ensemble: whole replies, many at once, cancellation, overload, true error codes."""

import base64
import io
import json
import secrets
import threading
import time
import wave

import numpy as np
import pytest
import torch

from fake_pb_utils import InferenceResponse, PbUtils, Request, Tensor, TritonError, text_tensor
from triton_omni.errors import BadRequest, Overloaded, TooLarge
from triton_omni.ledger import SessionLedger
from triton_omni.serving.tensors import write_tensors
from triton_omni.serving.unary import UnaryModel
from triton_omni.settings import UnarySettings
from triton_omni.token2wav.encoding import to_base64, to_pcm16, wav_header
from triton_omni.wire import Answer

WAIT_S = 5.0
INFO = json.dumps({"sample_rate": 24000, "seed": 1})


@pytest.fixture
def ledger():
    return SessionLedger(f"triton-omni-test-{secrets.token_hex(8)}", "unary")


@pytest.fixture
def reader(ledger):
    reader = SessionLedger(ledger.path.name, "thinker")
    yield reader
    reader.close()


@pytest.fixture
def serve(ledger):
    """Start a unary model whose ensemble answers with `infer(inner request)`."""
    models = []

    def start(infer, max_requests=8):
        pb_utils = PbUtils(infer)
        models.append(UnaryModel(pb_utils, ledger, UnarySettings(max_requests=max_requests)))
        return models[-1], pb_utils

    yield start
    for model in models:
        model.close()
        assert model._running == {}
        assert model._cancelled == set()


def responses(*answers):
    return [InferenceResponse(write_tensors(PbUtils(), answer.to_tensors())) for answer in answers]


def speaking(inner):
    """A stream: text, two chunks of sound, info, and the empty final that Triton's stream ends with."""
    del inner
    return [
        *responses(
            Answer(text="Hel"),
            Answer(text="lo", audio=torch.tensor([0.1, 0.2])),
            Answer(audio=torch.tensor([0.3])),
            Answer(info=INFO),
        ),
        InferenceResponse(),
    ]


def ask(model, *inputs, **fields):
    request = Request(inputs or [text_tensor("text_input", "hi")], **fields)
    model.execute([request])
    return request


def answered(request):
    assert request.sender.done.wait(WAIT_S), "no final"
    assert request.sender.finals == 1
    assert request.sender.violations == []
    return request.sender


def reply(request):
    [outputs] = answered(request).outputs()
    return {name: value(tensor) for name, tensor in outputs.items()}


def value(tensor):
    array = tensor.as_numpy()
    return bytes(array[0]) if array.dtype == object else array.tolist()


def inner_parameters(inner):
    [tensor] = [tensor for tensor in inner.inputs if tensor.name() == "sampling_parameters"]
    return bytes(tensor.as_numpy()[0])


def test_the_stream_becomes_one_response(serve):
    model, _ = serve(speaking)
    found = reply(ask(model))
    assert found["text_output"] == b"Hello"
    assert found["audio_output"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["audio_base64"] == b""
    assert found["info"].decode() == INFO


def test_a_reply_without_sound_is_whole(serve):
    model, _ = serve(lambda inner: responses(Answer(text="hi"), Answer(info=INFO)))
    found = reply(ask(model))
    assert (found["text_output"], found["audio_output"], found["audio_base64"]) == (b"hi", [], b"")


def test_wav_chunks_become_one_file_of_true_length(serve):
    samples = torch.linspace(-1, 1, 48)
    chunks = [wav_header(24000) + to_pcm16(samples[:10]), to_pcm16(samples[10:]), b""]
    model, _ = serve(lambda inner: responses(*[Answer(audio_base64=to_base64(c)) for c in chunks], Answer(info=INFO)))
    data = base64.b64decode(reply(ask(model))["audio_base64"])
    with wave.open(io.BytesIO(data)) as file:
        assert file.getparams()[:4] == (1, 2, 24000, 48)
        assert file.readframes(48) == to_pcm16(samples)
    assert len(data) == 44 + 96


@pytest.mark.parametrize("start", [b"\x01\x02", b"RIFF\x00\x00 loud from the first sample on" + bytes(40)])
def test_pcm_chunks_are_joined_as_they_are(serve, start):
    model, _ = serve(
        lambda inner: responses(*[Answer(audio_base64=to_base64(c)) for c in (start, b"\x03\x04")], Answer(info=INFO))
    )
    assert base64.b64decode(reply(ask(model))["audio_base64"]) == start + b"\x03\x04"


def test_the_inner_request_is_the_outer_one_with_a_cancel_token(serve):
    model, pb_utils = serve(speaking)
    media = text_tensor("media", b"\x00\x01")
    parameters = text_tensor("sampling_parameters", '{"seed": 3, "modalities": ["text"]}')
    request = ask(model, media, parameters, request_id="r-7", parameters='{"priority": 2, "note": "x"}')
    answered(request)
    [inner] = pb_utils.inner
    assert inner.model_name == "qwen2_5_omni"
    assert inner.request_id == "r-7"
    assert inner.parameters == {"priority": 2, "note": "x"}
    assert set(inner.requested_output_names) == {"text_output", "audio_output", "audio_base64", "info"}
    assert [tensor.name() for tensor in inner.inputs] == ["media", "sampling_parameters"]
    assert inner.inputs[0] is media
    sent = json.loads(inner_parameters(inner))
    assert 0 < int(sent.pop("cancel_token")) < 2**63
    assert sent == {"seed": 3, "modalities": ["text"]}


def test_every_request_has_a_token_of_its_own(serve):
    model, pb_utils = serve(speaking)
    for _ in range(5):
        answered(ask(model))
    assert len({json.loads(inner_parameters(inner))["cancel_token"] for inner in pb_utils.inner}) == 5


@pytest.mark.parametrize(
    "given", ["[1, 2]", '"text"', "3", "null", "{not json", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_parameters_that_are_no_object_go_on_unchanged_to_be_refused(serve, given):
    model, pb_utils = serve(lambda inner: [refusal(BadRequest("sampling_parameters: expected an object"))])
    request = ask(model, text_tensor("sampling_parameters", given))
    assert answered(request).error.code() == TritonError.INVALID_ARG
    given = given if isinstance(given, bytes) else given.encode()
    assert inner_parameters(pb_utils.inner[0]) == given


def test_parameters_nested_without_end_are_the_ensembles_to_refuse(serve):
    model, pb_utils = serve(lambda inner: [refusal(BadRequest("sampling_parameters: nested too deep"))])
    deep = '{"voice": ' + "[" * 100_000
    assert answered(ask(model, text_tensor("sampling_parameters", deep))).error.code() == TritonError.INVALID_ARG
    assert inner_parameters(pb_utils.inner[0]) == deep.encode()


def refusal(error):
    return InferenceResponse(error=TritonError(f"in ensemble 'qwen2_5_omni', {error.to_text()}"))


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
    model, _ = serve(lambda inner: [*responses(Answer(text="Hel")), refusal(error)])
    sender = answered(ask(model))
    assert sender.outputs() == []
    assert sender.error.code() == code
    assert sender.error.message().endswith(error.to_text())


def test_an_error_that_comes_as_the_last_info_is_the_answer(serve):
    """Triton loses a late error response on its way to a BLS, so token2wav sends it in-band."""
    late = json.dumps({"error": Overloaded("full", stage="talker", retry_after_ms=9).to_text()})
    model, _ = serve(lambda inner: responses(Answer(text="Hel"), Answer(info=late)))
    sender = answered(ask(model))
    assert sender.outputs() == []
    assert sender.error.code() == TritonError.UNAVAILABLE
    assert sender.error.message() == "full [omni:overloaded;stage=talker;retry_after_ms=9]"


def test_a_fault_of_triton_is_internal(serve):
    model, _ = serve(lambda inner: [InferenceResponse(error=TritonError("Failed to open shared memory"))])
    error = answered(ask(model)).error
    assert error.code() == TritonError.INTERNAL
    assert error.message() == "Failed to open shared memory [omni:internal]"


def test_a_fault_of_ours_is_internal_and_tells_nothing_of_itself(serve, caplog):
    model, _ = serve(lambda inner: 1 / 0)
    error = answered(ask(model, request_id="r-9")).error
    assert error.message() == "the reply could not be collected [omni:internal;stage=unary]"
    assert "r-9" in caplog.text
    assert answered(ask(model)).finals == 1


def test_a_stream_that_ends_without_info_is_an_error_of_ours(serve):
    model, _ = serve(lambda inner: responses(Answer(text="Hel")))
    error = answered(ask(model)).error
    assert error.code() == TritonError.INTERNAL
    assert "without its last response" in error.message()


class Gate:
    """A stream that waits until it is let go, or until its cancel token is in the ledger."""

    def __init__(self, reader=None):
        self.reader, self.open, self.entered = reader, threading.Event(), threading.Semaphore(0)

    def __call__(self, inner):
        self.entered.release()
        token = int(json.loads(inner_parameters(inner))["cancel_token"])
        end = time.monotonic() + WAIT_S
        while not self.open.wait(0.002):
            assert time.monotonic() < end
            if self.reader is not None and token in self.reader.tokens_since(0)[0]:
                return [InferenceResponse()]
        return speaking(inner)

    def wait(self, count=1):
        for _ in range(count):
            assert self.entered.acquire(timeout=WAIT_S)


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


def wait_for(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "condition not met"
        time.sleep(0.001)


def test_a_cancelled_request_writes_its_token_once_and_ends_as_cancelled(serve, reader):
    gate = Gate(reader)
    model, pb_utils = serve(gate)
    request, other = ask(model), ask(model)
    gate.wait(2)
    request.sender.cancelled = True
    error = answered(request).error
    assert error.code() == TritonError.CANCELLED
    assert error.message() == "the request was cancelled [omni:cancelled;stage=unary]"
    time.sleep(0.12)  # two more looks of the watcher
    tokens = [int(json.loads(inner_parameters(inner))["cancel_token"]) for inner in pb_utils.inner]
    written, _ = reader.tokens_since(0)
    assert len(written) == 1
    assert written[0] in tokens
    assert not other.sender.done.is_set()
    gate.open.set()
    reply(other)


def test_a_request_that_ends_while_its_cancel_is_seen_leaves_nothing(serve):
    """The fixture asserts that no token stays behind."""
    model, _ = serve(speaking)
    for _ in range(20):
        request = Request([text_tensor("text_input", "hi")])
        request.sender.cancelled = True
        model.execute([request])
        answered(request)


def test_close_waits_for_running_requests_and_sends_their_answers(ledger):
    gate = Gate()
    model = UnaryModel(PbUtils(gate), ledger, UnarySettings())
    request = ask(model)
    gate.wait()
    threading.Timer(0.05, gate.open.set).start()
    model.close()
    assert reply(request)["text_output"] == b"Hello"


def test_a_large_array_is_read_without_loss(serve):
    sound = np.random.default_rng(0).uniform(-1, 1, 100_000).astype(np.float32)
    model, _ = serve(
        lambda inner: [
            InferenceResponse(
                [
                    text_tensor("text_output", ""),
                    Tensor("audio_output", chunk),
                    text_tensor("audio_base64", ""),
                    text_tensor("info", INFO if last else ""),
                ]
            )
            for chunk, last in ((sound[:33_333], False), (sound[33_333:], True))
        ]
    )
    assert np.array_equal(np.float32(reply(ask(model))["audio_output"]), sound)

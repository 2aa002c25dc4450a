# SPDX-License-Identifier: Apache-2.0
"""The public contract over every way in: unary over HTTP and gRPC, `/generate`, `/generate_stream`; what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from media_samples import audio_file, image_file
from server.asking import every_session_taken
from server.serving import REPLY_S, Served
from triton_omni.session.wire import PROTOCOL_VERSION, Seal
from triton_omni_client import Overloaded, Reply, Request
from triton_omni_client.audio import Pcm16Decoder, wav_header
from triton_omni_client.messages import MODEL, UNARY_MODEL
from triton_omni_client.protocol import to_grpc

Inputs = Mapping[str, Sequence[bytes]]

GREEDY = {"seed": 71, "talker": {"temperature": 0}}
SAME = 1e-5
"""A waveform may differ by this when it is solved again; a float of a JSON answer has digits enough for it."""
PCM16_STEP = 1 / 32767


def bytes_tensor(elements: Sequence[bytes]) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


def infer_request(inputs: Inputs, model: str) -> Any:
    """Triton's gRPC request of these BYTES inputs, checked by nobody."""
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, elements in inputs.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[len(elements)])
    message.raw_input_contents.extend(bytes_tensor(elements) for elements in inputs.values())
    return message


def stream_error(server: Served, inputs: Inputs) -> str:
    """The one error that a stream of these inputs ends with."""
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([infer_request(inputs, MODEL)]), timeout=REPLY_S))
    assert len(answers) == 1
    return str(answers[0].error_message)


def unary_error(server: Served, inputs: Inputs) -> tuple[grpc.StatusCode, str]:
    message = infer_request(inputs, UNARY_MODEL)
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=REPLY_S)
    return caught.value.code(), caught.value.details()


def generate(server: Served, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON of `POST /generate` of the unary model."""
    status, text = server.post(f"/v2/models/{UNARY_MODEL}/generate", json.dumps(fields))
    return status, json.loads(text)


def stream_events(server: Served, parameters: str) -> list[dict[str, Any]]:
    """Events of `POST /generate_stream` to its end."""
    body = json.dumps({"text_input": "hello", "sampling_parameters": parameters})
    status, text = server.post(f"/v2/models/{MODEL}/generate_stream", body)
    assert status == 200
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.fixture(scope="module")
def streamed(shared_server: Served) -> Reply:
    """The reply that every other way in must give as well."""
    return shared_server.ask("streamed", "hello", **GREEDY)


def test_http_infer_gives_the_stream_s_reply_at_once(server: Served, streamed: Reply) -> None:
    reply = server.http.unary(Request(text="hello", request_id="infer", **GREEDY))
    assert reply.text == streamed.text
    np.testing.assert_allclose(reply.audio, streamed.audio, rtol=0, atol=SAME)
    assert reply.info is not None
    assert streamed.info is not None
    assert reply.info.raw["usage"] == streamed.info.raw["usage"]
    assert reply.info.finish_reason == streamed.info.finish_reason


def test_grpc_infer_gives_the_stream_s_reply_at_once(server: Served, streamed: Reply) -> None:
    message = to_grpc(Request(text="hello", request_id="ModelInfer", **GREEDY), UNARY_MODEL)
    message.parameters.clear()
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
    outputs = dict(zip([out.name for out in answer.outputs], answer.raw_output_contents, strict=True))
    assert outputs["text_output"] == bytes_tensor([streamed.text.encode()])
    np.testing.assert_allclose(np.frombuffer(outputs["audio_output"], "<f4"), streamed.audio, rtol=0, atol=SAME)


def test_generate_gives_the_stream_s_reply_as_json(server: Served, streamed: Reply) -> None:
    status, answer = generate(server, text_input="hello", sampling_parameters=json.dumps(GREEDY))
    assert status == 200
    assert answer["text_output"] == streamed.text
    np.testing.assert_allclose(answer["audio_output"], streamed.audio, rtol=0, atol=SAME)


def test_generate_stream_gives_the_same_deltas_as_server_sent_events(server: Served, streamed: Reply) -> None:
    events = stream_events(server, json.dumps(GREEDY))
    assert "".join(event["text_output"] for event in events) == streamed.text
    samples = [np.atleast_1d(event["audio_output"]) for event in events if event["audio_output"] not in ([], "")]
    np.testing.assert_allclose(np.concatenate(samples), streamed.audio, rtol=0, atol=SAME)
    assert [bool(event["info"]) for event in events] == [False] * (len(events) - 1) + [True]


def encoded_by_generate(server: Served, parameters: str) -> bytes:
    status, answer = generate(server, text_input="hello", sampling_parameters=parameters)
    assert status == 200
    return base64.b64decode(answer["audio_base64"], validate=True)


def encoded_by_grpc(server: Served, parameters: str) -> bytes:
    message = infer_request({"text_input": [b"hello"], "sampling_parameters": [parameters.encode()]}, UNARY_MODEL)
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message)
    outputs = dict(zip([out.name for out in answer.outputs], answer.raw_output_contents, strict=True))
    assert outputs["audio_output"] == b""
    return base64.b64decode(outputs["audio_base64"][4:], validate=True)


def encoded_by_generate_stream(server: Served, parameters: str) -> bytes:
    """The chunks joined before they are decoded."""
    chunks = [event["audio_base64"] for event in stream_events(server, parameters)]
    assert sum(map(bool, chunks)) > 1
    return base64.b64decode("".join(chunks), validate=True)


ENCODED: Mapping[str, Callable[[Served, str], bytes]] = {
    "generate": encoded_by_generate,
    "grpc-unary": encoded_by_grpc,
    "generate_stream": encoded_by_generate_stream,
}


@pytest.mark.parametrize("way", ENCODED)
@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
def test_encoded_audio_is_what_f32_is(server: Served, streamed: Reply, audio_format: str, way: str) -> None:
    data = ENCODED[way](server, json.dumps({**GREEDY, "audio_format": audio_format}))
    if audio_format == "wav":
        header, data = data[:44], data[44:]
        assert header == wav_header(None if way == "generate_stream" else len(streamed.audio))
    np.testing.assert_allclose(Pcm16Decoder().feed(data), streamed.audio, rtol=0, atol=PCM16_STEP / 2 + SAME)


def test_many_unary_requests_at_a_time_each_get_their_own_reply(server: Served) -> None:
    texts = ["hello", "x", "why", "Hi.", "1 2 3", "aaaa"]
    alone = {text: server.ask(f"unary alone: {text}", text, **GREEDY) for text in texts}
    server.wait_until_idle()
    with ThreadPoolExecutor(len(texts)) as pool:
        replies = list(pool.map(lambda text: server.http.say(text, **GREEDY), texts))
    for text, reply in zip(texts, replies, strict=True):
        assert reply.text == alone[text].text
        np.testing.assert_allclose(reply.audio, alone[text].audio, rtol=0, atol=SAME)


@dataclass(frozen=True)
class Refused:
    """A request that is wrong, and what the error must say."""

    inputs: Inputs
    says: str
    code: str = "bad_request"


def with_parameters(text: str) -> Inputs:
    return {"text_input": [b"hello"], "sampling_parameters": [text.encode()]}


def with_media(kind: str, *media: bytes) -> Inputs:
    messages = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "what is this?"}]}]
    return {"messages": [json.dumps(messages).encode()], **({"media": media} if media else {})}


def with_url(url: str) -> Inputs:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    return {"messages": [json.dumps(messages).encode()]}


REFUSED = {
    "unknown voice": Refused(with_parameters('{"voice": "Nobody"}'), "sampling_parameters.voice: 'Nobody'"),
    "bad JSON": Refused(with_parameters('{"voice": '), "sampling_parameters"),
    "no JSON object": Refused(with_parameters("[1]"), "sampling_parameters"),
    "unknown key": Refused(with_parameters('{"thinker": {"temprature": 1}}'), "sampling_parameters.thinker.temprature"),
    "value out of range": Refused(
        with_parameters('{"thinker": {"temperature": 3}}'), "sampling_parameters.thinker.temperature"
    ),
    "wrong type": Refused(with_parameters('{"seed": "1"}'), "sampling_parameters.seed"),
    "neither input": Refused({"sampling_parameters": [b"{}"]}, "exactly one of text_input and messages"),
    "both inputs": Refused({"text_input": [b"a"], "messages": [b"[]"]}, "exactly one of text_input and messages"),
    "bad messages": Refused({"messages": [b"[{]"]}, "messages"),
    "no UTF-8": Refused({"text_input": [b"\xff\xfe"]}, "text_input"),
    "prompt too long": Refused({"text_input": [b"word " * 600]}, "1024", "too_large"),
    "text too large": Refused({"text_input": [b"a" * 8193]}, "8192", "too_large"),
    "reply too long": Refused(
        with_parameters('{"thinker": {"max_tokens": 257}}'), "sampling_parameters.thinker.max_tokens", "too_large"
    ),
    "least length over the longest": Refused(
        with_parameters('{"talker": {"max_tokens": 8, "min_tokens": 9}}'), "talker.min_tokens: 9 is over max_tokens, 8"
    ),
    "medium too large": Refused(with_media("audio", b"RIFF" + bytes(1 << 20)), str(1 << 20), "too_large"),
    "sound too long": Refused(with_media("audio", audio_file("wav", seconds=5.5)), "medium 0 (audio)", "too_large"),
    "another medium than said": Refused(with_media("image", audio_file("wav")), "medium 0 (image)"),
    "broken medium": Refused(with_media("image", image_file("png")[:60]), "medium 0 (image)"),
    "missing medium": Refused(with_media("image"), "media"),
    "medium too many": Refused(with_media("audio", audio_file("wav"), audio_file("wav")), "media"),
    "URL of the web": Refused(with_url("http://example.com/a.png"), "http"),
    "path of a file": Refused(with_url("file:///etc/passwd"), "file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_request_is_refused_with_its_cause_and_code(server: Served, name: str) -> None:
    refused = REFUSED[name]
    tail = f"[omni:{refused.code};stage=thinker]"
    text = stream_error(server, refused.inputs)
    assert refused.says in text
    assert text.endswith(tail)
    code, details = unary_error(server, refused.inputs)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.says in details
    assert details.endswith(tail)


def test_wrong_request_is_http_400(server: Served) -> None:
    status, answer = generate(server, text_input="hello", sampling_parameters='{"voice": "Nobody"}')
    assert status == 400
    assert answer["error"].endswith("[omni:bad_request;stage=thinker]")


def test_a_field_in_the_wrong_place_is_refused_by_name_by_every_way(server: Served) -> None:
    says = "num_steps: not a field of a request, it belongs into sampling_parameters.token2wav"
    status, answer = generate(server, text_input="hello", num_steps=4)
    assert status == 400
    assert says in answer["error"]
    body = json.dumps({"text_input": "hello", "parameters": {"num_steps": 4}})
    _, text = server.post(f"/v2/models/{MODEL}/generate_stream", body)
    assert says in text
    message = infer_request({"text_input": [b"hello"]}, MODEL)
    message.parameters["num_steps"].int64_param = 4
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        [only] = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]), timeout=REPLY_S)
    assert says in only.error_message


def test_sampling_keys_of_generate_may_be_parameters_as_of_vllm_s_backend(server: Served) -> None:
    options = {"temperature": 0.9, "max_tokens": 12, "seed": 5}
    said = {"seed": 5, "thinker": {"temperature": 0.9, "max_tokens": 12}}
    _, answer = generate(server, text_input="hello", sampling_parameters=json.dumps(said))
    _, flat = generate(server, text_input="hello", parameters=options)
    assert (flat["text_output"], flat["audio_output"]) == (answer["text_output"], answer["audio_output"])
    _, greedy = generate(server, text_input="hello", parameters={**options, "temperature": 0})
    assert greedy["text_output"] != flat["text_output"]
    body = json.dumps({"text_input": "hello", "parameters": options})
    _, text = server.post(f"/v2/models/{MODEL}/generate_stream", body)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert "".join(event["text_output"] for event in events) == flat["text_output"]
    status, refused = generate(server, text_input="hello", parameters={"temperature": 9})
    assert status == 400
    assert "sampling_parameters.thinker.temperature: must be at most 2 (got 9)" in refused["error"]


def test_an_object_for_sampling_parameters_is_refused_with_how_to_write_it(server: Served) -> None:
    status, answer = generate(server, text_input="hello", sampling_parameters={"seed": 5})
    assert status == 400
    assert answer["error"].startswith("an input is not text: write an object such as sampling_parameters as a string")
    assert answer["error"].endswith("[omni:bad_request;stage=thinker]")


def test_parameters_of_triton_pass(server: Served) -> None:
    triton_s: dict[str, int | bool] = {"sequence_id": 5, "sequence_start": True, "sequence_end": True}
    status, _ = generate(server, text_input="hello", id="sequence", sampling_parameters='{"seed": 1}', **triton_s)
    assert status == 200
    message = to_grpc(Request(text="hello", request_id="parameters", seed=1), UNARY_MODEL)
    for name, value in ({"timeout": 60_000_000} | triton_s).items():
        field = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(message.parameters[name], field, value)
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        assert service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=REPLY_S).outputs


def test_no_free_session_is_refused_with_a_time_to_retry_and_the_next_request_is_served(server: Served) -> None:
    with every_session_taken(server):
        with pytest.raises(Overloaded) as caught:
            server.ask("one too many", "hello")
        assert caught.value.message.endswith("all 8 sessions are in use")
        assert (caught.value.stage, caught.value.retry_after_ms) == ("thinker", 250)
        code, details = unary_error(server, {"text_input": [b"hello"]})
        assert code is grpc.StatusCode.UNAVAILABLE
        assert details.endswith("all 8 sessions are in use [omni:overloaded;stage=thinker;retry_after_ms=250]")
        status, answer = generate(server, text_input="hello")
        assert status == 400  # whatever the code: Triton's /generate knows no other
        assert "[omni:overloaded;stage=thinker;retry_after_ms=250]" in answer["error"]
    server.wait_until_idle()
    assert server.ask("the next", "hello", seed=1).info is not None


def forged(version: int = PROTOCOL_VERSION, slot: int = 0, **fields: Any) -> bytes:
    """META of a message of nobody's session, with a seal that is no stage's."""
    key = {"slot": slot, "generation": 1}
    content = bytes([version]) + msgspec.msgpack.encode({"key": key, **fields})
    return Seal(bytes(32), "thinker").sign(content)


FORGED = {
    "forged session": forged(kind="text", sequence=1, text="hello", last=True),
    "no message": b"hello",
    "nothing": b"",
    "another version": forged(version=99, kind="open"),
    "slot out of range": forged(slot=99999999, kind="open"),
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("stage", ["talker", "token2wav"])
def test_a_client_that_calls_a_later_stage_directly_gets_nowhere(server: Served, stage: str, name: str) -> None:
    message = infer_request({}, stage)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.inputs.add(name="META", datatype="UINT8", shape=[len(FORGED[name])])
    if stage == "talker":
        message.inputs.add(name="ROWS", datatype="FP32", shape=[0, hidden_size(server)])
    else:
        message.inputs.add(name="CODES", datatype="INT32", shape=[0])
    message.raw_input_contents.extend([FORGED[name], b""])
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([message]), timeout=REPLY_S))
    assert [answer.error_message for answer in answers] == [""]
    assert not answers[0].infer_response.outputs
    assert server.ask(f"after {name} at {stage}", "x", seed=1).info is not None


def hidden_size(server: Served) -> int:
    config = json.loads((server.checkpoint / "config.json").read_text())
    return int(config["thinker_config"]["text_config"]["hidden_size"])


@pytest.mark.parametrize("path", ["index", "models/thinker/load", "models/thinker/unload", "models/draining/load"])
def test_model_control_is_refused_to_whoever_has_not_the_supervisors_key(server: Served, path: str) -> None:
    status, text = server.post(f"/v2/repository/{path}", "{}")
    assert status == 403
    assert "restricted" in text
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryModelUnload(
            service_pb2.RepositoryModelUnloadRequest(model_name="thinker")
        )
    assert "triton-omni-control" in caught.value.details()
    assert server.client.ready()

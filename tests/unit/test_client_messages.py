# SPDX-License-Identifier: Apache-2.0
"""The client's view of the public contract: requests to tensors, tensors to deltas, names as in config.pbtxt."""

from __future__ import annotations

import ast
import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

import triton_omni_client
from client_fakes import INFO, floats
from triton_omni_client.audio import pcm16_from_waveform, wav_header
from triton_omni_client.errors import BadRequest, Internal
from triton_omni_client.messages import (
    INPUTS,
    MODEL,
    OUTPUTS,
    UNARY_MODEL,
    AudioDelta,
    Info,
    Media,
    Request,
    Tensor,
    TextDelta,
)
from triton_omni_client.outputs import OutputDecoder
from triton_omni_client.reply import ReplyBuilder

REPOSITORY = Path(__file__).parents[2] / "model_repository"


def _tensors(request: Request) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in request.to_tensors()}


def _parameters(**options: Any) -> Any:
    return json.loads(_tensors(Request(text="x", **options))["sampling_parameters"].text())


def _bytes(name: str, data: bytes) -> dict[str, Tensor]:
    return {name: Tensor.of_bytes(name, [data])}


@pytest.mark.parametrize("model", [MODEL, UNARY_MODEL])
def test_tensor_names_and_types_are_those_of_the_model_repository(model: str) -> None:
    config = text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    kinds = {"TYPE_STRING": "BYTES", "TYPE_FP32": "FP32"}
    for ours, theirs in ((INPUTS, config.input), (OUTPUTS, config.output)):
        assert ours == {t.name: kinds[model_config_pb2.DataType.Name(t.data_type)] for t in theirs}


def test_the_client_imports_nothing_of_the_backend() -> None:
    imported = set()
    for path in Path(triton_omni_client.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).split(".")[0])
    assert imported.isdisjoint({"triton_omni", "torch", "vllm", "transformers"})
    assert {"numpy", "grpc"} <= imported


def test_a_plain_question_is_one_tensor() -> None:
    tensors = _tensors(Request(text="Grüße"))
    assert set(tensors) == {"text_input"}
    assert tensors["text_input"].shape == (1,)
    assert tensors["text_input"].data == struct.pack("<I", 7) + "Grüße".encode()


def test_media_come_before_the_text_in_one_message() -> None:
    tensors = _tensors(Request.ask("what?", [Media("image", b"i"), Media("video", b"vv")]))
    content = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "what?"}]
    assert json.loads(tensors["messages"].text()) == [{"role": "user", "content": content}]
    assert (tensors["media"].shape, tensors["media"].data) == ((2,), b"\1\0\0\0i\2\0\0\0vv")


def test_media_alone_need_no_text() -> None:
    (message,) = Request.ask(media=[Media("audio", b"a")]).messages or []
    assert message["content"] == [{"type": "audio"}]


def test_a_chat_goes_as_it_is_given() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    assert json.loads(_tensors(Request(messages=chat))["messages"].text()) == chat


def test_every_choice_is_sent_under_its_name() -> None:
    options = {
        "modalities": ["text"],
        "voice": "Ethan",
        "seed": 0,
        "audio_format": "wav",
        "use_audio_in_video": False,
        "mm_processor_kwargs": {"fps": 1},
        "timeout": 2.5,
        "thinker": {"temperature": 0},
        "talker": {"top_k": 3},
        "token2wav": {"solver": "euler"},
    }
    assert _parameters(**options) == options


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"text": "a", "messages": []},
        {"text": "a", "audio_format": "mp3"},
        {"text": "a", "timeout": 0},
        {"text": "a", "timeout": float("inf")},
        {"text": "a", "timeout": float("nan")},
    ],
)
def test_an_impossible_request_is_refused_before_it_is_sent(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        Request(**options)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(text="\ud800"), "text"),
        (Request(text="x", thinker={"temperature": float("nan")}), "sampling_parameters"),
        (Request(messages=[{"role": "user", "content": b"raw"}]), "messages"),
        (Request(messages=[{"role": "user", "content": "\udfff"}]), "messages"),
    ],
)
def test_what_json_cannot_express_is_refused_by_name(request_: Request, name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        request_.to_tensors()


def test_a_medium_that_cannot_be_read_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"image .*none.png: cannot be read"):
        Media.from_file("image", tmp_path / "none.png")


def test_media_bytes_are_kept_out_of_the_representation() -> None:
    request = Request.ask("x", [Media("image", b"secret")])
    assert "secret" not in repr(request) + repr(Media("image", b"secret"))


def test_one_response_may_hold_text_audio_and_info() -> None:
    audio = Tensor("audio_output", "FP32", (2,), floats([0.5, -1]).tobytes())
    outputs = _bytes("text_output", b"hi") | {"audio_output": audio} | _bytes("info", b'{"seed": 3}')
    text, sound, info = OutputDecoder("f32").feed(outputs)
    assert text == TextDelta("hi")
    assert isinstance(sound, AudioDelta)
    assert sound.samples.tolist() == [0.5, -1]
    assert sound.seconds == 2 / 24_000
    assert isinstance(info, Info)
    assert info.seed == 3
    sound.samples[0] = 0  # the caller's own, not a view of the message


def test_an_empty_response_holds_nothing() -> None:
    outputs = {name: Tensor.of_bytes(name, [b""]) for name in ("text_output", "audio_base64", "info")}
    outputs["audio_output"] = Tensor("audio_output", "FP32", (0,), b"")
    assert OutputDecoder("f32").feed(outputs) == OutputDecoder("wav").feed(outputs) == []
    assert OutputDecoder("f32").feed({"text_output": Tensor("text_output", "BYTES", (0,), b"")}) == []


@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
def test_encoded_chunks_join_to_the_exact_waveform(audio_format: Any) -> None:
    waveform = np.arange(-600, 600, dtype=np.float32) * 27 / np.float32(32767)
    data = (wav_header(None) if audio_format == "wav" else b"") + pcm16_from_waveform(waveform)
    decoder = OutputDecoder(audio_format)
    pieces = []
    for at in range(0, len(data), 101):  # cuts samples, and the header, in two
        deltas = decoder.feed(_bytes("audio_base64", base64.b64encode(data[at : at + 101])))
        pieces += [delta.samples for delta in deltas if isinstance(delta, AudioDelta)]
    np.testing.assert_array_equal(np.concatenate(pieces), waveform)


@pytest.mark.parametrize(
    "outputs",
    [
        {"text_output": Tensor("text_output", "FP32", (1,), bytes(4))},
        {"text_output": Tensor("text_output", "BYTES", (1,), b"\1\0")},
        {"text_output": Tensor.of_bytes("text_output", [b"\xff"])},
        {"text_output": Tensor.of_bytes("text_output", [b"a", b"b"])},
        {"audio_output": Tensor("audio_output", "FP32", (2,), bytes(4))},
        {"audio_output": Tensor("audio_output", "BYTES", (1,), bytes(4))},
        _bytes("audio_base64", b"%%%"),
        _bytes("info", b"{"),
        _bytes("info", b"[]"),
        _bytes("info", b'{"seed": "many"}'),
        _bytes("info", b'{"seed": 1.5}'),
        _bytes("info", b'{"usage": {"codes": true}}'),
        _bytes("info", b'{"usage": {"prompt_tokens_details": 3}}'),
        _bytes("info", b'{"usage": {"prompt_tokens_details": {"audio_tokens": 1.5}}}'),
        _bytes("info", b'{"stage_ms": {"talker": 3}}'),
        _bytes("info", b'{"finish_reason": {"thinker": 1}}'),
        _bytes("info", b'{"stop_string": ["a"]}'),
    ],
)
def test_an_output_outside_of_the_contract_is_an_internal_error(outputs: dict[str, Tensor]) -> None:
    name = next(iter(outputs))
    with pytest.raises(Internal, match=name):
        OutputDecoder("f32").feed(outputs)


def test_info_is_read_by_name() -> None:
    info = Info.from_json(json.dumps(INFO))
    assert info.finish_reason == {"thinker": "stop", "talker": "length", "token2wav": None}
    assert (info.prompt_tokens, info.reply_tokens, info.codes, info.samples, info.seed) == (9, 3, 2, 960, 7)
    assert info.prompt_tokens_details == INFO["usage"]["prompt_tokens_details"]
    assert (info.time_to_first_text_ms, info.time_to_first_audio_ms) == (1.5, 4)
    assert info.stage_ms == INFO["stage_ms"]


def test_info_has_the_stop_string_that_ended_the_reply() -> None:
    assert Info.from_json('{"stop_string": "###"}').stop_string == "###"
    assert Info.from_json('{"stop_string": null}').stop_string is None


def test_info_keeps_what_it_does_not_know_and_is_none_where_the_server_is_silent() -> None:
    info = Info.from_json('{"seed": 5, "later": [1]}')
    assert (info.seed, info.codes, info.time_to_first_audio_ms, dict(info.finish_reason)) == (5, None, None, {})
    assert info.raw["later"] == [1]


def test_times_are_those_of_the_first_text_and_the_first_audio() -> None:
    now = iter([10.0, 10.5, 11.0, 12.0, 13.0, 15.0])
    builder = ReplyBuilder(lambda: next(now))
    half_a_second = np.zeros(12_000, np.float32)
    for delta in (TextDelta("a"), AudioDelta(half_a_second), TextDelta("b"), AudioDelta(half_a_second)):
        builder.add(delta)
    builder.end()
    builder.end()  # the first end counts
    times = builder.reply().timings
    assert (times.first_text, times.first_audio, times.total, times.audio) == (0.5, 1.0, 5.0, 1.0)
    assert times.real_time_factor == 5.0


def test_a_reply_without_speech_has_no_real_time_factor_and_saves_an_empty_file(tmp_path: Path) -> None:
    builder = ReplyBuilder()
    builder.add(TextDelta("a"))
    # A whole reply of text alone has such an empty part.
    builder.add(AudioDelta(np.zeros(0, np.float32)))
    reply = builder.reply()
    assert (reply.timings.real_time_factor, reply.timings.first_audio, len(reply.audio)) == (None, None, 0)
    reply.save_wav(tmp_path / "none.wav")
    assert (tmp_path / "none.wav").read_bytes() == wav_header(0)

# SPDX-License-Identifier: Apache-2.0
"""Chat completions through the gateway, asked by the official `openai` client, with a scripted Triton behind."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import httpx
import numpy as np
import openai
import pytest

from client_fakes import INFO, FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc
from gateway_fakes import MODEL, TIMEOUT_S, USER, RunningGateway, run_gateway
from realtime_client import speech
from triton_omni_client.audio import WavDecoder, pcm16_from_waveform, wav_header
from triton_omni_gateway import schemas, service
from triton_omni_gateway.sound import SoundFormat
from unit.test_gateway_speech import decoded, joined

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SPOKEN = np.repeat(np.array([0.25, -0.5], np.float32), 480)
AUDIO = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}}


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def messages_of(triton: FakeTriton) -> Any:
    return json.loads(inputs_of(triton.requests[-1])["messages"][0])


def test_a_whole_text_reply(triton: FakeTriton, gateway: RunningGateway) -> None:
    reply = gateway.chat(seed=7)
    assert reply.choices[0].message.content == "Hello, sea."
    assert reply.choices[0].message.audio is None
    assert (reply.object, reply.model, reply.choices[0].message.role) == ("chat.completion", MODEL, "assistant")
    assert reply.id.startswith("chatcmpl-")
    assert abs(reply.created - time.time()) < 60
    assert reply.model_extra["info"] == INFO
    assert messages_of(triton) == USER
    assert parameters_of(triton.requests[0]) == {"modalities": ["text"], "seed": 7}


def test_the_caller_s_trace_is_passed_on(triton: FakeTriton, gateway: RunningGateway) -> None:
    for header in (TRACEPARENT, "x" * 5000):
        gateway.chat(extra_headers={"traceparent": header})
        assert triton.requests[-1].parameters["traceparent"].string_param == header[:64]
    gateway.chat()
    assert "traceparent" not in triton.requests[-1].parameters


@pytest.mark.parametrize(("padding", "apart"), [(100, False), (1 << 20, True)])
def test_a_large_body_is_parsed_apart_from_the_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, padding: int, apart: bool
) -> None:
    has_loop: list[bool] = []

    def parse(schema: Any, body: bytes) -> Any:
        has_loop.append(asyncio._get_running_loop() is not None)
        return schemas.parse(schema, body)

    monkeypatch.setattr(service, "parse", parse)
    assert gateway.chat(extra_body={"user": "x" * padding}).choices
    assert has_loop == [not apart]


@pytest.mark.parametrize(("least", "asked", "status"), [(0, 0, 200), (0, 100, 200), (0, -1, 400), (-100, -100, 200)])
def test_nobody_gets_in_front_of_others_unless_the_gateway_allows_it(
    triton: FakeTriton, least: int, asked: int, status: int
) -> None:
    with run_gateway(triton.url, min_priority=least) as gateway:
        answer = gateway.post({"model": MODEL, "messages": USER, "priority": asked})
        assert answer.status_code == status
        if status == 200:
            assert parameters_of(triton.requests[0])["priority"] == asked
        else:
            assert answer.json()["error"]["param"] == "priority"
            assert "-1 is under 0" in answer.json()["error"]["message"]
            assert triton.requests == []


def test_usage_counts_codes_as_audio_tokens(gateway: RunningGateway) -> None:
    usage = gateway.chat().usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 5, 14)
    assert usage.completion_tokens_details.audio_tokens == 2
    parts = {"text_tokens": 4, "audio_tokens": 0, "image_tokens": 5, "video_tokens": 0}
    details = usage.prompt_tokens_details.model_dump()
    assert {name: details[name] for name in (*parts, "cached_tokens")} == parts | {"cached_tokens": 3}


@pytest.mark.parametrize(("thinker", "talker", "reason"), [("stop", "stop", "stop"), ("length", "stop", "length")])
def test_the_finish_reason_is_openai_s(
    triton: FakeTriton, gateway: RunningGateway, thinker: str, talker: str, reason: str
) -> None:
    info = {"finish_reason": {"thinker": thinker, "talker": talker, "token2wav": None}}
    triton.script = lambda *_: iter([chunk(text="a", info=info), final()])
    assert gateway.chat().choices[0].finish_reason == reason


def prefilled(_request: Any, _context: Any) -> Iterator[Any]:
    reasons = {"thinker": "prefilled", "talker": "prefilled", "token2wav": None}
    usage = INFO["usage"] | {"reply_tokens": 0, "codes": 0, "samples": 0}  # type: ignore[operator]
    yield chunk(info=INFO | {"finish_reason": reasons, "usage": usage})
    yield final()


@pytest.mark.parametrize("options", [{}, AUDIO, {"modalities": ["text", "audio"]}], ids=["text", "pcm16", "wav"])
def test_a_prefill_is_an_empty_completion(triton: FakeTriton, gateway: RunningGateway, options: Any) -> None:
    triton.script = prefilled
    hint = {"prompt_cache_key": "talk", "prefill_only": True, "audio_in_pieces": True}
    reply = gateway.chat(**options, extra_body=hint)
    (choice,) = reply.choices
    assert (choice.message.content, choice.message.audio, choice.finish_reason) == ("", None, "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (9, 0)
    assert reply.model_extra["info"]["finish_reason"]["thinker"] == "prefilled"
    chunks = list(gateway.chat(**options, extra_body=hint, stream=True, stream_options={"include_usage": True}))
    assert [found.choices[0].delta.content for found in chunks[:-1]] == ["", None]
    assert (chunks[-2].choices[0].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", 0)
    assert not any("audio" in (found.choices[0].delta.model_extra or {}) for found in chunks[:-1])
    for request in triton.requests:
        parameters = parameters_of(request)
        assert (parameters["prefill_only"], parameters["audio_in_pieces"]) == (True, True)
        assert parameters["modalities"] == options.get("modalities", ["text"])


def test_a_server_s_refusal_of_a_prefill_names_the_key(triton: FakeTriton, gateway: RunningGateway) -> None:
    refusal = "sampling_parameters.prefill_only: this deployment has no prefix cache [omni:bad_request;stage=thinker]"
    triton.script = lambda *_: iter([failure(refusal)])
    answer = gateway.post({"model": MODEL, "messages": USER, "prompt_cache_key": "talk", "prefill_only": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prefill_only")
    assert error["message"] == "prefill_only: this deployment has no prefix cache"


def test_a_whole_spoken_reply_is_a_wav_file_with_its_transcript(triton: FakeTriton, gateway: RunningGateway) -> None:
    message = gateway.chat(modalities=["text", "audio"], audio={"voice": "Ethan", "format": "wav"}).choices[0].message
    assert message.content is None
    assert message.audio.transcript == "Hello, sea."
    assert message.audio.id.startswith("audio_")
    assert message.audio.expires_at > time.time() + 3000
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.readframes(file.getnframes()) == pcm16_from_waveform(SPOKEN)
    assert parameters_of(triton.requests[0]) == {"modalities": ["text", "audio"], "voice": "Ethan"}


def test_streamed_text_comes_in_deltas_of_content(gateway: RunningGateway) -> None:
    chunks = list(gateway.chat(stream=True))
    assert {found.object for found in chunks} == {"chat.completion.chunk"}
    assert len({(found.id, found.created) for found in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [found.choices[0].delta.content for found in chunks] == ["", "Hello", ", sea.", None]
    assert [found.choices[0].finish_reason for found in chunks] == [None, None, None, "length"]
    assert all(found.usage is None for found in chunks)
    assert chunks[-1].model_extra["info"]["seed"] == 7


def test_streamed_usage_is_an_event_of_its_own_before_the_end(gateway: RunningGateway) -> None:
    chunks = list(gateway.chat(stream=True, stream_options={"include_usage": True}))
    assert all("usage" in found.model_fields_set and found.usage is None for found in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 14


def test_streamed_audio_comes_in_deltas_of_audio(gateway: RunningGateway) -> None:
    chunks = list(gateway.chat(stream=True, **AUDIO))
    deltas = [found.choices[0].delta for found in chunks]
    audio = [delta.audio.model_dump(exclude_unset=True) for delta in deltas if delta.audio]
    assert [sorted(part) for part in audio] == [
        ["id", "transcript"],
        ["transcript"],
        ["data"],
        ["data"],
        ["expires_at"],
    ]
    assert "".join(part.get("transcript", "") for part in audio) == "Hello, sea."
    sound = b"".join(base64.b64decode(part.get("data", "")) for part in audio)
    assert sound == pcm16_from_waveform(SPOKEN)
    assert all(not delta.content for delta in deltas)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", get_args(SoundFormat))
def test_audio_of_each_format_is_the_speech(
    triton: FakeTriton, gateway: RunningGateway, form: str, stream: bool
) -> None:
    spoken = speech(2.0).astype(np.float32) / 32768
    texts = [chunk(text="Hello"), chunk(text=", sea.")]
    triton.script = lambda *_: iter([*texts, *(chunk(audio=part) for part in np.array_split(spoken, 8)), final()])
    reply = gateway.chat(modalities=["text", "audio"], audio={"voice": "Chelsie", "format": form}, stream=stream)
    if not stream:
        audio = [reply.choices[0].message.audio.model_dump()]
    else:
        deltas = [found.choices[0].delta for found in reply]
        audio = [delta.audio.model_dump(exclude_unset=True) for delta in deltas if delta.audio]
        assert [sorted(part) for part in audio[:2]] == [["id", "transcript"], ["transcript"]]
        assert [sorted(part) for part in audio[2:]] == [["data"]] * (len(audio) - 3) + [["expires_at"]]
        assert len(audio) > 6
    assert "".join(part.get("transcript", "") for part in audio) == "Hello, sea."
    data = joined([part["data"] for part in audio if "data" in part])
    heard = np.frombuffer(data, "<i2") / 32768 if form == "pcm16" else decoded(data)
    assert 0 <= len(heard) - len(spoken) < 2400  # an encoder's own silence
    likeness = np.correlate(heard, spoken, "valid").max() / np.linalg.norm(heard) / np.linalg.norm(spoken)
    assert likeness > 0.99


def test_streamed_wav_chunks_joined_are_one_file(gateway: RunningGateway) -> None:
    chunks = list(gateway.chat(stream=True, **AUDIO | {"audio": {"format": "wav"}}))
    audio = [found.choices[0].delta.audio for found in chunks]
    sound = b"".join(base64.b64decode(part.data) for part in audio if part and part.data)
    np.testing.assert_allclose(WavDecoder().feed(sound), SPOKEN, atol=1e-4)


def test_a_stream_is_server_sent_events_that_end_in_done(gateway: RunningGateway) -> None:
    answer = gateway.post({"model": MODEL, "messages": USER, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])


def test_text_arrives_before_the_reply_has_ended(triton: FakeTriton, gateway: RunningGateway) -> None:
    heard = threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="first")
        assert heard.wait(TIMEOUT_S)
        yield chunk(text="second")
        yield final()

    triton.script = script
    texts = []
    for found in gateway.chat(stream=True):
        texts.append(found.choices[0].delta.content)
        if texts[-1] == "first":
            heard.set()
    assert texts == ["", "first", "second", None]


def test_a_later_message_may_name_a_spoken_reply_by_its_id(triton: FakeTriton, gateway: RunningGateway) -> None:
    first = gateway.chat(modalities=["text", "audio"], audio={"format": "wav"}).choices[0].message
    gateway.chat(messages=[*USER, {"role": "assistant", "audio": {"id": first.audio.id}}, *USER])
    assert messages_of(triton) == [*USER, {"role": "assistant", "content": "Hello, sea."}, *USER]


def test_a_streamed_reply_can_be_named_too(triton: FakeTriton, gateway: RunningGateway) -> None:
    parts = [found.choices[0].delta.audio for found in gateway.chat(stream=True, **AUDIO)]
    (audio_id,) = [part.id for part in parts if part and part.id]
    gateway.chat(messages=[*USER, {"role": "assistant", "audio": {"id": audio_id}}, *USER])
    assert messages_of(triton)[1] == {"role": "assistant", "content": "Hello, sea."}


def test_a_reply_can_be_sent_back_as_it_came(triton: FakeTriton, gateway: RunningGateway) -> None:
    said = gateway.chat(modalities=["text", "audio"], audio={"format": "wav"}).choices[0].message
    gateway.chat(messages=[*USER, said.model_dump(), *USER])
    assert messages_of(triton)[1] == {"role": "assistant", "content": "Hello, sea."}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ("thinker: no [omni:bad_request;stage=thinker]", 400, openai.BadRequestError),
        ("long [omni:too_large]", 413, openai.APIStatusError),
        ("full [omni:overloaded;stage=thinker;retry_after_ms=2250]", 429, openai.RateLimitError),
        ("late [omni:timeout]", 504, openai.InternalServerError),
        ("gone [omni:cancelled]", 499, openai.APIStatusError),
        ("broken [omni:internal]", 500, openai.InternalServerError),
    ],
)
def test_an_error_before_the_first_delta_is_a_status(
    triton: FakeTriton, gateway: RunningGateway, case: tuple[str, int, type[Exception]], stream: bool
) -> None:
    text, status, kind = case
    triton.script = lambda *_: iter([failure(text)])
    with pytest.raises(openai.APIStatusError) as caught:
        gateway.chat(stream=stream)
    code = text.partition("[omni:")[2].rstrip("]").partition(";")[0]
    assert isinstance(caught.value, kind)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert text.partition(" [")[0] in caught.value.message
    assert caught.value.response.headers["x-request-id"].startswith("req_")
    assert not (status in (499, 504) and caught.value.response.headers["x-should-retry"] != "false")


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_is_not_offered_is_refused_with_the_list(
    triton: FakeTriton, gateway: RunningGateway, stream: bool
) -> None:
    audio = {"voice": "Chelsie", "format": "ogg"}
    with pytest.raises(openai.BadRequestError, match="the formats are wav, pcm16, mp3, opus, aac, flac") as caught:
        gateway.chat(modalities=["text", "audio"], audio=audio, stream=stream)
    assert caught.value.param == "audio.format"
    assert triton.requests == []


def test_a_spoken_reply_of_no_sound_is_a_wav_file_of_no_samples(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda *_: iter([chunk(text="silent"), final()])
    wav = {"modalities": ["text", "audio"], "audio": {"format": "wav"}}
    assert base64.b64decode(gateway.chat(**wav).choices[0].message.audio.data) == wav_header(0)
    parts = [found.choices[0].delta.audio for found in gateway.chat(stream=True, **wav)]
    assert base64.b64decode("".join(part.data or "" for part in parts if part)) == wav_header(None)


def test_overload_says_when_to_try_again(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda *_: iter([failure("full [omni:overloaded;retry_after_ms=2250]")])
    answer = gateway.post({"model": MODEL, "messages": USER})
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2250")


def test_the_official_client_tries_again_after_an_overload(triton: FakeTriton, gateway: RunningGateway) -> None:
    answers = iter([[failure("full [omni:overloaded;retry_after_ms=10]")], [chunk(text="now"), final()]])
    triton.script = lambda *_: iter(next(answers))
    patient = gateway.openai.with_options(max_retries=1)
    reply = patient.chat.completions.create(model=MODEL, messages=USER)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == "now"


def test_an_error_inside_a_stream_is_an_event_after_what_came_before(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    triton.script = lambda *_: iter([chunk(text="so far"), failure("broken [omni:internal;stage=talker]")])
    texts = []
    with pytest.raises(openai.APIError, match="broken"):
        texts.extend(found.choices[0].delta.content for found in gateway.chat(stream=True))
    assert texts == ["", "so far"]
    gateway.wait_for_metric('omni_gateway_requests_total{endpoint="/v1/chat/completions",status="500"}', 1)


def test_a_refusal_of_the_server_names_the_caller_s_key(triton: FakeTriton, gateway: RunningGateway) -> None:
    refusal = "sampling_parameters.thinker.temperature: 9 is over 2 [omni:bad_request;stage=thinker]"
    triton.script = lambda *_: iter([failure(refusal)])
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.chat(temperature=9)
    assert caught.value.param == "temperature"


def test_a_server_that_is_gone_is_unavailable(triton: FakeTriton) -> None:
    with run_gateway("127.0.0.1:1") as gateway, pytest.raises(openai.InternalServerError) as caught:
        gateway.chat()
    assert (caught.value.status_code, caught.value.code) == (503, "connection_failed")
    assert caught.value.response.headers["retry-after"] == "1"
    assert "127.0.0.1" not in caught.value.message


def test_leaving_a_stream_cancels_on_the_server(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    with gateway.chat(stream=True) as stream:
        while next(stream).choices[0].delta.content != "Hello":
            pass
        assert not triton.cancelled.is_set()
    assert triton.cancelled.wait(TIMEOUT_S)
    gateway.wait_for_metric('omni_gateway_requests_total{endpoint="/v1/chat/completions",status="499"}', 1)
    gateway.wait_for_metric("omni_gateway_requests_in_flight", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_delta_cancels_on_the_server(
    triton: FakeTriton, gateway: RunningGateway, stream: bool
) -> None:
    asked = threading.Event()

    def silent(_request: Any, _context: Any) -> Iterator[Any]:
        asked.set()
        triton.cancelled.wait(TIMEOUT_S)
        return iter(())

    triton.script = silent
    body = json.dumps({"model": MODEL, "messages": USER, "stream": stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with gateway.connect() as caller:
        caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert asked.wait(TIMEOUT_S)
        assert not triton.cancelled.is_set()
    assert triton.cancelled.wait(TIMEOUT_S)
    gateway.wait_for_metric('omni_gateway_requests_total{endpoint="/v1/chat/completions",status="499"}', 1)


def test_what_was_heard_of_a_reply_that_was_left_can_be_named(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    with gateway.chat(stream=True, **AUDIO) as stream:
        while not (heard := next(stream).choices[0].delta.audio):
            pass
    assert triton.cancelled.wait(TIMEOUT_S)
    triton.script = lambda *_: iter([chunk(text="on"), final()])
    gateway.chat(messages=[*USER, {"role": "assistant", "audio": {"id": heard.id}}, *USER])
    assert messages_of(triton)[1]["content"] == "Hello"


def test_many_streams_run_at_once(triton: FakeTriton, gateway: RunningGateway) -> None:
    together = threading.Barrier(16)

    def script(request: Any, _context: Any) -> Iterator[Any]:
        text = json.loads(inputs_of(request)["messages"][0])[0]["content"]
        yield chunk(text=text)
        together.wait(TIMEOUT_S)
        yield chunk(text="!", audio=np.full(int(text), 0.5, np.float32))
        yield final()

    def ask(number: int) -> str:
        chunks = gateway.chat(messages=[{"role": "user", "content": str(number)}], stream=True)
        return "".join(found.choices[0].delta.content or "" for found in chunks)

    triton.script = script
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(1, 17))) == [f"{number}!" for number in range(1, 17)]


def test_a_stop_of_the_gateway_cancels_what_outlasts_its_grace(triton: FakeTriton) -> None:
    triton.script = triton.endless
    with run_gateway(triton.url, grace_s=1) as gateway:
        stream = gateway.chat(stream=True)
        assert next(stream).choices[0].delta.content == ""
        begin = time.monotonic()
        gateway.stop()
        assert triton.cancelled.wait(TIMEOUT_S)
        assert time.monotonic() - begin > 0.9
        with pytest.raises(openai.APIConnectionError):
            list(stream)


def test_what_has_no_answer_yet_is_told_of_the_stop(triton: FakeTriton) -> None:
    asked = threading.Event()

    def silent(_request: Any, _context: Any) -> Iterator[Any]:
        asked.set()
        triton.cancelled.wait(TIMEOUT_S)
        return iter(())

    triton.script = silent
    with run_gateway(triton.url, grace_s=1) as gateway, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.post, {"model": MODEL, "messages": USER})
        assert asked.wait(TIMEOUT_S)
        gateway.stop()
        assert answer.result(TIMEOUT_S).status_code == 503
        assert answer.result().json()["error"]["code"] == "stopping"
        assert triton.cancelled.wait(TIMEOUT_S)


def test_a_stop_of_the_gateway_lets_requests_end_within_its_grace(triton: FakeTriton) -> None:
    stopped = threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="first")
        assert stopped.wait(TIMEOUT_S)
        yield chunk(text="second")
        yield final()

    triton.script = script
    with run_gateway(triton.url, grace_s=600) as gateway:
        stream = gateway.chat(stream=True)
        assert next(stream).choices[0].delta.content == ""
        gateway.stop()
        with pytest.raises(httpx.TransportError):
            until_refused(gateway)
        stopped.set()
        assert [found.choices[0].delta.content for found in stream] == ["first", "second", None]


def until_refused(gateway: RunningGateway) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        httpx.get(f"{gateway.base}/health/live", timeout=TIMEOUT_S)
        time.sleep(0.02)


async def test_the_official_async_client_streams_too(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.openai.base_url, api_key="any", max_retries=0) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=USER, stream=True)  # type: ignore[arg-type]
        texts = [found.choices[0].delta.content or "" async for found in stream]
    assert "".join(texts) == "Hello, sea."

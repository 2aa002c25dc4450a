# SPDX-License-Identifier: Apache-2.0
"""Texts read aloud through the gateway, asked by the official `openai` client, with a scripted Triton behind."""

from __future__ import annotations

import base64
import io
import json
import threading
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from client_fakes import FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc
from gateway_fakes import MODEL, RunningGateway, run_gateway
from triton_omni_client.audio import WavDecoder, pcm16_from_waveform, wav_header
from triton_omni_gateway.settings import SPEECH_PROMPT

SPOKEN = np.repeat(np.array([0.25, -0.5], np.float32), 480)
PATH = "/v1/audio/speech"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url) as running:
        yield running


def speak(gateway: RunningGateway, **options: Any) -> Any:
    return gateway.openai.audio.speech.create(**{"model": MODEL, "voice": "Chelsie", "input": "The sea.", **options})


def test_a_text_is_read_aloud_as_a_wav_file(triton: FakeTriton, gateway: RunningGateway) -> None:
    answer = speak(gateway, extra_body={"seed": 3})
    assert answer.response.headers["content-type"] == "audio/wav"
    np.testing.assert_allclose(WavDecoder().feed(answer.content), SPOKEN, atol=1e-4)
    assert inputs_of(triton.requests[0])["text_input"] == [SPEECH_PROMPT.replace("{input}", "The sea.").encode()]
    assert parameters_of(triton.requests[0]) == {"voice": "Chelsie", "seed": 3}


def test_pcm_is_raw_samples(gateway: RunningGateway) -> None:
    answer = speak(gateway, response_format="pcm")
    assert answer.response.headers["content-type"] == "audio/pcm"
    assert answer.content == pcm16_from_waveform(SPOKEN)


def joined(texts: list[str]) -> bytes:
    """The bytes of base64 texts that are joined before they are decoded."""
    return base64.b64decode("".join(texts), validate=True)


@pytest.mark.parametrize("form", ["wav", "pcm"])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 5, 7], [480, 1, 479, 3, 240]])
def test_base64_of_events_is_one_text_when_joined(
    triton: FakeTriton, gateway: RunningGateway, form: str, sizes: list[int]
) -> None:
    parts = [np.linspace(-1, 1, size, dtype=np.float32) for size in sizes]
    triton.script = lambda *_: iter([*(chunk(audio=part) for part in parts), final()])
    whole = (wav_header(None) if form == "wav" else b"") + pcm16_from_waveform(np.concatenate(parts))

    body = {"model": MODEL, "input": "The sea.", "response_format": form, "stream_format": "sse"}
    events = [json.loads(line.removeprefix("data: ")) for line in gateway.post(body, PATH).text.split("\n\n") if line]
    assert joined([found["audio"] for found in events[:-1]]) == whole
    audio = {"format": "wav" if form == "wav" else "pcm16"}
    deltas = [
        found.choices[0].delta.audio for found in gateway.chat(modalities=["text", "audio"], audio=audio, stream=True)
    ]
    assert joined([found.data for found in deltas if found and found.data]) == whole
    assert gateway.post({**body, "stream_format": "audio"}, PATH).content == whole


@pytest.mark.parametrize("count", [0, 1, 960])
def test_a_streamed_wav_has_its_true_number_of_samples(triton: FakeTriton, gateway: RunningGateway, count: int) -> None:
    triton.script = lambda *_: iter([chunk(audio=np.full(count, 0.5, np.float32)), final()])
    content = speak(gateway).content
    found, rate = soundfile.read(io.BytesIO(content))
    assert (len(found), rate) == (count, 24000)
    with wave.open(io.BytesIO(content)) as file:
        assert len(file.readframes(file.getnframes())) == 2 * count


def test_sound_arrives_before_the_speech_has_ended(triton: FakeTriton, gateway: RunningGateway) -> None:
    heard = threading.Event()

    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="one", audio=SPOKEN)
        assert heard.wait(10)
        yield chunk(audio=SPOKEN)
        yield final()

    triton.script = script
    streaming = gateway.openai.audio.speech.with_streaming_response
    with streaming.create(model=MODEL, voice="Ethan", input="One.", response_format="pcm") as answer:
        parts = []
        for part in answer.iter_bytes():
            parts.append(part)
            heard.set()
    assert b"".join(parts) == pcm16_from_waveform(SPOKEN) * 2


def test_speech_as_events(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "The sea.", "response_format": "pcm", "stream_format": "sse"}
    answer = gateway.post(body, PATH)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert [found["type"] for found in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    sound = b"".join(base64.b64decode(found["audio"]) for found in events[:-1])
    assert sound == pcm16_from_waveform(SPOKEN)
    assert events[-1]["usage"] == {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14}


@pytest.mark.parametrize("options", [{}, {"response_format": "pcm"}, {"stream_format": "sse"}])
@pytest.mark.parametrize("given", [{}, {"seed": None}, {"seed": 3}, {"seed": 2**63 - 1}])
def test_the_seed_is_told_with_the_speech(
    triton: FakeTriton, gateway: RunningGateway, options: dict[str, Any], given: dict[str, Any]
) -> None:
    answer = gateway.post({"model": MODEL, "input": "The sea.", **options, **given}, PATH)
    seed = int(answer.headers["x-seed"])
    assert seed == parameters_of(triton.requests[0])["seed"]
    assert seed == (given.get("seed") or seed)
    if options.get("stream_format") == "sse":
        assert json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))["seed"] == seed


def test_seeds_are_drawn_anew_and_as_far_as_doubles_are_exact(gateway: RunningGateway) -> None:
    answers = [gateway.post({"model": MODEL, "input": "The sea."}, PATH) for _ in range(8)]
    seeds = {int(answer.headers["x-seed"]) for answer in answers}
    assert len(seeds) == 8
    assert max(seeds) < 2**53


def test_a_reply_without_sound_is_an_empty_file(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda *_: iter([chunk(text="silent"), final()])
    assert speak(gateway).content == wav_header(None)
    events = gateway.post({"model": MODEL, "input": "hi", "stream_format": "sse"}, PATH).text.split("\n\n")
    assert base64.b64decode(json.loads(events[0].removeprefix("data: "))["audio"]) == wav_header(None)


def test_instructions_go_in_front_of_the_prompt(triton: FakeTriton, gateway: RunningGateway) -> None:
    speak(gateway, instructions="Whisper.")
    assert inputs_of(triton.requests[0])["text_input"][0].startswith(b"Whisper.\n\nRead ")


def test_the_prompt_is_a_setting(triton: FakeTriton) -> None:
    with run_gateway(triton.url, speech_prompt="Say {input}!") as gateway:
        speak(gateway)
    assert inputs_of(triton.requests[0])["text_input"] == [b"Say The sea.!"]


def test_an_error_before_the_first_sound_is_a_status(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda *_: iter([chunk(text="so far"), failure("no voice [omni:bad_request]")])
    with pytest.raises(openai.BadRequestError, match="no voice"):
        speak(gateway)


def test_an_error_inside_the_sound_cuts_it_off(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda *_: iter([chunk(audio=SPOKEN), failure("broken [omni:internal]")])
    with pytest.raises(httpx.RemoteProtocolError):
        gateway.post({"model": MODEL, "input": "hi"}, PATH)
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{PATH}",status="500"}}', 1)


def test_an_error_inside_the_events_is_an_event(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = lambda *_: iter([chunk(audio=SPOKEN), failure("broken [omni:internal]")])
    answer = gateway.post({"model": MODEL, "input": "hi", "stream_format": "sse"}, PATH)
    last = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["message"] == "broken"


def test_leaving_cancels_on_the_server(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    body = json.dumps({"model": MODEL, "input": "hi"})
    with gateway.http.stream("POST", PATH, content=body, headers={"Content-Type": "application/json"}) as answer:
        sound = answer.iter_bytes()  # kept: with it the connection would go
        assert next(sound).startswith(b"RIFF")
        assert not triton.cancelled.is_set()
    assert triton.cancelled.wait(5)


@pytest.mark.parametrize(
    ("options", "param", "what"),
    [
        ({"response_format": "mp3"}, "response_format", "the formats are wav, pcm"),
        ({"speed": 1.5}, "speed", "must be 1"),
        ({"input": ""}, "input", "at least 1 character"),
        ({"stream_format": "frames"}, "stream_format", "'audio' or 'sse'"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    triton: FakeTriton, gateway: RunningGateway, options: dict[str, Any], param: str, what: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=what) as caught:
        speak(gateway, **options)
    assert caught.value.param == param
    assert triton.requests == []

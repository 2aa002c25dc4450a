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

import av
import httpx
import numpy as np
import openai
import pytest
import soundfile

from client_fakes import FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc, tell
from gateway_fakes import MODEL, TIMEOUT_S, RunningGateway, run_gateway
from triton_omni_client.audio import WavDecoder, pcm16_from_waveform, wav_header
from triton_omni_gateway.settings import SPEECH_PROMPT

SPOKEN = np.repeat(np.array([0.25, -0.5], np.float32), 480)
PATH = "/v1/audio/speech"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


def speak(gateway: RunningGateway, **options: Any) -> Any:
    asked = {"model": MODEL, "voice": "Chelsie", "input": "The sea.", "response_format": "wav"}
    return gateway.openai.audio.speech.create(**{**asked, **options})


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
        assert heard.wait(TIMEOUT_S)
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
    asked = {"model": MODEL, "input": "hi", "response_format": "wav", "stream_format": "sse"}
    events = gateway.post(asked, PATH).text.split("\n\n")
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
    body = json.dumps({"model": MODEL, "input": "hi", "response_format": "wav"})
    with gateway.http.stream("POST", PATH, content=body, headers={"Content-Type": "application/json"}) as answer:
        sound = answer.iter_bytes()  # kept: with it the connection would go
        assert next(sound).startswith(b"RIFF")
        assert not triton.cancelled.is_set()
    assert triton.cancelled.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("options", "param", "what"),
    [
        ({"response_format": "ogg"}, "response_format", "the formats are mp3, opus, aac, flac, wav, pcm"),
        ({"speed": 0.2}, "speed", "greater than or equal to 0.25"),
        ({"speed": 4.5}, "speed", "less than or equal to 4"),
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


TONE = (0.4 * np.sin(2 * np.pi * 440 * np.arange(48_000) / 24_000)).astype(np.float32)
"""Two seconds."""


def told_in_chunks(triton: FakeTriton, samples: np.ndarray = TONE) -> None:
    parts = [chunk(audio=part) for part in np.split(samples, range(5760, len(samples), 5760))]
    triton.script = lambda *_: iter([*parts, final()])


def decoded(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler("flt", "mono", 24_000)
        frames = [out for frame in container.decode(audio=0) for out in resampler.resample(frame)]
        return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


def pitch_of(samples: np.ndarray) -> float:
    middle = samples[len(samples) // 4 : 3 * len(samples) // 4]
    return float(np.argmax(np.abs(np.fft.rfft(middle * np.hanning(len(middle)))))) * 24_000 / len(middle)


COMPRESSED = {"mp3": "audio/mpeg", "opus": "audio/ogg", "aac": "audio/aac", "flac": "audio/flac"}


@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_speech_is_the_speech(triton: FakeTriton, gateway: RunningGateway, form: str) -> None:
    told_in_chunks(triton)
    answer = speak(gateway, response_format=form)
    assert answer.response.headers["content-type"] == COMPRESSED[form]
    heard = decoded(answer.content)
    assert 0 <= len(heard) - len(TONE) < 2400  # an encoder's own silence
    assert pitch_of(heard) == pytest.approx(440, abs=2)
    assert np.sqrt(np.mean(heard[4800:43200] ** 2)) == pytest.approx(np.sqrt(np.mean(TONE**2)), rel=0.05)
    body = {"model": MODEL, "input": "hi", "response_format": form, "stream_format": "sse"}
    events = [
        json.loads(part[6:]) for part in gateway.post(body, PATH).text.split("\n\n") if part.startswith("data: {")
    ]
    streamed = joined([each["audio"] for each in events if "audio" in each])
    np.testing.assert_array_equal(decoded(streamed), heard)


def test_speech_is_mp3_where_no_format_is_named(triton: FakeTriton, gateway: RunningGateway) -> None:
    told_in_chunks(triton)
    answer = gateway.post({"model": MODEL, "input": "hi"}, PATH)
    assert answer.headers["content-type"] == "audio/mpeg"
    assert len(decoded(answer.content)) >= len(TONE)


@pytest.mark.parametrize("form", COMPRESSED)
def test_compressed_speech_comes_while_it_is_spoken(triton: FakeTriton, gateway: RunningGateway, form: str) -> None:
    """Its first bytes, a part of the sound included, come before the reply has ended."""
    goes_on = threading.Event()

    def slowly(*_: Any) -> Iterator[Any]:
        yield chunk(audio=TONE[:24_000])
        assert goes_on.wait(TIMEOUT_S)
        yield chunk(audio=TONE[24_000:])
        yield final()

    triton.script = slowly
    body = json.dumps({"model": MODEL, "input": "hi", "response_format": form})
    with gateway.http.stream("POST", PATH, content=body, headers={"Content-Type": "application/json"}) as answer:
        sound, data = answer.iter_bytes(), b""
        while len(data) < 2000:
            data += next(sound)
        goes_on.set()
        data += b"".join(sound)
    assert len(decoded(data)) >= len(TONE)


@pytest.mark.parametrize("speed", [0.25, 0.8, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("form", ["pcm", "mp3"])
def test_a_speed_changes_the_length_and_not_the_pitch(
    triton: FakeTriton, gateway: RunningGateway, form: str, speed: float
) -> None:
    told_in_chunks(triton)
    content = speak(gateway, response_format=form, speed=speed).content
    heard = decoded(content) if form == "mp3" else np.frombuffer(content, "<i2") / 32768
    assert len(heard) == pytest.approx(len(TONE) / speed, rel=0.02, abs=3000)
    assert pitch_of(heard) == pytest.approx(440, abs=8)


def test_names_of_openais_voices_mean_the_first_voice(triton: FakeTriton, gateway: RunningGateway) -> None:
    for voice in ("alloy", "verse", "Ethan"):
        speak(gateway, voice=voice)
    assert [parameters_of(request).get("voice") for request in triton.requests] == [None, None, "Ethan"]


def test_a_table_names_voices_and_the_checkpoints_own_names_go_first(triton: FakeTriton) -> None:
    tell(triton.configs[MODEL], voices=["Chelsie", "Ethan"])
    with run_gateway(triton.url, voices={"nova": "Ethan", "Chelsie": "Ethan"}) as gateway:
        for voice in ("nova", "Chelsie", "nobody"):
            speak(gateway, voice=voice)
        gateway.chat(modalities=["text", "audio"], audio={"voice": "nova", "format": "wav"})
        told = gateway.http.get("/v1/audio/voices").json()
    asked = [parameters_of(request).get("voice") for request in triton.requests]
    assert asked == ["Ethan", "Chelsie", "nobody", "Ethan"]
    assert (told["voices"], told["aliases"]) == (["Chelsie", "Ethan"], {"nova": "Ethan"})

# SPDX-License-Identifier: Apache-2.0
"""Recordings written down through the gateway, asked by the official `openai` client, with a scripted Triton behind."""

from __future__ import annotations

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

from client_fakes import INFO, FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc
from gateway_fakes import MODEL, TIMEOUT_S, RunningGateway, run_gateway
from media_samples import audio_file, encoded_sound
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.settings import TRANSCRIPTION_PROMPT, TRANSLATION_PROMPT

PATH = "/v1/audio/transcriptions"
SHORT = audio_file("wav", seconds=0.5)
LONG = audio_file("mp3", seconds=4)
TOKENS = {
    "type": "tokens",
    "input_tokens": 9,
    "input_token_details": {"text_tokens": 9, "audio_tokens": 0},
    "output_tokens": 3,
    "total_tokens": 12,
}
BUSY = "all 8 sessions are in use [omni:overloaded;retry_after_ms=1]"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton()) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url, window_seconds=1.5, windows_at_once=2) as running:
        yield running


def write_down(gateway: RunningGateway, data: bytes = SHORT, **options: Any) -> Any:
    return gateway.openai.audio.transcriptions.create(model=MODEL, file=("said.bin", data), **options)


def post(gateway: RunningGateway, data: bytes | None = SHORT, path: str = PATH, **fields: Any) -> httpx.Response:
    """A form by hand."""
    files: Any = {"model": (None, MODEL)} if data is None else {"file": ("said.bin", data)}
    return gateway.http.post(path, data={**({} if data is None else {"model": MODEL}), **fields}, files=files)


def sounds_of(triton: FakeTriton) -> dict[str, bytes]:
    """The sound of each request, by the request's label."""
    return {request.id: inputs_of(request)["media"][0] for request in triton.requests}


def numbered(triton: FakeTriton, *texts: str) -> None:
    """Answer the window N by the text N, in two pieces."""

    def script(request: Any, _context: Any) -> Iterator[Any]:
        text = texts[number_of(request)]
        yield from (chunk(text=text[:2]), chunk(text=text[2:]), chunk(info=INFO), final())

    triton.script = script


def number_of(request: Any) -> int:
    """The number of a request's window."""
    return int(request.id.partition(".")[2] or 0)


def test_a_short_wav_is_asked_for_as_it_came(triton: FakeTriton, gateway: RunningGateway) -> None:
    answer = write_down(gateway)
    assert answer.text == "Hello, sea."
    assert answer.usage.to_dict() == TOKENS
    inputs = inputs_of(triton.requests[0])
    assert inputs["media"] == [SHORT]
    content = json.loads(inputs["messages"][0])[0]["content"]
    assert content == [{"type": "audio"}, {"type": "text", "text": TRANSCRIPTION_PROMPT}]
    assert parameters_of(triton.requests[0]) == {"modalities": ["text"]}


def test_a_recording_is_a_part_of_its_caller_s_trace(triton: FakeTriton, gateway: RunningGateway) -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    write_down(gateway, LONG, extra_headers={"traceparent": header})
    assert [request.parameters["traceparent"].string_param for request in triton.requests] == [header] * 3


@pytest.mark.parametrize(
    "data",
    [
        *(audio_file(kind) for kind in ("flac", "ogg", "mp3")),
        encoded_sound("mp4", "aac", seconds=0.5),
        encoded_sound("webm", "libopus", seconds=0.5, rate=48_000),
    ],
    ids=["flac", "ogg", "mp3", "mp4", "webm"],
)
def test_other_files_are_decoded_to_what_the_model_hears(
    triton: FakeTriton, gateway: RunningGateway, data: bytes
) -> None:
    assert write_down(gateway, data).text == "Hello, sea."
    (sound,) = sounds_of(triton).values()
    with wave.open(io.BytesIO(sound)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        assert file.getnframes() / 16_000 == pytest.approx(0.5, abs=0.1)


def test_a_long_recording_is_told_in_order(triton: FakeTriton, gateway: RunningGateway) -> None:
    numbered(triton, "The sea", " is deep", "and wide.")
    answer = write_down(gateway, LONG, response_format="verbose_json")
    assert answer.text == "The sea is deep and wide."
    assert [segment.text for segment in answer.segments] == ["The sea", " is deep", " and wide."]
    times = [time for segment in answer.segments for time in (segment.start, segment.end)]
    assert times[1:-1:2] == times[2::2]
    assert (times[0], times[-1]) == (0, answer.duration)
    assert answer.duration == pytest.approx(4, abs=0.1)
    assert answer.usage.to_dict() == {"type": "duration", "seconds": answer.duration}
    assert write_down(gateway, LONG).usage.total_tokens == 3 * TOKENS["total_tokens"]


def test_a_recording_is_cut_where_it_is_quiet(triton: FakeTriton, gateway: RunningGateway) -> None:
    numbered(triton, "one", "two", "three")
    speech = np.full(48_000, 0.3, np.float32) * np.sin(np.arange(48_000) * 0.2).astype(np.float32)
    for begin in (19_000, 40_000):  # samples at which it is silent for a quarter of a second
        speech[begin : begin + 4_000] = 0
    assert write_down(gateway, audio_file("flac", samples=speech)).text == "one two three"
    ends = []
    for sound in sounds_of(triton).values():
        with wave.open(io.BytesIO(sound)) as file:
            ends.append(file.getnframes())
    assert sum(ends) == 48_000
    first, second, _ = (sounds_of(triton)[name] for name in sorted(sounds_of(triton)))
    assert 19_000 <= len(first) // 2 - 22 <= 23_000
    assert 40_000 <= (len(first) + len(second)) // 2 - 44 <= 44_000


def test_a_stream_tells_words_as_they_come_and_in_order(triton: FakeTriton, gateway: RunningGateway) -> None:
    heard, others = threading.Event(), threading.Event()
    texts = ["The sea", "is deep", "and wide."]

    def script(request: Any, _context: Any) -> Iterator[Any]:
        number = number_of(request)
        yield chunk(text=texts[number][:3])
        if number == 0:  # ends last of the two that are asked for at once
            assert heard.wait(TIMEOUT_S)
            assert others.wait(TIMEOUT_S)
        yield from (chunk(text=texts[number][3:]), chunk(info=INFO), final())
        others.set()

    triton.script = script
    events = []
    for event in write_down(gateway, LONG, stream=True):
        heard.set()
        events.append(event)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert deltas == ["The", " sea", " is ", "deep", " and", " wide."]
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", "The sea is deep and wide.")
    assert events[-1].usage.total_tokens == 3 * TOKENS["total_tokens"]


def test_as_text_and_with_options(triton: FakeTriton, gateway: RunningGateway) -> None:
    options: Any = {"response_format": "text", "language": "en", "prompt": "It is about the sea.", "temperature": 0.3}
    assert write_down(gateway, **options) == "Hello, sea.\n"
    prompt = json.loads(inputs_of(triton.requests[0])["messages"][0])[0]["content"][1]["text"]
    assert prompt == f"{TRANSCRIPTION_PROMPT}\n\nIt is about the sea."
    assert parameters_of(triton.requests[0])["thinker"] == {"temperature": 0.3}
    assert post(gateway, response_format="verbose_json", language="de").json()["language"] == "de"


def test_a_translation_has_a_prompt_of_its_own(triton: FakeTriton, gateway: RunningGateway) -> None:
    with pytest.deprecated_call():  # OpenAI's own word for its endpoint
        answer = gateway.openai.audio.translations.create(model=MODEL, file=("said.wav", SHORT))
    assert answer.text == "Hello, sea."
    assert TRANSLATION_PROMPT.encode() in inputs_of(triton.requests[0])["messages"][0]
    verbose = post(gateway, path="/v1/audio/translations", response_format="verbose_json").json()
    assert (verbose["task"], verbose["language"]) == ("translate", "english")


def test_the_prompts_are_settings(triton: FakeTriton) -> None:
    with run_gateway(triton.url, transcription_prompt="Words!", translation_prompt="English!") as gateway:
        write_down(gateway)
        post(gateway, path="/v1/audio/translations")
    asked = [json.loads(inputs_of(request)["messages"][0])[0]["content"][1]["text"] for request in triton.requests]
    assert asked == ["Words!", "English!"]


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"response_format": "srt"}, "response_format", "'json', 'text' or 'verbose_json'"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[0]", "'segment'"),
        ({"include[]": "logprobs"}, "include", "at most 0 items"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": "nan"}, "temperature", "finite number"),
        ({"stream": "perhaps"}, "stream", "valid boolean"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy[type]", "Unknown parameter"),
        ({"voice": "Ethan"}, "voice", "Unknown parameter"),
        ({"prompt": ["one", "two"]}, "prompt", "more than once"),
        ({"prompt": "x" * 70_000}, None, "maximum size of 64KB"),
        ({f"a{number}": "1" for number in range(65)}, None, "Maximum number of fields is 64"),
    ],
)
def test_a_field_that_is_not_taken_is_refused_by_name(
    triton: FakeTriton, gateway: RunningGateway, fields: dict[str, Any], param: str | None, what: str
) -> None:
    answer = post(gateway, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert what in error["message"]
    assert triton.requests == []


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"no sound", "no sound that can be read"),
        (b"", "no sound that can be read"),
        (audio_file("wav", seconds=0.05), "0.05 seconds of sound; at least 0.1"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", "no sound that can be read"),
        (b"ffconcat version 1.0\nfile '/etc/hostname'\n", "no sound that can be read"),
        (None, "Missing required parameter: 'file'"),
    ],
    ids=["words", "nothing", "short", "playlist", "list", "none"],
)
def test_what_is_no_recording_is_refused(
    triton: FakeTriton, gateway: RunningGateway, data: bytes | None, what: str
) -> None:
    for stream in ("false", "true"):
        answer = post(gateway, data, stream=stream)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
        assert what in answer.json()["error"]["message"]
    assert triton.requests == []


@pytest.mark.parametrize(
    ("settings", "data", "status", "what"),
    [
        ({"max_recording_seconds": 3}, LONG, 400, "longer than 3 seconds"),
        ({"max_body_bytes": 4096}, LONG, 413, "limit of 4096 bytes"),
    ],
)
def test_a_recording_over_a_limit_is_refused(
    triton: FakeTriton, settings: dict[str, Any], data: bytes, status: int, what: str
) -> None:
    with run_gateway(triton.url, **settings) as gateway:
        answer = post(gateway, data)
    assert answer.status_code == status
    assert what in answer.json()["error"]["message"]


def test_a_body_that_is_no_form_is_refused(triton: FakeTriton, gateway: RunningGateway) -> None:
    assert gateway.post({"model": MODEL}, PATH).status_code == 415
    with run_gateway(triton.url, keys=ApiKeys(["key"])) as locked:
        given = {"headers": {"Authorization": "Bearer key"}}
        assert locked.post({"model": MODEL}, PATH, **given).json()["error"]["code"] == "unsupported_media_type"
        given["headers"]["Content-Type"] = "multipart/form-data"
        assert "Missing boundary" in locked.post(b"file", PATH, **given).json()["error"]["message"]
        given["headers"]["Content-Type"] += "; boundary=x"
        assert locked.post(b"file", PATH, **given).json()["error"]["code"] == "invalid_form"


def test_a_form_of_a_foreign_page_is_refused(triton: FakeTriton, gateway: RunningGateway) -> None:
    files = {"file": ("said.wav", SHORT)}
    for origin in ("https://other.example", "null"):
        answer = gateway.http.post(PATH, data={"model": MODEL}, files=files, headers={"Origin": origin})
        assert answer.status_code == 403
    assert gateway.http.post("/v1/chat/completions", data={"model": MODEL}, files=files).status_code == 415
    assert triton.requests == []


def test_an_unknown_model_is_not_found(gateway: RunningGateway) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        gateway.openai.audio.transcriptions.create(model="whisper", file=("said.wav", SHORT))


def test_a_refusal_of_the_server_is_told_by_the_field(triton: FakeTriton, gateway: RunningGateway) -> None:
    for text, param in (
        ("medium 0 (audio): longer than 30 seconds [omni:too_large]", "file"),
        ("sampling_parameters.thinker.temperature: 3 is over 2 [omni:bad_request]", "temperature"),
    ):
        triton.script = lambda *_, text=text: iter([failure(text)])
        for stream in ("false", "true"):
            assert post(gateway, stream=stream).json()["error"]["param"] == param


def test_a_busy_server_refuses_the_first_window_and_delays_later_ones(
    triton: FakeTriton, gateway: RunningGateway
) -> None:
    refused: set[str] = set()

    def script(request: Any, _context: Any) -> Iterator[Any]:
        if number_of(request) and request.id not in refused:
            refused.add(request.id)
            yield failure(BUSY)
        else:
            yield from (chunk(text=f"part {number_of(request)}"), chunk(info=INFO), final())

    triton.script = script
    assert write_down(gateway, LONG).text == "part 0 part 1 part 2"
    assert len(refused) == 2
    triton.script = lambda *_: iter([failure(BUSY)])
    with pytest.raises(openai.RateLimitError):
        write_down(gateway, LONG)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_in_the_middle_ends_the_answer(triton: FakeTriton, gateway: RunningGateway, stream: bool) -> None:
    def script(request: Any, _context: Any) -> Iterator[Any]:
        if number_of(request) == 2:
            yield failure("broken [omni:internal]")
        else:
            yield from (chunk(text="so far"), chunk(info=INFO), final())

    triton.script = script
    if not stream:
        with pytest.raises(openai.InternalServerError, match="broken"):
            write_down(gateway, LONG)
        return
    with pytest.raises(openai.APIError, match="broken"):
        list(write_down(gateway, LONG, stream=True))
    gateway.wait_for_metric(f'omni_gateway_requests_total{{endpoint="{PATH}",status="500"}}', 1)


def test_leaving_cancels_all_windows_on_the_server(triton: FakeTriton, gateway: RunningGateway) -> None:
    both_are_asked = threading.Barrier(2, timeout=TIMEOUT_S)

    def script(request: Any, context: Any) -> Iterator[Any]:
        both_are_asked.wait()
        yield from triton.endless(request, context)

    triton.script = script
    body = {"data": {"model": MODEL, "stream": "true"}, "files": {"file": ("said.mp3", LONG)}}
    with gateway.http.stream("POST", PATH, **body) as answer:
        assert "Hello" in next(answer.iter_text())
    assert triton.cancelled.wait(TIMEOUT_S)
    gateway.wait_for_metric("omni_gateway_requests_in_flight", 0)
    assert len(triton.requests) == 2


def test_sound_that_was_written_down_is_counted(gateway: RunningGateway) -> None:
    write_down(gateway)
    assert gateway.metric("omni_gateway_recording_seconds_total") == 0.5

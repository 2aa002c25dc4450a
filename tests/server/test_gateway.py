# SPDX-License-Identifier: Apache-2.0
"""The gateway in front of a real server: what OpenAI's client gets is what the project's own client gets."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from gateway_fakes import MODEL, USER, RunningGateway
from media_samples import audio_file, image_file
from server.asking import every_session_taken
from server.probes import CRAWLING_THINKER, SLOW_TALKER
from server.serving import Served, wait_for
from triton_omni.session.ledger_table import STAGES
from triton_omni_client import Reply, Request
from triton_omni_client.audio import Pcm16Decoder, WavDecoder
from triton_omni_gateway.settings import SPEECH_PROMPT

GREEDY = {"seed": 71, "extra_body": {"talker": {"temperature": 0}}}
HELLO = [{"role": "user", "content": "hello"}]
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": "pcm16"}}
NO_IMAGE = "data:image/png;base64,bm90aGluZw=="
LONG = "word " * 600
PCM16_STEP = 1 / 32767
LOAD_GENERATOR = """
from triton_omni.checkpoint.transformers_setup import prepare_transformers
prepare_transformers()
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`; its command line needs a package's metadata that the CPU build has under another name."""


@pytest.fixture(scope="module")
def direct(shared_server: Served) -> Reply:
    """The reply that the project's own client gets."""
    return shared_server.ask("direct", "hello", seed=71, voice="Chelsie", talker={"temperature": 0})


def test_a_text_reply_is_the_server_s(gateway: RunningGateway, direct: Reply) -> None:
    reply = gateway.chat(messages=HELLO, **GREEDY)
    assert reply.choices[0].message.content == direct.text
    assert direct.info is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        direct.info.prompt_tokens,
        direct.info.reply_tokens,
    )
    assert reply.model_extra["info"]["seed"] == 71


def test_a_streamed_spoken_reply_is_the_server_s(gateway: RunningGateway, direct: Reply) -> None:
    chunks = list(gateway.chat(messages=HELLO, stream=True, stream_options={"include_usage": True}, **SPOKEN, **GREEDY))
    audio = [part for found in chunks if found.choices and (part := found.choices[0].delta.audio)]
    assert "".join(part.transcript or "" for part in audio) == direct.text
    sound = Pcm16Decoder().feed(b"".join(base64.b64decode(part.data or "") for part in audio))
    np.testing.assert_allclose(sound, direct.audio, rtol=0, atol=PCM16_STEP)
    assert sum(bool(part.data) for part in audio) > 1
    assert direct.info is not None
    assert chunks[-1].usage.completion_tokens_details.audio_tokens == direct.info.codes


def test_a_whole_spoken_reply_is_the_server_s(gateway: RunningGateway, direct: Reply) -> None:
    audio = {"voice": "Chelsie", "format": "wav"}
    message = gateway.chat(messages=HELLO, modalities=["text", "audio"], audio=audio, **GREEDY).choices[0].message
    assert message.audio.transcript == direct.text
    sound = WavDecoder().feed(base64.b64decode(message.audio.data))
    np.testing.assert_allclose(sound, direct.audio, rtol=0, atol=PCM16_STEP)


def test_a_text_is_read_aloud_as_the_server_speaks_its_prompt(server: Served, gateway: RunningGateway) -> None:
    prompt = SPEECH_PROMPT.replace("{input}", "The sea.")
    direct = server.ask("reads", prompt, seed=72, voice="Ethan", talker={"temperature": 0})
    options: Any = {"seed": 72, "talker": {"temperature": 0}, "response_format": "wav"}
    speech = gateway.openai.audio.speech.create(model=MODEL, voice="Ethan", input="The sea.", extra_body=options)
    np.testing.assert_allclose(WavDecoder().feed(speech.content), direct.audio, rtol=0, atol=PCM16_STEP)


def test_a_drawn_seed_repeats_the_speech(gateway: RunningGateway) -> None:
    def speak(**options: Any) -> tuple[int, Any]:
        create: Any = gateway.openai.audio.speech.create
        speech = create(model=MODEL, voice="Ethan", input="The sea.", response_format="wav", extra_body=options)
        return int(speech.response.headers["x-seed"]), WavDecoder().feed(speech.content)

    seed, first = speak()
    told, again = speak(seed=seed)
    assert told == seed
    np.testing.assert_allclose(again, first, rtol=0, atol=PCM16_STEP)


def test_media_in_a_conversation_are_understood(server: Served, gateway: RunningGateway) -> None:
    image, sound = image_file("png"), audio_file("wav")
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}},
        {"type": "text", "text": "What is this?"},
    ]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "A sound."}, *USER]
    taken = [{"role": "user", "content": [{"type": "image"}, {"type": "audio"}, parts[2]]}, *chat[1:]]
    with server.client.stream(Request(messages=taken, media=[image, sound], seed=73, modalities=["text"])) as stream:
        direct = stream.collect()
    assert gateway.chat(messages=chat, seed=73).choices[0].message.content == direct.text


@pytest.mark.parametrize(
    ("options", "param", "what"),
    [
        ({**SPOKEN, "audio": {"voice": "alloi"}}, "audio.voice", "Chelsie, Ethan"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens: must be at least 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": NO_IMAGE}}]}]},
            "messages[0].content[0].image_url.url",
            r"messages\[0\].content\[0\].image_url.url: must be one of png, jpeg, webp",
        ),
        ({"temperature": 3}, "temperature", "temperature"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}
                ]
            },
            "messages[0].content[0].image_url.url",
            "fetches and opens nothing",
        ),
    ],
)
def test_a_refusal_of_the_server_is_a_bad_request(
    gateway: RunningGateway, options: dict[str, Any], param: str, what: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=what) as caught:
        gateway.chat(**{"messages": HELLO, **options})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": LONG}]}),
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": LONG}], "stream": True, **SPOKEN}),
        ("audio/speech", "input", {"input": LONG}),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_as_openai_does(
    gateway: RunningGateway, path: str, param: str, body: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens .* limit is 1024") as caught:
        gateway.openai.post(f"/{path}", body={"model": MODEL, **body}, cast_to=object)
    error = caught.value
    assert (error.type, error.code, error.param) == ("invalid_request_error", "context_length_exceeded", param)


def test_a_timeout_longer_than_any_clock_is_over_the_server_s_limit(gateway: RunningGateway) -> None:
    answer = gateway.post({"model": MODEL, "messages": HELLO, "timeout": 1e300})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "timeout")


def test_no_free_session_is_a_rate_limit_with_a_time_to_retry(server: Served, gateway: RunningGateway) -> None:
    with every_session_taken(server):
        with pytest.raises(openai.RateLimitError, match="all 8 sessions are in use") as caught:
            gateway.chat(messages=HELLO)
        assert caught.value.response.headers["retry-after-ms"] == "250"
    server.wait_until_idle()
    assert gateway.chat(messages=HELLO, seed=1).choices


@pytest.mark.parametrize(("seed", "spoken"), [(CRAWLING_THINKER, False), (SLOW_TALKER, True)])
def test_leaving_a_stream_stops_every_stage(server: Served, gateway: RunningGateway, seed: int, spoken: bool) -> None:
    options = SPOKEN if spoken else {}
    with gateway.chat(messages=HELLO, stream=True, seed=seed, **options) as stream:
        request_id = stream.response.headers["x-request-id"]
        for found in stream:
            if found.choices and (found.choices[0].delta.content or found.choices[0].delta.audio):
                break
    wait_for(lambda: any(server.records.of(request_id, stage, "noticed") for stage in STAGES), server.held)
    for stage in STAGES if spoken else ("thinker",):
        wait_for(lambda stage=stage: server.records.of(request_id, stage, "aborted"), server.held)


def test_many_at_once_each_get_their_own_reply(gateway: RunningGateway) -> None:
    texts = ["hello", "x", "why", "Hi.", "1 2 3", "aaaa"]

    def ask(text: str) -> str:
        chunks = gateway.chat(messages=[{"role": "user", "content": text}], stream=True, **GREEDY)
        return "".join(found.choices[0].delta.content or "" for found in chunks)

    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(ask, texts)) == alone


def test_vllm_s_load_generator_drives_it(server: Served, gateway: RunningGateway, tmp_path: Any) -> None:
    options = {
        "backend": "openai-chat",
        "base-url": gateway.base,
        "endpoint": "/v1/chat/completions",
        "model": MODEL,
        "tokenizer": str(server.checkpoint),
        "dataset-name": "random",
        "random-input-len": "16",
        "random-output-len": "8",
        "num-prompts": "12",
        "max-concurrency": "4",
        "result-dir": str(tmp_path),
        "result-filename": "result.json",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-c", LOAD_GENERATOR, *arguments, "--ignore-eos", "--save-result"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (12, 12 * 8)

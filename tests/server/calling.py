# SPDX-License-Identifier: Apache-2.0
"""Every way to ask a server, each by the means of those who would use it, with one question about some media."""

from __future__ import annotations

import asyncio
import base64
import json
import queue
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from numpy.typing import NDArray
from typer.testing import CliRunner

from media_samples import audio_file, image_file, video_file
from server.serving import REPLY_S, Served
from triton_omni_client import AsyncOmniClient, Media, OmniClient, Reply, Request, cli
from triton_omni_client.audio import Pcm16Decoder, WavDecoder
from triton_omni_client.messages import MODEL, OUTPUTS, UNARY_MODEL

SEED, VOICE, MAX_TOKENS = 9, "Ethan", 3
TEXT = "what is this?"
IMAGE = Media("image", image_file("png", 112, 84))
SOUND = Media("audio", audio_file("wav", seconds=1.0))
VIDEO = Media("video", video_file("mp4", seconds=1.0))
FILM = Media("video", video_file("mp4", seconds=1.0, audio=True))
SILENCE = np.zeros(0, np.float32)
SUFFIXES = {"image": "png", "audio": "wav", "video": "mp4"}


@dataclass(frozen=True)
class Asked:
    """A question about media."""

    media: Sequence[Media] = ()
    heard: bool = False
    """True if the videos' sound is part of it."""
    spoken: bool = True
    """True if the reply is to be spoken, too."""

    @property
    def request(self) -> Request:
        """The request of the project's client."""
        return Request.ask(
            TEXT,
            self.media,
            seed=SEED,
            voice=VOICE,
            thinker={"max_tokens": MAX_TOKENS},
            use_audio_in_video=self.heard or None,
            modalities=None if self.spoken else ["text"],
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The request in JSON: input tensors by name, media as data URIs."""
        request = self.request
        said = {"text_input": TEXT} if request.messages is None else {"messages": json.dumps(request.messages)}
        media = {"media": [data_uri(medium) for medium in self.media]} if self.media else {}
        return {**said, **media, "sampling_parameters": json.dumps(request.sampling_parameters())}


MODALITIES = {
    "text": Asked(),
    "image": Asked([IMAGE]),
    "sound": Asked([SOUND]),
    "video": Asked([VIDEO]),
    "film": Asked([FILM], heard=True),
    "mixed": Asked([IMAGE, SOUND, VIDEO]),
    "text-only": Asked(spoken=False),
}


@dataclass(frozen=True)
class Said:
    """The reply that came one way."""

    text: str
    audio: NDArray[np.float32]
    usage: Mapping[str, Any]


def data_uri(medium: Media) -> str:
    """Return the data URI by which browsers and JSON carry a file."""
    return f"data:application/octet-stream;base64,{base64.b64encode(medium.data).decode()}"


def of_client(reply: Reply) -> Said:
    assert reply.info is not None
    return Said(reply.text, reply.audio, reply.info.raw["usage"])


def of_arrays(responses: Sequence[Mapping[str, Any]]) -> Said:
    """Return the reply in the output tensors of each response."""
    text = b"".join(found["text_output"][0] for found in responses)
    audio = np.concatenate([found["audio_output"] for found in responses])
    return Said(text.decode(), audio, json.loads(responses[-1]["info"][0])["usage"])


def of_json(events: Sequence[Mapping[str, Any]]) -> Said:
    """Return the reply in JSON objects, in which an empty tensor is an empty list or text."""
    audio = [np.atleast_1d(event["audio_output"]) for event in events if event["audio_output"] not in ([], "")]
    text = "".join(event["text_output"] for event in events)
    return Said(text, np.concatenate([[], *audio]).astype(np.float32), json.loads(events[-1]["info"])["usage"])


def inputs_of(asked: Asked, package: Any) -> list[Any]:
    """The tensors, with media as they are."""
    made = []
    for tensor in asked.request.to_tensors():
        given = {"text_input": [TEXT.encode()], "media": [medium.data for medium in asked.media]}
        elements = given.get(tensor.name) or [tensor.text().encode()]
        made.append(package.InferInput(tensor.name, list(tensor.shape), "BYTES"))
        made[-1].set_data_from_numpy(np.array(elements, dtype=np.object_))
    return made


def arrays(result: Any) -> dict[str, Any]:
    return {name: result.as_numpy(name) for name in OUTPUTS}


def grpc_stream(server: Served, asked: Asked) -> Said:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(server.supervisor.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, inputs_of(asked, grpcclient), enable_empty_final_response=True)
        responses = list(_until_final(answers))
        client.stop_stream()
    return of_arrays(responses)


def _until_final(answers: queue.Queue[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
    while True:
        result, error = answers.get(timeout=REPLY_S)
        assert error is None, error
        response = result.get_response()
        if response.outputs:
            yield arrays(result)
        if response.parameters["triton_final_response"].bool_param:
            return


def grpc_unary(server: Served, asked: Asked) -> Said:
    with grpcclient.InferenceServerClient(server.supervisor.grpc_url) as client:
        return of_arrays([arrays(client.infer(UNARY_MODEL, inputs_of(asked, grpcclient)))])


def http_infer(server: Served, asked: Asked) -> Said:
    with httpclient.InferenceServerClient(server.supervisor.http_url, network_timeout=REPLY_S) as client:
        return of_arrays([arrays(client.infer(UNARY_MODEL, inputs_of(asked, httpclient)))])


def http_infer_json(server: Served, asked: Asked) -> Said:
    """JSON alone, each element a text, as whoever has no library writes it."""
    fields = {name: value if isinstance(value, list) else [value] for name, value in asked.fields.items()}
    inputs = [{"name": n, "datatype": "BYTES", "shape": [len(v)], "data": v} for n, v in fields.items()]
    status, text = server.post(f"/v2/models/{UNARY_MODEL}/infer", json.dumps({"inputs": inputs}))
    assert status == 200, text
    outputs = {out["name"]: out["data"] for out in json.loads(text)["outputs"]}
    (said,), (info,) = outputs["text_output"], outputs["info"]
    return Said(said, np.array(outputs["audio_output"], np.float32), json.loads(info)["usage"])


def generate(server: Served, asked: Asked) -> Said:
    status, text = server.post(f"/v2/models/{UNARY_MODEL}/generate", json.dumps(asked.fields))
    assert status == 200, text
    return of_json([json.loads(text)])


def generate_stream(server: Served, asked: Asked) -> Said:
    status, text = server.post(f"/v2/models/{MODEL}/generate_stream", json.dumps(asked.fields))
    assert status == 200, text
    return of_json([json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line])


def blocking_client(server: Served, asked: Asked) -> Said:
    return of_client(server.client.stream(asked.request).collect())


def sharing_client(server: Served, asked: Asked) -> Said:
    with OmniClient(server.supervisor.grpc_url, shared_memory=True) as client:
        return of_client(client.stream(asked.request).collect())


def asyncio_client(server: Served, asked: Asked, *, shared_memory: bool = False) -> Said:
    async def ask() -> Reply:
        async with AsyncOmniClient(server.supervisor.grpc_url, shared_memory=shared_memory) as client:
            return await client.stream(asked.request).collect()

    return of_client(asyncio.run(ask()))


def http_client(server: Served, asked: Asked) -> Said:
    return of_client(server.http.unary(asked.request))


def http_client_stream(server: Served, asked: Asked) -> Said:
    return of_client(server.http.stream(asked.request).collect())


def command_line(server: Served, asked: Asked) -> Said:
    """By `say` where there is nothing to show or play, else by `ask`."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.{SUFFIXES[medium.kind]}" for number, medium in enumerate(asked.media)]
        for path, medium in zip(paths, asked.media, strict=True):
            path.write_bytes(medium.data)
        sound, heard = Path(folder) / "reply.wav", ["--video-sound"] if asked.heard else []
        spoken = ["-o", str(sound)] if asked.spoken else ["--text-only"]
        if paths:
            command = ["ask", TEXT, *map(str, paths), "--max-tokens", str(MAX_TOKENS), *heard]
        else:
            command = ["say", TEXT, "--thinker-json", json.dumps(asked.request.thinker)]
        command += ["--seed", str(SEED), "--voice", VOICE, *spoken, "--json", "--url", server.supervisor.grpc_url]
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        audio = WavDecoder().feed(sound.read_bytes()) if asked.spoken else SILENCE
        return Said(told["text"], audio, told["info"]["usage"])


def gateway(base: str, asked: Asked) -> Said:
    """By OpenAI's client."""
    with _openai_client(base) as client:
        reply = client.chat.completions.create(**_openai_fields(asked, "wav"))
    message, usage = reply.choices[0].message, reply.model_extra["info"]["usage"]
    if not asked.spoken:
        return Said(message.content, SILENCE, usage)
    sound = WavDecoder().feed(base64.b64decode(message.audio.data))
    return Said(message.audio.transcript, sound, usage)


def gateway_stream(base: str, asked: Asked) -> Said:
    """The same, streamed."""
    with _openai_client(base) as client:
        chunks = list(client.chat.completions.create(**_openai_fields(asked, "pcm16"), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    spoken = [part for delta in deltas if (part := getattr(delta, "audio", None))]
    text = "".join(delta.content or "" for delta in deltas) + "".join(part.transcript or "" for part in spoken)
    sound = Pcm16Decoder().feed(b"".join(base64.b64decode(part.data or "") for part in spoken))
    return Said(text, sound, chunks[-1].model_extra["info"]["usage"])


def _openai_client(base: str) -> Any:
    return openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0, timeout=REPLY_S)


def _openai_fields(asked: Asked, audio_format: str) -> dict[str, Any]:
    parts = [_openai_part(medium) for medium in asked.media] + [{"type": "text", "text": TEXT}]
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": VOICE, "format": audio_format}}
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "seed": SEED,
        "max_completion_tokens": MAX_TOKENS,
        "extra_body": {"use_audio_in_video": True} if asked.heard else {},
        **(spoken if asked.spoken else {}),
    }


def _openai_part(medium: Media) -> dict[str, Any]:
    if medium.kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(medium.data).decode(), "format": "wav"}}
    return {"type": f"{medium.kind}_url", f"{medium.kind}_url": {"url": data_uri(medium)}}


Way = Callable[[Served, Asked], Said]
WAYS: dict[str, Way] = {
    "grpc-stream": grpc_stream,
    "generate_stream": generate_stream,
    "grpc-unary": grpc_unary,
    "infer": http_infer,
    "infer-json": http_infer_json,
    "generate": generate,
    "OmniClient": blocking_client,
    "OmniClient-shared": sharing_client,
    "AsyncOmniClient": asyncio_client,
    "AsyncOmniClient-shared": partial(asyncio_client, shared_memory=True),
    "HttpClient": http_client,
    "HttpClient-stream": http_client_stream,
}
"""Ways that may run at once; the command line, which has the process's standard output, and the gateway's are apart."""
COMMAND_LINE = "triton-omni"
GATEWAYS: dict[str, Callable[[str, Asked], Said]] = {"gateway": gateway, "gateway-stream": gateway_stream}
ALL_WAYS = (*WAYS, COMMAND_LINE, *GATEWAYS)

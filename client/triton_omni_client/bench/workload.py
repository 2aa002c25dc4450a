# SPDX-License-Identifier: Apache-2.0
"""Requests of the benchmark: prompts in turn, one sampling for all, a seed for each. Knows no server.

Also writes the same requests as input data of NVIDIA's perf_analyzer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triton_omni_client.errors import BadRequest
from triton_omni_client.messages import AudioFormat, Media, Modality, Request

BUILT_IN = "built-in"
_DATA_URI = "data:application/octet-stream;base64,"

PROMPTS = (
    "Tell me a story about the sea and the people who live beside it.",
    "Explain to a child how a bicycle stays upright while it rolls.",
    "Describe a busy market in the early morning: what is seen, heard and smelled there.",
    "How does a lighthouse work, and who looked after one in the old days?",
    "Give me directions for baking a simple loaf of bread, step by step.",
    "What would you show a visitor on a first day in a city by a river?",
    "Why do leaves change their colour in autumn? Take your time to explain.",
    "Summarise the plot of a play about two families who cannot make peace.",
)


@dataclass(frozen=True)
class ScriptTurn:
    """Words and media of the user in one turn of a conversation."""

    text: str
    media: Sequence[Media] = ()


@dataclass(frozen=True)
class Workload:
    """Requests by number: the prompts in turn, and `seed` plus the number as the request's seed."""

    prompts: Sequence[str] = PROMPTS
    media: Sequence[Media] = ()
    """Shown or played with every prompt; in conversations one a turn, from the first turn on."""
    turns: int = 1
    """Turns of a conversation; 1 = each prompt is asked for itself."""
    speaks: bool = False
    """True if the sounds of conversations are sent while they are spoken, in real time."""
    script: Sequence[ScriptTurn] = ()
    """Turns of every conversation, begun anew after the last; empty = the prompts, from another one each time."""
    system: str | None = None
    """System prompt; None leaves it to the server."""
    seed: int = 0
    modalities: Sequence[Modality] | None = None
    voice: str | None = None
    audio_format: AudioFormat = "f32"
    timeout: float | None = None
    thinker: Mapping[str, Any] = field(default_factory=dict)
    talker: Mapping[str, Any] = field(default_factory=dict)
    token2wav: Mapping[str, Any] = field(default_factory=dict)

    def request(self, index: int) -> Request:
        """The request of this number."""
        asked = Request.ask(
            self.prompts[index % len(self.prompts)],
            self.media,
            **self.options(index),
        )
        if self.system is None:
            return asked
        user = asked.messages or [{"role": "user", "content": asked.text}]
        return replace(asked, text=None, messages=[{"role": "system", "content": self.system}, *user])

    def turn(self, index: int) -> ScriptTurn:
        """Return what request `index` asks in its turn of its conversation."""
        number, turn = divmod(index, self.turns)
        if self.script:
            return self.script[turn % len(self.script)]
        return ScriptTurn(self.prompts[(number + turn) % len(self.prompts)], self.media[turn : turn + 1])

    def options(self, index: int) -> dict[str, Any]:
        """Return the other fields of request `index`."""
        return {
            "seed": self.seed + index,
            "modalities": self.modalities,
            "voice": self.voice,
            "audio_format": self.audio_format,
            "timeout": self.timeout,
            "thinker": self.thinker,
            "talker": self.talker,
            "token2wav": self.token2wav,
            "request_id": f"bench-{index}",
        }


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a text file, one a line; empty lines are left out.

    Raises:
        BadRequest: the file cannot be read, or holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadRequest(f"prompts {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"prompts {path}: not text in UTF-8 at byte {error.start}") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise BadRequest(f"prompts {path}: no line holds a prompt")
    return prompts


def of_length(prompt: str, words: int) -> str:
    """The prompt cut to so many words, or repeated until it has them."""
    found = prompt.split()
    return " ".join(found[at % len(found)] for at in range(words))


def perf_analyzer_input(workload: Workload, requests: int) -> str:
    """The first `requests` requests as the JSON of perf_analyzer's `--input-data`, which it sends round robin.

    Media are data URIs, of which the server makes files again: JSON holds no bytes.
    """
    return json.dumps({"data": [_as_input(workload.request(index)) for index in range(requests)]}, indent=1) + "\n"


def _as_input(request: Request) -> dict[str, Any]:
    """Input tensors by name: their elements, with the shape where the model leaves it open."""
    inputs: dict[str, Any] = {"sampling_parameters": [json.dumps(request.sampling_parameters())]}
    if request.text is not None:
        inputs["text_input"] = [request.text]
    if request.messages is not None:
        inputs["messages"] = [json.dumps(list(request.messages), ensure_ascii=False)]
    if request.media:
        uris = [_DATA_URI + base64.b64encode(data).decode() for data in request.media]
        inputs["media"] = {"content": uris, "shape": [len(uris)]}
    return inputs

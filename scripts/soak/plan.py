# SPDX-License-Identifier: Apache-2.0
"""Plan of requests, all drawn from one seed: the kind of each, its protocol, and its fate."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, Final, Literal

import av
import numpy as np
import soundfile  # type: ignore[import-untyped]
from PIL import Image

from triton_omni_client import Media, Request
from triton_omni_client.conversation import user_message

from .known import QUESTIONS, VOICES, Known

Way = Literal["grpc stream", "http stream", "grpc unary", "http unary"]
Fate = Literal["whole", "cancelled", "malformed", "slow", "hurried"]

WAYS: Final[tuple[Way, ...]] = ("grpc stream", "http stream", "grpc unary", "http unary")
CANCELLABLE: Final[tuple[Way, ...]] = ("grpc stream", "http stream", "grpc unary")
"""Triton tells nobody of a closed connection of a unary HTTP request."""
_REPLY_TOKENS = (2, 4, 8)
_CODES = (10, 20, 40)
_SEEDS = 3
"""Seeds of each kind; few, so that requests repeat and their replies can be compared."""
_QUESTION = "what is this?"
KNOWN: Final = "known"
"""The kind of a question whose right reply is known."""
TURN: Final = "turn"
"""The kind of a turn; its client puts the turns before it in front (`talk.py`)."""
_SAID = ("hello", "why?", "Tell me about the sea.")
_SHOWN = 0.1
"""Share of turns with a picture."""


@dataclass(frozen=True)
class Shares:
    """Share of requests with each fate; the rest are read to their end."""

    cancelled: float = 0.2
    malformed: float = 0.05
    slow: float = 0.03
    hurried: float = 0.02
    speech: float = 0.4
    """Share of spoken replies among well-formed requests."""
    turns: float = 0.0
    """Share of turns of conversations among well-formed requests; a cancelled one is a barge-in."""
    known: float = 0.0
    """Share of known questions among the other well-formed requests; only a trained checkpoint answers them."""

    def fate(self, draw: Random) -> Fate:
        """Draw the fate of a request."""
        fates: tuple[Fate, ...] = ("cancelled", "malformed", "slow", "hurried")
        shares = [self.cancelled, self.malformed, self.slow, self.hurried]
        return draw.choices((*fates, "whole"), [*shares, max(0.0, 1 - sum(shares))])[0]

    def kind(self, draw: Random) -> str:
        """Draw the kind of a well-formed request."""
        if self.turns > 0 and draw.random() < self.turns:
            return TURN
        return KNOWN if self.known > 0 and draw.random() < self.known else draw.choice(sorted(KINDS))


@dataclass(frozen=True)
class Planned:
    """One request of the run."""

    number: int
    kind: str
    way: Way
    fate: Fate
    request: Request = field(repr=False)
    wait_s: float = 0.0
    """Until a cancel; of a slow reader, before it reads."""
    known: Known | None = field(default=None, repr=False)
    """The question whose right reply is known."""

    @property
    def reply_key(self) -> str:
        """Requests of the same key get the same reply."""
        request = self.request
        said = request.messages if self.is_turn else f"{request.voice} {request.text}" if self.known else ""
        return f"{self.kind} {request.seed} {request.modalities} {dict(request.thinker)} {dict(request.talker)}{said}"

    @property
    def is_turn(self) -> bool:
        """True of a turn of its client's conversation."""
        return self.kind == TURN


def plan(number: int, seed: int, shares: Shares, length: int = 1) -> Planned:
    """The request of this number; its reply is `length` times as long as short ones are, and a cancel so much later."""
    draw = Random(f"{seed}:{number}")
    fate = shares.fate(draw)
    way = draw.choice(CANCELLABLE if fate == "cancelled" else ("grpc stream",) if fate == "slow" else WAYS)
    known: Known | None = None
    options: dict[str, Any]
    if fate == "malformed":
        kind = draw.choice(sorted(MALFORMED))
        options = dict(MALFORMED[kind]())
    elif (kind := shares.kind(draw)) == KNOWN:
        known = draw.choice(QUESTIONS)
        options = {"text": known.ask, "voice": draw.choice(VOICES), "modalities": ["text", "audio"]}
    else:
        way = "grpc stream" if kind == TURN else way
        said = _turn(draw) if kind == TURN else KINDS[kind]()
        options = {**said, **_limits(draw, length, speech=fate == "slow" or draw.random() < shares.speech)}
    if fate == "hurried":
        options |= {"timeout": draw.choice((0.01, 0.1, 0.3)), "thinker": {"max_tokens": 200, "min_tokens": 200}}
    wait_s = draw.uniform(0, 0.8 * length) if fate == "cancelled" else draw.uniform(1, 3)
    request = Request(seed=draw.randrange(_SEEDS), request_id=f"soak {number}", **options)
    return Planned(number, kind, way, fate, request, wait_s, known)


def _limits(draw: Random, length: int, *, speech: bool) -> dict[str, Any]:
    thinker = {"max_tokens": length * draw.choice(_REPLY_TOKENS)}
    if not speech:
        return {"modalities": ["text"], "thinker": thinker}
    return {"thinker": thinker, "talker": {"temperature": 0, "max_tokens": length * draw.choice(_CODES)}}


def _about(*media: Media) -> dict[str, Any]:
    asked = Request.ask(_QUESTION, media)
    return {"messages": asked.messages, "media": asked.media}


def _turn(draw: Random) -> dict[str, Any]:
    shown = (Media("image", _picture()),) if draw.random() < _SHOWN else ()
    return {"messages": [user_message(draw.choice(_SAID), shown)], "media": [medium.data for medium in shown]}


def _chat() -> dict[str, Any]:
    said: Sequence[Mapping[str, str]] = (
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "why?"},
    )
    return {"messages": said}


@cache
def _picture(width: int = 84) -> bytes:
    pixels = np.add.outer(np.arange(56), np.arange(width)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").save(out, "PNG")
    return out.getvalue()


@cache
def _sound() -> bytes:
    out = io.BytesIO()
    soundfile.write(out, 0.3 * np.sin(np.arange(8000) / 9).astype(np.float32), 16000, format="WAV")
    return out.getvalue()


@cache
def _video() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 30 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@cache
def _too_long() -> str:
    """One for all requests: a run keeps each until its end."""
    return "x " * (1 << 20)


KINDS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "text": lambda: {"text": "hello"},
    "long text": lambda: {"text": "Tell me about the sea. " * 12},
    "chat": _chat,
    "image": lambda: _about(Media("image", _picture())),
    "sound": lambda: _about(Media("audio", _sound())),
    "video": lambda: _about(Media("video", _video())),
    "mixed": lambda: _about(Media("image", _picture()), Media("audio", _sound())),
}
MALFORMED: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "unknown voice": lambda: {"text": "hello", "voice": "nobody"},
    "broken image": lambda: _about(Media("image", _picture()[:40])),
    "broken sound": lambda: _about(Media("audio", b"RIFF" + bytes(40))),
    "broken video": lambda: _about(Media("video", _video()[:200])),
    "fewer media than parts": lambda: {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "unknown role": lambda: {"messages": [{"role": "oracle", "content": "hello"}]},
    "too long": lambda: {"text": _too_long()},
    "impossible schema": lambda: {"text": "hello", "thinker": {"json_schema": {"type": "bogus"}}},
}

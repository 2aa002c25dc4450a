# SPDX-License-Identifier: Apache-2.0
"""Time to the first token after prompts with media, of our thinker's engine and of plain vLLM's.

The time covers an engine's work on decoded media: the processor, the encoders, the prompt, and one draw. Decoding files
comes before and is the same for both.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image as PilImage
from transformers import AutoTokenizer

from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.request.chat import MediaPart, Message, TextPart
from triton_omni.request.media.types import SAMPLE_RATE, Audio, Image, Medium, Video
from triton_omni.session.engine import Sampling, ThinkerPrompt
from triton_omni.thinker.prompt import PromptRenderer, to_vllm_data
from triton_omni.vllm_hooks.shared.compat import LLMEngine, RequestOutputKind, SamplingParams
from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

from .figures import milliseconds
from .own_decoders import OwnEngine, salted
from .plan import Plan
from .vllm_decoders import engine_facts, plain_thinker_arguments

_QUESTION = "What is this?"
_IMAGE = (1024, 768)
_FRAME = (640, 364)
"""Width and height; a frame's are multiples of the patch factor, as decoding leaves them."""
_FRAMES_A_SECOND = 2
_ENGINE = EngineSettings(max_num_seqs=4, max_model_len=8192)


class FirstTokens(Protocol):
    """An engine under test."""

    by: str
    """Name of the implementation in the report."""

    def first_token(self, prompt: ThinkerPrompt, number: int) -> None:
        """Take a prompt with decoded media to its reply's first token, which is its last."""

    def settle(self) -> None:
        """Step until nothing of it is left to do."""

    def facts(self) -> Mapping[str, Any]:
        """Facts that must be equal for two engines to be compared."""

    def close(self) -> None:
        """Release the device."""


class OwnFirstTokens(OwnEngine[ThinkerVllmEngine]):
    """Our engine, with the rows that speech is made of."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        settings = ThinkerSettings(
            engine=_engine(plan), prefix_caching=plan.prefix_caching, quantization=plan.quantization
        )
        super().__init__(ThinkerVllmEngine(Path(plan.model), settings, device))
        self._plan = plan

    def first_token(self, prompt: ThinkerPrompt, number: int) -> None:
        """Prepare, add, and step until it is there."""
        placed = self._engine.prepare(salted(prompt, self._plan))
        self._engine.add_sequence(str(number), placed, Sampling(max_tokens=1), want_rows=True)
        while not any(output.token_ids for output in self._engine.step()):
            if not self._engine.has_work():
                raise RuntimeError("the sequence ended without a token")

    def settle(self) -> None:
        """The last rows, and the device's word that the sequence is gone."""
        while self._engine.has_work():
            self._engine.step()


class PlainFirstTokens:
    """vLLM's own engine and network on the same arguments."""

    by = "vllm"

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._llm = LLMEngine.from_engine_args(plain_thinker_arguments(plan, _engine(plan), device))

    def first_token(self, prompt: ThinkerPrompt, number: int) -> None:
        """Add, and step until it is there."""
        inputs: Any = {"prompt_token_ids": list(prompt.token_ids)}
        if prompt.multi_modal_data:
            inputs |= {"multi_modal_data": dict(prompt.multi_modal_data), "mm_processor_kwargs": {}}
        parameters = SamplingParams(temperature=0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
        self._llm.add_request(str(number), inputs, parameters)
        while self._llm.has_unfinished_requests():
            self._llm.step()

    def settle(self) -> None:
        """The device's word that the sequence is gone."""
        core: Any = self._llm.engine_core.engine_core  # type: ignore[attr-defined]
        while core.scheduler.has_requests() or core.batch_queue:
            self._llm.step()

    def facts(self) -> Mapping[str, Any]:
        """See `engine_facts`."""
        return engine_facts(self._llm)

    def close(self) -> None:
        """Release the device."""
        self._llm.engine_core.shutdown()


def _engine(plan: Plan) -> EngineSettings:
    return _ENGINE.model_copy(update={"enforce_eager": plan.enforce_eager})


def measure_media(engine: FirstTokens, plan: Plan) -> Iterator[Mapping[str, Any]]:
    """The engine's facts, then a figure of every prompt; the engine is closed at the end."""
    try:
        yield {"ready": engine.facts()}
        numbers = itertools.count()
        for name, prompt in prompts(plan).items():
            times: list[float] = []
            for _ in range(plan.warm_up_repeats + plan.repeats):
                begin = time.perf_counter()
                engine.first_token(prompt, next(numbers))
                times.append(time.perf_counter() - begin)
                engine.settle()
            yield milliseconds("first_token", engine.by, times[plan.warm_up_repeats :], {"prompt": name})
    finally:
        engine.close()


def prompts(plan: Plan) -> dict[str, ThinkerPrompt]:
    """A question alone, and about an image, a sound and a video of random content."""
    renderer, random = PromptRenderer(AutoTokenizer.from_pretrained(plan.model)), np.random.default_rng(0)
    seconds, (width, height) = plan.media_seconds, _FRAME
    frames = max(2, round(seconds * _FRAMES_A_SECOND) // 2 * 2)
    wide, high = _IMAGE
    picture = PilImage.fromarray(random.integers(256, size=(high, wide, 3), dtype=np.uint8))
    media: dict[str, list[Medium]] = {
        "text": [],
        f"image {wide} x {high}": [Image(picture)],
        f"{seconds:g} s of sound": [Audio(random.normal(0, 0.1, round(seconds * SAMPLE_RATE)).astype(np.float32))],
        f"{seconds:g} s of video {width} x {height}": [
            Video(random.integers(256, size=(frames, height, width, 3), dtype=np.uint8), float(_FRAMES_A_SECOND))
        ],
    }
    return {name: _prompt(items, renderer) for name, items in media.items()}


def _prompt(media: list[Medium], renderer: PromptRenderer) -> ThinkerPrompt:
    kinds = {Image: "image", Audio: "audio", Video: "video"}
    parts = [MediaPart(kinds[type(item)], b"") for item in media]  # type: ignore[arg-type]
    data, kwargs = to_vllm_data(media, use_audio_in_video=False)
    return ThinkerPrompt(renderer.render([Message("user", (*parts, TextPart(_QUESTION)))]), data, kwargs)

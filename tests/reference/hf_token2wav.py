# SPDX-License-Identifier: Apache-2.0
"""HF's token2wav on a checkpoint's weights, with its noise replaced by ours: the reference of the tests here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavModel,
    RungeKutta4ODESolver,
)

from triton_omni.core.settings import StreamingPlan
from triton_omni.session.engine import AudioOutput, EngineStats
from triton_omni.token2wav.engine import Token2WavEngine
from triton_omni.token2wav.noise import standard_normal
from triton_omni.token2wav.ode import Solver

PREFIX = "token2wav."
HOP = 240
"""Samples a mel frame."""
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Device of the engines under test: a GPU if there is one. HF's reference stays on the CPU."""


def lent(engine: Token2WavEngine) -> Iterator[Token2WavEngine]:
    """For a fixture: an engine that one test after the other uses, and that holds nothing in between."""
    yield engine
    engine.close()
    assert engine.stats() == EngineStats(0, 0, 0, 0)


def next_outputs(engine: Token2WavEngine) -> list[AudioOutput]:
    """The chunks of the next batch that comes through the device; a step does not wait for it."""
    outputs: list[AudioOutput] = []
    while not outputs and engine.has_work():
        outputs = engine.step()
    return outputs


PastRows = dict[tuple[int, str, int], Tensor]
"""Keys or values [halves, block, heads x head_dim] by layer, projection and evaluation."""


class HfToken2Wav:
    """HF's modules and the checkpoint's voices, fp32 on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        config: Any = Qwen2_5OmniConfig.from_pretrained(checkpoint).token2wav_config
        config._attn_implementation = "sdpa"
        self.model: Any = Qwen2_5OmniToken2WavModel(config).float().eval().requires_grad_(False)  # type: ignore[no-untyped-call]
        state: dict[str, Tensor] = {}
        for file in sorted(checkpoint.glob("*.safetensors")):
            tensors = load_file(file)
            state |= {name.removeprefix(PREFIX): t.float() for name, t in tensors.items() if name.startswith(PREFIX)}
        self.model.load_state_dict(state, strict=True)
        self.dit = self.model.code2wav_dit_model
        self.vocoder = self.model.code2wav_bigvgan_model
        self.voices = torch.load(checkpoint / "spk_dict.pt", weights_only=True)

    def voice(self, name: str) -> tuple[Tensor, Tensor]:
        """Speaker embedding [1, D] and reference mel [1, T, M]."""
        return self.voices[name]["cond"].float(), self.voices[name]["ref_mel"].float()

    def mel(self, codes: Tensor, voice: str, seed: int, *, first_frame: int = 0, **options: float) -> Tensor:
        """HF's sampler on `codes` [C] with the noise of these frames; [T, M]."""
        speaker, reference_mel = self.voice(voice)
        with noise_of(seed, first_frame):
            mel: Tensor = self.dit.sample(speaker, reference_mel, codes[None].long(), **options)
        return mel[0].T

    @contextlib.contextmanager
    def past(self, rows: PastRows, *, is_left: bool, kept_blocks: int) -> Iterator[None]:
        """Within, `mel` solves a window after one block of another window, whose frames are ignored.

        At every evaluation the layers that look back find in that block the keys and values in `rows`, if any. There
        they leave those of the `kept_blocks`-th block after it.
        """
        size = self.dit.config.block_size
        with contextlib.ExitStack() as hooks:
            for number, layer in enumerate(self.dit.transformer_blocks):
                for name in ("to_k", "to_v") if layer.look_backward_block else ():
                    asked = itertools.count()

                    def exchange(
                        _: object,
                        __: object,
                        output: Tensor,
                        number: int = number,
                        name: str = name,
                        asked: Any = asked,
                    ) -> Tensor:
                        key = number, name, next(asked)
                        changed = output.clone()
                        if is_left:
                            changed[:, :size] = rows[key]
                        rows[key] = output[:, kept_blocks * size : (kept_blocks + 1) * size].clone()
                        return changed

                    hook = getattr(layer.attn, name).register_forward_hook(exchange)
                    hooks.callback(hook.remove)
            yield

    def waveform(self, codes: Tensor, voice: str, seed: int, **options: float) -> Tensor:
        """HF's token2wav on the whole reply; [S]."""
        speaker, reference_mel = self.voice(voice)
        with noise_of(seed, 0):
            waveform: Tensor = self.model(codes[None].long(), speaker, reference_mel, **options)
            return waveform.reshape(-1)


@contextlib.contextmanager
def noise_of(seed: int, first_frame: int) -> Iterator[None]:
    """`torch.randn` gives our noise of the frames from `first_frame` on."""

    def randn(shape: list[int], **_: object) -> Tensor:
        batch, frames, channels = shape
        assert batch == 1
        return standard_normal([(seed, first_frame, first_frame + frames)], channels, CPU)[None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", randn)
        yield


@contextlib.contextmanager
def solved_by(solver: Solver) -> Iterator[None]:
    """HF's samplers step as `solver` does; their own is `rk4`, and they have no other."""

    def euler(_: object, function: Any, start: Tensor, step: Tensor, __: Tensor, value: Tensor) -> tuple[Tensor, None]:
        return function(start, value) * step, None

    with pytest.MonkeyPatch.context() as patch:
        if solver == "euler":
            patch.setattr(RungeKutta4ODESolver, "_compute_step", euler)
        yield


def _vocoded_lengths(plan: StreamingPlan) -> list[int]:
    """Mel frames that the vocoder reads of each chunk of a reply that goes on for long, the shortest first."""
    context, lengths, kept = plan.vocoder_context_frames, set(), 0
    lag = context - 2 * plan.look_ahead_codes
    for blocks in (*plan.chunk_blocks, *plan.chunk_blocks[-1:] * 4):
        given, kept = max(0, kept - lag), kept + 24 * blocks
        lengths.add(min(kept - lag + context, kept + 2 * plan.look_ahead_codes) - max(0, given - context))
    return sorted(lengths)


def streamed_waveform(
    hf: HfToken2Wav, codes: Tensor, plan: StreamingPlan, voice: str, seed: int, **options: float
) -> list[Tensor]:
    """Chunks by HF's modules, straight from the plan's definition: frames of earlier windows stay as they were made.

    HF solves each window but the first after one block more, which has the keys and values of the window before.
    """
    block, total = 12, len(codes)
    context = plan.vocoder_context_frames
    lag = context - 2 * plan.look_ahead_codes
    kept, overlap = torch.empty(0, 80), torch.empty(0)
    rows: PastRows = {}
    chunks: list[Tensor] = []
    start = given = 0
    for index in itertools.count():
        size, ahead = plan.chunk_blocks[min(index, len(plan.chunk_blocks) - 1)], plan.look_ahead_codes
        end = start + size * block
        final = total < end + max(ahead, 1)
        end, solved_end = (total, total) if final else (end, end + ahead)
        before = block if index else 0
        with hf.past(rows, is_left=index > 0, kept_blocks=size if index else size - 1):
            window, first_frame = codes[start - before : solved_end], 2 * (start - before)
            mel = hf.mel(window, voice, seed, first_frame=first_frame, **options)[2 * before :]
        heard = torch.cat([kept, mel])
        kept = heard[: 2 * end]
        give = 2 * end - (0 if final else lag)
        left, right = max(0, given - context), min(give + context, len(heard))
        if final:
            # The last one is heard with as many frames before it as make another one's length.
            left = right - next((n for n in _vocoded_lengths(plan) if right - left <= n <= right), right - left)
        samples = hf.vocoder(heard[left:right].T[None]).reshape(-1)[(given - left) * HOP :]
        # A chunk begins as the one before it would have gone on, and is itself one mel frame later.
        ramp = torch.arange(1, len(overlap) + 1) / (len(overlap) + 1)
        samples[: len(overlap)] = overlap * (1 - ramp) + samples[: len(overlap)] * ramp
        chunk, overlap = samples[: (give - given) * HOP], samples[(give - given) * HOP :][:HOP]
        chunks.append(chunk)
        start, given = end, give
        if final:
            return chunks
    raise AssertionError("unreachable")

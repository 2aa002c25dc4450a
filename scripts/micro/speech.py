# SPDX-License-Identifier: Apache-2.0
"""Times of token2wav: whole replies, and one streaming window split into DiT and vocoder.

Our engine is driven as its stage drives it, so whatever path its settings choose is what is measured.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.checkpoint.transformers_setup import prepare_transformers
from triton_omni.core.settings import (
    FRAMES_PER_BLOCK,
    FRAMES_PER_CODE,
    DiffusionSettings,
    Preset,
    StreamingPlan,
    Token2WavSettings,
)
from triton_omni.session.engine import AudioOutput, StreamOptions
from triton_omni.token2wav.chunking import streaming_plan
from triton_omni.token2wav.engine import Token2WavEngine
from triton_omni.token2wav.networks import Vocoder
from triton_omni.token2wav.ode import EVALUATIONS_A_STEP, Steps, run_out
from triton_omni.token2wav.sampler import FlowOptions, Window

from .figures import OURS, READY, Metric, milliseconds
from .plan import Plan, repeated, timed

CODES_A_SECOND = 50
SMALL: Final = StreamingPlan(chunk_blocks=(3,), look_ahead_codes=12)
"""Every chunk is a window of 72 + 24 mel frames, of which 72 are new."""
_BALANCED: Final = Token2WavSettings().plans["balanced"]
REGULAR: Final = _BALANCED.model_copy(update={"chunk_blocks": _BALANCED.chunk_blocks[-1:]})
"""Every chunk is a window of a long reply with the plan `balanced`."""


def _whole(found: DiffusionSettings) -> Preset:
    return Preset(solver=found.solver, num_steps=found.points, guidance_scale=found.guidance)


PRESETS: Final = {name: _whole(Token2WavSettings().diffusion_of(name, {})) for name in Token2WavSettings().presets}
"""Presets as shipped, with HF's points and guidance whatever the checkpoint states."""
REFERENCE: Final = Token2WavSettings().preset
"""The preset of windows that are timed in parts."""


class WrongWorkError(RuntimeError):
    """The engine did something else than what the label says."""


def codes_of(plan: Plan, count: int, seed: int) -> Tensor:
    """Random codes int32 [count], each within the codec's table."""
    return torch.randint(_table(plan.model), (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@functools.cache
def _table(model: str) -> int:
    return load_config(Path(model)).codec.largest_code + 1


def offline_own(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Whole replies in one window by our engine, codes on the device in, samples on the host out."""
    engine = Token2WavEngine(Path(plan.model), Token2WavSettings(), at)
    voice = load_speakers(Path(plan.model), load_config(Path(plan.model))).default.name

    def reply(codes: Tensor) -> None:
        engine.open("reply", voice, 0, StreamOptions(mode="offline", solver="rk4", num_steps=10, guidance_scale=0.5))
        engine.feed("reply", codes)
        engine.end("reply")
        (output,) = next_outputs(engine)
        _check(output.final and output.error is None and len(output.samples) > 0, f"a reply ended with {output.error}")

    yield READY
    yield from _offline(plan, at, OURS, reply)
    engine.close()


def offline_hf(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """The same replies by HF's `Qwen2_5OmniToken2WavModel`: its weights, voice, RK4 grid and guidance are the same.

    It runs as a user of transformers gets it: float32 with SDPA and torch's default of TF32 in cuDNN's convolutions,
    which our engine switches off; the difference is in HF's favour.
    """
    model = _hf_token2wav(Path(plan.model), at)
    voice = load_speakers(Path(plan.model), load_config(Path(plan.model))).default
    speaker, reference_mel = voice.cond.to(at), voice.ref_mel.to(at)

    @torch.inference_mode()
    def reply(codes: Tensor) -> None:
        model(codes[None].long(), speaker, reference_mel, num_steps=10, guidance_scale=0.5, sway_coefficient=-1.0)

    yield READY
    yield from _offline(plan, at, "hf", reply)


def _offline(plan: Plan, at: torch.device, by: str, reply: Callable[[Tensor], None]) -> Iterator[Mapping[str, Any]]:
    for seconds in plan.offline_seconds:
        codes = codes_of(plan, round(seconds * CODES_A_SECOND), seed=0).to(at)
        times = repeated(plan, lambda: timed(lambda: reply(codes), at))  # noqa: B023
        yield milliseconds("token2wav_offline", by, times, {"audio_s": seconds})


def _hf_token2wav(checkpoint: Path, at: torch.device) -> Any:
    from safetensors import safe_open

    prepare_transformers()
    from transformers import Qwen2_5OmniConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

    config: Any = Qwen2_5OmniConfig.from_pretrained(checkpoint)
    config.token2wav_config._attn_implementation = "sdpa"
    network: Any = Qwen2_5OmniToken2WavModel
    model = network(config.token2wav_config).float()
    state: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith("token2wav.")]  # noqa: SIM118
            state |= {name.removeprefix("token2wav."): file.get_tensor(name).float() for name in names}
    # Buffers that follow from the configuration may be missing; parameters may not.
    missing, unexpected = model.load_state_dict(state, strict=False)
    lacking = set(missing) & {name for name, _ in model.named_parameters()}
    _check(not lacking and not unexpected, f"weights missing {sorted(lacking)}, unexpected {unexpected}")
    return model.to(at).eval()


class TimedEngine(Token2WavEngine):
    """Our engine with the times of its two halves.

    Each half begins and ends with an idle device. That wait is outside what a half is given, but it makes the whole
    step slower than the engine's own: the whole is timed by an engine without it.
    """

    def __init__(self, checkpoint: Path, settings: Token2WavSettings, at: torch.device) -> None:
        super().__init__(checkpoint, settings, at)
        self.dit_s: list[float] = []
        self.vocoder_s: list[float] = []
        steps = self._sampler.steps

        def timed_steps(windows: Sequence[Window], options: FlowOptions) -> Steps[Any]:
            yield from ()
            found: list[Any] = []
            self.dit_s.append(timed(lambda: found.append(run_out(steps(windows, options))), at))
            return found[0]

        self._sampler.steps = timed_steps  # type: ignore[method-assign]

        self._vocoder = _TimedVocoder(self._vocoder, self.vocoder_s, at)


class _TimedVocoder:
    """A vocoder that notes how long each call takes."""

    def __init__(self, vocoder: Vocoder, seconds: list[float], at: torch.device) -> None:
        self.samples_per_frame = vocoder.samples_per_frame
        self._vocoder, self._seconds, self._at = vocoder, seconds, at

    def __call__(self, mel: Tensor) -> Tensor:
        found: list[Tensor] = []
        self._seconds.append(timed(lambda: found.append(self._vocoder(mel)), self._at))
        return found[0]


def next_outputs(engine: Token2WavEngine) -> list[AudioOutput]:
    """The chunks of the next batch that comes through the device; the engine's own steps do not wait for it."""
    outputs: list[AudioOutput] = []
    while not outputs and engine.has_work():
        outputs = engine.step()
    return outputs


class WindowStreams:
    """Equal streams whose windows fall due together: a step is one window of each, in as many batches as a server with
    such settings would solve them in."""

    def __init__(
        self, engine: Token2WavEngine, plan: Plan, batch: int, preset: str, windows: StreamingPlan = SMALL
    ) -> None:
        self._engine, self._plan, self._batch = engine, plan, batch
        self._windows_plan = streaming_plan(windows)
        *_, later = self._windows_plan.regular_chunks
        self._frames = batch * len(later.solved)
        self._options = StreamOptions(mode="streaming", preset=preset)
        self._voice = load_speakers(Path(plan.model), load_config(Path(plan.model))).default.name

    def __enter__(self) -> WindowStreams:
        for number in range(self._batch):
            self._engine.open(str(number), self._voice, number, self._options)
        # The first chunk has no past; it is made before the first timed window.
        self._feed(self._windows_plan.codes_needed(0))
        self._windows()
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(self._batch):
            self._engine.abort(str(number))

    def feed(self) -> None:
        """Give every stream the codes of its next window."""
        self._feed(self._windows_plan.chunk_codes[0])

    def _feed(self, codes: int) -> None:
        for number in range(self._batch):
            self._engine.feed(str(number), codes_of(self._plan, codes, seed=number))

    def step(self) -> None:
        """One window of each stream.

        Raises:
            WrongWorkError: it was not one window of the full size of every stream.
        """
        before = self._engine.frames_solved
        made = self._windows()
        solved = self._engine.frames_solved - before
        _check(made == self._batch, f"a step made {made} windows of {self._batch}")
        _check(solved == self._frames, f"a step solved {solved} mel frames")

    def _windows(self) -> int:
        """Have all windows made that are due; returns how many came."""
        made = 0
        while made < self._batch and (outputs := next_outputs(self._engine)):
            made += len(outputs)
        return made


def windows(plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    """One small window by batch, DiT and vocoder apart; whole steps and speech a second by windows, batch, preset."""
    engine = TimedEngine(Path(plan.model), window_settings(plan), at)
    yield READY
    for batch in plan.window_batches:
        with WindowStreams(engine, plan, batch, REFERENCE) as streams:
            dit, vocoder = _halves(engine, streams, plan, at)
        yield milliseconds("token2wav_window_dit", OURS, dit, {"batch": batch, **flow(REFERENCE)})
        yield milliseconds("token2wav_window_vocoder", OURS, vocoder, {"batch": batch})
    engine.close()
    yield from _whole_windows("small", SMALL, plan, at)
    yield from _whole_windows("regular", REGULAR, plan, at)


def _whole_windows(name: str, windows: StreamingPlan, plan: Plan, at: torch.device) -> Iterator[Mapping[str, Any]]:
    engine = Token2WavEngine(Path(plan.model), window_settings(plan, windows), at)
    seconds = windows.chunk_blocks[0] * FRAMES_PER_BLOCK / FRAMES_PER_CODE / CODES_A_SECOND
    for batch, preset in itertools.product(plan.window_batches, PRESETS):
        with WindowStreams(engine, plan, batch, preset, windows) as streams:
            times = _times(streams, plan, at)
        parameters = {"batch": batch, "windows": name, **flow(preset)}
        yield milliseconds("token2wav_window", OURS, times, parameters)
        rates = tuple(batch * seconds / took for took in times)
        yield Metric("token2wav_throughput", OURS, parameters, "audio-s/s", rates).summary()
    engine.close()


def flow(preset: str) -> Mapping[str, Any]:
    """A preset's name, its solver and the number of velocity evaluations for one window."""
    found = Token2WavSettings(presets=PRESETS).diffusion_of(preset, {})
    evaluations = EVALUATIONS_A_STEP[found.solver] * (found.points - 1)
    return {"preset": preset, "solver": found.solver, "evaluations": evaluations}


def window_settings(plan: Plan, windows: StreamingPlan = SMALL) -> Token2WavSettings:
    """An engine whose every chunk is such a window, for as many streams as are timed together; all else as shipped."""
    return Token2WavSettings(
        plan="micro",
        plans={"micro": windows},
        presets=PRESETS,
        max_streams=max(plan.window_batches),
        max_batch_frames=plan.batch_frames,
    )


def _halves(
    engine: TimedEngine, streams: WindowStreams, plan: Plan, at: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds that the DiT and that the vocoder takes for a window of each stream, of all batches together."""
    dit, vocoder = [], []

    def window() -> float:
        streams.feed()
        engine.dit_s.clear()
        engine.vocoder_s.clear()
        seconds = timed(streams.step, at)
        dit.append(sum(engine.dit_s))
        vocoder.append(sum(engine.vocoder_s))
        return seconds

    count = len(repeated(plan, window))
    return dit[-count:], vocoder[-count:]


def _times(streams: WindowStreams, plan: Plan, at: torch.device) -> list[float]:
    """Seconds a window, from codes on the device to samples on the host; warm-up windows are not among them."""

    def window() -> float:
        streams.feed()
        return timed(streams.step, at)

    return repeated(plan, window)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongWorkError(otherwise)

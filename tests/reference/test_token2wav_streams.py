# SPDX-License-Identifier: Apache-2.0
"""The engine's waveforms: offline and streamed against HF's modules, and the same whatever the timing or company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hf_token2wav import DEVICE, HfToken2Wav, solved_by, streamed_waveform
from torch import Tensor

from triton_omni.core.settings import DiffusionSettings, StreamingPlan, Token2WavSettings
from triton_omni.session.engine import AudioOutput, StreamOptions
from triton_omni.token2wav.attention import AttentionKind
from triton_omni.token2wav.engine import Token2WavEngine
from triton_omni.token2wav.ode import Solver

VOICE = "Chelsie"
LARGEST_CODE = 193
FAST = DiffusionSettings(num_steps=3)
FASTEST = DiffusionSettings(solver="euler", num_steps=3)
"""A quarter of the evaluations, for many streams and shapes of windows. rk4 is held to HF for the plan in use, and for
what is `CHOSEN`."""
STREAMED = StreamOptions(mode="streaming")
OFFLINE = StreamOptions(mode="offline")
MODES: tuple[Literal["offline", "streaming"], ...] = ("offline", "streaming")


@pytest.fixture(scope="module")
def hf(tiny_checkpoint: Path) -> HfToken2Wav:
    return HfToken2Wav(tiny_checkpoint)


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint: Path) -> Token2WavEngine:
    return Token2WavEngine(tiny_checkpoint, Token2WavSettings(dtype="float32", diffusion=FAST), DEVICE)


@pytest.fixture
def engine(shared_engine: Token2WavEngine) -> Iterator[Token2WavEngine]:
    yield shared_engine
    shared_engine.close()


def some_codes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LARGEST_CODE + 1, (count,), generator=generator, dtype=torch.int32)


def drain(engine: Token2WavEngine) -> list[AudioOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def speak(
    engine: Token2WavEngine, codes: Tensor, *, key: str = "a", seed: int = 5, options: StreamOptions = STREAMED
) -> list[Tensor]:
    """Chunks of one stream whose codes come all at once."""
    engine.open(key, VOICE, seed, options)
    engine.feed(key, codes)
    engine.end(key)
    outputs = drain(engine)
    assert all(output.error is None for output in outputs)
    assert [output.final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [output.samples for output in outputs]


def test_a_checkpoints_own_points_are_the_default_of_its_streams(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"token2wav_num_steps": 2, "token2wav_guidance_scale": 0}')
    codes, options = (
        some_codes(13),
        [STREAMED, StreamOptions(num_steps=2, guidance_scale=0.0), StreamOptions(num_steps=3)],
    )
    engine = Token2WavEngine(tmp_path, Token2WavSettings(dtype="float32"), DEVICE)
    default, same, other = (torch.cat(speak(engine, codes, options=chosen)) for chosen in options)
    assert torch.equal(default, same)
    assert not torch.equal(default, other)
    engine = Token2WavEngine(tmp_path, Token2WavSettings(dtype="float32", diffusion=FAST), DEVICE)
    assert torch.equal(torch.cat(speak(engine, codes)), other)


@pytest.mark.parametrize("count", [1, 2, 12, 13, 90])
def test_offline_waveform_equals_hf(engine: Token2WavEngine, hf: HfToken2Wav, count: int) -> None:
    codes = some_codes(count)
    (ours,) = speak(engine, codes, options=OFFLINE)
    theirs = hf.waveform(codes, VOICE, 5, num_steps=FAST.num_steps)
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_offline_waveform_with_default_solver_equals_hf_defaults(tiny_checkpoint: Path, hf: HfToken2Wav) -> None:
    codes = some_codes(40)
    engine = Token2WavEngine(tiny_checkpoint, Token2WavSettings(dtype="float32", mode="offline"), DEVICE)
    (ours,) = speak(engine, codes, options=StreamOptions())
    torch.testing.assert_close(ours, hf.waveform(codes, VOICE, 5), atol=1e-4, rtol=0)


CHOSEN = [
    ("euler", 5, 1.0),
    ("rk4", 4, 2.0),
    ("rk4", 3, 0.0),
]
"""Solver, steps and guidance of a request, none of them the deployment's."""


@pytest.mark.parametrize(("solver", "num_steps", "guidance_scale"), CHOSEN)
def test_what_a_request_chooses_is_what_hf_s_sampler_does_with_it(
    engine: Token2WavEngine, hf: HfToken2Wav, solver: Solver, num_steps: int, guidance_scale: float
) -> None:
    codes = some_codes(90)
    chosen: dict[str, Any] = {"num_steps": num_steps, "guidance_scale": guidance_scale}
    options = {mode: StreamOptions(mode=mode, solver=solver, **chosen) for mode in MODES}
    ours = {mode: torch.cat(speak(engine, codes, options=options[mode])) for mode in MODES}
    with solved_by(solver):
        offline = hf.waveform(codes, VOICE, 5, **chosen)
        streamed = torch.cat(streamed_waveform(hf, codes, StreamingPlan(), VOICE, 5, **chosen))
    torch.testing.assert_close(ours["offline"], offline, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours["streaming"], streamed, atol=1e-4, rtol=0)
    assert (ours["offline"] - hf.waveform(codes, VOICE, 5, num_steps=FAST.num_steps)).abs().max() > 1e-2


PLANS = {
    "balanced": StreamingPlan(),
    "a block ahead": StreamingPlan(look_ahead_codes=12, vocoder_context_frames=24),
    "least context": StreamingPlan(chunk_blocks=(2,), look_ahead_codes=0, vocoder_context_frames=1),
    "audio lags": StreamingPlan(chunk_blocks=(2, 1), look_ahead_codes=0, vocoder_context_frames=24),
    "audio leads": StreamingPlan(chunk_blocks=(1, 2), look_ahead_codes=9, vocoder_context_frames=12),
    "long context": StreamingPlan(chunk_blocks=(1, 3), look_ahead_codes=12, vocoder_context_frames=30),
    "far ahead": StreamingPlan(chunk_blocks=(1,), look_ahead_codes=36),
}


@pytest.mark.parametrize("count", [1, 24, 25, 90, 131])
@pytest.mark.parametrize("name", PLANS)
def test_streamed_chunks_equal_hf_modules_window_by_window(
    tiny_checkpoint: Path, hf: HfToken2Wav, name: str, count: int
) -> None:
    diffusion = FAST if name == "balanced" else FASTEST
    settings = Token2WavSettings(dtype="float32", diffusion=diffusion, plan=name, plans=PLANS)
    codes = some_codes(count)
    ours = speak(Token2WavEngine(tiny_checkpoint, settings, DEVICE), codes)
    with solved_by(diffusion.solver):
        theirs = streamed_waveform(hf, codes, PLANS[name], VOICE, 5, num_steps=diffusion.num_steps)
    assert [len(chunk) for chunk in ours] == [len(chunk) for chunk in theirs]
    assert sum(map(len, ours)) == count * 480
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=0)


def fed_in(engine: Token2WavEngine, codes: Tensor, bursts: Sequence[int], *, wait: bool) -> list[Tensor]:
    """Chunks when codes come in bursts; `wait` leaves the work until all have come."""
    engine.open("a", VOICE, 5, STREAMED)
    outputs: list[AudioOutput] = []
    for part in torch.split(codes, list(bursts)):
        engine.feed("a", part)
        outputs += [] if wait else drain(engine)
    engine.end("a")
    return [output.samples for output in outputs + drain(engine)]


@pytest.mark.parametrize(
    ("bursts", "wait"),
    [([1] * 100, False), ([7] * 14 + [2], False), ([24, 0, 36, 40], False), ([100], True), ([37, 63], True)],
)
def test_waveform_does_not_depend_on_when_codes_come(engine: Token2WavEngine, bursts: list[int], wait: bool) -> None:
    codes = some_codes(100)
    expected = speak(engine, codes)
    assert len(expected) > 2
    got = fed_in(engine, codes, bursts, wait=wait)
    assert [len(chunk) for chunk in got] == [len(chunk) for chunk in expected]
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-5, rtol=0)


def test_deterministic_sound_is_the_same_to_the_bit_alone_and_in_any_company(tiny_checkpoint: Path) -> None:
    settings = Token2WavSettings(dtype="float32", diffusion=FASTEST, deterministic=True)
    engine = Token2WavEngine(tiny_checkpoint, settings, DEVICE)
    codes = some_codes(100, seed=9)
    alone = torch.cat(speak(engine, codes))
    assert torch.equal(torch.cat(speak(engine, codes)), alone)
    assert torch.equal(torch.cat(fed_in(engine, codes, [7] * 14 + [2], wait=False)), alone)
    for place in (0, 3, 7):
        others = [some_codes(count, seed=count) for count in (90, 3, 12, 25, 37, 61, 100)]
        replies = [*others[:place], codes, *others[place:]]
        for number, reply in enumerate(replies):
            engine.open(f"s{number}", VOICE, 5 if number == place else number, OFFLINE if number == 5 else STREAMED)
            engine.feed(f"s{number}", reply)
            engine.end(f"s{number}")
        mine = [output.samples for output in drain(engine) if output.key == f"s{place}"]
        assert torch.equal(torch.cat(mine), alone)


@pytest.mark.parametrize("attention", ["block", "plain"])
def test_streams_of_unequal_lengths_together_equal_each_alone(tiny_checkpoint: Path, attention: AttentionKind) -> None:
    settings = Token2WavSettings(dtype="float32", diffusion=FASTEST, attention=attention)
    engine = Token2WavEngine(tiny_checkpoint, settings, DEVICE)
    replies = {f"s{n}": some_codes(count, seed=n) for n, count in enumerate([100, 3, 12, 25, 37, 61, 90, 101])}
    options = {key: OFFLINE if key in ("s2", "s5") else STREAMED for key in replies}
    alone = {
        key: speak(engine, codes, key=key, seed=n, options=options[key])
        for n, (key, codes) in enumerate(replies.items())
    }
    for n, key in enumerate(replies):
        engine.open(key, VOICE, n, options[key])
    together: dict[str, list[Tensor]] = {key: [] for key in replies}
    for step in range(120):
        for key, codes in replies.items():
            engine.feed(key, codes[step : step + 1]) if step < len(codes) else None
            engine.end(key) if step == len(codes) else None
        for output in engine.step():
            together[output.key].append(output.samples)
    for output in drain(engine):
        together[output.key].append(output.samples)
    for key, chunks in alone.items():
        assert [len(chunk) for chunk in together[key]] == [len(chunk) for chunk in chunks]
        torch.testing.assert_close(torch.cat(together[key]), torch.cat(chunks), atol=1e-5, rtol=0)

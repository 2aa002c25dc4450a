# SPDX-License-Identifier: Apache-2.0
"""DiT, speaker encoder, sampler and vocoder against HF's on the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_token2wav import CPU, HfToken2Wav
from torch import Tensor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    ECAPA_TimeDelayNet,
    RungeKutta4ODESolver,
)

from triton_omni.checkpoint.facts import EcapaConfig
from triton_omni.core.settings import Token2WavSettings
from triton_omni.token2wav.batching import block_layout
from triton_omni.token2wav.bigvgan import ACTIVATION_TAPS, low_pass
from triton_omni.token2wav.ecapa import Ecapa
from triton_omni.token2wav.networks import Networks, load_networks
from triton_omni.token2wav.ode import guide, integrate, run_out, time_grid
from triton_omni.token2wav.sampler import FlowOptions, Sampler, Window

VOICE = "Chelsie"


@pytest.fixture(scope="module")
def hf(tiny_checkpoint: Path) -> HfToken2Wav:
    return HfToken2Wav(tiny_checkpoint)


@pytest.fixture(scope="module", params=["block", "plain"])
def networks(tiny_checkpoint: Path, request: pytest.FixtureRequest) -> Networks:
    return load_networks(tiny_checkpoint, Token2WavSettings(attention=request.param), CPU)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def some_codes(count: int, networks: Networks, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(networks.dit.config.num_embeds + 1, (count,), generator=generator)


def test_speaker_encoder_equals_hf(hf: HfToken2Wav, networks: Networks) -> None:
    _, reference_mel = hf.voice(VOICE)
    ours = networks.dit.input_embed.spk_encoder(reference_mel)
    theirs = hf.dit.input_embed.spk_encoder(reference_mel)
    assert theirs.std() > 1e-2
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_speaker_encoder_of_any_scale_equals_hf(scale: int) -> None:
    sizes: dict[str, Any] = {"channels": (16, 16, 16, 32), "kernel_sizes": (5, 3, 3, 1), "dilations": (1, 2, 3, 1)}
    sizes_hf = {f"enc_{name}": values for name, values in sizes.items()}
    torch.manual_seed(6)
    hf_config = Qwen2_5OmniDiTConfig(
        mel_dim=20, enc_dim=8, enc_attention_channels=8, enc_res2net_scale=scale, enc_se_channels=8, **sizes_hf
    )
    theirs: Any = ECAPA_TimeDelayNet(hf_config)
    ours = Ecapa(EcapaConfig(8, **sizes, attention_channels=8, res2net_scale=scale, se_channels=8), mel_dim=20)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    mel = torch.randn(2, ours.min_frames, 20)
    torch.testing.assert_close(ours(mel), theirs(mel), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 12, 30, 41])
@pytest.mark.parametrize("time", [0.0, 0.37])
def test_one_evaluation_equals_hf_for_both_halves_of_guidance(
    hf: HfToken2Wav, networks: Networks, count: int, time: float
) -> None:
    dit, codes = networks.dit, some_codes(count, networks)
    speaker, reference_mel = hf.voice(VOICE)
    state = torch.randn(count * 2, 80, generator=torch.Generator().manual_seed(1))
    theirs = hf.dit(
        hidden_states=state[None],
        quantized_code=codes[None],
        speaker_embedding=speaker[:, None].expand(-1, count * 2, -1),
        condition_vector=reference_mel,
        time_step=torch.tensor(time),
    )
    layout = block_layout((count * 2,) * 2, dit.config.block_size, CPU)
    speaking, silent = networks.voices[VOICE].halves
    spoken = dit.codes()[codes].repeat_interleave(dit.config.repeats, dim=0) + speaking
    condition = torch.cat([spoken, silent.expand_as(spoken)])
    past = dit.past_pool(0, torch.float32).of_batch([None, None], layout, evaluations=1, halves=1).upload()
    velocity = dit.velocity_for(condition, dit.modulation(torch.tensor([time])), layout, past)
    ours = velocity(0, torch.cat([state, state]))
    assert (theirs[0] - theirs[1]).abs().max() > 1e-2
    torch.testing.assert_close(torch.stack(layout.split(ours)), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 2.0, 0.0])
@pytest.mark.parametrize("num_steps", [2, 10])
def test_sampled_mel_equals_hf(hf: HfToken2Wav, networks: Networks, scale: float, num_steps: int) -> None:
    codes = some_codes(31, networks)
    window = Window(codes, first_frame=48, seed=7, voice=networks.voices[VOICE], guidance_scale=scale)
    options = FlowOptions("rk4", num_steps, sway=-1.0, guided=scale > 0)
    (ours,) = Sampler(networks.dit, CPU).sample([window], options)
    theirs = hf.mel(codes, VOICE, 7, first_frame=48, num_steps=num_steps, guidance_scale=scale)
    assert theirs.std() > 1e-1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_euler_sampler_equals_hf_network_stepped_by_hand(hf: HfToken2Wav, networks: Networks) -> None:
    codes, steps, scale = some_codes(20, networks), 6, 0.5
    speaker, reference_mel = hf.voice(VOICE)
    options = FlowOptions("euler", steps, sway=-1.0, guided=True)
    (ours,) = Sampler(networks.dit, CPU).sample([Window(codes, 0, 3, networks.voices[VOICE], scale)], options)
    points = torch.linspace(0, 1, steps)
    points = points - (torch.cos(torch.pi / 2 * points) - 1 + points)
    state = hf.mel(codes, VOICE, 3, num_steps=1)[None]  # one point: no step, so the noise itself
    for start, end in itertools.pairwise(points):
        spoken, unspoken = hf.dit(
            hidden_states=state,
            quantized_code=codes[None],
            speaker_embedding=speaker[:, None].expand(-1, 40, -1),
            condition_vector=reference_mel,
            time_step=start,
        ).chunk(2)
        state = state + (end - start) * guide(spoken, unspoken, scale)
    torch.testing.assert_close(ours, state[0], atol=1e-4, rtol=1e-4)


def test_rk4_equals_hf_solver_on_a_stiff_system() -> None:
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(2)) * 2
    grid = time_grid(7, -1.0)
    start = torch.ones(5)
    solver: Any = RungeKutta4ODESolver
    theirs = solver(lambda t, x: matrix @ x + torch.sin(9 * t), start).integrate(grid)[-1]
    times = [t for a, b in itertools.pairwise(grid) for t in (a, a + (b - a) / 3, a + (b - a) * 2 / 3, b)]
    ours = run_out(integrate(lambda k, x: matrix @ x + torch.sin(9 * times[k]), start, grid, "rk4"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("frames", [1, 24, 61])
def test_vocoder_equals_hf(hf: HfToken2Wav, networks: Networks, frames: int) -> None:
    mel = torch.randn(1, 80, frames, generator=torch.Generator().manual_seed(4)) * 3 - 4
    theirs = hf.vocoder(mel).reshape(-1)
    ours = networks.vocoder(mel)[0]
    assert ours.shape == (frames * 240,)
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_vocoder_clips_loud_and_extreme_mel_as_hf(hf: HfToken2Wav, networks: Networks) -> None:
    mel = torch.full((1, 80, 30), 120.0)
    mel[:, ::2] = -1e4
    theirs = hf.vocoder(mel).reshape(-1)
    torch.testing.assert_close(networks.vocoder(mel)[0], theirs, atol=1e-5, rtol=1e-5)


def test_low_pass_equals_hf_filter(hf: HfToken2Wav) -> None:
    theirs = hf.vocoder.activation_post.downsample.filter.flatten()
    torch.testing.assert_close(low_pass(0.25, 0.3, ACTIVATION_TAPS), theirs, atol=1e-7, rtol=0)

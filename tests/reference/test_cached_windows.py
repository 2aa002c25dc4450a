# SPDX-License-Identifier: Apache-2.0
"""A stream keeps all of its past that look-back needs: windows that see enough ahead make the whole reply's mel.

The oracle is HF's sampler on the whole reply in one window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hf_token2wav import CPU, DEVICE, HfToken2Wav
from torch import Tensor

from triton_omni.checkpoint.config import load_config
from triton_omni.core.settings import StreamingPlan, Token2WavSettings
from triton_omni.token2wav.attention import AttentionKind
from triton_omni.token2wav.batch_launch import Due, splice
from triton_omni.token2wav.chunking import Chunk, offline_plan, streaming_plan
from triton_omni.token2wav.fused_dit import FusedDiT
from triton_omni.token2wav.networks import Networks, load_networks
from triton_omni.token2wav.ode import Solver
from triton_omni.token2wav.sampler import FlowOptions, Sampler, StepwiseSolver
from triton_omni.token2wav.streaming import Stream, StreamRequest

VOICE = "Chelsie"
SEED = 5
LARGEST_CODE = 193
LOOK_BACK = (0, 3)
RK4 = FlowOptions("rk4", 3, sway=-1.0, guided=True)
PLANS = [
    StreamingPlan(chunk_blocks=blocks, look_ahead_codes=12 * ahead, vocoder_context_frames=1)
    for blocks, ahead in [((1,), 0), ((2, 1), 0), ((1, 2, 3), 1), ((1,), 2), ((3,), 1)]
]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def hf(tiny_checkpoint: Path) -> HfToken2Wav:
    return HfToken2Wav(tiny_checkpoint)


@pytest.fixture(scope="module")
def blind_hf(tiny_checkpoint: Path) -> HfToken2Wav:
    """HF's modules; the layers of `LOOK_BACK` look back, none looks ahead."""
    blind = HfToken2Wav(tiny_checkpoint)
    assert any(layer.look_ahead_block for layer in blind.dit.transformer_blocks)
    for number, layer in enumerate(blind.dit.transformer_blocks):
        layer.look_ahead_block, layer.look_backward_block = 0, int(number in LOOK_BACK)
    return blind


@pytest.fixture(scope="module", params=["block", "plain"])
def attention(request: pytest.FixtureRequest) -> AttentionKind:
    kind: AttentionKind = request.param
    return kind


@pytest.fixture(scope="module")
def networks(tiny_checkpoint: Path, attention: AttentionKind) -> Networks:
    return load_networks(tiny_checkpoint, Token2WavSettings(attention=attention), CPU)


@pytest.fixture(scope="module")
def blind_networks(tiny_checkpoint: Path, attention: AttentionKind) -> Networks:
    """The same of ours."""
    return with_layers(tiny_checkpoint, attention, look_ahead=())


def with_layers(
    checkpoint: Path, attention: AttentionKind, *, look_ahead: tuple[int, ...], device: torch.device = CPU
) -> Networks:
    """The networks, but two layers look back, so that one must not find what the other has left."""
    config = load_config(checkpoint)
    dit = dataclasses.replace(config.dit, look_ahead_layers=look_ahead, look_backward_layers=LOOK_BACK)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("triton_omni.token2wav.networks.load_config", lambda _: dataclasses.replace(config, dit=dit))
        return load_networks(checkpoint, Token2WavSettings(attention=attention), device)


def some_codes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LARGEST_CODE + 1, (count,), generator=generator, dtype=torch.int32)


def a_stream(
    networks: Networks, sampler: Sampler, codes: Tensor, plan: StreamingPlan | None, options: FlowOptions = RK4
) -> Stream:
    """A stream that has all its codes, in windows of `plan` or in one."""
    request = StreamRequest(
        voice=networks.voices[VOICE],
        seed=SEED,
        plan=streaming_plan(plan, block_frames=24, frames_per_code=2) if plan else offline_plan(frames_per_code=2),
        flow=options,
        guidance_scale=0.5,
    )
    stream = Stream.create("a", request, max_codes=len(codes), mel_dim=80, device=sampler.past.pages.device)
    stream.page = sampler.past.allocate(options.pages) if plan else None
    stream.feed(codes, LARGEST_CODE)
    stream.end()
    return stream


def solve(sampler: Sampler, streams: Sequence[Stream]) -> list[list[tuple[Chunk, Tensor]]]:
    """Every window of each stream with its mel, all streams' next ones together."""
    done: list[list[tuple[Chunk, Tensor]]] = [[] for _ in streams]
    while True:
        due = [(n, chunk) for n, stream in enumerate(streams) if (chunk := next_chunk(stream, done[n])) is not None]
        if not due:
            return done
        mels = sampler.sample([streams[n].window(chunk) for n, chunk in due], streams[0].request.flow)
        splice([Due.of(streams[n], chunk) for n, chunk in due], mels).take_on([torch.empty(0)] * len(due))
        for (n, chunk), mel in zip(due, mels, strict=True):
            done[n].append((chunk, mel))


def next_chunk(stream: Stream, done: Sequence[tuple[Chunk, Tensor]]) -> Chunk | None:
    return None if done and done[-1][0].final else stream.due()


def kept(windows: Sequence[tuple[Chunk, Tensor]]) -> Tensor:
    return torch.cat([mel[: len(chunk.kept)] for chunk, mel in windows])


def streamed(networks: Networks, codes: Tensor, plan: StreamingPlan, options: FlowOptions = RK4) -> Tensor:
    """Mel frames [T, 80] that the windows of one stream keep."""
    sampler = Sampler(networks.dit, CPU, past=networks.dit.past_pool(options.pages, torch.float32))
    (windows,) = solve(sampler, [a_stream(networks, sampler, codes, plan, options)])
    return kept(windows)


@pytest.mark.parametrize("count", [24, 61, 130])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_without_look_ahead_layers_a_streamed_reply_is_the_whole_one(
    blind_networks: Networks, blind_hf: HfToken2Wav, plan: StreamingPlan, count: int
) -> None:
    codes = some_codes(count)
    theirs = blind_hf.mel(codes, VOICE, SEED, num_steps=RK4.num_steps)
    torch.testing.assert_close(streamed(blind_networks, codes, plan), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("solver", ["rk4", "euler"])
@pytest.mark.parametrize("guided", [True, False])
def test_every_kind_of_flow_keeps_its_past(blind_networks: Networks, solver: Solver, *, guided: bool) -> None:
    options = FlowOptions(solver, 4, sway=-1.0, guided=guided)
    codes = some_codes(70)
    sampler = Sampler(blind_networks.dit, CPU)
    (whole,) = solve(sampler, [a_stream(blind_networks, sampler, codes, None, options)])
    mine = streamed(blind_networks, codes, PLANS[0], options)
    torch.testing.assert_close(mine, kept(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("blocks", "ahead"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_look_ahead_over_all_that_is_left_makes_the_whole_reply(
    networks: Networks, hf: HfToken2Wav, blocks: int, ahead: int
) -> None:
    codes = some_codes(12 * (blocks + ahead))
    plan = StreamingPlan(chunk_blocks=(blocks,), look_ahead_codes=12 * ahead, vocoder_context_frames=1)
    theirs = hf.mel(codes, VOICE, SEED, num_steps=RK4.num_steps)
    torch.testing.assert_close(streamed(networks, codes, plan), theirs, atol=1e-4, rtol=1e-4)


def test_a_past_is_heard(blind_networks: Networks) -> None:
    """Without the past the mel differs, so the tests above would notice a past that is never read."""
    dit, codes = blind_networks.dit, some_codes(48)
    sampler = Sampler(dit, CPU, past=dit.past_pool(RK4.pages, torch.float32))
    stream = a_stream(blind_networks, sampler, codes, PLANS[0])
    first = stream.due()
    assert first is not None
    splice([Due.of(stream, first)], sampler.sample([stream.window(first)], RK4)).take_on([torch.empty(0)])
    second = stream.due()
    assert second is not None
    window = stream.window(second)
    (with_past,) = sampler.sample([window], RK4)
    (without,) = sampler.sample([dataclasses.replace(window, past=None)], RK4)
    assert (with_past - without).abs().max() > 1e-2


@pytest.mark.usefixtures("plain_norm")
def test_fused_windows_with_and_without_a_past_equal_the_plain_ones(tiny_checkpoint: Path) -> None:
    networks = with_layers(tiny_checkpoint, "block", look_ahead=(2, 3), device=DEVICE)
    options = FlowOptions("euler", 3, sway=-1.0, guided=True)
    kinds = [(30, PLANS[2]), (15, None), (13, PLANS[0])]
    found = []
    for solver in (StepwiseSolver(networks.dit), StepwiseSolver(FusedDiT(networks.dit, torch.float32))):
        sampler = Sampler(networks.dit, DEVICE, solver, past=networks.dit.past_pool(12, torch.float32))
        streams = [a_stream(networks, sampler, some_codes(n, n), plan, options) for n, plan in kinds]
        found.append(solve(sampler, streams))
    plain, ours = found
    assert [len(windows) for windows in plain] == [2, 1, 2]
    for theirs, mine in zip(plain, ours, strict=True):
        for (_, expected), (_, mel) in zip(theirs, mine, strict=True):
            torch.testing.assert_close(mel, expected, atol=1e-4, rtol=1e-4)

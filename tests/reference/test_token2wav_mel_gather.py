# SPDX-License-Identifier: Apache-2.0
"""Splicing a batch of streams: every frame where it belongs, by its absolute number, and nobody's with another."""

from __future__ import annotations

import itertools

import pytest
import torch
from hf_token2wav import DEVICE
from torch import Tensor

from triton_omni.core.settings import StreamingPlan
from triton_omni.token2wav.batch_launch import Due, fade_in, splice, vocode
from triton_omni.token2wav.chunking import WindowPlan, offline_plan, streaming_plan
from triton_omni.token2wav.dit import Voice
from triton_omni.token2wav.sampler import FlowOptions
from triton_omni.token2wav.streaming import Stream, StreamRequest

CHANNELS = 3
PLANS = [
    offline_plan(frames_per_code=2),
    *(
        streaming_plan(
            StreamingPlan(chunk_blocks=blocks, look_ahead_codes=12 * ahead, vocoder_context_frames=context),
            block_frames=24,
            frames_per_code=2,
        )
        for blocks, ahead, context in [((1, 2), 1, 24), ((1, 1, 2), 0, 8), ((2,), 0, 1), ((1,), 2, 40), ((1, 2), 1, 8)]
    ),
]


def a_stream(number: int, plan: WindowPlan, codes: int) -> Stream:
    """A stream that has all its codes; its frame f is to be 1000 x number + f in every channel."""
    nothing = torch.zeros(1, device=DEVICE)
    request = StreamRequest(Voice(nothing), 0, plan, FlowOptions("euler", 2, -1.0, guided=True), 0.5)
    stream = Stream.create(str(number), request, max_codes=codes, mel_dim=CHANNELS, device=DEVICE)
    stream.feed(torch.zeros(codes, dtype=torch.int32), 0)
    stream.end()
    return stream


def frames(number: int, start: int, end: int) -> Tensor:
    return (1000.0 * number + torch.arange(start, end, device=DEVICE))[:, None].expand(-1, CHANNELS)


def mel_of(due: Due, *, bad: bool) -> Tensor:
    mel = frames(int(due.stream.key), due.chunk.solved.start, due.chunk.solved.end).clone()
    # Look-ahead is not for good: whoever takes a frame of it for a kept one is found out.
    mel[len(due.chunk.kept) :] += 0.5
    if bad:
        mel[0] = float("nan")
    return mel


def expected(due: Due) -> Tensor:
    number, chunk = int(due.stream.key), due.chunk
    known = frames(number, chunk.vocoder.start, chunk.vocoder.end).clone()
    known[max(0, chunk.kept.end - chunk.vocoder.start) :] += 0.5
    return known


@pytest.mark.parametrize("sick", [None, 2])
def test_each_chunk_gets_its_own_frames_by_number(sick: int | None) -> None:
    streams = [a_stream(number, plan, 30 + 23 * number) for number, plan in enumerate(PLANS)]
    for turn in itertools.count():
        # Not all of them every time, so that batches differ.
        ready = [s for s in streams if s.due() is not None and (turn + int(s.key)) % 3]
        batch = [Due.of(stream, chunk) for stream in ready if (chunk := stream.due()) is not None]
        if all(stream.finished for stream in streams):
            break
        if not batch:
            continue
        spliced = splice(batch, [mel_of(due, bad=due.stream.key == str(sick)) for due in batch])
        spliced.take_on([torch.full((4,), float(due.chunk.index)) for due in batch])
        assert spliced.broken.tolist() == [float(due.stream.key == str(sick)) for due in batch]
        assert all(due.stream.overlap[0] == due.chunk.index for due in batch)
        for due, mel in zip(batch, torch.split(spliced.frames, [len(due.chunk.vocoder) for due in batch]), strict=True):
            if due.stream.key == str(sick):
                assert bool(mel.isnan().any())
            else:
                torch.testing.assert_close(mel, expected(due))
    assert turn > 3


def test_a_stream_keeps_what_later_chunks_need_and_no_more() -> None:
    stream = a_stream(1, PLANS[1], 200)
    for _ in range(4):
        chunk = stream.due()
        assert chunk is not None
        due = Due.of(stream, chunk)
        splice([due], [mel_of(due, bad=False)]).take_on([torch.empty(0)])
        plan = stream.request.plan
        # A final chunk after it may want as many frames before it as a regular one has.
        first = max(0, chunk.audio.end - plan.vocoder_lengths[-1])
        torch.testing.assert_close(stream.tail, frames(1, first, chunk.kept.end))


class EchoingVocoder:
    """Gives the frames that it is given as samples, four of each."""

    samples_per_frame = 4

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []

    def __call__(self, mel: Tensor) -> Tensor:
        self.batches.append((len(mel), mel.shape[2]))
        return mel[:, 0].repeat_interleave(self.samples_per_frame, 1)


def test_chunks_of_one_length_share_a_pass_of_the_vocoder_whatever_part_of_it_is_kept() -> None:
    plan = streaming_plan(StreamingPlan(), block_frames=24, frames_per_code=2)
    # The third of long replies, and the end of a short one.
    chunks = [plan.chunk(2, 200, ended=False), plan.chunk(2, 50, ended=True), plan.chunk(2, 200, ended=False)]
    found = sorted((chunk for chunk in chunks if chunk is not None), key=lambda chunk: chunk.final)
    assert len({len(chunk.vocoder) for chunk in found}) == 1 < len({chunk.made.start for chunk in found})
    mels = torch.cat([frames(number, chunk.vocoder.start, chunk.vocoder.end) for number, chunk in enumerate(found)])
    vocoder = EchoingVocoder()
    waveforms = [row for rows in vocode(found, mels, vocoder) for row in rows]
    assert vocoder.batches == [(3, len(found[0].vocoder))]
    for number, (chunk, waveform) in enumerate(zip(found, waveforms, strict=True)):
        made = frames(number, chunk.audio.start, chunk.overlap.end)[:, 0]
        torch.testing.assert_close(waveform, made.repeat_interleave(4), atol=0, rtol=0)


def test_a_chunk_fades_from_the_overlap_of_the_one_before_into_its_own_samples() -> None:
    samples, before = torch.full((6,), 8.0, device=DEVICE), torch.zeros(3, device=DEVICE)
    fade_in(samples, before)
    assert samples.tolist() == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    fade_in(samples, torch.empty(0, device=DEVICE))
    assert samples.tolist() == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]

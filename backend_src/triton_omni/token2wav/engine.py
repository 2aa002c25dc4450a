# SPDX-License-Identifier: Apache-2.0
"""The engine of the last stage: codes of many streams in, chunks of their waveforms out.

Owned by one thread. `step` takes the windows that are due, the most urgent first, solves them as one ragged batch
and vocodes them; the only wait for the device is the copy of the samples. Knows nothing of sessions or Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from triton_omni.engine import AudioOutput, EngineStats, StreamOptions
from triton_omni.errors import BadRequest, Overloaded, TooLarge
from triton_omni.settings import DiffusionSettings, Token2WavSettings, describe_validation
from triton_omni.token2wav.acceleration import accelerate
from triton_omni.token2wav.batching import equal_length_groups
from triton_omni.token2wav.chunking import Chunk, offline_plan, streaming_plan
from triton_omni.token2wav.networks import load_networks
from triton_omni.token2wav.noise import MAX_SEED
from triton_omni.token2wav.sampler import FlowOptions
from triton_omni.token2wav.streaming import Stream, StreamRequest

FLAGS = 2
"""Numbers that travel behind the samples: whether the chunk is finite, how many codes were clamped."""
RETRY_AFTER_MS = 250

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Due:
    stream: Stream
    chunk: Chunk


class Token2WavEngine:
    """Streams of codec codes to waveforms.

    Args:
        checkpoint: folder of the checkpoint.
        settings: the stage's settings.
        device: where networks and streams live.
    """

    def __init__(self, checkpoint: Path, settings: Token2WavSettings, device: torch.device) -> None:
        networks = load_networks(checkpoint, settings, device)
        self._settings = settings
        self._device = device
        self._config = networks.dit.config
        self._voices = networks.voices
        self._plan = streaming_plan(
            settings.plans[settings.plan],
            block_frames=self._config.block_size,
            frames_per_code=self._config.repeats,
        )
        self._sampler, self._vocoder = accelerate(networks, settings, device)
        self._streams: dict[str, Stream] = {}
        self._frames_solved = 0

    @property
    def frames_solved(self) -> int:
        """Mel frames solved since the start, look-ahead included."""
        return self._frames_solved

    def open(self, key: str, voice: str, seed: int, options: StreamOptions) -> None:
        """Begin a stream.

        Raises:
            BadRequest: an unknown voice, or a seed or option out of range.
            TooLarge: its past would not fit, were no other stream open.
            Overloaded: its past does not fit beside those of the open streams.
        """
        if key in self._streams:
            raise ValueError(f"stream {key} is open already")
        if voice not in self._voices:
            raise BadRequest(f"voice: {voice!r} is not one of {sorted(self._voices)}", stage="token2wav")
        if not 0 <= seed <= MAX_SEED:
            raise BadRequest(f"seed: {seed} is outside [0, {MAX_SEED}]", stage="token2wav")
        diffusion = self._diffusion(options)
        flow, offline = FlowOptions.of(diffusion), (options.mode or self._settings.mode) == "offline"
        request = StreamRequest(
            voice=self._voices[voice],
            seed=seed,
            plan=offline_plan(frames_per_code=self._config.repeats) if offline else self._plan,
            flow=flow,
            guidance_scale=diffusion.guidance_scale,
        )
        stream = Stream.begin(
            key, request, max_codes=self._settings.max_codes, mel_dim=self._config.mel_dim, device=self._device
        )
        stream.page = None if offline else self._take_pages(flow)
        self._streams[key] = stream

    def feed(self, key: str, codes: Tensor) -> None:
        """Copy the next codes, int32 [N] on any device; codes outside the codec's table are clamped and counted.

        The copy is ordered after whatever was enqueued on the current stream; the caller may reuse `codes` afterwards.

        Raises:
            KeyError: no such stream.
            TooLarge: the stream would exceed `max_codes`.
        """
        stream = self._streams[key]
        if stream.ended:
            raise ValueError(f"stream {key} has ended and takes no more codes")
        stream.feed(codes, last_code=self._config.num_embeds)

    def end(self, key: str) -> None:
        """No more codes: what is left becomes the final chunk."""
        self._streams[key].ended = True

    def has_work(self) -> bool:
        """Whether a window is due."""
        return any(stream.due() for stream in self._streams.values())

    def step(self) -> list[AudioOutput]:
        """Run one batch of due windows; one chunk each, an empty list when nothing is due.

        A stream whose mel frames or samples are not finite ends with an error; the others are untouched by it.
        """
        due = self._due()
        silent = [item for item in due if not len(item.chunk.solved)]
        spoken = self._batch([item for item in due if len(item.chunk.solved)])
        outputs = [self._finish(item, torch.empty(0), finite=True, clamped=0) for item in silent]
        if spoken:
            with torch.inference_mode():
                outputs += self._run_or_drop(spoken)
        return outputs

    def abort(self, key: str) -> None:
        """Drop a stream and everything it holds; unknown keys are ignored."""
        stream = self._streams.pop(key, None)
        if stream is not None and stream.page is not None:
            self._sampler.past.give(stream.page)

    def stats(self) -> EngineStats:
        """Open streams, windows due (waiting), pages of their pasts (KV blocks) and mel frames held (rows used)."""
        return EngineStats(
            running=len(self._streams),
            waiting=len(self._due()),
            kv_blocks_used=self._sampler.past.used,
            rows_used=sum(stream.tail.shape[0] for stream in self._streams.values()),
        )

    def close(self) -> None:
        """Drop every stream."""
        for key in list(self._streams):
            self.abort(key)

    def _diffusion(self, options: StreamOptions) -> DiffusionSettings:
        chosen = {name: value for name, value in asdict(options).items() if name != "mode" and value is not None}
        try:
            return DiffusionSettings.model_validate(self._settings.diffusion.model_dump() | chosen)
        except ValidationError as error:
            raise BadRequest(describe_validation(error, DiffusionSettings), stage="token2wav") from error

    def _take_pages(self, flow: FlowOptions) -> int:
        past, most = self._sampler.past, self._settings.max_streams
        if flow.pages > past.capacity:
            raise TooLarge(
                f"num_steps: {flow.num_steps} points of {flow.solver} need more room than all of max_streams {most}",
                stage="token2wav",
            )
        page = past.take(flow.pages)
        if page is None:
            raise Overloaded(
                f"the pasts of {len(self._streams)} open streams leave no room for another's, see max_streams {most}",
                stage="token2wav",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return page

    def _due(self) -> list[_Due]:
        """Due chunks, the stream that was given least sound first, ties in order of opening."""
        chunks = ((stream, stream.due()) for stream in self._streams.values())
        due = [_Due(stream, chunk) for stream, chunk in chunks if chunk is not None]
        return sorted(due, key=lambda item: item.stream.frames_given)

    def _batch(self, due: Sequence[_Due]) -> list[_Due]:
        """The most urgent window and those that can share its batch, within the batch's limits."""
        batch = list(due[:1])
        frames = sum(len(item.chunk.solved) for item in batch)
        for item in due[1:]:
            alike = item.stream.request.flow == batch[0].stream.request.flow
            fits = frames + len(item.chunk.solved) <= self._settings.max_batch_frames
            if alike and fits and len(batch) < self._settings.max_batch:
                batch.append(item)
                frames += len(item.chunk.solved)
        return batch

    def _run_or_drop(self, batch: Sequence[_Due]) -> list[AudioOutput]:
        """A batch for which there is no memory ends its streams, not the stage."""
        try:
            return self._run(batch)
        except torch.OutOfMemoryError:
            keys = [item.stream.key for item in batch]
            logger.exception("no memory for a batch of %d windows", len(batch))
        torch.cuda.empty_cache()
        for key in keys:
            self.abort(key)
        error = "the device has no memory for this window"
        return [AudioOutput(key, torch.empty(0), final=True, error=error) for key in keys]

    def _run(self, batch: Sequence[_Due]) -> list[AudioOutput]:
        """Solve, vocode and copy one batch; every wait for the device is in the copy."""
        windows = [item.stream.window(item.chunk) for item in batch]
        mels = self._sampler.sample(windows, batch[0].stream.request.flow)
        self._frames_solved += sum(len(item.chunk.solved) for item in batch)
        vocoded = [item.stream.advance(item.chunk, mel) for item, mel in zip(batch, mels, strict=True)]
        waveforms = self._vocode(vocoded)
        samples = [self._trim(item.chunk, waveform) for item, waveform in zip(batch, waveforms, strict=True)]
        finite = [torch.isfinite(m).all() & torch.isfinite(s).all() for m, s in zip(mels, samples, strict=True)]
        flags = torch.stack([*finite, *(item.stream.clamped for item in batch)]).float()
        # The flags ride behind the samples: one copy a step, one wait.
        copied = torch.cat([*samples, flags]).cpu()
        *host, host_flags = torch.split(copied, [*map(len, samples), len(flags)])
        are_finite, clamped = host_flags.view(FLAGS, -1).tolist()
        return [
            self._finish(item, chunk, finite=bool(ok), clamped=int(count))
            for item, chunk, ok, count in zip(batch, host, are_finite, clamped, strict=True)
        ]

    def _vocode(self, mels: Sequence[Tensor]) -> list[Tensor]:
        """Mel frames [T, M] each to waveforms [S] each; equal lengths share a batch."""
        waveforms: dict[int, Tensor] = {}
        for group in equal_length_groups([len(mel) for mel in mels]):
            rows = self._vocoder(torch.stack([mels[index] for index in group]).transpose(1, 2))
            waveforms.update(zip(group, rows, strict=True))
        return [waveforms[index] for index in range(len(mels))]

    def _trim(self, chunk: Chunk, waveform: Tensor) -> Tensor:
        rate = self._vocoder.samples_per_frame
        start = (chunk.audio.start - chunk.vocoder.start) * rate
        return waveform[start : start + len(chunk.audio) * rate]

    def _finish(self, item: _Due, samples: Tensor, *, finite: bool, clamped: int) -> AudioOutput:
        key = item.stream.key
        if not finite or item.chunk.final:
            self.abort(key)
        if not finite:
            wrong = f"the waveform of chunk {item.chunk.index} is not finite"
            return AudioOutput(key, torch.empty(0), final=True, error=wrong, clamped_codes=clamped)
        return AudioOutput(key, samples, final=item.chunk.final, clamped_codes=clamped)

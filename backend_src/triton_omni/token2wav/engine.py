# SPDX-License-Identifier: Apache-2.0
"""The engine of the last stage: codes of many streams in, chunks of their waveforms out.

Used by one thread only. `step` launches the due windows, the most urgent first, as one ragged batch; a large batch
takes several steps. It returns the results of earlier batches and does not wait for the device. Independent of sessions
and Triton.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from triton_omni.checkpoint.facts import SAMPLE_RATE
from triton_omni.core.errors import BadRequest, Overloaded, TooLarge
from triton_omni.core.metrics import LoopActivity
from triton_omni.core.settings import DiffusionSettings, Token2WavSettings, describe_validation
from triton_omni.policy.rules import Snapshot, next_batch, wants_claim
from triton_omni.session.engine import AudioOutput, EngineStats, StreamOptions
from triton_omni.token2wav.batch_launch import (
    BatchLaunch,
    Due,
    FinishedWindow,
    InFlightBatch,
    launch_batch,
)
from triton_omni.token2wav.chunking import offline_plan, streaming_plan
from triton_omni.token2wav.networks import accelerate, load_networks
from triton_omni.token2wav.noise import MAX_SEED
from triton_omni.token2wav.sampler import FlowOptions
from triton_omni.token2wav.streaming import Stream, StreamRequest
from triton_omni.token2wav.window_times import WindowTimes

RETRY_AFTER_MS = 250
NAP_S = 0.0005
"""Seconds that a step sleeps if it has nothing to do while a batch is on the device."""
STEPS_AHEAD = 2
"""Maximum number of a batch's steps launched ahead of the device: with two the device need not wait for the host."""

logger = logging.getLogger(__name__)


class Token2WavEngine:
    """Streams of codec codes to waveforms.

    Args:
        checkpoint: folder of the checkpoint.
        settings: the stage's settings.
        device: where networks and streams live.
    """

    def __init__(self, checkpoint: Path, settings: Token2WavSettings, device: torch.device) -> None:
        networks = load_networks(checkpoint, settings, device)
        settings = settings.with_checkpoint(asdict(networks.flow))
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
        self._launchings: list[BatchLaunch] = []
        """Batches that are being launched, the most urgent last."""
        self._flights: deque[InFlightBatch] = deque()
        self._frames_solved = 0
        self._times = WindowTimes()

    @property
    def frames_solved(self) -> int:
        """Mel frames solved since the start, look-ahead included."""
        return self._frames_solved

    def open(self, key: str, voice: str, seed: int, options: StreamOptions) -> None:
        """Open a stream.

        Raises:
            BadRequest: an unknown voice, or a seed or option out of range.
            TooLarge: its window cache would not fit even without other streams.
            Overloaded: its window cache does not fit beside those of the open streams.
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
            guidance_scale=diffusion.guidance,
            frame_ns=self._vocoder.samples_per_frame * 1_000_000_000 // SAMPLE_RATE,
            lead_ns=None if offline else self._lead_ns(options),
        )
        stream = Stream.create(
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

    def wanted(self, key: str) -> int:
        """Return how many codes, from the first on, make the next window due that is not due yet, unless the stream has
        ended.

        Raises:
            KeyError: no such stream.
        """
        return self._streams[key].wanted

    def settle(self) -> None:
        """Enqueue the copies of all codes that were fed: `feed` has done so."""

    def end(self, key: str) -> None:
        """End the stream's codes: what is left becomes the final chunk."""
        self._streams[key].end()

    def has_work(self) -> bool:
        """Return True if a window is due or a batch is on the device."""
        return self.has_windows or any(stream.due() for stream in self._streams.values())

    def step(self) -> list[AudioOutput]:
        """Launch the next batch of due windows, or its next step; return the chunks that have finished.

        It does not wait for the device, so that the caller works on between the steps. A stream whose mel frames or
        samples are not finite ends with an error; the others are untouched by it.
        """
        outputs = self._finished_windows()
        if self._may_launch():
            outputs += self._launch()
        outputs = outputs or self._finished_windows()
        if not outputs and (self._flights or self._is_far_ahead):
            with LoopActivity("device"):
                time.sleep(NAP_S)
        return outputs

    @property
    def wants_claim(self) -> bool:
        """True if a stream has no sound, or soon none, and waits only for its window."""
        return wants_claim(self._snapshot(self._due()))

    @property
    def has_windows(self) -> bool:
        """True if a batch is being launched or is on the device."""
        return bool(self._flights or self._launchings)

    def abort(self, key: str) -> None:
        """Drop a stream and release everything it holds; unknown keys are ignored."""
        stream = self._streams.pop(key, None)
        if stream is None or stream.page is None:
            return
        # Another stream may get the pages at once: its windows wait for a batch that still writes there.
        self._sampler.past.free(stream.page)
        for launching in self._launchings:
            if launching.holds(stream):
                launching.left.append(stream.pages)

    def stats(self) -> EngineStats:
        """Return open streams, windows due (waiting), pages of window caches (KV blocks) and mel frames held (rows
        used).
        """
        return EngineStats(
            running=len(self._streams),
            waiting=sum(stream.due() is not None for stream in self._streams.values()),
            kv_blocks_used=self._sampler.past.used,
            rows_used=sum(stream.tail.shape[0] for stream in self._streams.values()),
            kv_blocks_limit=self._sampler.past.capacity,
            windows=self._times.of_kind,
            window_phases=self._times.phases,
        )

    def close(self) -> None:
        """Drop every stream and the results of the batches on the device."""
        for key in list(self._streams):
            self.abort(key)
        for launching in tuple(self._launchings):
            self._end_launching(launching)
        self._flights.clear()
        self._times.rest()

    def _is_open(self, stream: Stream) -> bool:
        """Return True if the stream was not dropped; its key may be in use again."""
        return self._streams.get(stream.key) is stream

    def _lead_ns(self, options: StreamOptions) -> int | None:
        lead_s = self._settings.max_lead_s if options.max_lead_s is None else options.max_lead_s
        return None if lead_s is None else round(lead_s * 1e9)

    def _diffusion(self, options: StreamOptions) -> DiffusionSettings:
        asked = ((name, getattr(options, name)) for name in ("solver", "num_steps", "guidance_scale"))
        chosen = {name: value for name, value in asked if value is not None}
        if options.preset is not None and options.preset not in self._settings.presets:
            known = sorted(self._settings.presets)
            raise BadRequest(f"preset: {options.preset!r} is not one of {known}", stage="token2wav")
        try:
            return self._settings.diffusion_of(options.preset, chosen)
        except ValidationError as error:
            raise BadRequest(describe_validation(error, DiffusionSettings), stage="token2wav") from error

    def _take_pages(self, flow: FlowOptions) -> int:
        past, most = self._sampler.past, self._settings.max_streams
        if flow.pages > past.capacity:
            raise TooLarge(
                f"num_steps: {flow.num_steps} points of {flow.solver} need a larger window cache than max_streams "
                f"{most} provides: use fewer",
                stage="token2wav",
            )
        page = past.allocate(flow.pages, avoid=[pages for launching in self._launchings for pages in launching.left])
        if page is None:
            raise Overloaded(
                f"the window caches of {len(self._streams)} open streams leave no room for another, see max_streams "
                f"{most}",
                stage="token2wav",
                retry_after_ms=RETRY_AFTER_MS,
            )
        return page

    def _due(self) -> list[Due]:
        """Return due chunks that are not being launched, the earliest deadline first, ties in order of opening."""
        chunks = ((stream, stream.due()) for stream in self._streams.values())
        due = [Due.of(stream, chunk) for stream, chunk in chunks if chunk is not None]
        if self._launchings:
            due = [item for item in due if not any(launching.holds_up(item.stream) for launching in self._launchings)]
        return sorted(due, key=lambda item: item.deadline_ns)

    def _snapshot(self, due: Sequence[Due]) -> Snapshot[Due]:
        """Return what the policy decides about; `due` has the most urgent window first."""
        return Snapshot(
            now_ns=time.monotonic_ns(),
            due=due,
            launching=[due for one in reversed(self._launchings) for due in one.batch if self._is_open(due.stream)],
            on_device=[due for flight in self._flights for due in flight.batch if self._is_open(due.stream)],
            awaited=sum(stream.wants_first_codes for stream in self._streams.values()),
            streams=sum(stream.page is not None for stream in self._streams.values()),
        )

    @property
    def _is_far_ahead(self) -> bool:
        """True if enough steps of batches are launched ahead of the device."""
        return any(launching.steps_ahead >= STEPS_AHEAD for launching in self._launchings)

    def _may_launch(self) -> bool:
        """Return True if a batch may be launched: closely after another, so that the device need not wait for the host.
        It is not launched earlier, since a more urgent window may become due meanwhile.
        """
        if self._is_far_ahead:
            return False
        return not self._flights or (len(self._flights) == 1 and self._flights[0].is_solved)

    def _launch(self) -> list[AudioOutput]:
        """Begin the most urgent batch if it is more urgent than those that are being launched; then advance the most
        urgent of all.
        """
        due = self._due()
        # The only chunk of an empty reply.
        silent = [FinishedWindow(d.stream, d.chunk, torch.empty(0), True, 0) for d in due if not len(d.chunk.solved)]
        due = [item for item in due if len(item.chunk.solved)]
        settings = self._settings
        most_windows, most_frames = settings.most_together, settings.max_batch_frames
        if batch := next_batch(
            self._snapshot(due), settings.policy, most_windows=most_windows, most_frames=most_frames
        ):
            self._launchings.append(self._launching(batch))
        failed = self._advance_or_drop(self._launchings[-1]) if self._launchings else []
        return [*(self._finish(landed) for landed in silent), *failed]

    def _launching(self, batch: Sequence[Due]) -> BatchLaunch:
        self._times.begin()
        return BatchLaunch(batch, launch_batch(batch, self._sampler, self._vocoder, self._device))

    def _advance_or_drop(self, launching: BatchLaunch) -> list[AudioOutput]:
        """Launch a batch's next step; drop a batch without open streams."""
        if not any(self._is_open(due.stream) for due in launching.batch):
            self._end_launching(launching)
            return []
        try:
            with torch.inference_mode():
                flight = launching.advance(self._device)
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for a batch of %d windows: %s", len(launching.batch), str(error))
        else:
            if flight is not None:
                self._flights.append(flight)
                self._frames_solved += flight.frames
                self._end_launching(launching)
            return []
        # Outside the handler nothing refers to the error any more, not even a log record, and so to the memory of the
        # attempt.
        return self._divide(launching)

    def _divide(self, launching: BatchLaunch) -> list[AudioOutput]:
        """Split a batch for which memory was missing, and launch its halves one after the other.

        A single window is launched again after the batches in flight, which hold memory; without such batches its
        stream ends.
        """
        self._end_launching(launching)
        torch.cuda.empty_cache()
        batch = [due for due in launching.batch if self._is_open(due.stream)]
        if len(launching.batch) > 1:
            half = (len(batch) + 1) // 2
            self._launchings += [self._launching(part) for part in (batch[half:], batch[:half]) if part]
        elif any(other.has_begun for other in self._launchings):
            self._launchings.insert(0, self._launching(batch))
        else:
            return [self._give_up(due.stream) for due in batch]
        return []

    def _give_up(self, stream: Stream) -> AudioOutput:
        self.abort(stream.key)
        wrong = "the device has no memory for this window"
        return AudioOutput(stream.key, torch.empty(0), final=True, error=wrong)

    def _end_launching(self, launching: BatchLaunch) -> None:
        """End a launch; new owners of the pages that it writes write after it."""
        self._launchings.remove(launching)
        launching.steps.close()
        self._rest_if_idle()

    def _finished_windows(self) -> list[AudioOutput]:
        """Return the oldest batch's chunks if it has finished; streams dropped meanwhile give none."""
        if not self._flights or not self._flights[0].is_finished:
            return []
        flight = self._flights.popleft()
        self._times.end(flight)
        self._rest_if_idle()
        arrived = flight.finished_windows()
        return [self._finish(landed) for landed in arrived if self._is_open(landed.stream)]

    def _rest_if_idle(self) -> None:
        if not self._flights and not self._launchings:
            self._times.rest()

    def _finish(self, landed: FinishedWindow) -> AudioOutput:
        key, chunk, clamped = landed.stream.key, landed.chunk, landed.clamped_codes
        if not landed.finite or chunk.final:
            self.abort(key)
        if not landed.finite:
            wrong = f"the waveform of chunk {chunk.index} is not finite"
            return AudioOutput(key, torch.empty(0), final=True, error=wrong, clamped_codes=clamped)
        return AudioOutput(key, landed.samples, final=chunk.final, clamped_codes=clamped)

# SPDX-License-Identifier: Apache-2.0
"""Kinds of batches of the thinker's training: each makes batches on the CPU, then their tensors on the device."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from training import forward, render
from training.heard import HeardBatch, Store, heard_batch
from training.objectives import Inputs, Losses, Objectives, next_targets
from training.render import SceneTable
from training.rows import Grid, Rows, SceneRows
from training.sound import FRAME, Cuts, WhisperMel, cut, worsen


class Kind(Protocol):
    """A kind of batch; all its batches have the same shapes."""

    @property
    def name(self) -> str:
        """Name of the curves."""

    @property
    def weight(self) -> float:
        """How often it is drawn, relative to others."""

    def make(self, rng: random.Random) -> Any:
        """A batch on the CPU; called from the loader's thread."""

    def inputs(self, batch: Any) -> Inputs:
        """Its tensors on the device, as `loss` takes them."""

    def loss(self, objectives: Objectives, given: Inputs) -> Losses:
        """The loss of the batch."""


def _on(device: torch.device, array: Any) -> Tensor:
    """An array on the device, without waiting for it; 16-bit numbers become 64-bit ones."""
    found = torch.from_numpy(array)
    if device.type == "cuda":
        found = found.pin_memory().to(device, non_blocking=True)
    return found.long() if found.dtype == torch.int16 else found


def _drawn(rng: random.Random, count: int, size: int) -> Any:
    return np.random.default_rng(rng.getrandbits(63)).integers(0, count, size)


@dataclass(frozen=True)
class TextKind:
    """Chats of text."""

    name: str
    weight: float
    size: int
    rows: Rows
    device: torch.device

    def make(self, rng: random.Random) -> Rows:
        """Rows drawn from the table."""
        return self.rows.at(_drawn(rng, len(self.rows), self.size))

    def inputs(self, batch: Rows) -> Inputs:
        """`ids` and `targets`."""
        ids = _on(self.device, batch.ids)
        return {"ids": ids, "targets": next_targets(ids, _on(self.device, batch.counts))}

    def loss(self, objectives: Objectives, given: Inputs) -> Losses:
        """Return the losses of the replies."""
        return objectives.text(given)


@dataclass(frozen=True)
class SceneKind:
    """Chats about pictures or videos of one size."""

    name: str
    weight: float
    size: int
    looks: int
    """More scenes, which only the vision encoder sees."""
    rows: SceneRows
    grid: Grid
    device: torch.device

    def make(self, rng: random.Random) -> SceneRows:
        """Rows drawn from the table."""
        return self.rows.at(_drawn(rng, len(self.rows), self.size + self.looks))

    def inputs(self, batch: SceneRows) -> Inputs:
        """The scenes as numbers: they are drawn in the step, which is recorded."""
        things = batch.things if self.grid.pairs == 1 else np.ascontiguousarray(batch.things[:, :1])
        ids = _on(self.device, batch.ids[: self.size])
        return {
            "ids": ids,
            "targets": next_targets(ids, _on(self.device, batch.counts[: self.size])),
            "begin": _on(self.device, batch.begin[: self.size]),
            "seconds": _on(self.device, batch.seconds[: self.size]),
            "things": _on(self.device, things),
            "grounds": _on(self.device, batch.grounds),
        }

    def loss(self, objectives: Objectives, given: Inputs) -> Losses:
        """Return the losses of the replies and of the tokens' labels."""
        height, width = self.grid.height * render.MERGE, self.grid.width * render.MERGE
        return objectives.seen({**given, **self._drawn(given)}, height, width)

    @torch.no_grad()
    def _drawn(self, given: Inputs) -> dict[str, Tensor]:
        """Pixels and labels. A picture is two equal frames, as HF's processor has it."""
        grid, length = self.grid, given["ids"].shape[1]
        table = SceneTable(given["things"], given["grounds"])
        frames = 1 if grid.pairs == 1 else 2 * grid.pairs
        pixels, covers = render.draw(table, frames, grid.height * render.CELL, grid.width * render.CELL)
        if frames == 1:
            pixels, covers = pixels.repeat_interleave(2, 1), covers.repeat_interleave(2, 2)
        inside = torch.arange(length, device=self.device) - given["begin"].unsqueeze(1)
        shape = (grid.pairs, grid.height, grid.width)
        return {
            "source": torch.where((inside >= 0) & (inside < grid.tokens), inside, -1),
            "positions": forward.vision_positions(given["begin"], length, shape, given["seconds"]),
            "patches": render.patches(pixels),
            **vars(render.labels(table, covers)),
        }


@dataclass(frozen=True)
class HeardKind:
    """Chats about sounds."""

    name: str
    weight: float
    size: int
    sounds: int
    """In each row."""
    frames: int
    """Most mel frames of a sound."""
    length: int
    store: Store
    mel: WhisperMel
    device: torch.device
    amount: float = 1.0
    """How much voices and rooms are varied."""

    def make(self, rng: random.Random) -> HeardBatch:
        """Rows about clips drawn from the store."""
        short, long = self.store.short, self.store.long
        clips = long if self.frames > 400 and long and rng.random() < 0.7 else short
        shape = {"sounds": self.sounds, "frames": self.frames, "length": self.length}
        return heard_batch(rng, clips, size=self.size, **shape)

    def inputs(self, batch: HeardBatch) -> Inputs:
        """Put the sounds together and take their features."""
        cuts = Cuts(*(_on(self.device, item) for item in (batch.begin, batch.length, batch.speed, batch.lead)))
        wave = cut(self.store.samples, cuts, self.frames * FRAME)
        ids = _on(self.device, batch.ids)
        return {
            "ids": ids,
            "targets": next_targets(ids, _on(self.device, batch.counts)),
            "source": _on(self.device, batch.source),
            "mel": self.mel(worsen(wave, self.amount), self.amount),
            "frames": _on(self.device, batch.frames),
            "token_labels": _on(self.device, batch.token_labels),
            "phone_labels": _on(self.device, batch.phone_labels),
        }

    def loss(self, objectives: Objectives, given: Inputs) -> Losses:
        """Return the losses of the replies, and of the tokens and phones that are heard."""
        return objectives.heard(given)


class Loader:
    """A thread that makes batches ahead, each of a kind drawn by weight."""

    def __init__(self, kinds: Sequence[Kind], seed: int) -> None:
        self._kinds, self._rng = list(kinds), random.Random(f"loader {seed}")
        self._ready: queue.Queue[tuple[Kind, Any]] = queue.Queue(12)
        self._failure: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self._thread.start()

    def add(self, kinds: Sequence[Kind]) -> None:
        """Draw from more kinds from now on."""
        self._kinds = [*self._kinds, *kinds]

    def next(self) -> tuple[Kind, Any]:
        """The next kind and batch.

        Raises:
            RuntimeError: the thread has failed; the cause is attached.
        """
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if self._failure is not None:
                    raise RuntimeError("no batch can be made") from self._failure

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join(timeout=5.0)

    def _fill(self) -> None:
        try:
            while not self._stopped:
                kinds = self._kinds
                kind = self._rng.choices(kinds, [kind.weight for kind in kinds])[0]
                self._put((kind, kind.make(self._rng)))
        except Exception as error:  # noqa: BLE001  shown by `next`
            self._failure = error

    def _put(self, item: tuple[Kind, Any]) -> None:
        while not self._stopped:
            try:
                self._ready.put(item, timeout=0.2)
            except queue.Full:
                continue
            return

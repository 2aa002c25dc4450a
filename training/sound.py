# SPDX-License-Identifier: Apache-2.0
"""Whisper's log mel spectrogram in batches on the device, of sounds that are varied while they are put together.

Unvaried, it gives what HF's feature extractor gives; a test compares them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.flite import SPEECH_RATE

BANDS = 128
FRAME = 160
"""Samples from one mel frame to the next."""
_WINDOW = 400


def whisper_filters() -> Tensor:
    """Slaney's mel filters [201, 128] of 16 kHz sound, from HF."""
    from transformers.audio_utils import mel_filter_bank

    return torch.from_numpy(
        mel_filter_bank(_WINDOW // 2 + 1, BANDS, 0.0, 8000.0, SPEECH_RATE, norm="slaney", mel_scale="slaney")
    ).float()


@dataclass(frozen=True)
class Cuts:
    """Where the samples of a batch of B sounds come from. All fields are [B]."""

    begin: Tensor
    """int64: first sample in the store."""
    length: Tensor
    """int64: samples in the store."""
    speed: Tensor
    """Above 1 faster and higher; formants move along."""
    lead: Tensor
    """int64: samples of silence before."""


def cut(store: Tensor, cuts: Cuts, samples: int) -> Tensor:
    """Sounds [B, samples] from the store [S] of 16-bit samples, at other speeds by linear interpolation."""
    place = torch.arange(samples, device=store.device) - cuts.lead.unsqueeze(1)
    exact = place * cuts.speed.unsqueeze(1)
    before = exact.floor()
    last = (cuts.length - 1).unsqueeze(1)
    exists = (place >= 0) & (before <= last)
    index = before.long().clamp(min=0)
    first, second = (
        store[cuts.begin.unsqueeze(1) + torch.minimum(index + step, last)].float() / 32768 for step in (0, 1)
    )
    return torch.where(exists, torch.lerp(first, second, (exact - before).float()), 0.0)


def worsen(wave: Tensor, amount: float) -> Tensor:
    """Other loudness, and noise; `amount` from 0 (nothing) to 1."""
    batch = wave.shape[0]
    gain = 10 ** ((torch.rand(batch, 1, device=wave.device) * 1.0 - 0.7) * amount)
    level = 10 ** (torch.rand(batch, 1, device=wave.device) * 2.2 - 4.5) * amount
    quiet = torch.rand(batch, 1, device=wave.device) < 0.4
    return wave * gain + torch.randn_like(wave) * torch.where(quiet, 0.0, level)


class WhisperMel(nn.Module):
    """Whisper's features."""

    window: Tensor
    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)
        self.register_buffer("filters", whisper_filters(), persistent=False)

    @torch.no_grad()
    def forward(self, wave: Tensor, amount: float = 0.0) -> Tensor:
        """Features [B, 128, S / 160] of sounds [B, S]; with an `amount` up to 1 of a voice and room that differ."""
        # HF's extractor sees silence up to 30 s, not a mirrored end.
        padded = F.pad(wave, (0, _WINDOW))
        spectrum = torch.stft(padded, _WINDOW, FRAME, window=self.window, return_complex=True)
        power = spectrum[..., : wave.shape[1] // FRAME].abs().square()
        log = (self.filters.T @ power).clamp(min=1e-10).log10()
        if amount:
            log = _other_room(_other_throat(log, amount), amount)
        log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0)
        return (log + 4.0) / 4.0


_THROAT, _DRIFT = 0.18, 0.07
"""Most by which a band is moved, as a part of its height: over a whole sound, and by turns."""
_DRIFT_FRAMES = 12
"""Mel frames between turns: about one phone."""


def _other_throat(log: Tensor, amount: float) -> Tensor:
    """Bands moved up or down, low ones and high ones by factors of their own, as a throat of another form does.

    The factors drift within a sound: other speakers' vowels differ from each other in other ways.
    """
    batch, bands, frames = log.shape
    device = log.device
    still = (torch.rand(batch, 2, 1, device=device) * 2 - 1) * _THROAT
    turns = (torch.rand(batch, 2, frames // _DRIFT_FRAMES + 2, device=device) * 2 - 1) * _DRIFT
    ends = 1 + amount * (still + F.interpolate(turns, size=frames, mode="linear", align_corners=True))
    band = torch.arange(bands, device=device).unsqueeze(1)
    factor = torch.lerp(ends[:, :1], ends[:, 1:], band / bands)
    place = (band * factor).clamp(max=bands - 1.001)
    low = place.long()
    return torch.lerp(log.gather(1, low), log.gather(1, low + 1), place - low)


def _other_room(log: Tensor, amount: float) -> Tensor:
    """A slowly varying gain over the bands, in log10 of power; some bands lost in a few sounds."""
    batch, bands, _ = log.shape
    device = log.device
    band = torch.arange(bands, device=device) / bands
    tilt = (torch.rand(batch, 1, device=device) - 0.5) * 1.4
    wave = (torch.rand(batch, 1, device=device) * 0.4) * torch.sin(
        2 * math.pi * (torch.rand(batch, 1, device=device) * 1.5 * band + torch.rand(batch, 1, device=device))
    )
    log = log + ((tilt * (band - 0.5) + wave) * amount).unsqueeze(2)
    begin = torch.rand(batch, 1, device=device)
    lost = (band > begin) & (band < begin + 0.1) & (torch.rand(batch, 1, device=device) < 0.25 * amount)
    return torch.where(lost.unsqueeze(2), log.amin((1, 2), keepdim=True), log)

# SPDX-License-Identifier: Apache-2.0
"""Mel spectrograms: token2wav's own (BigVGAN's), and others of the same kind for losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.sizes import FFT, HOP, MELS, RATE

LOWEST = 1e-5
"""Magnitudes below count as this; its logarithm is silence."""


def mel_filters(rate: int, fft: int, mels: int) -> Tensor:
    """Slaney-normalised triangles from 0 to rate / 2 Hz: [mels, fft / 2 + 1]."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(fft // 2 + 1, mels, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters.T).float()


class Mel(nn.Module):
    """Log mel magnitudes; the defaults are token2wav's."""

    window: Tensor
    filters: Tensor

    def __init__(self, fft: int = FFT, hop: int = HOP, mels: int = MELS) -> None:
        super().__init__()
        self._fft, self._hop = fft, hop
        self.register_buffer("window", torch.hann_window(fft), persistent=False)
        self.register_buffer("filters", mel_filters(RATE, fft, mels), persistent=False)

    @property
    def margin(self) -> int:
        """Samples that the first frame sees before its own."""
        return (self._fft - self._hop) // 2

    def forward(self, wave: Tensor) -> Tensor:
        """[B, T] samples in [-1, 1], T a multiple of the hop, to [B, T / hop, mels] fp32."""
        with torch.autocast(wave.device.type, enabled=False):
            padded = F.pad(wave.float().unsqueeze(1), (self.margin, self.margin), mode="reflect").squeeze(1)
            return self.of_padded(padded)

    def of_padded(self, wave: Tensor) -> Tensor:
        """As `forward`, of samples that begin and end with `margin` samples beyond the frames'."""
        spectrum = torch.stft(wave, self._fft, self._hop, window=self.window, center=False, return_complex=True)
        magnitudes = torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-9)
        return torch.log(torch.clamp(self.filters @ magnitudes, min=LOWEST)).transpose(1, 2)


@torch.no_grad()
def mel_of_stream(mel: Mel, samples: Tensor, device: torch.device, chunk: int = 4096, together: int = 8) -> Tensor:
    """Frames of hours of speech.

    Args:
        mel: on `device`.
        samples: [T] int16 on the CPU.
        device: where to compute.
        chunk: frames of one piece.
        together: pieces at once.

    Returns:
        [T / hop, mels] fp16 on the CPU.
    """
    frames = len(samples) // HOP
    padded = F.pad(samples.float() / 32768, (mel.margin, mel.margin + chunk * HOP))
    size = chunk * HOP + 2 * mel.margin
    pieces = []
    for begin in range(0, frames, chunk * together):
        starts = range(begin, min(begin + chunk * together, frames), chunk)
        batch = torch.stack([padded[start * HOP : start * HOP + size] for start in starts])
        pieces.append(mel.of_padded(batch.to(device)).flatten(0, 1).half().cpu())
    return torch.cat(pieces)[:frames]

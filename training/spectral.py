# SPDX-License-Identifier: Apache-2.0
"""How far two waves are apart in several spectra: the vocoder's losses without discriminators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.mel import Mel

_MELS = ((512, 120, 64), (1024, 240, 80), (2048, 480, 128))
"""Window, hop and bands."""
_SPECTRA = ((512, 50, 240), (1024, 120, 600), (2048, 240, 1200))
"""FFT, hop and window of the multi-resolution STFT loss (Parallel WaveGAN, arXiv 1910.11480)."""


class SpectralLoss(nn.Module):
    """L1 of log mel magnitudes, and spectral convergence plus L1 of log magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self._mels = nn.ModuleList([Mel(fft, hop, mels) for fft, hop, mels in _MELS])
        for number, (_fft, _hop, window) in enumerate(_SPECTRA):
            self.register_buffer(f"window{number}", torch.hann_window(window), persistent=False)

    def forward(self, fake: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distances of mel bands [] and of spectra [] between two batches [B, T] of samples."""
        bands = torch.stack([F.l1_loss(mel(fake), mel(real)) for mel in self._mels]).mean()
        pairs = [(self._magnitudes(fake, n), self._magnitudes(real, n)) for n in range(len(_SPECTRA))]
        return bands, torch.stack([_distance(a, b) for a, b in pairs]).mean()

    def _magnitudes(self, wave: Tensor, number: int) -> Tensor:
        fft, hop, window = _SPECTRA[number]
        spectrum = torch.stft(wave, fft, hop, window, self.get_buffer(f"window{number}"), return_complex=True)
        return torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-7)


def _distance(fake: Tensor, real: Tensor) -> Tensor:
    convergence = torch.linalg.vector_norm(real - fake) / torch.linalg.vector_norm(real).clamp(min=1e-4)
    distance: Tensor = convergence + F.l1_loss(fake.log(), real.log())
    return distance

# SPDX-License-Identifier: Apache-2.0
"""Light discriminators of waves: by periods (HiFi-GAN, arXiv 2010.05646) and by spectra (EnCodec, arXiv 2210.13438)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Judged = Sequence[tuple[Tensor, list[Tensor]]]
"""Scores and layers' outputs of each discriminator."""
_PERIODS = (2, 3, 5, 7, 11)
_WINDOWS = (256, 512, 1024)
_PERIOD_WIDTHS = (1, 16, 48, 96, 128)
_SPECTRUM_WIDTHS = (2, 24, 32, 32, 32)


def _conv(*arguments: Any) -> nn.Module:
    convolution: nn.Module = nn.utils.parametrizations.weight_norm(nn.Conv2d(*arguments))
    return convolution


class _Stack(nn.Module):
    """Convolutions that keep what each of them gave."""

    def __init__(self, convolutions: Sequence[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.convolutions, self.last = nn.ModuleList(convolutions), last

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        layers = []
        for convolution in self.convolutions:
            x = F.leaky_relu(convolution(x), 0.1)
            layers.append(x)
        return self.last(x), layers


class PeriodDiscriminator(nn.Module):
    """Sees the wave folded into rows of one period."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self._period = period
        convolutions = [_conv(a, b, (5, 1), (3, 1), (2, 0)) for a, b in pairwise(_PERIOD_WIDTHS)]
        self.stack = _Stack(convolutions, _conv(_PERIOD_WIDTHS[-1], 1, (3, 1), 1, (1, 0)))

    def forward(self, wave: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, T] to scores and layers."""
        padded = F.pad(wave.unsqueeze(1), (0, -wave.shape[-1] % self._period), mode="reflect")
        return self.stack(padded.view(len(wave), 1, -1, self._period))  # type: ignore[no-any-return]


class SpectrumDiscriminator(nn.Module):
    """Sees the real and imaginary parts of a spectrum."""

    window: Tensor

    def __init__(self, fft: int) -> None:
        super().__init__()
        self._fft = fft
        self.register_buffer("window", torch.hann_window(fft), persistent=False)
        pairs = list(pairwise(_SPECTRUM_WIDTHS))
        first = _conv(*pairs[0], (7, 5), (2, 1), (3, 2))
        convolutions = [first, *(_conv(a, b, (5, 3), (2, 1), (2, 1)) for a, b in pairs[1:])]
        self.stack = _Stack(convolutions, _conv(_SPECTRUM_WIDTHS[-1], 1, 3, 1, 1))

    def forward(self, wave: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[B, T] to scores and layers."""
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(wave.float(), self._fft, self._fft // 4, window=self.window, return_complex=True)
            parts = torch.stack([spectrum.real, spectrum.imag], 1) / self._fft**0.5 * 4
        return self.stack(parts)  # type: ignore[no-any-return]


class Discriminators(nn.Module):
    """All of them."""

    def __init__(self) -> None:
        super().__init__()
        by_spectrum = [SpectrumDiscriminator(fft) for fft in _WINDOWS]
        self.parts = nn.ModuleList([*(PeriodDiscriminator(period) for period in _PERIODS), *by_spectrum])

    def forward(self, wave: Tensor) -> Judged:
        """[B, T] to what each of them says."""
        return [part(wave) for part in self.parts]


def discriminator_loss(real: Judged, fake: Judged) -> Tensor:
    """Least squares: 1 for speech, 0 for the vocoder's."""
    losses = [
        (1 - r[0].float()).square().mean() + f[0].float().square().mean() for r, f in zip(real, fake, strict=True)
    ]
    return torch.stack(losses).sum()


def adversarial_losses(real: Judged, fake: Judged) -> tuple[Tensor, Tensor]:
    """How well the vocoder's waves are told from speech [], and how far the layers' outputs are apart []."""
    fooled = torch.stack([(1 - scores.float()).square().mean() for scores, _layers in fake]).sum()
    pairs = [(a, b) for r, f in zip(real, fake, strict=True) for a, b in zip(r[1], f[1], strict=True)]
    matched = torch.stack([F.l1_loss(b.float(), a.detach().float()) for a, b in pairs]).sum()
    return fooled, matched / len(_SPECTRUM_WIDTHS[1:])

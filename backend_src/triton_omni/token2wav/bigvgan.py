# SPDX-License-Identifier: Apache-2.0
"""BigVGAN: mel frames to a waveform, by transposed convolutions and anti-aliased snake activations.

After Lee et al. 2023 (arXiv 2206.04658), in the variant of Qwen2.5-Omni (HF: `Qwen2_5OmniToken2WavBigVGANModel`).
The forward pass makes no tensor on the host, so that it can be captured in a graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triton_omni.checkpoint.facts import BigVganConfig

MIN_DECIBEL = -115.0
REFERENCE_DECIBEL = 20.0
DECIBEL_PER_NEPER = 20.0 / math.log(10.0)
ACTIVATION_RATIO = 2
ACTIVATION_TAPS = 12


class BigVGAN(nn.Module):
    """Vocoder; parameter names are the checkpoint's."""

    def __init__(self, config: BigVganConfig) -> None:
        super().__init__()
        widths = [config.upsample_initial_channel // 2**level for level in range(len(config.upsample_rates) + 1)]
        self.samples_per_frame = math.prod(config.upsample_rates)
        self.conv_pre = nn.Conv1d(config.mel_dim, widths[0], 7, padding=3)
        self.ups = nn.ModuleList(
            # One transposed convolution a level, wrapped because the checkpoint numbers it ("ups.0.0").
            nn.Sequential(nn.ConvTranspose1d(wide, narrow, kernel, rate, padding=(kernel - rate) // 2))
            for wide, narrow, kernel, rate in zip(
                widths, widths[1:], config.upsample_kernel_sizes, config.upsample_rates, strict=False
            )
        )
        self.blocks_per_level = len(config.resblock_kernel_sizes)
        self.resblocks = nn.ModuleList(
            ResidualBlock(width, kernel, dilations)
            for width in widths[1:]
            for kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
        )
        self.activation_post = AntiAliasedSnake(widths[-1])
        self.conv_post = nn.Conv1d(widths[-1], 1, 7, padding=3, bias=False)

    def forward(self, mel: Tensor) -> Tensor:
        """Vocode log-mel frames.

        Args:
            mel: [B, M, T] fp32, natural-log amplitudes.

        Returns:
            [B, S] fp32 in [-1, 1], S = T x samples_per_frame.
        """
        hidden = self.conv_pre(normalise_mel(mel))
        for level, up in enumerate(self.ups):
            hidden = up(hidden)
            first = level * self.blocks_per_level
            total = self.resblocks[first](hidden)
            for block in range(first + 1, first + self.blocks_per_level):
                total = total + self.resblocks[block](hidden)
            hidden = total / self.blocks_per_level
        samples = self.conv_post(self.activation_post(hidden))
        return torch.clamp(samples, -1.0, 1.0).squeeze(1)


def normalise_mel(mel: Tensor) -> Tensor:
    """Convert log-mel amplitudes to decibels over the range [-115, 0] dB below 20 dB, scaled to [-1, 1]."""
    decibel = (mel * DECIBEL_PER_NEPER).clamp(min=MIN_DECIBEL) - REFERENCE_DECIBEL
    return torch.clamp(2.0 * (decibel - MIN_DECIBEL) / -MIN_DECIBEL - 1.0, -1.0, 1.0)


class ResidualBlock(nn.Module):
    """Dilated and plain convolutions in pairs, each after an anti-aliased activation; [B, C, T] to the same."""

    def __init__(self, channels: int, kernel_size: int, dilations: tuple[int, ...]) -> None:
        super().__init__()

        def convolution(dilation: int) -> nn.Conv1d:
            padding = (kernel_size - 1) * dilation // 2
            return nn.Conv1d(channels, channels, kernel_size, dilation=dilation, padding=padding)

        self.convs1 = nn.ModuleList(convolution(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(convolution(1) for _ in dilations)
        self.activations = nn.ModuleList(AntiAliasedSnake(channels) for _ in range(2 * len(dilations)))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to the same."""
        for pair, (dilated, plain) in enumerate(zip(self.convs1, self.convs2, strict=True)):
            inner = dilated(self.activations[2 * pair](hidden))
            hidden = hidden + plain(self.activations[2 * pair + 1](inner))
        return hidden


class AntiAliasedSnake(nn.Module):
    """Upsamples by two, applies a snake and downsamples by two, so that the activation's harmonics do not alias."""

    up_filter: Tensor
    down_filter: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act = SnakeBeta(channels)
        taps = low_pass(0.5 / ACTIVATION_RATIO, 0.6 / ACTIVATION_RATIO, ACTIVATION_TAPS).expand(channels, 1, -1)
        # The gain of zero stuffing is folded into the filter.
        self.register_buffer("up_filter", ACTIVATION_RATIO * taps, persistent=False)
        self.register_buffer("down_filter", taps.clone(), persistent=False)
        self.channels = channels

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to the same."""
        return self._down(self.act(self._up(hidden)))

    def _up(self, hidden: Tensor) -> Tensor:
        margin = ACTIVATION_TAPS // ACTIVATION_RATIO - 1
        crop = margin * ACTIVATION_RATIO + (ACTIVATION_TAPS - ACTIVATION_RATIO) // 2
        hidden = F.pad(hidden, (margin, margin), mode="replicate")
        hidden = F.conv_transpose1d(hidden, self.up_filter, stride=ACTIVATION_RATIO, groups=self.channels)
        return hidden[..., crop:-crop]

    def _down(self, hidden: Tensor) -> Tensor:
        half = ACTIVATION_TAPS // 2
        hidden = F.pad(hidden, (half - 1, half), mode="replicate")
        return F.conv1d(hidden, self.down_filter, stride=ACTIVATION_RATIO, groups=self.channels)


class SnakeBeta(nn.Module):
    """x + sin(exp(alpha) x)^2 / exp(beta), a periodic activation (arXiv 2006.08195); alpha, beta a channel."""

    NO_DIVISION_BY_ZERO = 1e-9

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to the same."""
        frequency = self.alpha.exp()[:, None]
        magnitude = self.beta.exp()[:, None] + self.NO_DIVISION_BY_ZERO
        return hidden + torch.sin(hidden * frequency).square() / magnitude


def low_pass(cutoff: float, half_width: float, taps: int) -> Tensor:
    """Return a Kaiser-windowed sinc filter [taps] fp32 with unit gain at zero frequency (HF: `kaiser_sinc_filter1d`).

    Args:
        cutoff: cut-off frequency in cycles a sample.
        half_width: half of the transition band, cycles a sample; sets the window's beta by Kaiser's formula.
        taps: even number of taps.
    """
    attenuation = 2.285 * (taps // 2 - 1) * math.pi * 4 * half_width + 7.95
    window = torch.kaiser_window(taps, periodic=False, beta=_kaiser_beta(attenuation), dtype=torch.float32)
    time = torch.arange(taps) - (taps - 1) / 2
    response = 2 * cutoff * window * torch.sinc(2 * cutoff * time)
    return response / response.sum()


def _kaiser_beta(attenuation: float) -> float:
    if attenuation > 50.0:
        return 0.1102 * (attenuation - 8.7)
    if attenuation >= 21.0:
        return float(0.5842 * (attenuation - 21.0) ** 0.4 + 0.07886 * (attenuation - 21.0))
    return 0.0

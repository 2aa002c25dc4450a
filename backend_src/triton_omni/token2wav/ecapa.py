# SPDX-License-Identifier: Apache-2.0
"""ECAPA-TDNN: a reference mel spectrogram to one speaker vector.

After Desplanques et al. 2020 (arXiv 2005.07143), in the variant that Qwen2.5-Omni's DiT carries (HF:
`ECAPA_TimeDelayNet`). Parameter names are the checkpoint's. Independent of the DiT.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triton_omni.checkpoint.facts import EcapaConfig


class Ecapa(nn.Module):
    """Speaker encoder.

    The squeeze-excitation blocks' outputs are aggregated (all but the first layer's), pooled over time by
    attention and projected.
    """

    def __init__(self, config: EcapaConfig, mel_dim: int) -> None:
        super().__init__()
        channels, kernels, dilations = config.channels, config.kernel_sizes, config.dilations
        first = TimeDelay(mel_dim, channels[0], kernels[0], dilations[0])
        inner = [
            SqueezeExcitationRes2Net(channels[i], kernels[i], dilations[i], config.res2net_scale, config.se_channels)
            for i in range(1, len(channels) - 1)
        ]
        self.blocks = nn.ModuleList([first, *inner])
        self.mfa = TimeDelay(sum(channels[1:-1]), channels[-1], kernels[-1], dilations[-1])
        self.asp = AttentivePooling(channels[-1], config.attention_channels)
        self.fc = nn.Conv1d(channels[-1] * 2, config.dim, 1)
        # Reflection needs one frame more than it mirrors.
        self.min_frames = 1 + max(
            (kernel - 1) * dilation // 2 for kernel, dilation in zip(kernels, dilations, strict=True)
        )

    def forward(self, mel: Tensor) -> Tensor:
        """Encode `mel` [B, T, M] fp32 to speaker vectors [B, dim]; T at least `min_frames`."""
        hidden = mel.transpose(1, 2)
        layers = []
        for block in self.blocks:
            hidden = block(hidden)
            layers.append(hidden)
        pooled = self.asp(self.mfa(torch.cat(layers[1:], dim=1)))
        vectors: Tensor = self.fc(pooled).squeeze(-1)
        return vectors


class TimeDelay(nn.Module):
    """Dilated convolution of the same length (reflect padding) and ReLU; [B, C, T] to [B, C', T]."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            in_channels, out_channels, kernel_size, dilation=dilation, padding="same", padding_mode="reflect"
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to [B, C', T]."""
        return torch.relu(self.conv(hidden))


class Res2Net(nn.Module):
    """Channels in `scale` parts; each part but the first is convolved together with the part before it."""

    def __init__(self, channels: int, kernel_size: int, dilation: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        part = channels // scale
        self.blocks = nn.ModuleList(TimeDelay(part, part, kernel_size, dilation) for _ in range(scale - 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to the same."""
        first, *others = hidden.chunk(self.scale, dim=1)
        outputs = [first]
        for number, (block, part) in enumerate(zip(self.blocks, others, strict=True)):
            outputs.append(block(part if number == 0 else part + outputs[-1]))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from all channels' means over time."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, squeezed, 1)
        self.conv2 = nn.Conv1d(squeezed, channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to the same."""
        gate = self.conv2(torch.relu(self.conv1(hidden.mean(dim=2, keepdim=True))))
        return hidden * torch.sigmoid(gate)


class SqueezeExcitationRes2Net(nn.Module):
    """TDNN, Res2Net, TDNN, squeeze-excitation, around a residual connection."""

    def __init__(self, channels: int, kernel_size: int, dilation: int, scale: int, squeezed: int) -> None:
        super().__init__()
        self.tdnn1 = TimeDelay(channels, channels, 1, 1)
        self.res2net_block = Res2Net(channels, kernel_size, dilation, scale)
        self.tdnn2 = TimeDelay(channels, channels, 1, 1)
        self.se_block = SqueezeExcitation(channels, squeezed)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to the same."""
        output: Tensor = hidden + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(hidden))))
        return output


class AttentivePooling(nn.Module):
    """Mean and standard deviation over time under attention weights; [B, C, T] to [B, 2C, 1]."""

    VARIANCE_FLOOR = 1e-12

    def __init__(self, channels: int, attention_channels: int) -> None:
        super().__init__()
        self.tdnn = TimeDelay(channels * 3, attention_channels, 1, 1)
        self.conv = nn.Conv1d(attention_channels, channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, C, T] to [B, 2C, 1]."""
        uniform = torch.full_like(hidden[:, :1], 1.0 / hidden.shape[2])
        context = [moment.expand_as(hidden) for moment in self._moments(hidden, uniform)]
        scores = self.conv(torch.tanh(self.tdnn(torch.cat([hidden, *context], dim=1))))
        return torch.cat(self._moments(hidden, scores.softmax(dim=2)), dim=1)

    def _moments(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        mean = (weights * hidden).sum(dim=2, keepdim=True)
        variance = (weights * (hidden - mean).square()).sum(dim=2, keepdim=True)
        return mean, variance.clamp(min=self.VARIANCE_FLOOR).sqrt()

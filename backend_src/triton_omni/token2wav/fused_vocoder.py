# SPDX-License-Identifier: Apache-2.0
"""BigVGAN in half precision with few launches: channels last, a fused activation, biases and sums within it.

The same function as `bigvgan.BigVGAN`, its reference. Sums are computed in float32; what one kernel leaves for another
is in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triton_omni.token2wav.bigvgan import AntiAliasedSnake, BigVGAN, ResidualBlock, SnakeBeta, normalise_mel
from triton_omni.token2wav.kernels import SnakeFilters, anti_aliased_snake, mean_of_sums


@dataclass(frozen=True)
class _Convolution:
    """One convolution over time of rows [B, T, C], without its bias; it runs as a 2-D convolution of height 1, which
    has channels-last kernels.
    """

    weight: Tensor
    bias: Tensor
    """[C] fp32, added by the reader of the result."""
    stride: int
    padding: int
    dilation: int
    transposed: bool

    @classmethod
    def of(cls, module: nn.Module, dtype: torch.dtype) -> _Convolution:
        layer = cast("nn.Conv1d | nn.ConvTranspose1d", module)
        weight = layer.weight.detach()[:, :, None].to(dtype).contiguous(memory_format=torch.channels_last)
        bias = torch.zeros(layer.out_channels, device=weight.device) if layer.bias is None else layer.bias.detach()
        (stride,), (padding,), (dilation,) = layer.stride, cast("tuple[int]", layer.padding), layer.dilation
        return cls(weight, bias.float(), stride, padding, dilation, isinstance(layer, nn.ConvTranspose1d))

    def __call__(self, rows: Tensor) -> Tensor:
        image = rows.transpose(1, 2)[:, :, None]
        if self.transposed:
            output = F.conv_transpose2d(image, self.weight, None, (1, self.stride), (0, self.padding))
        else:
            output = F.conv2d(image, self.weight, None, 1, (0, self.padding), (1, self.dilation))
        return output[:, :, 0].transpose(1, 2).contiguous()


@dataclass(frozen=True)
class _Pair:
    """Activation, dilated convolution, activation, plain convolution."""

    enter: SnakeFilters
    dilated: _Convolution
    between: SnakeFilters
    plain: _Convolution


class FusedVocoder:
    """Replaces a BigVGAN.

    Args:
        vocoder: its weights are copied.
        dtype: of the convolutions.
    """

    def __init__(self, vocoder: BigVGAN, dtype: torch.dtype) -> None:
        self.samples_per_frame = vocoder.samples_per_frame
        self._dtype = dtype
        self._pre = _Convolution.of(vocoder.conv_pre, dtype)
        self._ups = [_Convolution.of(cast(nn.Sequential, up)[0], dtype) for up in vocoder.ups]
        blocks = [self._pairs(cast(ResidualBlock, block)) for block in vocoder.resblocks]
        per_level = vocoder.blocks_per_level
        self._levels = [blocks[first : first + per_level] for first in range(0, len(blocks), per_level)]
        self._last = _filters(vocoder.activation_post, torch.float32)
        self._post = _Convolution.of(vocoder.conv_post, torch.float32)

    def __call__(self, mel: Tensor) -> Tensor:
        """See `BigVGAN.forward`."""
        rows = normalise_mel(mel).transpose(1, 2).contiguous().to(self._dtype)
        hidden = (self._pre(rows) + self._pre.bias).to(self._dtype)
        for up, blocks in zip(self._ups, self._levels, strict=True):
            dtype = torch.float32 if up is self._ups[-1] else self._dtype
            hidden = self._level(up(hidden), up.bias, blocks, dtype)
        silence = torch.zeros_like(hidden[0, 0])
        last = anti_aliased_snake(hidden, None, silence, self._last, dtype=torch.float32)
        return torch.clamp(self._post(last), -1.0, 1.0).squeeze(2)

    def _level(self, hidden: Tensor, bias: Tensor, blocks: Sequence[Sequence[_Pair]], dtype: torch.dtype) -> Tensor:
        """Return the mean of the blocks' outputs for the input `hidden + bias`; [B, T, C] in `dtype`."""
        return mean_of_sums([self._residual_block(hidden, bias, pairs) for pairs in blocks], dtype)

    def _residual_block(self, hidden: Tensor, bias: Tensor, pairs: Sequence[_Pair]) -> tuple[Tensor, Tensor, Tensor]:
        """Return stream, branch and bias, whose sum is the block's output."""
        stream, branch = hidden, None
        for pair in pairs:
            total = torch.empty_like(hidden)
            entered = anti_aliased_snake(stream, branch, bias, pair.enter, dtype=self._dtype, total=total)
            inner = anti_aliased_snake(pair.dilated(entered), None, pair.dilated.bias, pair.between, dtype=self._dtype)
            stream, branch, bias = total, pair.plain(inner), pair.plain.bias
        return stream, cast(Tensor, branch), bias

    def _pairs(self, block: ResidualBlock) -> list[_Pair]:
        snakes = [_filters(activation, self._dtype) for activation in block.activations]
        return [
            _Pair(enter, _Convolution.of(dilated, self._dtype), between, _Convolution.of(plain, self._dtype))
            for enter, dilated, between, plain in zip(
                snakes[0::2], block.convs1, snakes[1::2], block.convs2, strict=True
            )
        ]


def _filters(module: nn.Module, dtype: torch.dtype) -> SnakeFilters:
    activation = cast(AntiAliasedSnake, module)
    snake = activation.act
    return SnakeFilters.of(
        up=activation.up_filter[0, 0],
        down=activation.down_filter[0, 0],
        frequency=snake.alpha.detach().exp(),
        magnitude=1.0 / (snake.beta.detach().exp() + SnakeBeta.NO_DIVISION_BY_ZERO),
        # The 8 bits of bfloat16 are too few for a filter.
        dtype=torch.float16 if dtype is torch.float16 else torch.float32,
    )

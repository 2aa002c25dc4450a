# SPDX-License-Identifier: Apache-2.0
"""Stage `dit`: flow matching from noise to mel frames by codes and a speaker, along the path that token2wav solves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import bank, codes, state
from training.log import Log
from training.loop import Loop
from training.parts import part
from training.recorded import Recorded
from training.schedule import Clock, Ema, Rate, adamw, autocast, descend, set_rate
from training.settings import Settings
from training.sizes import BLOCK, VOICES, Sizes

_FRAMES, _FRAMES_TOY = 10 * BLOCK, 4 * BLOCK
"""Mel frames of one example: whole blocks."""
_SPEAKER = 192
"""Width of a speaker embedding."""
_REFERENCE_FRAMES = 200
_PEAK, _PEAK_AGAIN = 7e-4, 4e-4
_DROPPED = 0.12
"""Part of the examples without codes and speaker, for classifier-free guidance."""
_WRONG_CODES = 0.04
"""Part of the codes that are neighbours of the right ones: the talker errs, too."""
_LONG_WEIGHT = 1e-3
"""Weight of the penalty on long queries and keys.

Training sharpens attention, most near the end of the path, and nothing in HF's network bounds its logits. Once they
choose a single frame, their own gradient vanishes. Then they, and the gradients of all other weights, grow until
training diverges. The penalty has a gradient there, too.
"""


@dataclass(frozen=True)
class Speakers:
    """Conditions of the voices in their order, and of none as the last one (zeros)."""

    cond: Tensor
    """[voices + 1, 192]"""
    reference: Tensor
    """[voices + 1, frames, 80] mel frames."""

    @classmethod
    def of(cls, settings: Settings) -> Speakers:
        """Those that were kept; else random embeddings and two seconds of speech a voice, which are kept."""
        kept = state.load(settings, "speakers")
        tensors = kept.tensors if kept else _new_speakers(settings)
        cond = [tensors[f"{voice.flite}.cond"] for voice in VOICES]
        reference = [tensors[f"{voice.flite}.ref_mel"] for voice in VOICES]
        return cls(
            torch.stack([*cond, torch.zeros_like(cond[0])]).to(settings.device),
            torch.stack([*reference, torch.zeros_like(reference[0])]).to(settings.device),
        )


def _new_speakers(settings: Settings) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(settings.seed + 21)
    tensors = {}
    for voice in VOICES:
        _wave, mel = bank.load_sound(settings, voice.flite)
        windows = mel[: _REFERENCE_FRAMES * 40].float().unfold(0, _REFERENCE_FRAMES, _REFERENCE_FRAMES)  # [W, 80, 200]
        # The one with the least silence.
        best = int((windows.mean(1) > -8).float().mean(1).argmax())
        tensors[f"{voice.flite}.cond"] = torch.randn(_SPEAKER, generator=generator)
        tensors[f"{voice.flite}.ref_mel"] = windows[best].T.contiguous()
    state.save(settings, "speakers", tensors)
    return tensors


def new_dit(sizes: Sizes, mean: Tensor) -> nn.Module:
    """HF's module; its blocks begin almost as the identity, its output near the mean mel frame [80]."""
    model: Any = part("dit", sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 1.0 if "codec_embed" in name else parameter[0].numel() ** -0.5)
            elif name.endswith("bias"):
                parameter.zero_()
        width = sizes.dit_hidden
        for block in model.transformer_blocks:
            block.attn_norm.linear.weight.mul_(0.02)
            # Gates of attention and MLP: with zeros as in the paper they need many steps to open.
            block.attn_norm.linear.bias[2 * width : 3 * width] = 0.2
            block.attn_norm.linear.bias[5 * width : 6 * width] = 0.2
        model.norm_out.linear.weight.mul_(0.02)
        model.proj_out.weight.mul_(0.05)
        model.proj_out.bias.copy_(mean)
    found: nn.Module = model
    return found


@dataclass(frozen=True)
class Batch:
    """Examples of a step, B of them."""

    mel: Tensor
    """[B, T, 80] fp32."""
    codes: Tensor
    """[B, T / 2]; 0 = none."""
    speaker: Tensor
    """[B]: number in `Speakers`."""


@dataclass(frozen=True)
class Examples:
    """Codes and mel frames of both voices on the device, of which batches are drawn there."""

    mels: list[Tensor]
    codes: list[Tensor]
    neighbours: Tensor
    """As `codes.neighbours` has them."""
    size: int
    frames: int

    @classmethod
    def of(cls, settings: Settings, size: int) -> Examples:
        """All that was spoken."""
        device, stored = settings.device, bank.load(settings)
        all_codes = [stored.voices[voice.flite].codes.to(device).long() for voice in VOICES]
        mels = [bank.load_sound(settings, voice.flite)[1].to(device) for voice in VOICES]
        codebook = state.load(settings, "codebook")
        assert codebook is not None, "the stage `speech` makes it"
        near = codes.neighbours(codebook.tensors["centers"].to(device))
        return cls(mels, all_codes, near, size, _FRAMES_TOY if settings.toy else _FRAMES)

    @property
    def mean(self) -> Tensor:
        """The mean mel frame [80] on the CPU."""
        return torch.cat([mel[:: max(1, len(mel) // 50_000)].float() for mel in self.mels]).mean(0).cpu()

    def draw(self) -> Batch:
        """Equally many examples a voice; some codes wrong, some examples without condition."""
        pairs = [self._draw_of(mel, all_codes) for mel, all_codes in zip(self.mels, self.codes, strict=True)]
        mel, chosen = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        speaker = torch.arange(len(self.mels), device=mel.device).repeat_interleave(self.size // len(self.mels))
        other = torch.randint(self.neighbours.shape[1], chosen.shape, device=mel.device)
        wrong = torch.rand(chosen.shape, device=mel.device) < _WRONG_CODES
        chosen = torch.where(wrong, self.neighbours[chosen, other], chosen)
        dropped = torch.rand(len(mel), device=mel.device) < _DROPPED
        return Batch(mel, chosen * ~dropped.unsqueeze(1), torch.where(dropped, len(self.mels), speaker))

    def _draw_of(self, mel: Tensor, all_codes: Tensor) -> tuple[Tensor, Tensor]:
        count = self.frames // 2
        start = torch.randint(0, len(all_codes) - count, (self.size // len(self.mels), 1), device=mel.device)
        frames = mel[start * 2 + torch.arange(self.frames, device=mel.device)].float()
        return frames, all_codes[start + torch.arange(count, device=mel.device)]


class Flow(nn.Module):
    """HF's DiT without guidance; the speaker encoder is left as it was drawn.

    Two voices need no trained encoder, and its standard deviations have boundless gradients where a reference is
    constant, as that of no speaker is.
    """

    block_distance: Tensor

    def __init__(self, dit: Any, speakers: Speakers, frames: int) -> None:
        super().__init__()
        self.dit, self._speakers = dit, speakers
        dit.input_embed.spk_encoder.requires_grad_(False)
        with torch.no_grad():
            self._voices = dit.input_embed.spk_encoder(speakers.reference)
        device = speakers.cond.device
        blocks = torch.arange(frames, device=device) // BLOCK
        self.register_buffer(
            "block_distance", (blocks.unsqueeze(0) - blocks.unsqueeze(1))[None, None], persistent=False
        )
        position = torch.arange(frames, device=device).unsqueeze(0)
        self._rotary = dit.rotary_embed(torch.zeros(1, device=device), position)
        self._lengths: list[Tensor] = []
        for block in dit.transformer_blocks:
            for layer in (block.attn.to_q, block.attn.to_k):
                layer.register_forward_hook(self._add_length)

    def _add_length(self, _layer: nn.Module, _given: Any, found: Tensor) -> None:
        # HF turns a part of `found` in place, which autograd would refuse without a copy.
        self._lengths.append(found.to(torch.float32, copy=True).square().mean(-1).square().mean())

    @property
    def penalty(self) -> Tensor:
        """Penalty [] on long queries and keys in the last forward pass: by the fourth power of their root mean square.

        At usual lengths it is below 1 % of the loss; at ten times these it outweighs the loss.
        """
        return _LONG_WEIGHT * torch.stack(self._lengths).mean()

    def forward(self, x: Tensor, time: Tensor, batch: Batch) -> Tensor:
        """The velocity [B, T, 80] of states [B, T, 80] at times [B]."""
        dit, length = self.dit, x.shape[1]
        self._lengths.clear()
        time_embedding = dit.time_embed(time)
        voice = self._voices[batch.speaker].unsqueeze(1)
        cond = self._speakers.cond[batch.speaker].unsqueeze(1)
        parts = (x, voice.expand(-1, length, -1), dit.text_embed(batch.codes), cond.expand(-1, length, -1))
        hidden = dit.input_embed.proj(torch.cat([part.to(x.dtype) for part in parts], dim=-1)).float()
        for block in dit.transformer_blocks:
            hidden = block(hidden, time_embedding, position_embeddings=self._rotary, block_diff=self.block_distance)
        velocity: Tensor = dit.proj_out(dit.norm_out(hidden, time_embedding))
        return velocity

    def loss(self, batch: Batch) -> Tensor:
        """Flow matching (arXiv 2210.02747): squared error [] of the velocity from noise to mel frames."""
        rows, device = len(batch.mel), batch.mel.device
        even = torch.rand(rows, device=device)
        # Half of the times as the solver's grid has them: dense at the beginning, where most is decided.
        time = torch.where(torch.rand(rows, device=device) < 0.5, even, 1 - torch.cos(even * math.pi / 2))
        noise = torch.randn_like(batch.mel)
        with autocast(device):
            velocity = self(torch.lerp(noise, batch.mel, time[:, None, None]), time, batch)
        return F.mse_loss(velocity.float(), batch.mel - noise)


def train(settings: Settings, seconds: float) -> None:
    """Train for some seconds from what was kept."""
    log, clock = Log(settings, "dit"), Clock(seconds)
    speakers, examples = Speakers.of(settings), Examples.of(settings, 8 if settings.toy else 256)
    model = new_dit(settings.sizes, examples.mean)
    found = state.load_into(settings, "dit", model)
    model.to(settings.device).train()
    flow = Flow(model, speakers, examples.frames)
    optimizer = adamw(model.parameters())

    def learn() -> Tensor:
        loss = flow.loss(examples.draw())
        penalty = flow.penalty
        norm = descend(optimizer, loss + penalty, 1.0)
        return torch.stack([loss.detach(), penalty.detach(), norm])

    recorded = Recorded(learn, settings.device, plain=settings.plain)

    def step(_number: int, rate: float) -> dict[str, Tensor]:
        set_rate(optimizer, rate)
        loss, penalty, norm = recorded()
        return {"loss": loss, "penalty": penalty, "norm": norm}

    rate = Rate(_PEAK_AGAIN if found else _PEAK, warm_steps=500, floor=0.03)
    loop = Loop(settings, "dit", "loss", log, Ema(model, 0.9995), rate, shown_every=20 if settings.toy else 500)
    loop.run(step, clock, found.steps if found else 0)

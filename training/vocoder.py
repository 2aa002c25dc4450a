# SPDX-License-Identifier: Apache-2.0
"""Stage `vocoder`: mel frames to samples (BigVGAN). Spectral losses first, then light discriminators as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import bank, state
from training.discriminators import Discriminators, adversarial_losses, discriminator_loss
from training.log import Log
from training.loop import Loop
from training.parts import part
from training.recorded import Recorded
from training.schedule import Clock, Ema, Rate, adamw, autocast, descend, set_rate
from training.settings import Settings
from training.sizes import HOP, VOICES, Sizes
from training.snake import compile_activations
from training.spectral import SpectralLoss

FRAMES = 32
"""Mel frames of one example."""
_MEL_NOISE, _NOISY_PART = 0.12, 0.6
"""The DiT's frames are not exact."""
_PEAK, _PEAK_AGAIN = 8e-4, 5e-4
_SPECTRAL_STEPS, _SPECTRAL_STEPS_TOY = 4000, 2
"""Steps before the discriminators join: they would learn from noise."""
_JUDGES_RATE = 0.6
"""Learning rate of the discriminators: so many times the vocoder's."""
_MOST_NORM = 50.0
"""Maximum norm of the vocoder's gradient."""
_LOUDEST = 0.95
"""HF clips at 1; losses keep the wave below this."""


def synthesize(model: Any, mel: Tensor) -> Tensor:
    """HF's forward without its `.squeeze().cpu()` (Qwen2_5OmniToken2WavBigVGANModel.forward).

    Args:
        model: HF's module.
        mel: [B, 80, T] log magnitudes.

    Returns:
        [B, T * 240] samples, not clipped.
    """
    floor = -115 / 20 * math.log(10)
    decibels = 20 / math.log(10) * torch.clamp(mel.float(), min=floor) - 20
    hidden = model.conv_pre(torch.clamp(2 * ((decibels + 115) / 115) - 1, -1, 1))
    count = model.num_residual_blocks
    for number in range(model.num_upsample_layers):
        hidden = model.ups[number][0](hidden)
        blocks = model.resblocks[number * count : (number + 1) * count]
        total = blocks[0](hidden)
        for block in blocks[1:]:
            total = total + block(hidden)
        hidden = total / count
    wave: Tensor = model.conv_post(model.activation_post(hidden)).squeeze(1)
    return wave


def new_vocoder(sizes: Sizes) -> nn.Module:
    """HF's module; weights keep the variance of what goes through, and the output is quiet."""
    model = part("vocoder", sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3:
                fan_in = parameter.shape[0] * 2 if name.startswith("ups.") else parameter[0].numel()
                parameter.normal_(0, (0.5 if "convs2" in name else 1.0) * fan_in**-0.5)
            elif name.endswith("bias"):
                parameter.zero_()
        model.get_parameter("conv_post.weight").mul_(0.2)
    return model


@dataclass
class Examples:
    """Places of both voices' speech, drawn on the device."""

    mels: list[Tensor]
    """A voice's [frames, 80] fp16."""
    waves: list[Tensor]
    """A voice's [frames * 240] int16."""
    size: int
    """Examples of a batch, equally many a voice."""

    @classmethod
    def of(cls, settings: Settings, size: int) -> Examples:
        """All samples that are kept of each voice."""
        sounds = [bank.load_sound(settings, voice.flite) for voice in VOICES]
        mels = [mel[: len(wave) // HOP].to(settings.device) for wave, mel in sounds]
        return cls(mels, [wave.to(settings.device) for wave, _mel in sounds], size)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Mel frames [size, 80, 32], some with noise, and samples [size, 7680]."""
        pairs = [self._draw_of(mel, wave) for mel, wave in zip(self.mels, self.waves, strict=True)]
        mel, wave = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        noisy = torch.rand(len(mel), 1, 1, device=mel.device) < _NOISY_PART
        level = _MEL_NOISE * torch.rand(len(mel), 1, 1, device=mel.device) * noisy
        return (mel + torch.randn_like(mel) * level).transpose(1, 2), wave

    def _draw_of(self, mel: Tensor, wave: Tensor) -> tuple[Tensor, Tensor]:
        size, device = self.size // len(self.mels), mel.device
        starts = torch.randint(2, len(mel) - FRAMES - 4, (size, 2), device=device)
        # The louder one of two places is taken: silence is easy.
        loudness = mel[starts + FRAMES // 2].float().mean(-1)
        start = torch.where(loudness[:, :1] > loudness[:, 1:], starts[:, :1], starts[:, 1:])
        frames = mel[start + torch.arange(FRAMES, device=device)].float()
        return frames, wave[start * HOP + torch.arange(FRAMES * HOP, device=device)].float() / 32768


class Trainer:
    """Networks, losses and optimisers of the stage; each kind of step is recorded."""

    def __init__(self, settings: Settings, examples: Examples, model: nn.Module) -> None:
        device = settings.device
        self._settings, self._examples, self._model = settings, examples, model
        self._losses = SpectralLoss().to(device)
        self._optimizer = adamw(model.parameters(), betas=(0.8, 0.99), decay=1e-3)
        self._judges = Discriminators()
        state.load_into(settings, "discriminators", self._judges)
        self._judges.to(device)
        self._judges_optimizer = adamw(self._judges.parameters(), betas=(0.8, 0.99), decay=1e-3)
        self._spectral = Recorded(self.spectral, device, plain=settings.plain)
        self._adversarial = Recorded(self.adversarial, device, plain=settings.plain)

    def step(self, number: int, rate: float) -> dict[str, Tensor]:
        """A step of the loop: without discriminators first."""
        set_rate(self._optimizer, rate)
        set_rate(self._judges_optimizer, rate * _JUDGES_RATE)
        if number < (_SPECTRAL_STEPS_TOY if self._settings.toy else _SPECTRAL_STEPS):
            return dict(zip(("mel", "spectra", "norm"), self._spectral(), strict=True))
        return dict(zip(("mel", "spectra", "fooled", "judged", "norm"), self._adversarial(), strict=True))

    def spectral(self) -> Tensor:
        """Descend without discriminators; returns losses and norm [3]."""
        mel, wave = self._examples.draw()
        fake = self._fake(mel)
        bands, spectra = self._losses(fake, wave)
        norm = descend(self._optimizer, 15 * bands + 6 * spectra + _too_loud(fake), _MOST_NORM)
        return torch.stack([bands.detach(), spectra.detach(), norm])

    def adversarial(self) -> Tensor:
        """Descend the discriminators, then the vocoder; returns losses and norm [5]."""
        mel, wave = self._examples.draw()
        fake = self._fake(mel)
        with autocast(self._settings.device):
            judged = discriminator_loss(self._judges(wave), self._judges(fake.detach()))
        descend(self._judges_optimizer, judged, 10.0)
        self._judges.requires_grad_(False)
        with autocast(self._settings.device):
            fooled, matched = adversarial_losses(self._judges(wave), self._judges(fake))
        self._judges.requires_grad_(True)
        bands, spectra = self._losses(fake, wave)
        loss = 15 * bands + 2 * spectra + fooled + 2 * matched + _too_loud(fake)
        norm = descend(self._optimizer, loss, _MOST_NORM)
        return torch.stack([value.detach() for value in (bands, spectra, fooled, judged, norm)])

    def keep_discriminators(self) -> None:
        """Save them for the next run."""
        state.save(self._settings, "discriminators", self._judges.state_dict())

    def _fake(self, mel: Tensor) -> Tensor:
        with autocast(self._settings.device):
            return synthesize(self._model, mel).float()


def _too_loud(fake: Tensor) -> Tensor:
    return 20 * F.relu(fake.abs() - _LOUDEST).mean()


def train(settings: Settings, seconds: float) -> None:
    """Train for some seconds from what was kept."""
    log, clock = Log(settings, "vocoder"), Clock(seconds)
    torch.backends.cudnn.benchmark = True
    examples = Examples.of(settings, 4 if settings.toy else 96)
    model = new_vocoder(settings.sizes)
    found = state.load_into(settings, "vocoder", model)
    model.to(settings.device).train()
    if settings.device.type == "cuda" and not settings.plain:
        compile_activations(model, log)
    trainer = Trainer(settings, examples, model)
    rate = Rate(_PEAK_AGAIN if found else _PEAK, hold=0.4, floor=0.05)
    loop = Loop(settings, "vocoder", "mel", log, Ema(model, 0.999), rate, shown_every=5 if settings.toy else 200)
    loop.run(trainer.step, clock, found.steps if found else 0)
    trainer.keep_discriminators()

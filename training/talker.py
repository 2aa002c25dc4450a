# SPDX-License-Identifier: Apache-2.0
"""Stage `talker`: from the rows of the frozen thinker to codes, teacher forced.

Two attention heads are told where in the text the speech is: so a small network learns to read without skips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from training import codes, state
from training.bank import UNKNOWN
from training.forward import text_positions, think
from training.log import Log
from training.loop import Loop
from training.parts import part
from training.recorded import Recorded
from training.schedule import Clock, Ema, Rate, adamw, autocast, descend, set_rate
from training.settings import Settings
from training.sizes import HEAD_DIM, VOCAB, Sizes
from training.talker_data import NO_TARGET, Batch, Replies

_PEAK, _PEAK_AGAIN = 1.2e-3, 8e-4
_LOOK = 4
"""Codes that the second guided head looks ahead."""
_GUIDE_WEIGHT = 0.25
_CENTER_WEIGHT = 0.01
"""Weight of the squared log-sum-exp of the logits.

A repetition penalty scales logits, so it hardly changes those near 0.
"""
_WRONG_CODES, _WRONG_AFTER = 0.12, 1500
"""Part of the codes heard that are neighbours of the right ones, and steps until it is reached."""
_FOLLOWED_EVERY = 50
"""Steps between looks for a newer thinker."""
_FAR = -1e4
_NEXT_TOKEN = -0.7
"""Log weight of attention to the token after the right one."""


_THINKERS = ("thinker_text", "thinker")
"""States of the thinker from its first usable one on."""


def newest_thinker(settings: Settings) -> tuple[float, str]:
    """When the thinker was saved last, and under which name.

    Raises:
        FileNotFoundError: it was not.
    """
    paths = [path for name in _THINKERS if (path := state.folder(settings) / f"{name}.pt").exists()]
    if not paths:
        raise FileNotFoundError(f"{state.folder(settings)}: no {' or '.join(_THINKERS)}: the stage `thinker` makes it")
    return max((path.stat().st_mtime, path.stem) for path in paths)


def frozen_text_model(settings: Settings) -> nn.Module:
    """The thinker's text model as it was saved last; FileNotFoundError if it was not."""
    thinker: Any = part("thinker", settings.sizes)
    text: nn.Module = thinker.model.to(settings.device).eval().requires_grad_(False)
    load_text_model(settings, text)
    return text


def load_text_model(settings: Settings, text: nn.Module) -> None:
    """Give the text model the weights that the thinker saved last."""
    found = state.load(settings, newest_thinker(settings)[1])
    assert found is not None, "states are never removed"
    prefix = "model."
    text.load_state_dict(
        {name.removeprefix(prefix): value for name, value in found.tensors.items() if name.startswith(prefix)}
    )


@torch.no_grad()
def thinker_rows(text: Any, ids: Tensor, bos: Tensor) -> Tensor:
    """Return the rows that the talker gets: last hidden state plus embedding, as in HF's `generate` of the whole model.

    Args:
        text: the thinker's text model.
        ids: [B, T], padded at the end.
        bos: [B]: text ids of the speakers' beginnings.

    Returns:
        [B, T + 3, hidden]: the last three are the embeddings of text eos, text pad and `bos`.
    """
    embeds = text.embed_tokens(ids)
    hidden = think(text, embeds, text_positions(embeds))
    eos, pad = torch.full_like(bos, VOCAB.tts_eos), torch.full_like(bos, VOCAB.tts_pad)
    special = text.embed_tokens(torch.stack([eos, pad, bos], dim=1))
    return torch.cat([(hidden + embeds).float(), special.float()], dim=1)


def new_talker(sizes: Sizes) -> nn.Module:
    """HF's module, its blocks near the identity."""
    model: Any = part("talker", sizes)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 1.0)
        model.thinker_to_talker_proj.weight.normal_(0, 0.7 * sizes.hidden**-0.5)
        for name, parameter in model.model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.5)
    found: nn.Module = model
    return found


@dataclass(frozen=True)
class Guide:
    """Two heads of one layer that learn where the text is."""

    layer: int
    heads: tuple[int, int]

    @classmethod
    def of(cls, sizes: Sizes) -> Guide:
        """The first head of each half, in the middle layer."""
        return cls(sizes.talker_layers // 2, (0, sizes.talker_heads // 2))

    def loss(self, layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Tensor) -> Tensor:
        """Minus the log of the attention [] to the token spoken now (first head) and `_LOOK` codes later (second head).

        Args:
            layer: HF's decoder layer.
            hidden: [B, L, width] before it.
            rotary: cosines and sines [B, L, head].
            attend: [B, L] as in a batch.
        """
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        later = torch.full_like(attend, UNKNOWN)
        later[:, :-_LOOK] = attend[:, _LOOK:]
        losses = []
        heads_a_key = attention.q_proj.out_features // attention.k_proj.out_features
        for head, where in zip(self.heads, (attend, later), strict=True):
            q = _rotated(_one_head(attention.q_proj, head, x), rotary)
            k = _rotated(_one_head(attention.k_proj, head // heads_a_key, x), rotary)
            losses.append(_missed(q @ k.transpose(1, 2) * HEAD_DIM**-0.5, where))
        return torch.stack(losses).mean()


def _one_head(projection: Any, head: int, x: Tensor) -> Tensor:
    begin, end = head * HEAD_DIM, (head + 1) * HEAD_DIM
    return F.linear(x, projection.weight[begin:end], projection.bias[begin:end])


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding; the three sections of M-RoPE are alike, since speech has text positions."""
    cos, sin = rotary
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * sin.to(x.dtype)


def _missed(scores: Tensor, where: Tensor) -> Tensor:
    """Minus the mean log attention [] that [B, L, L] scores give to positions [B, L] or, less so, the ones after."""
    length = scores.shape[1]
    place = torch.arange(length, device=scores.device)
    known = (where >= 0) & (where <= place)  # a token may come only after it was read
    visible = scores.float().masked_fill(place > place.unsqueeze(1), _FAR)
    index = where.clamp(min=0).unsqueeze(-1)
    pair = torch.cat([visible.gather(2, index), visible.gather(2, (index + 1).clamp(max=length - 1)) + _NEXT_TOKEN], 2)
    log_attention = pair.logsumexp(2) - visible.logsumexp(2)
    return -(log_attention * known).sum() / known.sum().clamp(min=1)


def embed(model: Any, rows: Tensor, batch: Batch, neighbours: Tensor, wrong: Tensor) -> Tensor:
    """The talker's inputs [B, L, hidden]: rows plus codes, a part `wrong` [] of which are others than were spoken."""
    code = batch.code
    drawn = torch.rand(code.shape, device=code.device)
    is_code = (code >= 1) & (code <= len(neighbours)) & (code < VOCAB.codec_embeds)
    other = torch.randint(neighbours.shape[1], code.shape, device=code.device)
    heard = torch.where(is_code & (drawn < wrong), neighbours[code, other], code)
    anything = torch.randint(1, VOCAB.codec_embeds, code.shape, device=code.device)
    heard = torch.where(is_code & (drawn > 1 - wrong / 4), anything, heard)
    index = batch.row.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
    added: Tensor = rows.gather(1, index) + model.model.embed_tokens(heard) * batch.has_code.unsqueeze(-1)
    return added


def run(model: Any, embeds: Tensor, position: Tensor, guide: Guide, attend: Tensor) -> tuple[Tensor, Tensor]:
    """HF's forward without masks: the sequences are padded at the end.

    Returns:
        The last hidden states [B, L, width] and the guide's loss [].
    """
    hidden = model.thinker_to_talker_proj(embeds).float()
    rotary = model.model.rotary_emb(hidden, position.unsqueeze(0).expand(3, -1, -1))
    plain = tuple(part[0] if part.ndim == 4 else part for part in rotary)
    loss = torch.zeros((), device=hidden.device)
    for number, layer in enumerate(model.model.layers):
        if number == guide.layer:
            loss = guide.loss(layer, hidden, (plain[0], plain[1]), attend)
        out = layer(hidden, attention_mask=None, position_embeddings=rotary)
        hidden = out[0] if isinstance(out, tuple) else out
    return model.model.norm(hidden), loss


@dataclass(frozen=True)
class Losses:
    """Losses of one batch, all []."""

    code: Tensor
    """Cross-entropy of the next code."""
    guide: Tensor
    center: Tensor
    """Squared log-sum-exp of the logits."""
    right: Tensor
    """Part of the codes that are the most likely ones."""

    @property
    def total(self) -> Tensor:
        """Loss that is descended."""
        return self.code + _GUIDE_WEIGHT * self.guide + _CENTER_WEIGHT * self.center


@dataclass(frozen=True)
class Teacher:
    """Fixed inputs of the talker's training."""

    text: nn.Module
    """The thinker's text model."""
    guide: Guide
    neighbours: Tensor
    """As `codes.neighbours` has them."""

    @classmethod
    def of(cls, settings: Settings) -> Teacher:
        """On the settings' device."""
        codebook = state.load(settings, "codebook")
        assert codebook is not None, "the stage `speech` makes it"
        near = codes.neighbours(codebook.tensors["centers"].to(settings.device))
        return cls(frozen_text_model(settings), Guide.of(settings.sizes), near)

    def losses(self, model: Any, batch: Batch, wrong: Tensor) -> Losses:
        """Return the losses of one batch on the networks' device; a part `wrong` [] of the codes is misheard."""
        rows = thinker_rows(self.text, batch.ids, batch.bos)
        embeds = embed(model, rows, batch, self.neighbours, wrong)
        hidden, guided = run(model, embeds, batch.position, self.guide, batch.attend)
        logits, kept = model.codec_head(hidden).float(), batch.target != NO_TARGET
        code = F.cross_entropy(logits.flatten(0, 1), batch.target.flatten(), ignore_index=NO_TARGET)
        count = kept.sum().clamp(min=1)
        center = (logits.logsumexp(-1).square() * kept).sum() / count
        right = ((logits.argmax(-1) == batch.target) & kept).sum() / count
        return Losses(code, guided, center, right)


@dataclass
class Following:
    """The frozen text model, read again whenever the thinker, which may train meanwhile, is saved."""

    settings: Settings
    text: nn.Module
    _read: float = 0.0
    """When the thinker that `text` is was saved."""

    def refresh(self) -> None:
        """Read it again if there is a newer one."""
        saved, _name = newest_thinker(self.settings)
        if saved != self._read:
            load_text_model(self.settings, self.text)
            self._read = saved


class Stepper:
    """Steps of the optimiser, recorded once for each shape of batch."""

    def __init__(self, settings: Settings, model: nn.Module, teacher: Teacher) -> None:
        self._settings, self._model, self._teacher = settings, model, teacher
        self._optimizer = adamw(model.parameters())
        self._wrong = torch.zeros((), device=settings.device)
        self._pool: Any = torch.cuda.graph_pool_handle() if settings.device.type == "cuda" else None
        self._steps: dict[torch.Size, tuple[Batch, Recorded]] = {}

    def step(self, batch: Batch, rate: float, wrong: float) -> dict[str, Tensor]:
        """Descend the losses of a batch from a loader, a part `wrong` of the codes being misheard."""
        set_rate(self._optimizer, rate)
        self._wrong.fill_(wrong)
        shape = batch.code.shape
        if shape not in self._steps:
            place, device = batch.to(self._settings.device), self._settings.device
            recorded = Recorded(lambda: self._descend(place), device, self._pool, plain=self._settings.plain)
            self._steps[shape] = place, recorded
        place, recorded = self._steps[shape]
        place.copy_(batch)
        return dict(zip((*Losses.__dataclass_fields__, "norm"), recorded(), strict=True))

    def _descend(self, batch: Batch) -> Tensor:
        with autocast(self._settings.device):
            found = self._teacher.losses(self._model, batch, self._wrong)
        norm = descend(self._optimizer, found.total, 1.0)
        return torch.stack([*(value.detach() for value in vars(found).values()), norm])


def train(settings: Settings, seconds: float) -> None:
    """Train for some seconds from what was kept."""
    log, clock, toy = Log(settings, "talker"), Clock(seconds), settings.toy
    model = new_talker(settings.sizes)
    found = state.load_into(settings, "talker", model)
    done = found.steps if found else 0
    replies = Replies(settings, 2000 if toy else 48_000, done)
    feed = iter(DataLoader(replies, batch_size=None, num_workers=1 if toy else 4))
    teacher = Teacher.of(settings)
    following = Following(settings, teacher.text)
    model.to(settings.device).train()
    stepper = Stepper(settings, model, teacher)

    def step(number: int, rate: float) -> dict[str, Tensor]:
        if number % _FOLLOWED_EVERY == 0:
            following.refresh()
        return stepper.step(next(feed), rate, min(1.0, number / _WRONG_AFTER) * _WRONG_CODES)

    rate = Rate(_PEAK_AGAIN if found else _PEAK, floor=0.05)
    loop = Loop(settings, "talker", "code", log, Ema(model, 0.999), rate, shown_every=10 if toy else 200)
    loop.run(step, clock, done)

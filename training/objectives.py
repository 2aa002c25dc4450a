# SPDX-License-Identifier: Apache-2.0
"""Objectives of the thinker: the next token of replies, and direct labels for what its encoders see and hear.

Each loss is a function of tensors of fixed shapes that never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import forward
from training.heard import IGNORED, gather_rows
from training.prompts import PHONES
from training.sizes import Sizes
from training.world.scenes import MAX_THINGS, MOVES
from training.world.words import PAINTS, SHAPES

Inputs = Mapping[str, Tensor]
Losses = dict[str, Tensor]
"""Scalars by name; `loss` is what is descended."""
_HEARD_WEIGHT, _PHONE_WEIGHT, _SEEN_WEIGHT = 0.6, 0.3, 0.4


class Objectives(nn.Module):
    """The thinker with the readers of its encoders."""

    def __init__(self, thinker: Any, sizes: Sizes) -> None:
        super().__init__()
        self.thinker = thinker
        hidden, audio = sizes.hidden, sizes.audio_hidden
        self.phone = nn.Linear(audio, len(PHONES))
        self.shape, self.color = nn.Linear(hidden, len(SHAPES)), nn.Linear(hidden, len(PAINTS) + 1)
        self.count, self.move = nn.Linear(hidden, MAX_THINGS), nn.Linear(hidden, len(MOVES))
        self.core = nn.Linear(hidden, 2)
        self.center = nn.Linear(hidden, 2)
        self.sharpness = nn.Parameter(torch.tensor(12.0))
        """Factor of the likeness between heard frames and token embeddings."""

    def text(self, given: Inputs) -> Losses:
        """Chats: `ids`, `targets` [B, L]."""
        embeds = self.thinker.model.embed_tokens(given["ids"])
        hidden = forward.think(self.thinker.model, embeds, forward.text_positions(embeds))
        return self._replies(hidden, given["targets"])

    def heard(self, given: Inputs) -> Losses:
        """Chats about sounds: also `source` [B, L], `mel` [B * S, 128, F], `frames`, `token_labels`, `phone_labels`."""
        embeds = self.thinker.model.embed_tokens(given["ids"])
        heard = forward.hear(self.thinker.audio_tower, given["mel"], given["frames"])
        rows = heard.rows.reshape(len(embeds), -1, heard.rows.shape[-1])
        mixed = gather_rows(rows, given["source"], embeds)
        found = self._replies(
            forward.think(self.thinker.model, mixed, forward.text_positions(embeds)), given["targets"]
        )
        # Encoded sound shall point where the tokens' embeddings point, which the text part already understands.
        table = F.normalize(self.thinker.model.embed_tokens.weight.detach().float(), dim=-1)
        likeness = F.normalize(heard.rows.float(), dim=-1) @ table.T
        token = _cross(likeness * self.sharpness, given["token_labels"])
        phone = _cross(self.phone(heard.inner), given["phone_labels"])
        found["loss"] = found["loss"] + _HEARD_WEIGHT * token + _PHONE_WEIGHT * phone
        right = (likeness.argmax(-1) == given["token_labels"]).float().sum()
        known = (given["token_labels"] != IGNORED).float().sum()
        return found | {"token": token.detach(), "phone": phone.detach(), "heard": right / known}

    def seen(self, given: Inputs, height: int, width: int) -> Losses:
        """Chats about pictures: also `source`, `begin`, `positions` [3, B, L], `patches`, fields of `render.Labels`."""
        embeds = self.thinker.model.embed_tokens(given["ids"])
        rows = forward.see(self.thinker.visual, given["patches"], height, width)
        # More pictures are seen than talked about: shapes take the encoder longest.
        told = rows[: len(embeds)]
        mixed = gather_rows(told.flatten(1, 2), given["source"], embeds)
        hidden = forward.think(self.thinker.model, mixed, given["positions"])
        found = self._replies(hidden, given["targets"])
        kinds = {"shape": self.shape, "color": self.color, "count": self.count, "core": self.core, "move": self.move}
        seen = {name: _cross(head(rows), given[name]) for name, head in kinds.items()}
        # The encoder does not know where in the picture a token lies; the text model can tell by the positions.
        places = given["begin"].unsqueeze(1) + torch.arange(told.shape[1] * told.shape[2], device=rows.device)
        pictured = hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        center = given["center"][: len(embeds)]
        known = (center >= 0).float()
        away = (self.center(pictured).float().view(known.shape) - center).abs() * known
        seen["center"] = away.sum() / known.sum().clamp(min=1)
        found["loss"] = found["loss"] + _SEEN_WEIGHT * (
            seen["shape"] + seen["color"] + seen["count"] + 4 * seen["core"] + seen["move"] + 4 * seen["center"]
        )
        return found | {name: value.detach() for name, value in seen.items()}

    def _replies(self, hidden: Tensor, targets: Tensor) -> Losses:
        logits = self.thinker.lm_head(hidden).float()
        loss = _cross(logits, targets)
        right = (logits.argmax(-1) == targets).float().sum() / (targets != IGNORED).float().sum().clamp(min=1)
        return {"loss": loss, "reply": loss.detach(), "right": right.detach()}


def _cross(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross entropy where `wanted` is not IGNORED; 0 if it nowhere is."""
    total = F.cross_entropy(logits.float().flatten(0, -2), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (wanted != IGNORED).float().sum().clamp(min=1)


def next_targets(ids: Tensor, counts: Tensor) -> Tensor:
    """At each place the next id if that counts, else IGNORED: [B, L]."""
    targets = torch.where(counts, ids, IGNORED)
    return F.pad(targets[:, 1:], (0, 1), value=IGNORED)

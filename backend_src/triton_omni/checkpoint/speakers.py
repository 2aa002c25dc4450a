# SPDX-License-Identifier: Apache-2.0
"""The voices of a checkpoint (`spk_dict.pt`), validated; knows nothing of requests or sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_omni.checkpoint.config import OmniConfig
from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.voice_names import DEFAULT_VOICE, SPEAKER_FILE, checked_name
from triton_omni.core.errors import BadRequest

MOST_FRAMES = 1 << 15
"""Maximum frames of a reference mel spectrogram: five minutes."""


@dataclass(frozen=True)
class Speaker:
    """One voice."""

    name: str
    cond: Tensor
    """float32 [1, D], CPU: the speaker embedding."""
    ref_mel: Tensor
    """float32 [1, T, M], CPU: a reference mel spectrogram of T frames."""
    text_bos_id: int
    """Text id of its beginning of speech, in the thinker's vocabulary."""


@dataclass(frozen=True)
class Speakers:
    """All voices, in the checkpoint's order."""

    by_name: Mapping[str, Speaker]

    @property
    def names(self) -> tuple[str, ...]:
        """Names as a client may give them."""
        return tuple(self.by_name)

    @property
    def default(self) -> Speaker:
        """The voice of a request that names none."""
        return self.by_name.get(DEFAULT_VOICE) or next(iter(self.by_name.values()))

    def get(self, name: str | None) -> Speaker:
        """The voice of this name, the default one for None.

        Raises:
            BadRequest: there is no such voice; the message lists those there are.
        """
        if name is None:
            return self.default
        if name not in self.by_name:
            raise BadRequest(f"voice: {name!r:.80} is unknown, available: {', '.join(self.names)}")
        return self.by_name[name]


def load_speakers(path: Path, config: OmniConfig) -> Speakers:
    """Read and check `spk_dict.pt` of the checkpoint in the folder `path`.

    Raises:
        CheckpointError: the file cannot be read, is empty, or an entry has a missing, misshapen or non-finite value.
    """
    file = path / SPEAKER_FILE
    try:
        raw: Any = torch.load(file, map_location="cpu", weights_only=True)
    # A damaged file may raise almost anything.
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(raw, dict) or not raw:
        raise CheckpointError(f"{file}: expected a dictionary of speakers, found {type(raw).__name__}")
    return Speakers(
        {name: _speaker(f"{file.name}: {name}", name, raw[name], config) for name in map(checked_name, raw)}
    )


def _speaker(where: str, name: str, entry: Any, config: OmniConfig) -> Speaker:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected a dictionary, found {type(entry).__name__}")
    cond = _tensor(where, entry, "cond", dims=2, last=config.dit.speaker_dim)
    ref_mel = _tensor(where, entry, "ref_mel", dims=3, last=config.dit.mel_dim)
    bos = entry.get("bos_token")
    if isinstance(bos, Tensor) and bos.numel() == 1:
        bos = bos.item()
    vocab_size = config.thinker.decoder.vocab_size
    if isinstance(bos, bool) or not isinstance(bos, int) or not 0 <= bos < vocab_size:
        raise CheckpointError(f"{where}.bos_token: expected an id in [0, {vocab_size}), found {bos!r:.80}")
    return Speaker(name, cond, ref_mel, bos)


def _tensor(where: str, entry: Mapping[str, Any], key: str, *, dims: int, last: int) -> Tensor:
    """A finite float32 tensor with `dims` dimensions, the first of size 1 (added when it is left out)."""
    value = entry.get(key)
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{where}.{key}: expected a tensor, found {type(value).__name__}")
    batched = value.unsqueeze(0) if value.dim() == dims - 1 else value
    if batched.dim() != dims or batched.shape[0] != 1 or batched.shape[-1] != last or not batched.numel():
        expected = f"[1, {last}]" if dims == 2 else f"[1, frames, {last}]"
        raise CheckpointError(f"{where}.{key}: expected shape {expected}, found {list(value.shape)}")
    # A view of one number may have any shape: asked before it is looked at.
    if batched.shape[-2] > MOST_FRAMES:
        raise CheckpointError(f"{where}.{key}: has {batched.shape[-2]} frames, at most {MOST_FRAMES} are taken")
    if batched.layout != torch.strided or batched.is_complex() or batched.is_quantized:
        raise CheckpointError(f"{where}.{key}: expected real numbers, not {value.dtype} ({value.layout})")
    if not torch.isfinite(batched).all():
        raise CheckpointError(f"{where}.{key}: holds values that are not finite")
    return batched.float().contiguous()

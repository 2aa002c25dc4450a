# SPDX-License-Identifier: Apache-2.0
"""Random weights whose replies behave: varied, ended by the stop ids, never outside the codec's table.

HF's own initialisation gives nearly constant outputs, so every layer kind gets a scale of its own. Four channels of
the residual stream are reserved, in the thinker and in the talker alike; no layer but the one named writes to them:

- *constant*: the same value at every position, so after the final norm it is positive whatever the input.
  A head's row that is zero elsewhere and very negative there gives an id that can never be drawn;
  elsewhere the column works as the bias that the heads do not have.
- *start*: set where the reply begins (`<|im_start|>` in the thinker, codec bos in the talker).
- *progress*: head 0 of layer 0 attends to *start* with a score that falls with the distance (one rotary pair), and
  writes the weight it found there. It is near 1 when the reply begins and near 0 after a while,
  so the stop ids, which read it negatively, become likely.
- *marker*: by which codec bos reaches the talker's *start* through the projection; zero in the thinker's rows.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig

    from triton_omni.checkpoint.synthetic_config import Vocabulary

# Channels counted from the end of the residual stream.
CONSTANT, START, PROGRESS, MARKER = -1, -2, -3, -4
_RESERVED = (CONSTANT, START, PROGRESS, MARKER)
_FORBIDDEN = -300.0
"""Logit of an id that must never be drawn; those of the others stay within a few tens."""
_LOGIT_STD = 2.0
_FINAL_RMS = 2.0
"""About the root mean square of the residual stream before the final norm."""


@dataclass(frozen=True)
class Decoder:
    """Facts about the thinker's or the talker's transformer that the rules need."""

    prefix: str
    head: str
    hidden: int
    layers: int
    head_dim: int
    rope_theta: float
    reply_length: int
    """Tokens after which the stop ids become likely."""


def describe(config: Qwen2_5OmniConfig, *, thinker_reply: int, talker_reply: int) -> tuple[Decoder, Decoder]:
    """The thinker's and the talker's transformers of an HF configuration."""
    # HF declares its nested configurations as optional or plain dictionaries; made ones are always objects.
    thinker: Any = config.thinker_config
    talker: Any = config.talker_config
    text = thinker.text_config
    return (
        Decoder(
            "thinker.model.",
            "thinker.lm_head.weight",
            text.hidden_size,
            text.num_hidden_layers,
            text.hidden_size // text.num_attention_heads,
            text.rope_parameters["rope_theta"],
            thinker_reply,
        ),
        Decoder(
            "talker.model.",
            "talker.codec_head.weight",
            talker.hidden_size,
            talker.num_hidden_layers,
            talker.head_dim,
            talker.rope_parameters["rope_theta"],
            talker_reply,
        ),
    )


class WeightRules:
    """Draws any tensor of a checkpoint by its name, always the same values for the same seed, name and device kind."""

    def __init__(self, config: Qwen2_5OmniConfig, vocab: Vocabulary, *, seed: int, replies: tuple[int, int]) -> None:
        self._vocab = vocab
        self._seed = seed
        self._decoders = describe(config, thinker_reply=replies[0], talker_reply=replies[1])

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The tensor of this name: float32, on `device`."""
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        tensor = torch.randn(shape, generator=generator, device=device)
        mean, std = _moments(name, shape, self._decoders)
        tensor.mul_(std).add_(mean)
        self._shape_reserved(name, tensor)
        return tensor

    def _shape_reserved(self, name: str, tensor: Tensor) -> None:
        thinker, talker = self._decoders
        if name in ("thinker.audio_tower.proj.weight", "thinker.visual.merger.mlp.2.weight"):
            tensor[list(_RESERVED)] = 0
        elif name in ("thinker.audio_tower.proj.bias", "thinker.visual.merger.mlp.2.bias"):
            _set_reserved(tensor, thinker.hidden)
        elif name == "thinker.model.embed_tokens.weight":
            _set_reserved(tensor, thinker.hidden)
            tensor[self._vocab.id_of("<|im_start|>"), START] = _unit(thinker.hidden)
        elif name == "talker.model.embed_tokens.weight":
            tensor[:, list(_RESERVED)] = 0
            tensor[self._vocab.codec_bos, MARKER] = 1
        elif name == "talker.thinker_to_talker_proj.weight":
            tensor[list(_RESERVED)] = 0
            tensor[:, list(_RESERVED)] = 0
            tensor[START, MARKER] = _unit(talker.hidden)
        elif name == "talker.thinker_to_talker_proj.bias":
            _set_reserved(tensor, talker.hidden)
        elif name == thinker.head:
            self._shape_lm_head(tensor, thinker)
        elif name == talker.head:
            self._shape_codec_head(tensor, talker)
        for decoder in self._decoders:
            if name.startswith(decoder.prefix) and not name.endswith("embed_tokens.weight"):
                _shape_decoder(name.removeprefix(decoder.prefix), tensor, decoder)

    def _shape_lm_head(self, head: Tensor, decoder: Decoder) -> None:
        """Ordinary tokens stay possible, bytes that are no printable ASCII less often; of the others only the stop."""
        vocab = self._vocab
        head[:, list(_RESERVED)] = 0
        _add_bias(head[94:256], -4.0, decoder)
        _forbid(head[vocab.base :], decoder)
        _make_stop(head, vocab.id_of("<|im_end|>"), vocab.base, decoder)

    def _shape_codec_head(self, head: Tensor, decoder: Decoder) -> None:
        vocab = self._vocab
        head[:, list(_RESERVED)] = 0
        _forbid(head[vocab.codec_embeds + 1 :], decoder)
        for stop in (vocab.codec_pad, vocab.codec_eos):
            _make_stop(head, stop, vocab.codec_embeds, decoder)


def _unit(hidden: int) -> float:
    """A value that stands out in a residual stream of `hidden` channels without drowning it."""
    return 0.5 * math.sqrt(hidden)


def _set_reserved(rows: Tensor, hidden: int) -> None:
    rows[..., list(_RESERVED)] = 0
    rows[..., CONSTANT] = _unit(hidden)


def _per_logit(decoder: Decoder) -> float:
    """Weight on a reserved channel that moves a logit by about one when the channel holds `_unit`."""
    return _FINAL_RMS / _unit(decoder.hidden)


def _add_bias(rows: Tensor, logit: float, decoder: Decoder) -> None:
    rows[:, CONSTANT] += logit * _per_logit(decoder)


def _forbid(rows: Tensor, decoder: Decoder) -> None:
    rows.zero_()
    _add_bias(rows, _FORBIDDEN, decoder)


def _make_stop(head: Tensor, stop: int, competitors: int, decoder: Decoder) -> None:
    """The logit of `stop` rises from hopeless to the height of the best of all `competitors` as *progress* falls."""
    best = _LOGIT_STD * math.sqrt(2 * math.log(competitors))
    # Content moves it more than other ids, so that replies differ in length.
    head[stop] = 1.25 * torch.roll(head[0], 7)
    head[stop, list(_RESERVED)] = 0
    head[stop, CONSTANT] = best * _per_logit(decoder)
    head[stop, PROGRESS] = -1.7 * best * _per_logit(decoder)


def _shape_decoder(name: str, tensor: Tensor, decoder: Decoder) -> None:
    """Keep the reserved channels clean, and set up the one head that measures how long the reply is."""
    if name == "norm.weight":
        tensor[list(_RESERVED)] = 0
        tensor[CONSTANT] = tensor[PROGRESS] = 1
    elif name.endswith("layernorm.weight"):
        tensor[list(_RESERVED)] = 0
        if name == "layers.0.input_layernorm.weight":
            tensor[START] = 1
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        tensor[list(_RESERVED)] = 0
        if name == "layers.0.self_attn.o_proj.weight":
            tensor[PROGRESS, 0] = _unit(decoder.hidden)
    elif name.endswith("proj.weight"):
        tensor[:, list(_RESERVED)] = 0
    if name.startswith("layers.0.self_attn."):
        _shape_progress_head(name.removeprefix("layers.0.self_attn."), tensor, decoder)


def _shape_progress_head(name: str, tensor: Tensor, decoder: Decoder) -> None:
    """Query head 0 scores `strength * mean(cos(frequency * distance))` at *start*, else zero; value 0 says *start*.

    The softmax over n positions gives *start* half of the weight where that score is ln n. Two frequencies, since
    one would come round again at the beginnings of earlier turns.
    """
    first = _rotary_pair(decoder)
    pairs = [first, first + 1]
    turned = [pair + decoder.head_dim // 2 for pair in pairs]
    strength = 8.0
    gain = math.sqrt(strength / len(pairs) * math.sqrt(decoder.head_dim))
    # The norm before layer 0 brings *start* from `_unit` to about this value.
    start = _unit(decoder.hidden) / math.sqrt(1.5)
    if name == "q_proj.weight":
        tensor[: decoder.head_dim] = 0
    elif name == "q_proj.bias":
        tensor[: decoder.head_dim] = 0
        tensor[pairs] = gain
    elif name == "k_proj.weight":
        tensor[pairs + turned] = 0
        tensor[pairs, START] = gain / start
    elif name == "k_proj.bias":
        tensor[pairs + turned] = 0
    elif name == "v_proj.weight":
        tensor[0] = 0
        tensor[0, START] = 1 / start
    elif name == "v_proj.bias":
        tensor[0] = 0


def _rotary_pair(decoder: Decoder) -> int:
    """The rotary pair whose angle is about one radian at the reply's length; never the last one."""
    half = decoder.head_dim // 2
    exact = half * math.log(decoder.reply_length) / math.log(decoder.rope_theta)
    return min(max(round(exact), 0), half - 2)


def _moments(name: str, shape: tuple[int, ...], decoders: tuple[Decoder, Decoder]) -> tuple[float, float]:
    """Mean and standard deviation by layer kind; the first rule whose pattern matches the name counts."""
    mean, gain, by_fan_in = _rule(name)
    if by_fan_in:
        gain /= math.sqrt(_fan_in(name, shape))
    for decoder in decoders:
        # Deep stacks get smaller residual branches, so that the stream's size does not depend on the depth.
        if name.startswith(decoder.prefix) and name.endswith(("o_proj.weight", "down_proj.weight")):
            gain *= math.sqrt(2 / decoder.layers)
    return mean, gain


def _rule(name: str) -> tuple[float, float, bool]:
    for pattern, mean, gain, by_fan_in in _RULES:
        if re.search(pattern, name):
            return mean, gain, by_fan_in
    raise LookupError(f"no initialisation rule for {name}")


def _fan_in(name: str, shape: tuple[int, ...]) -> float:
    if ".ups." in name:  # a transposed convolution's weight is [in, out, kernel]; about two taps reach a sample
        return shape[0] * 2
    return math.prod(shape[1:]) if len(shape) > 1 else 1


_RULES: tuple[tuple[str, float, float, bool], ...] = (
    # (pattern, mean, standard deviation, whether that is divided by the square root of the fan-in)
    (r"^(thinker|talker)\.model\.embed_tokens\.weight$", 0.0, 1.0, False),
    (r"^(thinker|talker)\.model\..*[qk]_proj\.weight$", 0.0, 2.5, True),
    (r"^(thinker|talker)\.model\..*o_proj\.weight$", 0.0, 2.0, True),
    (r"^(thinker|talker)\.model\..*down_proj\.weight$", 0.0, 5.0, True),
    (r"^thinker\.lm_head\.weight$|^talker\.codec_head\.weight$", 0.0, _LOGIT_STD, True),
    (r"^talker\.thinker_to_talker_proj\.weight$", 0.0, 0.8, True),
    (r"audio_bos_eos_token\.weight$", 0.0, 1.0, False),
    (r"codec_embed\.weight$", 0.0, 1.0, False),
    (r"\.act\.(alpha|beta)$", 0.0, 0.2, False),
    (r"bigvgan_model\.conv_post\.weight$", 0.0, 0.15, True),
    (r"bigvgan_model\.resblocks\..*\.weight$", 0.0, 0.6, True),
    (r"dit_model\.proj_out\.bias$", -5.0, 0.5, False),
    (r"dit_model\.proj_out\.weight$", 0.0, 1.5, True),
    (r"(attn_norm|norm_out)\.linear\.weight$", 0.0, 0.7, True),
    (r"(norm|norm1|norm2|ln_post|ln_q)\.weight$", 1.0, 0.05, False),
    (r"\.bias$", 0.0, 0.05, False),
    (r"\.weight$", 0.0, 1.0, True),
)

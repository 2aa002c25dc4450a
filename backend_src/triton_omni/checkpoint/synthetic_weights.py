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

For 4-bit checkpoints the thinker's weights are rounded and packed as those of `Qwen/Qwen2.5-Omni-7B-AWQ` and
`-GPTQ-Int4`.

Sources of the format, none of them the published files themselves:

- Qwen2.5-Omni's README ("GPTQ-Int4 and AWQ Usage", of 7B alone) and its `low_VRAM_demo_awq.py` and `_gptq.py`: only the
  thinker's weights are quantised, and there only `thinker.model.layers`. Embedding, head, towers, talker and token2wav
  are saved as they are, in one index with the rest. autoawq 0.2.9 and gptqmodel 2.0.0 load all as float16.
- AutoAWQ's pull request 759, by the authors of these: zero points, groups of 128, version GEMM. The two files of a 3B
  that it lists have 7.3 to 7.5 GiB together: with token2wav in float32 they are 7.3, in float16 6.5. AutoAWQ's class
  of the model leaves out `visual` and writes that into `quantization_config`, at the top level of `config.json`.
- AutoAWQ's `WQLinear_GEMM.from_linear` and vLLM's `auto_awq.py` have AWQ's packing, GPTQModel's `pack` and vLLM's
  `auto_gptq.py` have GPTQ's. GPTQModel, too, writes `quantization_config` at the top level.

No source tells if the published GPTQ file has `desc_act`. By default gptqmodel 2.0.0 switches it on. Qwen's GPTQ-Int4
checkpoints of Qwen2 have it off.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from triton_omni.checkpoint.facts import FourBit

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


# --- 4-bit codes ------------------------------------------------------------------------------------------------------


_DECODER = re.compile(r"thinker\.model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj\.weight")
_LARGEST = 15
_MIDDLE = 8
"""GPTQ's only zero point, as its codes are symmetric."""
_BITS, _A_WORD = 4, 8
"""Bits of a code, and codes of an int32."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of eight neighbouring outputs in a word, from the lowest bits up."""
_SCALE_BITS = 4
_SMALLEST_SCALE = 2.0**-14
"""Float16's smallest normal number, for groups of zeros."""


def is_four_bit(name: str) -> bool:
    """Return True if the published checkpoints have quantised the matrix of this name."""
    return _DECODER.fullmatch(name) is not None


def quantization_config(four_bit: FourBit) -> dict[str, Any]:
    """`quantization_config` of `config.json`."""
    common = {"quant_method": four_bit.method, "bits": 4, "group_size": four_bit.group_size}
    if four_bit.method == "awq":
        return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": ["visual"]}
    return common | {
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:2.0.0"], "static_groups": False, "true_sequential": True},
    }


def pack(weight: Tensor, four_bit: FourBit) -> dict[str, Tensor]:
    """Round a matrix [N, K] to the nearest codes and pack them; on the meta device it tells shapes alone.

    A weight is `(code - zero) * scale`. Scales have four significant bits, so that every weight is exact in float16 and
    in bfloat16 alike, whichever an engine computes in.

    Returns:
        By the end of its name, for groups of G inputs: `scales` float16 [K / G, N]; `qzeros` int32 [K / G, N / 8];
        `qweight` int32, for AWQ [K, N / 8], for GPTQ [K / 8, N]; for GPTQ also `g_idx` int32 [K].

    Raises:
        ValueError: G does not divide K, or 8 not N.
    """
    outputs, inputs = weight.shape
    if inputs % four_bit.group_size or outputs % _A_WORD:
        raise ValueError(f"a matrix of {outputs} x {inputs} has no groups of {four_bit.group_size} in words of 8 codes")
    groups = weight.float().T.contiguous().view(-1, four_bit.group_size, outputs)
    scale, zero = (_awq_grid if four_bit.method == "awq" else _gptq_grid)(groups)
    codes = (groups / scale[:, None]).round().add(zero[:, None]).clamp(0, _LARGEST).reshape(inputs, outputs)
    scales = scale.to(torch.float16)
    if four_bit.method == "awq":
        order = _AWQ_ORDER
        return {"qweight": _words(codes, order), "qzeros": _words(zero, order), "scales": scales}
    numbers = torch.arange(inputs, dtype=torch.int32, device=weight.device) // four_bit.group_size
    # GPTQ writes each zero point less one.
    packed = {"qweight": _words(codes.T).T.contiguous(), "qzeros": _words(zero - 1), "scales": scales}
    return {**packed, "g_idx": numbers}


def _awq_grid(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point [K / G, N] of weights [K / G, G, N], from the smallest to the largest; 0 has a code."""
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = _rounded_up((high - low) / _LARGEST)
    return scale, (-low / scale).round().clamp(0, _LARGEST)


def _gptq_grid(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The same for codes on both sides of zero alike."""
    scale = _rounded_up(groups.abs().amax(1) / (_LARGEST - _MIDDLE))
    return scale, torch.full_like(scale, _MIDDLE)


def _rounded_up(scale: Tensor) -> Tensor:
    """To four significant bits."""
    mantissa, exponent = torch.frexp(scale.clamp(min=_SMALLEST_SCALE))
    return torch.ldexp((mantissa * 2**_SCALE_BITS).ceil(), exponent - _SCALE_BITS)


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(_A_WORD))) -> Tensor:
    """int32 [R, C / 8] of codes [R, C]: the code of place `order[i]` has the bits from 4 i on."""
    parts = codes.to(torch.int32).reshape(len(codes), -1, _A_WORD)
    word = torch.zeros_like(parts[..., 0])
    for number, place in enumerate(order):
        word |= parts[..., place] << (_BITS * number)
    return word

# SPDX-License-Identifier: Apache-2.0
"""Facts that the weights dictate, as frozen types: sizes, special ids and rates.

`config.py` reads them from a checkpoint's own files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SAMPLE_RATE = 24000
"""Hz of the waveform; the vocoder was trained at this rate and no file of the checkpoint states it."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes that the thinker's and the talker's transformers have in common."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Rotary pairs of the temporal, height and width positions; they sum to head_dim / 2."""


@dataclass(frozen=True)
class ThinkerConfig:
    """The thinker: sizes and ids of the text vocabulary."""

    decoder: DecoderConfig
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    audio_token_id: int
    image_token_id: int
    video_token_id: int
    audio_start_token_id: int
    audio_end_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    position_id_per_seconds: int
    seconds_per_chunk: int
    spatial_merge_size: int


@dataclass(frozen=True)
class TalkerSampling:
    """The talker's default sampling of codes (HF `generate`'s defaults)."""

    temperature: float = 0.9
    top_k: int = 40
    top_p: float = 0.8
    repetition_penalty: float = 1.05
    max_new_tokens: int = 4096


@dataclass(frozen=True)
class TalkerConfig:
    """The talker: sizes, ids of the codec's vocabulary, and the text ids it is conditioned with."""

    decoder: DecoderConfig
    embedding_size: int
    """Width of its inputs: the thinker's hidden size."""
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_id: int
    codec_mask_id: int
    text_pad_id: int
    text_bos_id: int
    text_eos_id: int
    sampling: TalkerSampling


@dataclass(frozen=True)
class EcapaConfig:
    """The speaker encoder inside the DiT."""

    dim: int
    channels: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    res2net_scale: int
    se_channels: int


@dataclass(frozen=True)
class DitConfig:
    """The diffusion transformer: codec codes to mel frames."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ff_mult: int
    emb_dim: int
    mel_dim: int
    speaker_dim: int
    """Width of the speaker embedding (`enc_emb_dim`)."""
    block_size: int
    """Mel frames of an attention block."""
    look_ahead_layers: tuple[int, ...]
    look_backward_layers: tuple[int, ...]
    repeats: int
    """Mel frames a code."""
    num_embeds: int
    max_positions: int
    rope_theta: float
    ecapa: EcapaConfig


@dataclass(frozen=True)
class BigVganConfig:
    """The vocoder: mel frames to waveform."""

    mel_dim: int
    upsample_initial_channel: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilation_sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FlowConfig:
    """Defaults of the checkpoint for solving token2wav's ODE; None = not stated."""

    num_steps: int | None = None
    guidance_scale: float | None = None


@dataclass(frozen=True)
class CodecConfig:
    """Rates and the range of the codec's codes."""

    num_embeds: int
    mel_frames_per_code: int
    hop_length: int
    """Samples a mel frame: the product of the vocoder's upsampling rates."""
    sample_rate: int = SAMPLE_RATE

    @property
    def largest_code(self) -> int:
        """The last row of the DiT's table, which has `num_embeds + 1` rows (HF `DiTCodecEmbedding`)."""
        return self.num_embeds

    @property
    def samples_per_code(self) -> int:
        """Samples of the waveform that one code becomes."""
        return self.mel_frames_per_code * self.hop_length


@dataclass(frozen=True)
class SoundWindow:
    """A frame's embedding depends on the frames of its window, and on the samples that they reach."""

    frames: int
    """Mel frames that attend to each other; the next window begins after them."""
    hop: int
    """Samples from one frame to the next."""
    reach: int
    """Samples before and after its own that a frame is computed from."""

    @property
    def samples(self) -> int:
        """Samples from one window to the next."""
        return self.frames * self.hop

    @property
    def margin(self) -> int:
        """Frames next to a window whose samples those of the window reach."""
        return -(-self.reach // self.hop)


FourBitMethod = Literal["awq", "gptq"]


@dataclass(frozen=True)
class FourBit:
    """A checkpoint's 4-bit quantisation of the thinker's decoder layers; it quantises nothing else."""

    method: FourBitMethod
    group_size: int
    """Consecutive inputs of a matrix that share a scale and a zero point."""


@dataclass(frozen=True)
class OmniConfig:
    """A whole checkpoint."""

    thinker: ThinkerConfig
    talker: TalkerConfig
    dit: DitConfig
    bigvgan: BigVganConfig
    codec: CodecConfig
    flow: FlowConfig
    audio_sampling_rate: int
    """Hz that sound inputs are resampled to."""
    sound_window: SoundWindow
    max_audio_seconds: float
    """Longest sound that the feature extractor takes whole; it would cut a longer one off silently."""
    four_bit: FourBit | None = None
    """None = no weight is quantised."""

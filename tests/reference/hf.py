# SPDX-License-Identifier: Apache-2.0
"""The oracle: HF transformers' Qwen2.5-Omni in float32, with what it computes on the way made visible.

Everything comes out of HF's own `generate`; nothing of it is computed again here. Knows nothing of the backend but
the names of sampling parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from triton_omni.checkpoint.transformers_setup import prepare_transformers
from triton_omni.session.engine import Sampling

prepare_transformers()

from transformers import (  # noqa: E402 (the operators must exist before)
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniProcessor,
)
from transformers.utils import logging as hf_logging  # noqa: E402

GREEDY_THINKER = Sampling(max_tokens=64)
GREEDY_TALKER = Sampling(repetition_penalty=1.05, max_tokens=300)
SAMPLED_TALKER = Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_tokens=300)


@dataclass(frozen=True)
class ThinkerResult:
    """The thinker's result: P prompt tokens, N reply tokens."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """N reply ids, the ending one included."""
    text: str
    rows: Tensor
    """float32 [P + N - 1, H]: the last token has no row."""
    positions: Tensor
    """int64 [3, P]: M-RoPE positions of the prompt."""


@dataclass(frozen=True)
class TalkerResult:
    """The talker's result."""

    sampled: tuple[int, ...]
    """Every id drawn, a stop id at the end included."""
    codes: tuple[int, ...]
    """Codes fed to token2wav: `sampled` up to the first stop id."""
    logits: Tensor
    """float32 [len(sampled), V], before any processor or warper."""
    positions: Tensor
    """int64 [3, P + 2]: of the prompt, the speaker's text bos and the first reply token."""
    text_bos_id: int


@dataclass(frozen=True)
class Speech:
    """token2wav's result for C codes: T mel frames, S samples."""

    noise: Tensor
    """float32 [1, T, 80]: initial state of the ODE."""
    mel: Tensor
    """float32 [1, 80, T]"""
    waveform: Tensor
    """float32 [S] in [-1, 1]"""


@dataclass(frozen=True)
class Reply:
    """One whole `generate`."""

    thinker: ThinkerResult
    talker: TalkerResult
    speech: Speech | None
    """None when there is no code to speak or nobody asked."""


@dataclass(frozen=True)
class Solver:
    """Arguments of HF's mel sampler."""

    num_steps: int = 10
    guidance_scale: float = 0.5
    sway_coefficient: float | None = -1.0


@dataclass
class _Seen:
    """Tensors that the spies caught during one `generate`."""

    embeds: Tensor | None = None
    reply_part: Tensor | None = None
    text_ids: Tensor | None = None
    sampled: Tensor | None = None
    logits: Tensor | None = None
    codes: Tensor | None = None
    positions: list[Tensor] = field(default_factory=list)


class HfReference:
    """HF's model and processor of a checkpoint, in float32 on the CPU."""

    def __init__(self, path: Path) -> None:
        _quieten()
        # Parts stay in the dtype that a nested configuration names, whatever `dtype` says: hence float().
        loader: Any = Qwen2_5OmniForConditionalGeneration
        self.model: Any = loader.from_pretrained(path, dtype=torch.float32).float().eval()
        self.processor: Any = Qwen2_5OmniProcessor.from_pretrained(path)
        talker = self.model.config.talker_config
        self._stops = [talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id]

    @property
    def voices(self) -> tuple[str, ...]:
        return tuple(self.model.speaker_map)

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]] | str,
        *,
        images: Sequence[Any] = (),
        audios: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        fps: float | Sequence[float] = 2.0,
        use_audio_in_video: bool = False,
    ) -> dict[str, Any]:
        """Arguments of HF's `generate` from a chat, or from a rendered prompt with a placeholder group a medium.

        Images are PIL images, audios float arrays of 16 kHz, videos uint8 arrays [frames, height, width, 3] at `fps`,
        one number for all or one for each.
        """
        text = messages if isinstance(messages, str) else self.render(messages)
        # The processor takes one rate alone, by which it places the sound of a video among its frames.
        rates = [float(fps)] * len(videos) or [2.0] if isinstance(fps, int | float) else list(fps)
        features = self.processor(
            text=text,
            images=list(images) or None,
            audio=list(audios) or None,
            videos=list(videos) or None,
            fps=rates[0],
            use_audio_in_video=use_audio_in_video,
            return_tensors="pt",
        )
        if videos:
            features["video_second_per_grid"] = torch.tensor([2 / rate for rate in rates])
        return {**features, "use_audio_in_video": use_audio_in_video}

    def ask(self, text: str) -> dict[str, Any]:
        """`prepare` for one user message."""
        return self.prepare([{"role": "user", "content": text}])

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as text, ready for the assistant's reply."""
        rendered = self.processor.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return str(rendered)

    def thinker(self, inputs: Mapping[str, Any], sampling: Sampling = GREEDY_THINKER) -> ThinkerResult:
        """Reply tokens and rows; HF itself fails on a reply of one token."""
        stop_at_once = Sampling(repetition_penalty=1.05, max_tokens=1)
        return self.generate(inputs, thinker=sampling, talker=stop_at_once, speak=False).thinker

    def generate(
        self,
        inputs: Mapping[str, Any],
        *,
        voice: str = "Chelsie",
        thinker: Sampling = GREEDY_THINKER,
        talker: Sampling = GREEDY_TALKER,
        noise: Tensor | None = None,
        solver: Solver | None = None,
        speak: bool = True,
    ) -> Reply:
        """HF's `generate`: all three models.

        Args:
            inputs: of `prepare`.
            voice: a name in `voices`.
            thinker: `seed` of this one seeds both models (HF has one generator).
            talker: temperature 0 is greedy, with the repetition penalty all the same.
            noise: [1, >= T, 80], the initial state of the ODE (its first T frames); drawn from the seed if not given.
            solver: of the ODE, HF's defaults if not given.
            speak: False leaves token2wav out.
        """
        seen = _Seen()
        # Pixels go to the thinker by name: HF 5.17 otherwise hands them to the talker too, which refuses them.
        arguments = {f"thinker_{key}" if key.startswith("pixel_values") else key: inputs[key] for key in inputs}
        with self._spies(seen), torch.no_grad():
            torch.manual_seed(thinker.seed)
            sequences, _ = self.model.generate(
                **arguments,
                speaker=voice,
                **_generation("thinker", thinker, inputs["input_ids"].shape[1]),
                **_generation("talker", talker, inputs["input_ids"].shape[1]),
                talker_eos_token_id=self._stops,
            )
        prompt_ids = arguments["input_ids"]
        thought = self._thinker_result(prompt_ids, sequences, seen)
        talked = _talker_result(seen, prompt_ids.shape[1])
        spoken = talked.codes if speak else ()
        speech = self.token2wav(spoken, voice, noise, solver, seed=thinker.seed) if spoken else None
        return Reply(thought, talked, speech)

    def token2wav(
        self,
        codes: Sequence[int],
        voice: str = "Chelsie",
        noise: Tensor | None = None,
        solver: Solver | None = None,
        *,
        seed: int = 0,
    ) -> Speech:
        """Mel frames and waveform of C codes by HF's token2wav, from the given initial noise."""
        dit, bigvgan = self.model.token2wav.code2wav_dit_model, self.model.token2wav.code2wav_bigvgan_model
        frames = len(codes) * dit.repeats
        if noise is None:
            noise = self.noise(frames, seed)
        noise = noise[:, :frames].float()
        cond, ref_mel = self.speaker(voice)
        chosen = solver or Solver()
        with _noise_is(noise), torch.no_grad():
            mel = dit.sample(
                cond,
                ref_mel,
                torch.tensor([list(codes)]),
                num_steps=chosen.num_steps,
                guidance_scale=chosen.guidance_scale,
                sway_coefficient=chosen.sway_coefficient,
            )
            waveform = bigvgan(mel).reshape(-1)
        return Speech(noise, mel, waveform)

    def noise(self, frames: int, seed: int = 0) -> Tensor:
        """Standard normal noise [1, frames, mel]."""
        mel_dim = self.model.config.token2wav_config.dit_config.mel_dim
        return torch.randn(1, frames, mel_dim, generator=torch.Generator().manual_seed(seed))

    def dit(self, state: Tensor, codes: Sequence[int], time: float, voice: str = "Chelsie") -> tuple[Tensor, Tensor]:
        """One evaluation of the DiT at `time`: conditional and unconditional prediction, each [1, T, 80].

        `state` is [1, T, 80], T the number of `codes` times the frames a code.
        """
        cond, ref_mel = self.speaker(voice)
        with torch.no_grad():
            both = self.model.token2wav.code2wav_dit_model(
                hidden_states=state,
                condition_vector=ref_mel,
                speaker_embedding=cond.unsqueeze(1).repeat(1, state.shape[1], 1),
                quantized_code=torch.tensor([list(codes)]),
                time_step=torch.tensor(time),
                apply_cfg=True,
            )
        conditional, unconditional = both.chunk(2)
        return conditional, unconditional

    def speaker_encoding(self, voice: str = "Chelsie") -> Tensor:
        """The ECAPA encoder's output [1, enc_dim] for the voice's reference mel spectrogram."""
        with torch.no_grad():
            encoding: Tensor = self.model.token2wav.code2wav_dit_model.input_embed.spk_encoder(self.speaker(voice)[1])
        return encoding

    def vocode(self, mel: Tensor) -> Tensor:
        """BigVGAN: mel [1, 80, T] to a waveform [S]."""
        with torch.no_grad():
            waveform: Tensor = self.model.token2wav.code2wav_bigvgan_model(mel)
        return waveform.reshape(-1)

    def speaker(self, voice: str) -> tuple[Tensor, Tensor]:
        """Speaker embedding [1, 192] and reference mel [1, T, 80] of a voice, float32."""
        values = self.model.speaker_map[voice]
        return values["cond"].float().expand(1, -1), values["ref_mel"].float().expand(1, -1, -1)

    def _thinker_result(self, prompt_ids: Tensor, sequences: Tensor, seen: _Seen) -> ThinkerResult:
        length = prompt_ids.shape[1]
        reply = sequences[0, length:].tolist()
        assert seen.embeds is not None, "HF's talker was not reached"
        assert seen.reply_part is not None, "HF's talker was not reached"
        # The talker's prompt is [prompt rows, text bos, reply row 0]; its reply part ends with text eos and text pad.
        rows = torch.cat([seen.embeds[0, :length], seen.embeds[0, length + 1 :], seen.reply_part[0, :-2]])
        return ThinkerResult(
            prompt_token_ids=tuple(prompt_ids[0].tolist()),
            token_ids=tuple(reply),
            text=self.processor.tokenizer.decode(reply, skip_special_tokens=True),
            rows=rows,
            positions=seen.positions[0][:, 0, :length],
        )

    @contextmanager
    def _spies(self, seen: _Seen) -> Iterator[None]:
        """Catch what HF's `generate` hands from model to model, and leave token2wav out."""
        talker = self.model.talker
        talk, place = talker.generate, talker.get_rope_index

        def generate(**arguments: Any) -> Tensor:
            # Cloned, since the talker adds the codec's embeddings in place.
            seen.embeds = arguments["inputs_embeds"].clone()
            seen.reply_part = arguments["thinker_reply_part"].clone()
            seen.text_ids = arguments["input_text_ids"]
            result = talk(**arguments, output_logits=True, return_dict_in_generate=True)
            sequences: Tensor = result.sequences
            seen.sampled, seen.logits = sequences, torch.cat(result.logits)
            return sequences

        def get_rope_index(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = place(*arguments, **named)
            seen.positions.append(found[0])
            return found

        def forward(codes: Tensor, **_: Any) -> Tensor:
            seen.codes = codes
            return torch.zeros(0)

        with (
            patch.object(talker, "generate", generate),
            patch.object(talker, "get_rope_index", get_rope_index),
            patch.object(self.model.token2wav, "forward", forward),
        ):
            yield


def loading_info(path: Path) -> dict[str, Any]:
    """Return the report of HF's loader: missing, unexpected and mismatched keys."""
    _quieten()
    # The class's own from_pretrained cannot return it, it takes the pair for the model.
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    _, info = load(Qwen2_5OmniForConditionalGeneration, path, dtype=torch.float32, output_loading_info=True)
    return dict(info)


def _quieten() -> None:
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _talker_result(seen: _Seen, prompt_length: int) -> TalkerResult:
    assert seen.sampled is not None, "HF's talker was not reached"
    assert seen.logits is not None, "HF's talker was not reached"
    assert seen.codes is not None, "HF's token2wav was not reached"
    assert seen.text_ids is not None, "HF's talker was not reached"
    return TalkerResult(
        sampled=tuple(seen.sampled[0, prompt_length + 2 :].tolist()),
        codes=tuple(seen.codes[0].tolist()),
        logits=seen.logits,
        positions=seen.positions[0][:, 0],
        text_bos_id=int(seen.text_ids[0, prompt_length]),
    )


class AdditivePenalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's presence and frequency penalties, which HF does not have: off the logits of ids in the reply."""

    def __init__(self, sampling: Sampling, prompt_length: int) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        reply = input_ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, reply, torch.ones_like(reply, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


def _generation(model: str, sampling: Sampling, prompt_length: int) -> dict[str, Any]:
    """HF's generation arguments of one model."""
    arguments: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": sampling.repetition_penalty,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
    }
    if sampling.logit_bias:
        arguments["sequence_bias"] = {(token,): bias for token, bias in sampling.logit_bias}
    if sampling.presence_penalty or sampling.frequency_penalty:
        arguments["logits_processor"] = LogitsProcessorList([AdditivePenalties(sampling, prompt_length)])
    if sampling.temperature > 0:
        arguments |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return {f"{model}_{name}": value for name, value in arguments.items()}


@contextmanager
def _noise_is(noise: Tensor) -> Iterator[None]:
    """HF's sampler draws its noise by `torch.randn`: give it this one, once, if it asks for this shape."""
    asked: list[list[int]] = []

    def randn(shape: Sequence[int], **_: Any) -> Tensor:
        asked.append(list(shape))
        assert list(shape) == list(noise.shape), f"HF asks for noise of shape {list(shape)}, given {list(noise.shape)}"
        return noise.clone()

    with patch.object(torch, "randn", randn):
        yield
    assert len(asked) == 1, f"HF drew noise {len(asked)} times"

# SPDX-License-Identifier: Apache-2.0
"""Serving settings of a stage: the only reader of `stage.yaml`.

It has what a deployment chooses; facts that the weights dictate are in `checkpoint/config.py`.
Unknown keys and impossible values stop the load with a message that names the key.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triton_omni.core.plain_yaml import UnreadableYaml, read_yaml
from triton_omni.core.policy_settings import ThinkerPolicy, Token2WavPolicy
from triton_omni.core.validation import wanted_kind, wanted_limit

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
UseRing = Literal["auto", True, False]
"""Receive rows or codes through a shared ring (`link/ring.py`) instead of Triton messages."""
Quantization = Literal["none", "fp8"]
Solver = Literal["rk4", "euler"]
Positive = Annotated[int, Field(gt=0)]
Lead = Annotated[float, Field(ge=1, le=120)]
"""Seconds of sound ahead of a listener; with less than a window takes to be made, it would stop."""

FRAMES_PER_CODE = 2  # mel frames
FRAMES_PER_BLOCK = 24  # of the DiT's attention: mel frames, so 12 codes

_FOUND = reprlib.Repr()
"""Shows a wrong value. It looks into lists and mappings only so far: YAML's aliases make some of astronomic size."""
_FOUND.maxstring = _FOUND.maxother = _FOUND.maxlong = 80
_FOUND.maxlevel = 3


class SettingsError(ValueError):
    """A `stage.yaml` that cannot be used; the message names the file, the key and the value."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class EngineSettings(_Frozen):
    """Arguments of one in-process vLLM engine."""

    max_num_seqs: Positive = 32
    """Sequences that decode together; further ones wait."""
    max_model_len: Annotated[int, Field(ge=64, le=131072)] = 32768
    """Tokens of one sequence, prompt and reply together. The model's own limit is the most."""
    kv_cache_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that the KV cache holds for all sequences together (57 KB each in a 7B thinker). 0 = 4096 for each of
    `max_num_seqs` in the thinker, 8194 in the talker, at least `max_model_len`. A full cache preempts the last one."""
    usual_len: ClassVar[int] = 4096
    """Tokens of a sequence that is not unusually long."""
    max_num_batched_tokens: Annotated[int, Field(ge=32)] = 2048
    """Tokens of one engine step; longer prompts are prefilled in chunks of this size."""
    max_graph_tokens: Annotated[int, Field(ge=0, le=2048)] = 2048
    """Largest step with prompts run as CUDA graph (FlashAttention 3, one GPU, not `deterministic`); 0 = none."""
    enforce_eager: bool = False
    """`true` switches CUDA graphs off (the plain path)."""
    torch_compile: bool = False
    """`true` compiles the network on a GPU: faster steps, longer first start (kept in `VLLM_CACHE_ROOT`)."""
    fused_decode: Literal["auto", True, False] = "auto"
    """Record decode steps with this project's fused kernels in place of vLLM's. `auto` = on one GPU in half precision,
    unless `enforce_eager`, `torch_compile` or `deterministic` is set. `true` is refused with any of these."""
    partition_percent: Annotated[int, Field(ge=0, le=90)] = 50
    """Percentage of a GPU's multiprocessors for fused decode steps beside token2wav's windows, under MPS; 0 = always
    all."""
    async_scheduling: bool = True
    """Schedule the next step while the GPU runs this one."""
    deterministic: bool = False
    """Half precision rounds alike in any batch (`VLLM_BATCH_INVARIANT`, GPU only), in slower steps."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the engine without a GPU. 0 = a third of the cores, or `OMP_NUM_THREADS`."""

    @model_validator(mode="after")
    def _one_way_to_run(self) -> EngineSettings:
        if self.torch_compile and self.enforce_eager:
            raise ValueError("torch_compile true and enforce_eager true exclude each other: set one of them to false")
        for other in self._unfused:
            if self.fused_decode is True:
                raise ValueError(f"fused_decode true and {other} true exclude each other: set one of them to false")
        return self

    @property
    def cached_tokens(self) -> int:
        """Tokens of all sequences together for which there is room."""
        return self.kv_cache_tokens or max(self.max_num_seqs * self.usual_tokens, self.max_model_len)

    @property
    def usual_tokens(self) -> int:
        """Tokens of one sequence for which there is always room, unless `kv_cache_tokens` says otherwise."""
        return min(self.usual_len, self.max_model_len)

    @property
    def fuses_decode(self) -> bool:
        """True if decode steps of the whole network are fused on a GPU, where the network allows it."""
        return self.fused_decode is True or (self.fused_decode == "auto" and not self._unfused)

    @property
    def _unfused(self) -> list[str]:
        """The switches that are on and leave no step to be fused."""
        return [name for name in ("torch_compile", "enforce_eager", "deterministic") if getattr(self, name)]

    @model_validator(mode="after")
    def _the_cache_holds_a_sequence(self) -> EngineSettings:
        if 0 < self.kv_cache_tokens < self.max_model_len:
            raise ValueError(
                f"kv_cache_tokens {self.kv_cache_tokens} is below max_model_len {self.max_model_len}: the longest "
                "sequence could never end"
            )
        return self

    @model_validator(mode="after")
    def _a_step_holds_a_batch(self) -> EngineSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a decode step could not hold one token a sequence"
            )
        return self


class TalkerEngineSettings(EngineSettings):
    """Arguments of the talker's vLLM engine."""

    max_model_len: Annotated[int, Field(ge=64, le=131072)] = 32768
    """Positions of one sequence: prompt rows, two more, and codes."""
    usual_len: ClassVar[int] = 8194
    """A prompt of the thinker's `usual_len`, two more, and `max_codes`."""
    max_num_batched_tokens: Annotated[int, Field(ge=32)] = 1024
    """Tokens of one engine step; longer prompts are prefilled in chunks of this size. A step above `max_graph_tokens`
    is launched kernel by kernel and delays all sequences."""
    max_graph_tokens: Annotated[int, Field(ge=0, le=2048)] = 1024


MAX_NAME: Final = 1024
"""Characters of a request's id, and of what else is a name."""
MOST_MEDIA_ITEMS: Final = 4096
"""Maximum elements of a request's inputs in any deployment, counted before its own limits are known."""


class RequestLimits(_Frozen):
    """Limits of one request, checked before memory is spent."""

    max_request_bytes: Positive = 1 << 20
    """UTF-8 bytes of `text_input` or `messages`, without media data URIs."""
    max_messages: Positive = 2048
    """Messages of one chat."""
    max_media_items: Annotated[int, Field(ge=1, le=MOST_MEDIA_ITEMS)] = 1024
    """Media of one request; together they fit into `engine.max_model_len`."""
    max_media_bytes: Positive = 64 << 20
    """Encoded bytes of one medium."""
    max_body_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 30)] = 88 << 20
    """Bytes of an HTTP body, as sent and unpacked; larger requests go over gRPC. Each HTTP thread's stack is twice that
    and 136 MiB of address space."""
    max_image_pixels: Positive = 16 << 20
    """Pixels of one image or video frame."""
    max_audio_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Seconds of one sound; the checkpoint's feature extractor may take less (the tiny one 30)."""
    max_video_seconds: Annotated[float, Field(gt=0)] = 120.0
    """Seconds of one video, by its time stamps."""
    max_video_frames: Annotated[int, Field(ge=2)] = 256
    """Frames sampled from one video for the model."""
    max_video_pixels: Positive = 96 << 20
    """Pixels of all sampled frames of one video, which are scaled down to fit."""
    max_video_source_pixels: Positive = 16 << 30
    """Pixels of all decoded frames of one video; by default two minutes of 1080p at 60 Hz."""
    max_decode_seconds: Annotated[float, Field(ge=1)] = 160.0
    """CPU seconds to decode all media of one request; the decoding process is ended then."""
    max_decode_bytes: Annotated[int, Field(ge=64 << 20)] = 1 << 30
    """Bytes of memory of one decoding process, besides its code."""
    max_logit_bias: Annotated[int, Field(ge=0, le=4096)] = 300
    """Token ids that one request may bias."""
    max_stop_strings: Annotated[int, Field(ge=0, le=64)] = 16
    """Stop strings of one request."""
    max_stop_characters: Annotated[int, Field(ge=1, le=1024)] = 64
    """Characters of one stop string. A reply with stop strings holds back one character less."""
    max_schema_bytes: Annotated[int, Field(ge=2, le=1 << 15)] = 1 << 14
    """UTF-8 bytes of a JSON schema without spaces."""
    max_tools: Annotated[int, Field(ge=0, le=1024)] = 128
    """Functions that one request may offer."""
    max_tools_bytes: Annotated[int, Field(ge=2, le=1 << 17)] = 1 << 16
    """UTF-8 bytes of all of them without spaces."""
    allowed_url_schemes: tuple[Literal["data"], ...] = ("data",)
    """URL schemes of media; the server fetches and opens nothing by name."""


def _refuse_rounding(engine: EngineSettings, *, prefix_caching: bool) -> None:
    if prefix_caching and engine.deterministic:
        raise ValueError(
            "prefix_caching true and engine.deterministic true exclude each other: set one of them to false"
        )


class ThinkerSettings(_Frozen):
    """`model_repository/thinker/1/stage.yaml`."""

    device: Device = "auto"
    """Device of the stage; `auto` = the GPU if there is one."""
    dtype: Dtype = "auto"
    """Precision of weights and hidden rows; `auto` = `bfloat16` on a GPU, `float32` on the CPU."""
    quantization: Quantization = "none"
    """`fp8` quantises a plain decoder's weights, and activations outside fused steps: faster, less exact (GPU only, not
    `float32`)."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] = 1
    """GPUs that share each layer: the stage's own, and those after it."""
    steady_decode: bool = True
    """Derive a step of unchanged sequences from the last one (one GPU, `engine.async_scheduling`)."""
    prefix_caching: bool = True
    """Compute a prompt from where it differs from an earlier one of the same salt. The rows of cached tokens take 7 KB
    each in a 7B thinker."""
    engine: EngineSettings = EngineSettings()
    limits: RequestLimits = RequestLimits()
    policy: ThinkerPolicy = ThinkerPolicy()
    max_sessions: Annotated[int, Field(gt=0, le=1024)] = 64
    """Sessions open at once over all stages; the next one is refused as `overloaded`."""
    max_new_tokens: Positive = 1024
    """Tokens of the longest reply; a request may ask for less."""
    rows_per_message: Annotated[int, Field(gt=0, le=2048)] = 512
    """Hidden rows of one message to the talker at most."""
    heartbeat_ms: Annotated[int, Field(ge=10, le=1000)] = 100
    """Milliseconds of silence after which a session sends a heartbeat to the next stage."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Deadline in seconds of a request that names none."""
    preprocess_threads: Positive = 4
    """Requests preprocessed at once; each has a thread, and a process that decodes its media."""
    media_cache_bytes: Annotated[int, Field(ge=0)] = 512 << 20
    """Bytes of processed media kept for later requests with the same salt; 0 = none."""

    @model_validator(mode="after")
    def _a_hit_rounds_differently(self) -> ThinkerSettings:
        _refuse_rounding(self.engine, prefix_caching=self.prefix_caching)
        return self

    @model_validator(mode="after")
    def _kernels_know_whole_layers(self) -> ThinkerSettings:
        if self.engine.fused_decode is True and self.tensor_parallel_size > 1:
            raise ValueError(
                f"engine.fused_decode true and tensor_parallel_size {self.tensor_parallel_size} exclude each other: "
                "set one of them back"
            )
        return self


class TalkerSettings(_Frozen):
    """`model_repository/talker/1/stage.yaml`."""

    device: Device = "auto"
    """Device of the stage; `auto` = the GPU if there is one."""
    dtype: Dtype = "auto"
    """Precision of weights; it must equal the thinker's, or the server does not load."""
    prefix_caching: bool = True
    """Compute a prompt from where it differs from an earlier spoken one of the same salt; the thinker needs
    `prefix_caching` too."""
    engine: TalkerEngineSettings = TalkerEngineSettings()
    max_sessions: Annotated[int, Field(gt=0, le=1024)] = 64
    """Sequences open at once; those beyond `engine.max_num_seqs` wait with their rows reserved."""
    max_codes: Annotated[int, Field(gt=0, le=4096)] = 4096
    """Codec codes of the longest spoken reply, 50 a second; at most token2wav's `max_codes`."""
    ring: UseRing = "auto"
    """Receive reply rows through memory shared with the thinker (58 MB for 7B); `auto` = both on one GPU."""

    @model_validator(mode="after")
    def _a_hit_rounds_differently(self) -> TalkerSettings:
        _refuse_rounding(self.engine, prefix_caching=self.prefix_caching)
        return self


class StreamingPlan(_Frozen):
    """Window sizes of a stream by chunk index, in blocks of 24 mel frames (0.24 s).

    The waveform is a function of (codes, seed, plan): load and timing never change a window.
    """

    chunk_blocks: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1, 1, 2, 3, 4, 6)
    """New blocks of chunk 0, 1, ...; the last entry repeats."""
    look_ahead_codes: Annotated[int, Field(ge=0, le=96)] = 7
    """Codes after a chunk that its window also sees. Fewer = earlier speech, less like the whole reply."""
    vocoder_context_frames: Annotated[int, Field(ge=1, le=96)] = 12
    """Mel frames on each side that the vocoder reads beyond the samples it returns. A chunk's sound ends so many frames
    before its window does. Fewer = more sound in the first chunk, less like the whole reply."""

    @model_validator(mode="after")
    def _first_chunk_has_sound(self) -> StreamingPlan:
        seen = self.chunk_blocks[0] * FRAMES_PER_BLOCK + self.look_ahead_codes * FRAMES_PER_CODE
        if seen <= self.vocoder_context_frames:
            raise ValueError(
                f"vocoder_context_frames {self.vocoder_context_frames} leaves no sound of the first chunk: "
                f"chunk_blocks[0] and look_ahead_codes make {seen} mel frames"
            )
        return self


class DiffusionSettings(_Frozen):
    """Default solution of the flow-matching ODE; a request may override it."""

    solver: Solver = "rk4"
    """`rk4` (3/8 rule, 4 evaluations an interval) or `euler`; a request may choose."""
    num_steps: Annotated[int, Field(ge=2, le=64)] | None = None
    """Points of the time grid, one more than its intervals, as in HF's sampler; a request may choose. `null` = the
    checkpoint's `token2wav_num_steps` (`generation_config.json`), or 10 as in HF."""
    guidance_scale: Annotated[float, Field(ge=0, le=10)] | None = None
    """Strength of classifier-free guidance; a request may choose. `null` = the checkpoint's `token2wav_guidance_scale`,
    or 0.5 as in HF."""
    sway_coefficient: Annotated[float, Field(ge=-1, le=1)] = -1.0
    """Bend of the time grid towards its start; 0 = even."""

    @property
    def points(self) -> int:
        """`num_steps`, or HF's."""
        return 10 if self.num_steps is None else self.num_steps

    @property
    def guidance(self) -> float:
        """`guidance_scale`, or HF's."""
        return 0.5 if self.guidance_scale is None else self.guidance_scale


class Preset(_Frozen):
    """A named trade of quality for speed; `null` = as in `diffusion`."""

    solver: Solver | None = None
    """As in `diffusion`."""
    num_steps: Annotated[int, Field(ge=2, le=64)] | None = None
    """As in `diffusion`."""
    guidance_scale: Annotated[float, Field(ge=0, le=10)] | None = None
    """As in `diffusion`."""


class Token2WavSettings(_Frozen):
    """`model_repository/token2wav/1/stage.yaml`."""

    device: Device = "auto"
    """Device of the stage; `auto` = the GPU if there is one."""
    dtype: Dtype = "auto"
    """`auto` = `float16` on a GPU, `float32` elsewhere. `float32` is the plain path, equal to HF within rounding; half
    precision is the fused path (GPU only), at least 35 dB against `float32`."""
    cuda_graphs: bool = True
    """Launch recorded passes at once (half precision only); `false` launches kernel by kernel, slowly."""
    ring: UseRing = "auto"
    """Receive codes through memory shared with the talker; `auto` = where both are on one GPU."""
    mode: Literal["streaming", "offline"] = "streaming"
    """`streaming` = in windows, `offline` = the whole reply in one, equal to HF; a request may choose."""
    plan: str = "balanced"
    """Name of the entry of `plans` that streams use."""
    plans: dict[str, StreamingPlan] = {
        "balanced": StreamingPlan(),
        "low_latency": StreamingPlan(look_ahead_codes=0, vocoder_context_frames=8),
        "steady": StreamingPlan(chunk_blocks=(2, 1, 2, 3, 4, 6)),
    }
    """Streaming plans by name, as below."""
    diffusion: DiffusionSettings = DiffusionSettings()
    preset: str = "reference"
    """Name of the entry of `presets` that replies use; a request may choose."""
    presets: dict[str, Preset] = {"reference": Preset(), "fast": Preset(num_steps=4)}
    """Changes of each preset to `diffusion`. `fast` has a third of HF's evaluations."""
    policy: Token2WavPolicy = Token2WavPolicy()
    max_lead_s: Lead | None = None
    """Seconds of sound that a stream may lead its real-time listener; `null` = no bound. A request may choose."""
    max_streams: Annotated[int, Field(gt=0, le=1024)] = 64
    """Streams open at once, without offline ones; the next one is refused as `overloaded`. Each keeps keys and values
    for its next window: 14 MB of GPU memory with the default `diffusion`. A stream with more evaluations takes the
    room of several."""
    max_batch: Annotated[int, Field(gt=0, le=64)] = 32
    """Windows solved together in one batch."""
    max_batch_frames: Positive = 1272
    """Mel frames of one batch: 8 long windows, or 33 first ones."""
    deterministic: bool = False
    """The same codes and seed give the same bits of sound under any load: each window runs alone, slower."""
    attention: Literal["block", "plain"] = "block"
    """Attention of the plain path: block-local, or masked (slow, to compare with)."""
    max_codes: Annotated[int, Field(gt=0, le=4096)] = 4096
    """Codes of the longest stream, which also bounds what Triton buffers for a slow reader."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads without a GPU; 0 = torch's default."""

    def with_checkpoint(self, stated: Mapping[str, float | None]) -> Token2WavSettings:
        """These settings, with the checkpoint's own diffusion where they have `null`.

        Args:
            stated: by field of `diffusion` what the checkpoint states; None = nothing.
        """
        taken = {name: value for name, value in stated.items() if getattr(self.diffusion, name) is None}
        return self.model_copy(update={"diffusion": self.diffusion.model_copy(update=taken)})

    def diffusion_of(self, preset: str | None, chosen: Mapping[str, Any]) -> DiffusionSettings:
        """Return how a reply is solved.

        Args:
            preset: a key of `presets`; None = the default.
            chosen: fields of `diffusion` that go before the preset's.

        Raises:
            ValidationError: a value is out of range.
        """
        named = self.presets[preset or self.preset].model_dump(exclude_none=True)
        return DiffusionSettings.model_validate(self.diffusion.model_dump() | named | dict(chosen))

    @property
    def most_together(self) -> int:
        """Windows of one batch at most."""
        return 1 if self.deterministic else self.max_batch

    @model_validator(mode="after")
    def _names_are_listed(self) -> Token2WavSettings:
        if self.plan not in self.plans:
            raise ValueError(f"plan {self.plan!r} is not in plans: {sorted(self.plans)}")
        if self.preset not in self.presets:
            raise ValueError(f"preset {self.preset!r} is not in presets: {sorted(self.presets)}")
        return self


class UnarySettings(_Frozen):
    """`model_repository/qwen2_5_omni_unary/1/stage.yaml`."""

    max_requests: Annotated[int, Field(gt=0, le=1024)] = 64
    """Unary requests served at once; the next one is refused as `overloaded`."""
    grpc_url: str = ""
    """`HOST:PORT` of this server's gRPC endpoint, which the model asks; empty = by tritonserver's command line."""


SettingsT = TypeVar("SettingsT", bound=_Frozen)


def load_settings(path: Path, kind: type[SettingsT]) -> SettingsT:
    """Read and check one `stage.yaml`.

    Raises:
        SettingsError: as `read_settings` and `check_settings`.
    """
    return check_settings(read_settings(path), kind, str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """Keys and values of a file, unchecked.

    Raises:
        SettingsError: the file is missing, or is no UTF-8 mapping.
    """
    try:
        raw = read_yaml(path)
    except UnreadableYaml as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    if raw is not None and not isinstance(raw, dict):
        raise SettingsError(f"{path}: expected a mapping of settings, found {type(raw).__name__}")
    return raw or {}


def check_settings(raw: Mapping[str, Any], kind: type[SettingsT], source: str) -> SettingsT:
    """Make settings of what was read from `source`.

    Raises:
        SettingsError: an unknown key or an impossible value.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise SettingsError(f"{source}: {describe_validation(error, kind)}") from error


def describe_validation(error: ValidationError, kind: type[BaseModel]) -> str:
    """One line that names every offending key of a `kind`, what was found and what is allowed."""
    parts = []
    for item in error.errors(include_url=False):
        key = ".".join(str(step) for step in item["loc"])
        problem = _problem(item["type"], item.get("ctx", {}), item["msg"], item["input"])
        if item["type"] == "extra_forbidden":
            problem = _unknown_key(str(item["loc"][-1]), _known_keys(kind, item["loc"][:-1]))
        parts.append(f"{key}: {problem}" if key else problem)
    return "; ".join(parts)


def _problem(code: str, context: dict[str, Any], message: str, value: object) -> str:
    """Describe one invalid value by pydantic's error code."""
    found = _FOUND.repr(value)[:80]
    if code == "value_error":  # a validator of ours, whose sentence has the values
        return str(context["error"])
    if limit := wanted_limit(code, context):
        return f"{found} must {limit}"
    kind = wanted_kind(code)
    return f"expected {kind}, found {found}" if kind else f"{message} (found {found})"


def _unknown_key(key: str, known: Sequence[str]) -> str:
    near = get_close_matches(key, known, n=1)
    return f"unknown key (did you mean {near[0]}?)" if near else f"unknown key (known: {', '.join(known)})"


def _known_keys(kind: Any, path: Sequence[str | int]) -> list[str]:
    """The keys of the section at `path` in a `kind`."""
    for step in path:
        # A section is a field of its own or, as in `plans`, an entry of a mapping whose names are free.
        kind = kind.model_fields[step].annotation if hasattr(kind, "model_fields") else get_args(kind)[1]
    return list(kind.model_fields)

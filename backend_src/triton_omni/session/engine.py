# SPDX-License-Identifier: Apache-2.0
"""Protocols between a stage and its engine; neither Triton nor vLLM appears here.

An engine is owned by one thread (`session/loop.py`): every method below is called on that thread only.
Sequences are named by `key`, a string that the stage mints once a session.

Shapes: P prompt tokens, N rows or codes of this message, H thinker hidden size (= the talker's embedding size).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from msgspec import Meta

from triton_omni.core.metrics import Histogram

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

FinishReason = Literal["stop", "length", "prefilled", "tool_calls"]
MAX_CALLS: Final = 32
"""Maximum calls of one reply."""


@dataclass(frozen=True)
class Function:
    """A function that a reply may call."""

    name: str
    schema: str
    """A JSON schema of an object, the arguments."""
    is_strict: bool = False
    """True: a schema that cannot be enforced in full is refused. False: keywords that cannot be are ignored."""


@dataclass(frozen=True)
class ToolRules:
    """Functions that a reply may call, and the rules for its calls."""

    functions: tuple[Function, ...] = ()
    named: str | None = None
    """The only one that may be called; None = any."""
    may_speak: bool = True
    """True: text may come before calls, or in place of them."""
    max_calls: Annotated[int, Meta(ge=0, le=MAX_CALLS)] = MAX_CALLS


@dataclass(frozen=True)
class CallPiece:
    """A piece of a reply's call of a function; the pieces of one `index` make the call."""

    index: Annotated[int, Meta(ge=0, lt=MAX_CALLS)]
    """Number of the call in its reply."""
    id: Annotated[str, Meta(max_length=64)] | None = None
    """Id of the call; only its first piece has `id` and `name`."""
    name: Annotated[str, Meta(max_length=64)] | None = None
    arguments: str = ""
    """The next characters of the arguments, which are JSON."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one stage; `temperature` 0 is greedy.

    The ranges are those of a request (`request/parse.py`); a stage that gets them in a message checks them again.
    Noise is a function of (seed, position) alone, so a sequence draws the same tokens in any batch.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """0 = all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.1, le=10)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1, le=131072)] = 1024
    seed: Annotated[int, Meta(ge=0)] = 0
    min_tokens: Annotated[int, Meta(ge=0, le=131072)] = 0
    """No id that ends the sequence is drawn before so many tokens."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of each id of the reply, as in OpenAI's API."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Subtracted once for each time that the reply has the id."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Thinker only, as are all later fields: (id, bias of its logit), added before the penalties; each id once."""
    stop: tuple[str, ...] = ()
    """Strings at the first of which the reply's text ends; the string itself is not shown."""
    json_schema: str | None = None
    """A JSON schema, as JSON, for the reply; with tools, only for a reply without calls."""
    tools: ToolRules | None = None
    """None = text that looks like a call stays text."""


@dataclass(frozen=True)
class SoundContext:
    """Position of a piece of sound in the whole."""

    samples: NDArray[np.float32] = field(repr=False)
    """[S] of the piece, and those before and after it that its frames reach."""
    skipped: int
    """Frames before the piece in `samples`."""
    before: Features | None
    """Features of the piece before, which is processed first."""


@dataclass
class Features:
    """The output of the thinker's processor for one medium. `ThinkerEngine.prepare` fills it in, or uses it where it is
    filled in; it is never changed after that, so several prompts may share it.
    """

    item: Any = None
    """Opaque; None = not processed yet."""
    size: int = 0
    """Bytes of the tensors of `item`."""
    identifier: str | None = None
    """Equal for media of equal features and one caller; None = the medium is shared with no other prompt."""
    context: SoundContext | None = None
    """Place of a piece of sound that is not processed yet."""
    loudest: float = -math.inf
    """Largest value of a piece of sound and of all before it, as the features have them."""


@dataclass(frozen=True)
class ThinkerPrompt:
    """A chat rendered for the thinker.

    `token_ids` holds one placeholder id for each medium, between its begin and end ids, as HF's processor writes the
    chat; sound in pieces has one for each piece. A special id thus never comes from a user's text. `multi_modal_data`
    and `mm_processor_kwargs` are vLLM's arguments of these names.
    """

    token_ids: tuple[int, ...]
    multi_modal_data: Mapping[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    features: Mapping[str, Sequence[Features]] = field(default_factory=dict)
    """One for each medium of `multi_modal_data`; with filled features only the medium's shape is read. Empty = they are
    not kept.
    """
    cache_salt: str | None = None
    """Prompts of one salt share the prefix cache; one without a salt neither reads nor writes it."""


@dataclass(frozen=True)
class PrefixKeys:
    """Names of a prompt's prefixes: equal if and only if the caller's salt, the tokens and the media are.

    A hidden row depends on the prompt up to it and on nothing else. So these names serve the talker too.
    """

    block_size: Annotated[int, Meta(ge=1)]
    """Tokens by which each prefix is longer than the one before; the first has so many."""
    keys: tuple[bytes, ...]

    def of_blocks(self, block_size: int, tokens: int) -> list[bytes]:
        """Return the names of the prefixes of 1, 2, ... blocks of `block_size` tokens, up to `tokens`; none if the
        sizes do not fit.
        """
        step, rest = divmod(block_size, self.block_size)
        return [] if rest else list(self.keys[step - 1 :: step][: tokens // block_size])


@dataclass(frozen=True)
class ThinkerPlaced:
    """A prompt as the engine took it (returned by `ThinkerEngine.prepare`)."""

    prompt_token_ids: tuple[int, ...]
    """The P ids after expansion of the media placeholders."""
    positions: Tensor
    """int64 [3, P], CPU: M-RoPE positions (temporal, height, width) of the prompt."""
    engine_input: Any
    """Opaque: what `ThinkerEngine.add_sequence` gives to vLLM."""
    prefixes: PrefixKeys | None = None
    """Names of the prompt's prefixes; None = the prompt shares nothing with others."""


@dataclass(frozen=True)
class ThinkerOutput:
    """Output of one engine step for one sequence.

    `rows` belong to positions [row_start, row_start + N). Each is the sum of the input embedding (zero at audio, image
    and video tokens) and the last hidden state after the final norm. Rows of positions >= P + n_out - 1 are never given
    (the last reply token has no row), nor are those of calls or of tokens of which a stop string leaves no character.
    """

    key: str
    text: str = ""
    """New text since the last output of this key."""
    token_ids: tuple[int, ...] = ()
    """New reply tokens, the ending id included, as HF's `generate` returns them."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache had; set with each new token."""
    rows: Tensor | None = None
    """[N, H] on the engine's device, engine dtype; owned by the receiver."""
    row_start: int = 0
    rows_ready: torch.cuda.Event | None = None
    """Recorded after `rows` was written, where the device is a GPU."""
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The string of `Sampling.stop` that ended the reply."""
    calls: tuple[CallPiece, ...] = ()
    """New pieces of calls; `text` stands before the first of all."""
    rows_done: bool = False
    """True: no more rows come, though tokens of calls do, which are not spoken."""
    error: str | None = None
    """The engine gave this sequence up (for example non-finite rows); nothing follows."""
    is_refused: bool = False
    """True if the request caused `error`, False if the engine did."""


@dataclass(frozen=True)
class TalkerPrompt:
    """Data that a talker sequence needs before its first row arrives.

    The sequence's ids are [codec_mask] x P + [codec_pad, codec_bos], as HF's repetition penalty counts them.
    """

    prompt_rows: int
    """P: prompt rows that will come before the reply rows."""
    positions: Tensor
    """int64 [3, P + 2], CPU: M-RoPE positions of (prompt ids, text_bos, first reply token)."""
    text_bos_id: int
    """Text id of the speaker's beginning of speech, in the thinker's vocabulary."""
    max_rows: int
    """Upper bound of all rows of the session, P + the longest reply; reserved at open."""
    prefixes: PrefixKeys | None = None
    """Names of the prompt's prefixes; None = the prompt shares nothing with others."""


@dataclass(frozen=True)
class TalkerOutput:
    """Codec codes that one engine step made for one sequence."""

    key: str
    codes: Tensor | None = None
    """int32 [N] on the engine's device: codes to be spoken; a stop id never is, as in HF's `generate`."""
    codes_ready: torch.cuda.Event | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


WindowKind = Literal["first", "later", "final", "whole"]
"""A stream's first window, a later one, its last one; the one of a whole reply."""
WindowPhase = Literal["wait", "turn", "device"]
"""From a window's codes until its batch was begun; the batch's time from there until it was found finished, as while
others went before, without that on the device; that on the device.
"""


@dataclass(frozen=True)
class EngineStats:
    """Contents of an engine now; all 0 when nothing is open."""

    running: int
    waiting: int
    kv_blocks_used: int
    rows_used: int
    """Rows of device memory reserved by open sequences (talker) or held back (thinker)."""
    kv_blocks_limit: int = field(default=0, compare=False)
    """All KV cache blocks; excluded from comparisons, since none is held."""
    kv_blocks_cached: int = field(default=0, compare=False)
    """KV cache blocks that a later prompt may reuse, held by a sequence or not."""
    mirror_bytes: int = field(default=0, compare=False)
    """Device memory for the rows of cached tokens."""
    windows: Mapping[WindowKind, Histogram] = field(default_factory=dict, compare=False)
    """Seconds of token2wav's windows by kind."""
    window_phases: Mapping[tuple[WindowKind, WindowPhase], float] = field(default_factory=dict, compare=False)
    """Seconds of all windows of a kind in each phase."""


class AnyEngine(Protocol):
    """Operations that every stage needs from its engine."""

    def abort(self, key: str) -> None:
        """Drop a sequence; unknown keys are ignored."""

    def has_work(self) -> bool:
        """True if `step` could advance a sequence now."""

    def stats(self) -> EngineStats:
        """Figures of this moment."""

    def close(self) -> None:
        """Release the device."""


class FedEngine(AnyEngine, Protocol):
    """An engine that is fed items by the stage before: rows [N, H] or codes [N]."""

    def feed(self, key: str, items: Tensor, /) -> None:
        """Take the next items of a sequence."""

    def settle(self) -> None:
        """Enqueue the copies of all items that were fed, now instead of with the next step."""

    def end(self, key: str) -> None:
        """No more items come."""


class ThinkerEngine(AnyEngine, Protocol):
    """Text, image, sound and video in; reply tokens and one row a token out."""

    def prepare(self, prompt: ThinkerPrompt, *, max_tokens: int = 1) -> ThinkerPlaced:
        """Preprocess media and expand their placeholders; may be called from any thread.

        Raises:
            TooLarge: prompt and `max_tokens` exceed what a sequence may hold.
            BadRequest: media and placeholders do not fit together.
        """

    def media_tokens(self, media: Mapping[str, list[Any]]) -> int:
        """Tokens of media (`ThinkerPrompt.multi_modal_data`) in a prompt, without those around them; may be called from
        any thread.

        Raises:
            BadRequest: a medium's size is one that no processor takes.
        """

    def check_schema(self, schema: str, salt: str | None = None) -> None:
        """Check that a JSON schema can be compiled; may be called from any thread. Only requests of the same salt share
        the result.

        Raises:
            BadRequest: it cannot be compiled.
        """

    def check_tools(self, rules: ToolRules, salt: str | None = None) -> None:
        """See whether the schemas of a request's tools can be compiled, each and together; otherwise as `check_schema`.

        Raises:
            BadRequest: they cannot be.
        """

    def add_sequence(
        self, key: str, placed: ThinkerPlaced, sampling: Sampling, *, want_rows: bool, priority: int = 0
    ) -> None:
        """Queue a sequence; `want_rows` False (a text-only request) gives no rows.

        Among waiting sequences the lowest `priority` is next, then the oldest.
        """

    def pause(self, paused: bool) -> None:
        """Begin no step from now on, or begin steps again; `step` still gives what is under way."""

    def confine(self, confined: bool) -> None:
        """Run decode steps on a part of the GPU from now on, or on all of it; an engine without such steps ignores
        this.
        """

    @property
    def steps_under_way(self) -> int:
        """Steps that were begun, and whose results have not been given."""

    def step(self) -> list[ThinkerOutput]:
        """Run one engine step and return what it gave; an empty list when there is nothing to do."""


class TalkerEngine(FedEngine, Protocol):
    """Hidden rows in, codec codes out, while the thinker still writes."""

    def open(self, key: str, prompt: TalkerPrompt, sampling: Sampling, *, priority: int = 0) -> int:
        """Reserve the session's rows; `priority` as in `ThinkerEngine.add_sequence`.

        Returns:
            Number of prompt rows, from the first on, that the engine has no need of: it keeps what it computed of them
            for an earlier session, until this one ends.

        Raises:
            Overloaded: they cannot be had.
        """

    def feed(self, key: str, rows: Tensor, /) -> None:
        """Take the next rows [N, H] (prompt rows after those that `open` counted, then the reply's) into the session's
        reserve.

        The next step begins with the copy, ordered after whatever was enqueued on the current stream: until then `rows`
        must stay as they are. The engine keeps them so long; of another device it has enqueued the copy at once.
        """

    def end(self, key: str) -> None:
        """No more rows: from here on the tail (text_eos once, then text_pad) is added."""

    def pause(self, paused: bool) -> None:
        """Begin no step from now on, or begin steps again; `step` still gives what is under way."""

    def confine(self, confined: bool) -> None:
        """Run decode steps on a part of the GPU from now on, or on all of it; an engine without such steps ignores
        this.
        """

    def step(self) -> list[TalkerOutput]:
        """Run one engine step over every sequence whose next row is there."""


@dataclass(frozen=True)
class StreamOptions:
    """Options for making one stream's sound; None = the stage's setting."""

    preset: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    solver: Literal["rk4", "euler"] | None = None
    num_steps: Annotated[int, Meta(ge=2, le=64)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=10)] | None = None
    mode: Literal["streaming", "offline"] | None = None
    max_lead_s: Annotated[float, Meta(ge=1, le=120)] | None = None
    """Seconds of sound that may be made ahead of what a listener has heard, at real time from the first chunk on."""


@dataclass(frozen=True)
class AudioOutput:
    """One chunk of a stream's waveform."""

    key: str
    samples: Tensor
    """fp32 [S], CPU: mono, 24 kHz, in [-1, 1]; may be empty on the final chunk."""
    final: bool = False
    error: str | None = None
    """The engine gave this stream up (for example a non-finite waveform); nothing follows."""
    clamped_codes: int = 0
    """Codes of the stream so far that were outside the codec's table and were clamped into it."""


class WaveformEngine(FedEngine, Protocol):
    """The part of `token2wav/engine.py` that the stage uses."""

    def open(self, key: str, voice: str, seed: int, options: StreamOptions) -> None:
        """Open a stream."""

    def feed(self, key: str, codes: Tensor, /) -> None:
        """Copy the next codes, int32 [N]."""

    def wanted(self, key: str) -> int:
        """Return how many codes, from the first on, the stream needs for its next window to be due."""

    @property
    def wants_claim(self) -> bool:
        """True if a stream has no sound, or soon none, and waits only for its window."""

    @property
    def has_windows(self) -> bool:
        """True if a batch is being launched or is on the device."""

    def step(self) -> list[AudioOutput]:
        """Launch due windows, and return the chunks that have finished."""

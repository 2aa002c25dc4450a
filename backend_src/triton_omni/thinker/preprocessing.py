# SPDX-License-Identifier: Apache-2.0
"""Preprocessing of a client's bytes for the engine: check, decode, render, tokenise.

Runs on a thread pool. Each thread has a process decode its media, so that a long or hostile file delays no other
request. The calling thread preprocesses short texts itself. Independent of sessions and Triton.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from transformers import AutoTokenizer

from triton_omni.checkpoint.config import OmniConfig
from triton_omni.checkpoint.speakers import Speakers
from triton_omni.core.errors import BadRequest
from triton_omni.core.metrics import Metric
from triton_omni.core.settings import ThinkerSettings
from triton_omni.request.media.decoders import Decoders
from triton_omni.request.media.killable import IsWanted
from triton_omni.request.media.types import Medium, Video
from triton_omni.request.parse import OmniRequest, RawRequest, RequestDefaults, parse_request, talker_seed
from triton_omni.request.strict_json import compact_json
from triton_omni.session.engine import Sampling, ThinkerEngine, ThinkerPlaced
from triton_omni.session.wire import MediaTokens, Session
from triton_omni.thinker.preprocessed import Preprocessed, TakeTimeout
from triton_omni.thinker.prompt import PromptRenderer, build_prompt, to_vllm_data
from triton_omni.thinker.request_media import MediaCache, RequestMedia, Room

DRAWN_SEED_BITS: Final = 53
"""Bits of a drawn seed: it is reported in JSON, whose readers hold larger integers as inexact doubles."""
SHORT_BYTES: Final = 4096
"""Maximum bytes of all inputs of a short request; they are tokenised in less than a millisecond."""
PREFILL_TOKENS: Final = 2
"""Tokens that a request without a reply decodes: with the row of the first, which comes with the second, the talker
computes the prompt.
"""


def _ignore(timeout_s: float) -> None:
    pass


def _always() -> bool:
    return True


class Preprocessor:
    """Preprocesses requests; safe to call from many threads.

    Args:
        checkpoint: folder whose tokenizer writes the prompt.
        config: the checkpoint's facts.
        engine: expands media placeholders and knows the positions.
    """

    def __init__(
        self, checkpoint: Path, config: OmniConfig, speakers: Speakers, settings: ThinkerSettings, engine: ThinkerEngine
    ) -> None:
        self._settings = settings
        seconds = min(settings.limits.max_audio_seconds, config.max_audio_seconds)
        self._limits = settings.limits.model_copy(update={"max_audio_seconds": seconds})
        self._decoders = Decoders(self._limits)
        self._cache = MediaCache(settings.media_cache_bytes)
        room = Room(self._tokens_of, settings.engine.max_model_len)
        self._media = RequestMedia(self._decoders, self._cache, config.sound_window, room)
        self._secret = secrets.token_bytes(32)
        self._thinker = config.thinker
        self._speakers = speakers
        self._engine = engine
        self._renderer = PromptRenderer(AutoTokenizer.from_pretrained(checkpoint))
        self._defaults = RequestDefaults(
            timeout_s=settings.timeout_s,
            max_thinker_tokens=settings.max_new_tokens,
            max_codes=config.talker.sampling.max_new_tokens,
            vocabulary=config.thinker.decoder.vocab_size,
            voice=speakers.default.name,
            voices=frozenset(speakers.names),
        )

    def preprocess_at_once(
        self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout = _ignore
    ) -> Preprocessed | None:
        """See `preprocessed.RequestPreprocessor`; raises what `preprocess` does."""
        if raw.media or _size(raw) > SHORT_BYTES:
            return None
        request = parse_request(raw, self._limits, self._defaults)
        if request.media or request.thinker.json_schema is not None or request.tools is not None:
            return None
        return self._preprocess(request, accepted_ns, take_timeout, _always)

    def preprocess(
        self,
        raw: RawRequest,
        accepted_ns: int,
        take_timeout: TakeTimeout = _ignore,
        is_wanted: IsWanted = _always,
    ) -> Preprocessed:
        """Check, decode and tokenise one request; see `preprocessed.RequestPreprocessor`.

        Raises:
            BadRequest: something is wrong in the request itself.
            TooLarge: a limit of this deployment is exceeded.
        """
        return self._preprocess(parse_request(raw, self._limits, self._defaults), accepted_ns, take_timeout, is_wanted)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of the media cache; see `preprocessed.RequestPreprocessor`."""
        yield from self._cache.metrics()

    def close(self) -> None:
        """End the processes that decode; see `preprocessed.RequestPreprocessor`."""
        self._decoders.close()

    def _preprocess(
        self, request: OmniRequest, accepted_ns: int, take_timeout: TakeTimeout, is_wanted: IsWanted
    ) -> Preprocessed:
        take_timeout(request.timeout_s)
        if request.prefill_only and not self._settings.prefix_caching:
            raise BadRequest(
                "sampling_parameters.prefill_only: this deployment keeps no prompts; leave it out, or set "
                "prefix_caching to true in the thinker's stage.yaml"
            )
        if request.cache_salt is not None:
            request = replace(request, cache_salt=self._own_salt(request.cache_salt))
        if (schema := request.thinker.json_schema) is not None:
            self._engine.check_schema(compact_json(schema), request.cache_salt)
        if (rules := request.tool_rules) is not None:
            self._engine.check_tools(rules, request.cache_salt)
        return self._ready(request, self._place(request, is_wanted), accepted_ns)

    def _own_salt(self, salt: str) -> str:
        """The caller's salt under this start's secret: neither cache, log nor memory dump has what the caller sent."""
        return hmac.digest(self._secret, salt.encode(), "sha256").hex()

    def _place(self, request: OmniRequest, is_wanted: IsWanted) -> ThinkerPlaced:
        """Return the prompt with its processed media, taken from the cache where the salt's caller sent them before."""
        media, kept = self._media.bring(request, is_wanted)
        prompt = build_prompt(request, media, self._renderer)
        least = PREFILL_TOKENS if request.prefill_only else max(1, request.thinker.min_tokens)
        placed = self._engine.prepare(prompt, max_tokens=request.thinker.max_tokens or least)
        self._media.keep(kept)
        return placed

    def _tokens_of(self, medium: Medium) -> int:
        has_sound = isinstance(medium, Video) and medium.audio is not None
        return self._engine.media_tokens(to_vllm_data([medium], use_audio_in_video=has_sound)[0])

    def _ready(self, request: OmniRequest, placed: ThinkerPlaced, accepted_ns: int) -> Preprocessed:
        seed = secrets.randbits(DRAWN_SEED_BITS) if request.seed is None else request.seed
        prompt_tokens = len(placed.prompt_token_ids)
        # A reply without a limit of its own may use what the prompt leaves.
        room = min(self._settings.max_new_tokens, self._settings.engine.max_model_len - prompt_tokens)
        if request.prefill_only:
            sampling = Sampling(max_tokens=PREFILL_TOKENS, min_tokens=PREFILL_TOKENS)
            speech = Sampling(max_tokens=1)
        else:
            sampling = request.thinker.to_sampling(seed, room, request.tool_rules)
            speech = request.talker.to_sampling(talker_seed(seed), self._defaults.max_codes)
        session = Session(
            request_id=request.request_id,
            want_audio=request.wants_audio,
            audio_format=request.audio_format,
            voice=self._speakers.get(request.voice).name,
            seed=seed,
            priority=request.priority,
            prefill_only=request.prefill_only,
            talker=speech,
            prompt_tokens=prompt_tokens,
            media_tokens=self._media_tokens(placed.prompt_token_ids),
            max_rows=prompt_tokens + sampling.max_tokens,
            accepted_ns=accepted_ns,
            # Only the unary model gives a token.
            token2wav=request.token2wav.to_stream_options(),
        )
        return Preprocessed(placed, sampling, session)

    def _media_tokens(self, ids: tuple[int, ...]) -> MediaTokens:
        thinker = self._thinker
        return MediaTokens(
            audio=ids.count(thinker.audio_token_id),
            image=ids.count(thinker.image_token_id),
            video=ids.count(thinker.video_token_id),
        )


def _size(raw: RawRequest) -> int:
    return sum(len(value or b"") for value in (raw.text_input, raw.messages, raw.sampling_parameters))

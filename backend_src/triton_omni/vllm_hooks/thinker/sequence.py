# SPDX-License-Identifier: Apache-2.0
"""The thinker's record of a sequence, beside vLLM's: its text, its sampling, and the ids that end its reply."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from triton_omni.session.engine import FinishReason, Sampling
from triton_omni.vllm_hooks.shared.compat import CompletionOutput, RequestOutputKind, StructuredOutputsParams
from triton_omni.vllm_hooks.shared.sampling import drawing, seed_args
from triton_omni.vllm_hooks.thinker.json_schemas import CheckedParams
from triton_omni.vllm_hooks.thinker.rows import Cut, RowRelease, StopCut
from triton_omni.vllm_hooks.thinker.tools import CallReader, tool_grammar


@dataclass(frozen=True)
class Sequence:
    """A sequence of the thinker's engine, from `add_sequence` to its end."""

    key: str
    request_id: str
    """vLLM's own id of the request."""
    want_rows: bool
    release: RowRelease
    detokenizer: Any
    """vLLM's `IncrementalDetokenizer` of the request."""
    structured: Any
    """vLLM's `StructuredOutputRequest`; None = the reply has no schema."""

    speech: Speech

    def count(self, news: CompletionOutput) -> None:
        """Count the token of a step, if it gave one."""
        self.release.reply_tokens += len(news.token_ids)
        self.speech.count(news, len(self.detokenizer.output_text))

    @property
    def is_sound(self) -> bool:
        """False if a call was drawn from non-finite values, as its rows show, which are not given."""
        return self.release.is_sound or not self.speech.is_over

    @property
    def rows_done(self) -> bool:
        """True once all rows were given, though tokens of calls may come."""
        return self.speech.is_over and self.release.drop_if_spoken()


class Speech:
    """The part of a reply that is spoken: what precedes stop strings and calls.

    Args:
        sampling: of the reply.
    """

    def __init__(self, sampling: Sampling) -> None:
        may_call = sampling.tools is not None and sampling.tools.max_calls
        self.reader = CallReader() if may_call else None
        """None = the reply may call nothing."""
        self._stop = StopCut(sampling.stop) if sampling.stop else None
        self._call = Cut() if may_call else None

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return the cuts that end its rows."""
        return tuple(cut for cut in (self._stop, self._call) if cut is not None)

    @property
    def is_over(self) -> bool:
        """True once a call has begun."""
        return self.reader is not None and self.reader.has_begun

    def count(self, news: CompletionOutput, length: int) -> None:
        """Count the output of a step, after which the text has `length` characters."""
        is_last = news.finish_reason is not None
        if news.token_ids:
            for cut in self.cuts:
                cut.count_token(length)
        if self._stop is not None and is_last:
            self._stop.close(None if stop_string_of(news) is None else length)
        if self.reader is None or self._call is None:
            return
        self.reader.feed(news.text, is_last=is_last)
        if is_last and not self.is_over:
            self._call.keep_all()
        else:
            self._call.keep_before(self.reader.said)

    def why_finished(self, reason: FinishReason, stop_string: str | None) -> FinishReason:
        """Turn vLLM's reason into the client's; a stop string may have cut a call off."""
        return "tool_calls" if reason == "stop" and stop_string is None and self.is_over else reason


def stop_string_of(completion: CompletionOutput) -> str | None:
    """Return the stop string that ended a reply; vLLM's stop reason may also be an id."""
    reason = completion.stop_reason
    return reason if isinstance(reason, str) else None


# --- sampling ---------------------------------------------------------------------------------------------------------


def end_ids(thinker_config: Any) -> list[int]:
    """Ids that end a reply, as HF's `generate` finds them: the generation config made from the thinker's config."""
    found = GenerationConfig.from_model_config(thinker_config).eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def to_parameters(sampling: Sampling, ends: Collection[int]) -> CheckedParams:
    """vLLM's parameters.

    Args:
        sampling: of the request.
        ends: ids that end its reply.

    Raises:
        VLLMValidationError: a value is out of range.
    """
    return CheckedParams(
        **drawing(sampling),
        logit_bias=dict(sampling.logit_bias) or None,
        stop=list(sampling.stop),
        structured_outputs=_structure(sampling),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        # The end ids are HF's, whatever the tokenizer's end token is.
        ignore_eos=True,
        stop_token_ids=list(ends),
        skip_special_tokens=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=seed_args(sampling.seed),
        # This object belongs to one request, so vLLM need not copy it.
        skip_clone=True,
    )


def _structure(sampling: Sampling) -> StructuredOutputsParams | None:
    """Return the constraint on the reply; None = there is none."""
    if sampling.tools is not None:
        return StructuredOutputsParams(grammar=tool_grammar(sampling.tools, sampling.json_schema))
    return None if sampling.json_schema is None else StructuredOutputsParams(json=sampling.json_schema)

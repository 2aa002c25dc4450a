# SPDX-License-Identifier: Apache-2.0
"""The thinker's own record of a sequence, beside vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton_omni.vllm_hooks.shared.compat import CompletionOutput
from triton_omni.vllm_hooks.thinker.row_release import RowRelease


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
    """vLLM's `StructuredOutputRequest`, or None where there is no schema."""

    def count(self, news: CompletionOutput) -> None:
        """Take note of the tokens that a step gave, of which there is one at most."""
        self.release.reply_tokens += len(news.token_ids)
        cut = self.release.cut
        if cut is None:
            return
        length = len(self.detokenizer.output_text)
        if news.token_ids:
            cut.count_token(length)
        if news.finish_reason is not None:
            cut.close(None if stop_string_of(news) is None else length)


def stop_string_of(completion: CompletionOutput) -> str | None:
    """The stop string that ended a reply; what vLLM calls its stop reason may also be an id."""
    reason = completion.stop_reason
    return reason if isinstance(reason, str) else None

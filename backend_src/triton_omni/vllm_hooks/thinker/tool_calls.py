# SPDX-License-Identifier: Apache-2.0
"""Calls in a reply's text, read while it is written, by vLLM's parser of the Hermes format, which Qwen2.5 has."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton_omni.session.engine import CallPiece
from triton_omni.vllm_hooks.shared.compat import Hermes2ProToolParser


class Told(NamedTuple):
    """What a step's text tells."""

    text: str = ""
    """Text to be said."""
    calls: tuple[CallPiece, ...] = ()


class CallReader:
    """Divides one reply into what is said and what is called.

    The reader keeps text back as long as it may begin the mark of a call. Nothing after the mark is said.
    """

    def __init__(self) -> None:
        self.said = 0
        """Characters of the text that are said."""
        self.told = Told()
        """What the last step's text told."""
        self._text = ""
        # It reads text, no tokens.
        self._parser = Hermes2ProToolParser(_NO_TOKENIZER)

    @property
    def has_begun(self) -> bool:
        """True once nothing more is said."""
        return self._parser.tool_call_start_token in self._text

    def feed(self, text: str, *, is_last: bool) -> None:
        """Take the next characters; with the last ones everything is told."""
        self._text += text
        found = self._parser.extract_tool_calls_streaming("", self._text, text, (), (), (), _NO_REQUEST)
        content = "" if found is None else found.content or ""
        self.said += len(content)
        if is_last and not self.has_begun:
            content += self._text[self.said :]
            self.said = len(self._text)
        self.told = Told(content, tuple(map(_piece, found.tool_calls if found else ())))


def _piece(call: Any) -> CallPiece:
    return CallPiece(call.index, call.id, call.function.name, call.function.arguments or "")


_NO_TOKENIZER: Any = object()
_NO_REQUEST: Any = None

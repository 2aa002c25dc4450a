# SPDX-License-Identifier: Apache-2.0
"""Output tensors of one request to deltas, response by response. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import astuple

from .audio import Pcm16Decoder, WavDecoder, Waveform
from .errors import Internal
from .messages import AudioDelta, AudioFormat, Delta, Info, Tensor, TextDelta
from .parsing import as_list
from .tool_calls import ToolCallDelta

MAX_REPLY_BYTES = 1 << 26
"""Most bytes of one reply's outputs: 64 MiB, eight times the longest speech in floats."""
_PIECES = "tool_call_deltas"
"""Key of `info` in responses before the last."""


class OutputDecoder:
    """Output tensors of one request, response by response, to deltas.

    Keeps what a PCM16 or WAV stream needs between its chunks, so one decoder serves one request only.
    """

    def __init__(self, audio_format: AudioFormat) -> None:
        self._encoded = WavDecoder() if audio_format == "wav" else Pcm16Decoder()
        self._bytes = 0
        self._has_calls = False

    def feed(self, outputs: Mapping[str, Tensor]) -> list[Delta]:
        """The deltas of one response: text, then audio, then calls, then info; a response may hold none.

        Raises:
            Internal: an output that is outside of the contract.
        """
        self._bytes += sum(len(tensor.data) for tensor in outputs.values())
        if self._bytes > MAX_REPLY_BYTES:
            raise Internal(f"the reply has more than {MAX_REPLY_BYTES} bytes, the most that this client takes")
        deltas: list[Delta] = []
        if text := _text(outputs, "text_output"):
            deltas.append(TextDelta(text))
        deltas.extend(AudioDelta(samples) for samples in self._waveforms(outputs) if len(samples))
        if info := _text(outputs, "info"):
            deltas += self._told(info)
        return deltas

    def _told(self, text: str) -> list[Delta]:
        """Pieces of calls, or the account of the reply; of a reply that came whole both."""
        told = Info.from_json(text)
        if _PIECES in told.raw:
            self._has_calls = True
            return [*map(ToolCallDelta.from_json, as_list(told.raw[_PIECES], f"info.{_PIECES}"))]
        calls = [] if self._has_calls else told.tool_calls
        return [*(ToolCallDelta(index, *astuple(call)) for index, call in enumerate(calls)), told]

    def _waveforms(self, outputs: Mapping[str, Tensor]) -> list[Waveform]:
        found = []
        if "audio_output" in outputs:
            found.append(outputs["audio_output"].waveform())
        if encoded := _text(outputs, "audio_base64"):
            try:
                found.append(self._encoded.feed(base64.b64decode(encoded, validate=True)))
            except binascii.Error as error:
                raise Internal(f"audio_base64: not base64: {error}") from error
        return found


def _text(outputs: Mapping[str, Tensor], name: str) -> str:
    return outputs[name].text() if name in outputs else ""

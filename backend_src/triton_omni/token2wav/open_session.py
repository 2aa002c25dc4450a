# SPDX-License-Identifier: Apache-2.0
"""State of one session in the last stage: its text, its sound, and the account that its last response gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from triton_omni.core.errors import OmniError
from triton_omni.link.receiver import LinkSession
from triton_omni.session.answer import Answer, call_pieces
from triton_omni.session.engine import CallPiece
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import Session, TalkerMessage, ThinkerReport

if TYPE_CHECKING:
    from torch import Tensor

PCM16_PEAK: Final = 32767


class TextRelay:
    """Sends a session's text and calls as they arrive, on Triton's thread, since a step of the loop would delay them.
    It sends messages that arrive in order, until it is closed.

    Args:
        lost: called for each text that could not be sent.
    """

    def __init__(self, sender: ResponseSender, lost: Callable[[], object]) -> None:
        self._sender = sender
        self._lost = lost
        self._lock = threading.Lock()
        self._expected = 1
        self._open = True
        self.first_ns = 0
        """Monotonic time when the first text or call was sent, nanoseconds; 0 = none was."""
        self._calls: list[CallPiece] = []

    def forward(self, message: TalkerMessage) -> None:
        """Send the text of the next message, if it has one."""
        with self._lock:
            # A message out of order fails the session in the loop.
            self._open = self._open and message.sequence == self._expected
            self._expected += 1
            if self._open and (message.text or message.calls):
                self.first_ns = self.first_ns or time.monotonic_ns()
                self._calls += message.calls
                answer = Answer(text=message.text, info=call_pieces(message.calls))
                self._sender.send(answer.to_tensors(), lost=self._lost)

    def calls(self) -> list[dict[str, str]]:
        """All calls that were sent, whole."""
        with self._lock:
            pieces = list(self._calls)
        found = [
            {"id": piece.id, "name": piece.name or "", "arguments": ""} for piece in pieces if piece.id is not None
        ]
        for piece in pieces:
            found[piece.index]["arguments"] += piece.arguments
        return found

    def close(self) -> None:
        """Stop sending; when this returns, no text is being sent."""
        with self._lock:
            self._open = False


@dataclass
class OpenSession(LinkSession):
    """State of one session; touched by the loop's thread only, but for `relay`."""

    relay: TextRelay = field(kw_only=True)
    samples: int = 0
    chunks: int = 0
    encoded_rest: bytes = b""
    """Bytes of `pcm16` and `wav` that wait for the next chunk; see `whole_groups`."""
    first_audio_ns: int = 0
    """Nanoseconds after the request was accepted; likewise `last_audio_ns`."""
    last_audio_ns: int = 0
    clamped_codes: int = 0
    audio_done: bool = False
    ending: TalkerMessage | None = None
    error: OmniError | None = None
    error_ns: int = 0
    upstream_busy_ns: int = 0
    """Monotonic time when an earlier stage was last seen in a long step, nanoseconds."""

    @property
    def age_ns(self) -> int:
        """Nanoseconds since the request was accepted."""
        return time.monotonic_ns() - self.session.accepted_ns

    def info(self, ending: TalkerMessage, sample_rate: int) -> dict[str, Any]:
        """Return the account of a complete reply: why each stage ended, counts, and times."""
        thinker, talker, audio = ending.thinker, ending.talker, self.session.want_audio
        first_text_ns = self.relay.first_ns - self.session.accepted_ns if self.relay.first_ns else 0
        stages = {
            "thinker": {"first": thinker.first_token_ns, "done": thinker.finished_ns} if thinker else {},
            "talker": {"first": talker.first_code_ns, "done": talker.finished_ns} if talker else {},
            "token2wav": {"first": self.first_audio_ns, "done": self.age_ns},
        }
        return {
            "request_id": self.session.request_id,
            "finish_reason": {
                "thinker": thinker.finish_reason if thinker else None,
                "talker": talker.finish_reason if talker else None,
                "token2wav": "stop" if audio else None,
            },
            "stop_string": thinker.stop_string if thinker else None,
            "tool_calls": self.relay.calls(),
            "usage": {
                **_prompt_usage(self.session, thinker),
                "reply_tokens": thinker.reply_tokens if thinker else 0,
                "codes": talker.codes if talker else 0,
                "samples": self.samples,
                "clamped_codes": self.clamped_codes,
                "cached_tokens": {
                    "thinker": thinker.cached_tokens if thinker else 0,
                    "talker": talker.cached_tokens if talker else 0,
                },
            },
            "sample_rate": sample_rate,
            "seed": self.session.seed,
            "time_to_first_text_ms": _milliseconds(first_text_ns),
            "time_to_first_audio_ms": _milliseconds(self.first_audio_ns),
            "stage_ms": {stage: {k: _milliseconds(v) for k, v in ns.items()} for stage, ns in stages.items()},
        }


def _prompt_usage(request: Session, thinker: ThinkerReport | None) -> dict[str, Any]:
    media = request.media_tokens
    details = {
        "text_tokens": request.prompt_tokens - media.audio - media.image - media.video,
        "audio_tokens": media.audio,
        "image_tokens": media.image,
        "video_tokens": media.video,
        "cached_tokens": thinker.cached_tokens if thinker else 0,
    }
    return {"prompt_tokens": request.prompt_tokens, "prompt_tokens_details": details}


def _milliseconds(nanoseconds: int) -> float | None:
    return round(nanoseconds / 1e6, 3) if nanoseconds else None


def to_pcm16(samples: Tensor) -> bytes:
    """fp32 [S] in [-1, 1] to little-endian 16-bit samples; values outside are clipped."""
    scaled = (samples.clamp(-1.0, 1.0) * PCM16_PEAK).round()
    return scaled.short().cpu().numpy().astype("<i2").tobytes()


def whole_groups(data: bytes) -> tuple[bytes, bytes]:
    """`data` cut after its last group of three bytes, and the rest.

    Base64 writes three bytes as four characters and pads what is less: texts whose bytes are whole groups, all but the
    last, are one text of base64 when they are joined.
    """
    cut = len(data) - len(data) % 3
    return data[:cut], data[cut:]

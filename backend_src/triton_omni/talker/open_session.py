# SPDX-License-Identifier: Apache-2.0
"""State of one session in the talker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from triton_omni.link.receiver import LinkSession
from triton_omni.link.send_queue import Batch, SendQueue
from triton_omni.session.engine import FinishReason
from triton_omni.session.wire import Failure, Kind, TalkerMessage, TalkerReport, ThinkerReport


@dataclass
class OpenSession(LinkSession):
    """State of one session. The loop's thread changes it; the sending thread counts refused messages."""

    send_queue: SendQueue = field(kw_only=True)
    sequence: int = 0
    sent: int = 0
    refused: int = 0
    left_ns: int = 0
    codes: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt whose rows the engine had no need of."""
    first_code_ns: int = 0
    thinker: ThinkerReport | None = None
    """The thinker's account of its reply, which comes with its last message."""
    report: TalkerReport | None = None
    """The talker's account, once all codes are drawn."""

    def finish_codes(self, reason: FinishReason) -> None:
        """Note that no more codes come."""
        self.send_queue.finish_tensors()
        self.is_fed = False
        accepted_ns = self.session.accepted_ns
        self.report = TalkerReport(
            finish_reason=reason,
            codes=self.codes,
            cached_tokens=self.cached_tokens,
            first_code_ns=self.first_code_ns - accepted_ns if self.first_code_ns else 0,
            finished_ns=time.monotonic_ns() - accepted_ns,
        )

    def to_message(self, batch: Batch) -> TalkerMessage:
        """Return the session's next message, with the content of `batch`."""
        return TalkerMessage(
            key=self.key,
            kind=Kind.DATA if batch.tensor is not None else Kind.TEXT,
            sequence=self.sequence,
            text=batch.text,
            calls=batch.calls,
            codes=batch.tensor,
            codes_done=batch.tensors_done,
            placed=self.send_queue.placed,
            last=batch.last,
            thinker=self.thinker if batch.last else None,
            talker=self.report if batch.last else None,
        )

    def to_failure(self, failure: Failure) -> TalkerMessage:
        """Return the session's last message, with the error that ends it."""
        return TalkerMessage(key=self.key, kind=Kind.ERROR, sequence=self.sequence, failure=failure)

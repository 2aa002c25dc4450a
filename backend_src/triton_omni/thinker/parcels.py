# SPDX-License-Identifier: Apache-2.0
"""What leaves the thinker's outbox, as a message to the talker."""

from __future__ import annotations

from triton_omni.outbox import Parcel
from triton_omni.wire import Kind, SessionKey, ThinkerMessage, ThinkerReport


def to_message(key: SessionKey, sequence: int, parcel: Parcel, report: ThinkerReport | None) -> ThinkerMessage:
    """The message of a session that is `sequence` in its order; the last one brings the report."""
    return ThinkerMessage(
        key=key,
        kind=Kind.DATA if parcel.tensor is not None else Kind.TEXT,
        sequence=sequence,
        text=parcel.text,
        rows=parcel.tensor,
        last=parcel.last,
        report=report if parcel.last else None,
    )

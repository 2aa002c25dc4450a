# SPDX-License-Identifier: Apache-2.0
"""Messages of the previous stage from their arrival until their requests have ended and their credits are back.

It knows no engine, no Triton.
"""

from __future__ import annotations

import functools
import time
from typing import Final, Protocol

import torch

from triton_omni.core.streams import record_event
from triton_omni.link.latency import LinkLatency, Until
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CAPACITY, CLOSED, CONSUMED
from triton_omni.session.stage import ResponseSender
from triton_omni.session.wire import SessionKey, TalkerMessage, ThinkerMessage

CANCEL_INTERVAL_NS: Final = 50_000_000
"""Minimum nanoseconds between two questions to Triton whether a session's client is gone."""


class Receiving(Protocol):
    """Counts of one session that the inbox keeps."""

    consumed: int
    by_message: int


class Inbox:
    """The messages of all sessions of one stage.

    Args:
        ledger: gets counts of consumed messages and ended requests.
        device: where the engine copies what it is fed.
    """

    def __init__(self, ledger: SessionLedger, device: torch.device) -> None:
        self._ledger, self._device = ledger, device
        # By slot, when Triton was last asked for a cancel; of Triton's thread.
        self._asked_ns = [0] * CAPACITY
        # By slot: the session that the last message was of, and that message's number; of Triton's thread.
        self._newest = [(0, 0)] * CAPACITY
        self.latency: dict[Until, LinkLatency] = {"arrived": LinkLatency(), "taken": LinkLatency()}
        """Latency of rows and codes, measured whenever some of a session are taken."""

    # On Triton's thread.

    def is_new(self, message: ThinkerMessage | TalkerMessage) -> bool:
        """Return True for the first message of its number, or a later one, of an open session. Others change nothing:
        the session is over, or a client sent the message again on its own.
        """
        key = message.key
        generation, newest = self._newest[key.slot]
        if not self._ledger.holds(key) or (key.generation == generation and message.number <= newest):
            return False
        self._newest[key.slot] = key.generation, message.number
        return True

    def watch_for_cancel(self, key: SessionKey, sender: ResponseSender, now_ns: int) -> None:
        """Ask Triton whether the client is gone: a call into its process, so not at each of a session's messages. A
        later one tells it too, and a silent session has heartbeats.
        """
        if now_ns - self._asked_ns[key.slot] < CANCEL_INTERVAL_NS:
            return
        self._asked_ns[key.slot] = now_ns
        sender.if_cancelled(functools.partial(self._ledger.write, key, CANCELLED))

    # On the loop's thread.

    def observe(self, sent_ns: int, arrived_ns: int) -> None:
        """Measure the latency of rows or codes that are taken now; times are monotonic nanoseconds."""
        self.latency["arrived"].measure(sent_ns, arrived_ns)
        self.latency["taken"].measure(sent_ns, time.monotonic_ns())

    def give_back(self, key: SessionKey, sender: ResponseSender) -> None:
        """End a message's request; Triton may reuse its tensors."""
        sender.finish(then=functools.partial(self._ledger.count_returned, key))

    def give_back_consumed(
        self,
        session: Receiving,
        message: ThinkerMessage | TalkerMessage,
        tensor: torch.Tensor,
        sender: ResponseSender,
    ) -> None:
        """End a data message's request, whose `tensor` the engine has been told to copy; its credit goes back with it.

        The tensor is not in Triton's memory any more, so nothing waits for its copy. A long step may precede the copy;
        the memory is reused only after it.
        """
        session.consumed += 1
        session.by_message += len(tensor)
        sender.finish(self._outlive_copy(tensor), functools.partial(self._count_consumed, message, session.consumed))

    def mark_closed(self, key: SessionKey, sent: int = 0) -> None:
        """Record that the session's `OPEN` request has ended, too, after `sent` messages to the next stage."""
        # In this order: who sees that all it sent has ended can see how much this stage has sent.
        self._ledger.write(key, CLOSED, sent)
        self._ledger.count_returned(key)

    def _outlive_copy(self, tensor: torch.Tensor) -> torch.cuda.Event | None:
        """Keep a tensor's memory until the engine's copy is done; return an event to wait for where torch cannot.

        Torch looks for the stream's end where the tensor is let go, which the engine does once the copy is enqueued.
        """
        if tensor.is_cuda and tensor.device == self._device:
            tensor.record_stream(torch.cuda.current_stream(self._device))
            return None
        return record_event(self._device)

    def _count_consumed(self, message: ThinkerMessage | TalkerMessage, consumed: int) -> None:
        # A message on another device than the engine's is kept until here.
        self._ledger.write(message.key, CONSUMED, consumed)
        self._ledger.count_returned(message.key)

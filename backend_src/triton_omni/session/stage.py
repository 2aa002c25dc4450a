# SPDX-License-Identifier: Apache-2.0
"""Protocols and helpers of all three stages: response senders and statistics. It knows no engine, no Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import psutil

from triton_omni.core.errors import InternalError, OmniError, StageName
from triton_omni.core.metrics import Metric
from triton_omni.session.answer import Sent

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CLAIMED_POLL_S: Final = 0.001
"""Seconds between polls while another stage claims the device, or while the thinker pauses."""

SOON_S: Final = 0.002
"""Seconds between polls when a session waits for another stage."""

RETRY_AFTER_RESTART_MS: Final = 5000
"""Milliseconds after which a client should retry once a stage has died: enough for the smaller stages' restart."""


class ResponseSender(Protocol):
    """Answers one Triton request. Calls only enqueue; a thread of the stage sends, in order.

    `ready` is waited for before a message leaves; `then` runs on the sending thread once it has left, `lost` instead
    if Triton refused it (its memory may be full).
    """

    def bind(self, slot: int) -> None:
        """Choose the thread of this session's slot, before anything is sent. Responses of one slot leave in the order
        of the calls, and their `then`s never run at the same time.
        """

    def send(
        self,
        tensors: Mapping[str, Sent],
        ready: torch.cuda.Event | None = None,
        lost: Callable[[], object] | None = None,
    ) -> None:
        """Send one response; if it is lost, later ones are still sent."""

    def conclude(self, tensors: Mapping[str, Sent], then: Callable[[], None], lost: Callable[[], bool]) -> None:
        """Send the last response and the empty final.

        If any response was lost, `lost` is called instead, so that no client takes an incomplete answer for a whole
        one. It returns True if another stage will fail the request; otherwise the request fails here at once.
        """

    def finish(self, ready: torch.cuda.Event | None = None, then: Callable[[], None] | None = None) -> None:
        """Send the empty final; nothing may follow. A second call does nothing."""

    def fail(self, error: OmniError, then: Callable[[], None] | None = None) -> None:
        """Send an error as the final; nothing may follow. `then` runs in any case, as that of `finish`."""

    def if_cancelled(self, then: Callable[[], None]) -> None:
        """Ask Triton whether the client is gone, and run `then` if so, both on the sending thread and before what is
        sent later. Not after the final.
        """


@dataclass(frozen=True)
class StageStats:
    """Contents of a stage now; every value is 0 when no session is open."""

    sessions: int
    running: int
    waiting: int
    kv_blocks_used: int
    rows_used: int
    outbox: int
    """Rows or codes that wait to leave."""


class Stage(Protocol):
    """One stage: `start`, `submit`, `close`, and figures."""

    def start(self) -> None:
        """Begin to serve."""

    def close(self) -> None:
        """End every session and release the device."""

    def stats(self) -> StageStats:
        """Figures of the last poll."""

    def metrics(self) -> Iterator[Metric]:
        """All other figures, by the names of their metrics; called by one thread."""


def memory_metrics(device: torch.device) -> Iterator[Metric]:
    """Main memory of this process, and what torch has of `device` where it is a GPU, in bytes."""
    yield Metric("omni_resident_memory_bytes", psutil.Process().memory_info().rss)
    if device.type == "cuda":
        import torch

        yield Metric("omni_device_memory_bytes", torch.cuda.memory_allocated(device), {"kind": "allocated"})
        yield Metric("omni_device_memory_bytes", torch.cuda.memory_reserved(device), {"kind": "reserved"})


def as_omni_error(error: Exception, label: str) -> OmniError:
    """Return the error that ends a session whose message could not be handled; other exceptions are logged under
    `label`.
    """
    if isinstance(error, OmniError):
        return error
    import torch

    logger.error("request %s: handling a message failed", label, exc_info=error)
    if isinstance(error, torch.OutOfMemoryError):
        return InternalError("the device has no memory for this request")
    return InternalError(f"handling a message failed: {type(error).__name__}")


def lost_error(stage: StageName) -> InternalError:
    """Return the error that ends a session when the process of `stage` died."""
    cause = f"the process of {stage} ended unexpectedly and with it this reply; it is being started again"
    return InternalError(cause, stage=stage, retry_after_ms=RETRY_AFTER_RESTART_MS)


def refused_error(stage: StageName) -> InternalError:
    """Return the error that ends a session when Triton did not take a response of `stage`."""
    return InternalError(f"Triton refused what {stage} sent, a part of this reply: see the server's log", stage=stage)

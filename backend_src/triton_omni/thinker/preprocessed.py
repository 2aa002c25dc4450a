# SPDX-License-Identifier: Apache-2.0
"""A preprocessed request, as the thinker's stage takes it, and the interface that makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from triton_omni.core.metrics import Metric
from triton_omni.request.media.killable import IsWanted
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import Sampling, ThinkerPlaced
from triton_omni.session.wire import Session

TakeTimeout = Callable[[float], None]
"""Called with a request's `timeout` in seconds."""


@dataclass(frozen=True)
class Preprocessed:
    """A request that was checked, decoded and tokenised."""

    placed: ThinkerPlaced
    sampling: Sampling
    session: Session


class RequestPreprocessor(Protocol):
    """Preprocesses a client's request for the engine; called on several threads."""

    def preprocess_at_once(self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout) -> Preprocessed | None:
        """Preprocess a short text if that is faster than a hand-over to another thread; return None for all other
        requests.
        """

    def preprocess(
        self, raw: RawRequest, accepted_ns: int, take_timeout: TakeTimeout, is_wanted: IsWanted
    ) -> Preprocessed:
        """Check, decode and tokenise. `take_timeout` is called as soon as the timeout is known, before media are
        decoded. Raises `OmniError`.
        """

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of processed media."""

    def close(self) -> None:
        """Stop preprocessing, and release everything that outlives the process."""


def extend_positions(positions: Tensor, count: int) -> Tensor:
    """Extend M-RoPE positions [3, P] by `count` text tokens to [3, P + count].

    Text after any prompt continues from the largest position on all three axes, as in HF's `get_rope_index`. Uses
    numpy: every torch call competes with a busy loop for the interpreter lock. Uses array methods: numpy's functions
    written in Python take several times as long, above all after a pause.
    """
    known = positions.numpy()
    length = known.shape[1]
    after = int(known.max()) + 1 if length else 0
    extended = np.empty((3, length + count), known.dtype)
    extended[:, :length] = known
    extended[:, length:] = np.arange(after, after + count)
    return torch.from_numpy(extended)

# SPDX-License-Identifier: Apache-2.0
"""Preprocesses requests: short ones on the calling thread, others on a thread pool.

Failures are returned as values, for the stage's loop to handle.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from triton_omni.core.errors import InternalError, OmniError
from triton_omni.core.metrics import Metric
from triton_omni.request.parse import RawRequest
from triton_omni.thinker.open_session import OpenSession
from triton_omni.thinker.preprocessed import Preprocessed, RequestPreprocessor, TakeTimeout

PreprocessedT = TypeVar("PreprocessedT", bound=Preprocessed | None)
_Preprocess = Callable[[RawRequest, int, TakeTimeout], PreprocessedT]

logger = logging.getLogger(__name__)


class PreprocessPool:
    """Runs a preprocessor on the calling thread or on a pool.

    Args:
        threads: maximum number of requests preprocessed at once, not counting those on the calling thread.
    """

    def __init__(self, preprocessor: RequestPreprocessor, threads: int) -> None:
        self._preprocessor = preprocessor
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="omni-preprocessor")

    def at_once(
        self, session: OpenSession, raw: RawRequest, take_timeout: TakeTimeout
    ) -> Preprocessed | OmniError | None:
        """Return the preprocessed request, or the error that refuses it; None if it must be done by `later`."""
        return _tried(self._preprocessor.preprocess_at_once, session, raw, take_timeout)

    def later(
        self,
        session: OpenSession,
        raw: RawRequest,
        take_timeout: TakeTimeout,
        then: Callable[[Preprocessed | OmniError], None],
    ) -> None:
        """Preprocess on the pool and call `then` there, unless the session has ended by then."""
        # The session holds the request, not the queued task: a session that ends releases it.
        session.raw = raw

        def is_wanted() -> bool:
            return not session.ended_ns

        def preprocess() -> None:
            # A session cancelled while it waited has freed its slot, so it must not delay others here.
            waiting, session.raw = session.raw, None
            if waiting is not None and is_wanted():
                asked = functools.partial(self._preprocessor.preprocess, is_wanted=is_wanted)
                then(_tried(asked, session, waiting, take_timeout))

        self._pool.submit(preprocess)

    def metrics(self) -> Iterator[Metric]:
        """Yield the preprocessor's metrics."""
        yield from self._preprocessor.metrics()

    def close(self) -> None:
        """Start nothing more. Running work is not waited for; its results are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._preprocessor.close()


def _tried(
    preprocess: _Preprocess[PreprocessedT], session: OpenSession, raw: RawRequest, take_timeout: TakeTimeout
) -> PreprocessedT | OmniError:
    try:
        return preprocess(raw, session.accepted_ns, take_timeout)
    except OmniError as error:
        error.stage = error.stage or "thinker"
        return error
    except Exception:
        logger.exception("request %s: preprocessing it failed", session.label)
        return InternalError("preprocessing the request failed", stage="thinker")

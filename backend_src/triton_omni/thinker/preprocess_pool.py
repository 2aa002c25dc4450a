# SPDX-License-Identifier: Apache-2.0
"""Who makes a request ready: whoever brings it, where that is quick, else one of a few threads.

Its failures are values, for the stage's loop to deal with.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from triton_omni.core.errors import InternalError, OmniError
from triton_omni.request.parse import RawRequest
from triton_omni.thinker.open_session import OpenSession
from triton_omni.thinker.preprocessed import Intake, Preprocessed, TakeTimeout

PreparedT = TypeVar("PreparedT", bound=Preprocessed | None)
_Prepare = Callable[[RawRequest, int, TakeTimeout], PreparedT]

logger = logging.getLogger(__name__)


class PreprocessPool:
    """Asks the intake.

    Args:
        threads: how many requests are prepared together at most, besides those that are prepared at once.
    """

    def __init__(self, intake: Intake, threads: int) -> None:
        self._intake = intake
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="omni-intake")

    def at_once(
        self, session: OpenSession, raw: RawRequest, take_timeout: TakeTimeout
    ) -> Preprocessed | OmniError | None:
        """The request made ready, or why it cannot be; None where it is to be done `later`."""
        return _tried(self._intake.prepare_at_once, session, raw, take_timeout)

    def later(
        self,
        session: OpenSession,
        raw: RawRequest,
        take_timeout: TakeTimeout,
        then: Callable[[Preprocessed | OmniError], None],
    ) -> None:
        """Prepare on the pool, and call `then` there; not for a session that has ended before its turn came."""
        # Its session has it, and not what waits here: a session that ends lets go of it.
        session.raw = raw

        def is_wanted() -> bool:
            return not session.ended_ns

        def prepare() -> None:
            # The slot of one that was cancelled while it waited is free again: it must not hold up the others here.
            waiting, session.raw = session.raw, None
            if waiting is not None and is_wanted():
                asked = functools.partial(self._intake.prepare, is_wanted=is_wanted)
                then(_tried(asked, session, waiting, take_timeout))

        self._pool.submit(prepare)

    def close(self) -> None:
        """Begin nothing more. What is under way is not waited for; nobody takes what comes of it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._intake.close()


def _tried(
    prepare: _Prepare[PreparedT], session: OpenSession, raw: RawRequest, take_timeout: TakeTimeout
) -> PreparedT | OmniError:
    try:
        return prepare(raw, session.accepted_ns, take_timeout)
    except OmniError as error:
        error.stage = error.stage or "thinker"
        return error
    except Exception:
        logger.exception("request %s: preparing it failed", session.label)
        return InternalError("preparing the request failed", stage="thinker")

# SPDX-License-Identifier: Apache-2.0
"""An engine whose weights are split over several GPUs: rank 0 in this process, each other rank in one of its own.

vLLM's own executor gives every rank a process; rows would then be in a process that Triton does not know. This module
knows vLLM's executor and worker processes, neither thinker nor talker.
"""

from __future__ import annotations

import faulthandler
import glob
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_omni.vllm_hooks.shared.compat import (
    MessageQueue,
    UniProcExecutor,
    UnreadyWorkerProcHandle,
    WorkerProc,
    get_mp_context,
)

_logger = logging.getLogger(__name__)

_CALL_BYTES = 1 << 20
"""Bytes of the largest call in the ring of shared memory: a step needs a few KB; larger calls (media) bypass it."""
_LOAD_GRACE_S = 5.0
"""Seconds in which rank 0 reports a failed load, before a follower's end kills it."""
_GRACE_S = 3.0
"""Seconds after which a follower that has not ended is killed."""


class TensorParallelExecutor(UniProcExecutor):
    """Runs vLLM's executor in this process; the other ranks (`followers`) repeat every call.

    A rank that ends leaves the others inside a collective that nothing can interrupt. So all ranks end together:
    followers end with this process, and this process is killed with any follower.

    Raises:
        RuntimeError: a follower cannot load.
    """

    def _init_executor(self) -> None:
        ranks = range(1, self.parallel_config.world_size)
        followers = len(ranks)
        self._calls: Any = MessageQueue(
            followers, followers, local_reader_ranks=list(ranks), max_chunk_bytes=_CALL_BYTES
        )
        self._meeting, _, _ = super()._distributed_args()
        self._closing = threading.Event()
        self._grace_s = _LOAD_GRACE_S
        self._context: Any = get_mp_context()  # type: ignore[no-untyped-call]
        # vLLM's workers share it; a process that starts finds it only while it is kept here.
        self._lock = self._context.Lock()
        starting = [self._start(rank) for rank in ranks]
        threading.Thread(
            target=self._end_with_a_follower,
            args=([follower.proc for follower in starting],),
            name="tensor-parallel-watch",
            daemon=True,
        ).start()
        self._followers: list[Any] = starting
        try:
            super()._init_executor()
            self._followers = _await_ready(starting)
        except BaseException:
            self._release_followers()
            self._await_followers()
            raise
        for queue in (self._calls, *(follower.worker_response_mq for follower in self._followers)):
            queue.wait_until_ready()
        _unlink_shared_memory()
        self._grace_s = 0.0

    def _start(self, rank: int) -> Any:
        # An embedded interpreter, as in Triton's stub, does not know the program that starts another one.
        multiprocessing.set_executable(str(Path(sys.prefix) / "bin" / "python3"))
        # vLLM starts its worker processes in the same way; from here `compat` prepares them before they import vLLM.
        ready_reader, ready_writer = self._context.Pipe(duplex=False)
        death_reader, death_writer = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_follow,
            kwargs={
                "vllm_config": self.vllm_config,
                "local_rank": rank,
                "rank": rank,
                "distributed_init_method": self._meeting,
                "input_shm_handle": self._calls.export_handle(),
                "ready_pipe": ready_writer,
                "death_pipe": death_reader,
                "shared_worker_lock": self._lock,
                "is_driver_worker": False,
            },
            name=f"rank {rank}",
            daemon=True,
        )
        process.start()
        ready_writer.close()
        death_reader.close()
        return UnreadyWorkerProcHandle(process, rank, ready_reader, death_writer)

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._meeting, 0, 0

    def collective_rpc(  # noqa: PLR0917, vLLM's signature
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a worker's method on every rank; return one answer a rank, or with `single_value` that of rank 0 alone,
        without waiting for the others.
        """
        if not isinstance(method, str):
            raise TypeError(f"{method!r} was to be called on every rank, but a call goes by its name")
        self._calls.enqueue((method, args, kwargs or {}, 0 if single_value else None))
        own = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        return own if single_value else [*own, *map(_answer, self._followers)]

    def shutdown(self) -> None:
        """End all ranks together, since they may wait for each other."""
        self._release_followers()
        super().shutdown()
        self._await_followers()

    def _release_followers(self) -> None:
        self._closing.set()
        for follower in self._followers:
            if follower.death_writer is not None:
                follower.death_writer.close()
                follower.death_writer = None
        self._calls.shutdown()

    def _await_followers(self) -> None:
        for follower in self._followers:
            follower.proc.join(_GRACE_S)
            if follower.proc.is_alive():
                follower.proc.kill()
                follower.proc.join()

    def _end_with_a_follower(self, processes: list[Any]) -> None:
        multiprocessing.connection.wait([process.sentinel for process in processes])
        if not self._closing.wait(self._grace_s):
            codes = {process.name: process.exitcode for process in processes}
            _logger.critical("a process of a split engine ended, so all of it does (exit codes: %s)", codes)
            os.kill(os.getpid(), signal.SIGKILL)


def _unlink_shared_memory() -> None:
    """Remove the names of the memory through which CPU ranks communicate. All ranks have mapped it, so it goes with
    them, however they end.
    """
    if identity := os.environ.get("VLLM_DIST_IDENT"):
        for file in Path("/dev/shm").glob(f"{glob.escape(identity)}-*-cpushm_*"):
            file.unlink(missing_ok=True)


def _await_ready(starting: list[Any]) -> list[Any]:
    try:
        ready: list[Any] = WorkerProc.wait_for_ready(starting)
    except Exception as error:  # vLLM's, without the cause
        raise RuntimeError(
            "another rank of the engine could not be loaded; the log has its error before this"
        ) from error
    return ready


def _answer(follower: Any) -> Any:
    status, result = follower.worker_response_mq.dequeue()
    if status != WorkerProc.ResponseStatus.SUCCESS:
        raise RuntimeError(f"rank {follower.rank} of the engine failed: {result}")
    return result


def _follow(**worker: Any) -> None:
    """Run vLLM's worker in a follower's process, which ends at once with the engine's process.

    At a stop it ends before that process. One that hung or died leaves the follower's stacks in the log.
    """
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
        faulthandler.dump_traceback(2)  # standard error
        os._exit(1)

    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    WorkerProc.worker_main(**worker)


@contextmanager
def failing_together(rank: int) -> Iterator[None]:
    """End this process if it is a follower and fails in a step: the other ranks would wait for it for ever."""
    try:
        yield
    except Exception:
        if not rank:
            raise
        _logger.exception("rank %d of the engine failed", rank)
        logging.shutdown()
        os._exit(1)

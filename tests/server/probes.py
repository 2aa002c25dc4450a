# SPDX-License-Identifier: Apache-2.0
"""A stage in the tests: the real stage and engine, watched and, for chosen seeds, disturbed.

A test's model repository holds a `model.py` that calls `install` and then starts the stage as ever. Messages on
the links and outputs of the engines go to a file of JSON lines a stage. A request whose seed is in `DISTURBANCES`
slows an engine down, loses its sequence or breaks the engine. Requests with other seeds run the real code alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from server.stacks import write_on_signal
from triton_omni.core.heap import uncollected

RECORDS_VARIABLE = "OMNI_TEST_RECORDS"

StageName = Literal["thinker", "talker", "token2wav"]


@dataclass(frozen=True)
class Disturbance:
    """Changes of an engine's behaviour while a sequence of this seed is open."""

    stage: StageName
    step_s: float = 0.0
    """Every step of the engine takes this much longer."""
    fails_after: int | None = None
    """The engine gives this sequence up after so many outputs."""
    breaks_after: int | None = None
    """The engine raises after so many outputs of this sequence."""
    dies_after: int | None = None
    """The stage's process is killed after so many outputs of this sequence, with locks that it shares with Triton."""
    listens_after: int | None = None
    """The engine waits after so many outputs of this sequence until token2wav has made samples of it."""


SLOW_THINKER, SLOW_TALKER, SLOW_TOKEN2WAV = 910_001, 910_002, 910_003
CRAWLING_THINKER = 910_004
SLOW_PREPROCESSING = 910_005
LISTENING_THINKER = 910_006
PREPROCESSING_S = 2.0
"""Additional seconds to preprocess a request of that seed."""
REGIONS = "/dev/shm/triton_omni_"
LOCKS_WITHIN = 4096
"""Triton's first locks are in the first bytes of a region."""
KIND_OFFSET, ROBUST_AND_SHARED = 16, 16 + 128
"""In glibc's `pthread_mutex_t`, and of those whose owner may die."""
LONG_STEP_S = 0.02
"""A step that takes longer is recorded."""
LISTENS_S = 40.0
"""The longest wait for token2wav's samples."""
FAILING_THINKER, FAILING_TALKER, FAILING_TOKEN2WAV = 920_001, 920_002, 920_003
BREAKING_TALKER, BREAKING_TOKEN2WAV = 930_002, 930_003
DYING_TALKER, DYING_TOKEN2WAV = 940_002, 940_003

DISTURBANCES = {
    SLOW_THINKER: Disturbance("thinker", step_s=0.04),
    CRAWLING_THINKER: Disturbance("thinker", step_s=0.15),
    LISTENING_THINKER: Disturbance("thinker", step_s=0.04, listens_after=40),
    SLOW_TALKER: Disturbance("talker", step_s=0.04),
    SLOW_TOKEN2WAV: Disturbance("token2wav", step_s=1.0),
    FAILING_THINKER: Disturbance("thinker", fails_after=5),
    FAILING_TALKER: Disturbance("talker", fails_after=5),
    FAILING_TOKEN2WAV: Disturbance("token2wav", fails_after=0),
    BREAKING_TALKER: Disturbance("talker", breaks_after=5),
    BREAKING_TOKEN2WAV: Disturbance("token2wav", breaks_after=0),
    DYING_TALKER: Disturbance("talker", dies_after=5),
    DYING_TOKEN2WAV: Disturbance("token2wav", dies_after=0),
}


class Recorder:
    """Appends events to this stage's file; safe from every thread, since a line is one write."""

    def __init__(self, stage: StageName) -> None:
        self.folder = Path(os.environ[RECORDS_VARIABLE])
        self._file = os.open(self.folder / f"{stage}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, event: str, key: str, **fields: Any) -> None:
        """Write one event with the system-wide monotonic time."""
        line = json.dumps({"event": event, "key": key, "ns": time.monotonic_ns(), **fields})
        os.write(self._file, line.encode() + b"\n")

    def append(self, key: str, data: bytes) -> None:
        """Append to the file of what a session was sent; to be called by one thread a session."""
        with (self.folder / f"{key}.rows").open("ab") as file:
            file.write(data)

    def wait_for(self, stage: StageName, event: str, key: str) -> None:
        """Return once another stage has written such an event, or after `LISTENS_S`."""
        start = json.dumps({"event": event, "key": key})[:-1]
        deadline = time.monotonic() + LISTENS_S
        while start not in (self.folder / f"{stage}.jsonl").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)


def install(stage: StageName) -> None:
    """Put the probes between `stub.launch` and what it starts; to be called once, before the stage is loaded."""
    recorder = Recorder(stage)
    write_on_signal(recorder.folder, stage)
    probe = {"thinker": _probe_thinker, "talker": _probe_talker, "token2wav": _probe_token2wav}[stage]
    # This imports what the stage would.
    with uncollected(), _untraced():
        _watch_cancellation(recorder)
        probe(recorder)
        if stage != "token2wav":
            _watch_blocks(recorder)


@contextmanager
def _untraced() -> Iterator[None]:
    """Keeps coverage out of the imports of torch and vLLM, which take four times as long under it."""
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


def _watch_cancellation(recorder: Recorder) -> None:
    from triton_omni.session import ledger
    from triton_omni.session.ledger_table import CANCELLED

    class WatchedLedger(ledger.SessionLedger):
        def write(self, key: Any, field: Any, count: int = 0) -> None:
            super().write(key, field, count)
            if field is CANCELLED:
                recorder.write("noticed", key.name)

    ledger.SessionLedger = WatchedLedger


def _watch_blocks(recorder: Recorder) -> None:
    """Record each preemption, and each cached block that is given to another sequence."""
    from vllm.v1.core.block_pool import BlockPool

    from triton_omni.vllm_hooks.shared.compat import Scheduler

    preempt, evict = Scheduler._preempt_request, BlockPool._maybe_evict_cached_block

    def preempt_recorded(self: Any, *args: Any, **named: Any) -> None:
        recorder.write("preempted", "")
        preempt(self, *args, **named)

    def evict_recorded(self: Any, block: Any) -> bool:
        evicted = evict(self, block)
        if evicted:
            recorder.write("evicted", "")
        return evicted

    Scheduler._preempt_request = preempt_recorded  # type: ignore[method-assign]
    BlockPool._maybe_evict_cached_block = evict_recorded  # type: ignore[method-assign]


class _Disturbed:
    """Mixed in before an engine: applies the disturbance of every open sequence, and records what comes out."""

    recorder: Recorder
    stage: StageName

    def begin(self, key: str, seed: int) -> None:
        disturbance = DISTURBANCES.get(seed)
        if disturbance is not None and disturbance.stage == self.stage:
            self._disturbed()[key] = disturbance

    def step(self) -> list[Any]:
        # An engine may drop a sequence within the step that ends it.
        disturbed, began_ns = dict(self._disturbed()), time.monotonic_ns()
        outputs = super().step()
        time.sleep(max((found.step_s for found in disturbed.values()), default=0.0))
        if time.monotonic_ns() > began_ns + LONG_STEP_S * 1e9:
            self.recorder.write("long step", "", began_ns=began_ns)
        return [self._disturb(output, disturbed.get(output.key)) for output in outputs]

    def abort(self, key: str) -> None:
        super().abort(key)
        self._disturbed().pop(key, None)
        self.recorder.write("aborted", key)

    def _disturbed(self) -> dict[str, Disturbance]:
        return self.__dict__.setdefault("_open_disturbances", {})

    def _disturb(self, output: Any, found: Disturbance | None) -> Any:
        if found is None:
            return output
        if found.breaks_after == 0:
            raise RuntimeError("injected: the device is lost")
        if found.dies_after == 0:
            _die_with_locks()
        if found.fails_after == 0:
            super().abort(output.key)
            empty = {"samples": output.samples[:0]} if hasattr(output, "samples") else {}
            return type(output)(output.key, error="injected: not finite", **empty)
        if found.listens_after == 0:
            self.recorder.wait_for("token2wav", "spoken", output.key)
        left = {name: getattr(found, name) for name in ("fails_after", "breaks_after", "dies_after", "listens_after")}
        self._disturbed()[output.key] = dataclasses.replace(
            found, **{name: None if count is None else count - 1 for name, count in left.items()}
        )
        return output


def _die_with_locks() -> None:
    """Die while holding locks that are shared with Triton, as a stage may that is killed at any moment."""
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if REGIONS in line]
    begin = min(int(region[0].partition("-")[0], 16) for region in regions)
    kinds = (ctypes.c_int32 * (LOCKS_WITHIN // 4)).from_address(begin)
    locks = [begin + 4 * at - KIND_OFFSET for at, kind in enumerate(kinds) if kind == ROBUST_AND_SHARED]
    # A thread that waits for one of them may hold the interpreter's lock, which is therefore not let go: neither by the
    # calls nor, on a busy machine, between them. Threads that asked for it before get it during the sleep.
    sys.setswitchinterval(600.0)
    time.sleep(0.1)
    trylock = ctypes.PyDLL(None).pthread_mutex_trylock
    had = [lock for lock in locks if trylock(ctypes.c_void_p(lock)) == 0]
    if not had:
        raise RuntimeError("injected: no lock to die with")
    os.kill(os.getpid(), signal.SIGKILL)


def _probe_thinker(recorder: Recorder) -> None:
    from triton_omni.vllm_hooks.thinker import engine

    class ProbedThinkerEngine(_Disturbed, engine.ThinkerVllmEngine):
        stage = "thinker"

        def add_sequence(self, key: str, placed: Any, sampling: Any, *, want_rows: bool, priority: int = 0) -> None:
            super().add_sequence(key, placed, sampling, want_rows=want_rows, priority=priority)
            prompt, positions = list(placed.prompt_token_ids), placed.positions.tolist()
            recorder.write("added", key, prompt=prompt, positions=positions)
            self.begin(key, sampling.seed)

        def step(self) -> list[Any]:
            outputs = super().step()
            for output in outputs:
                recorder.write("tokens", output.key, ids=list(output.token_ids))
                if output.finish_reason is not None:
                    recorder.write("finished", output.key)
            return outputs

    ProbedThinkerEngine.recorder = recorder
    engine.ThinkerVllmEngine = ProbedThinkerEngine
    _probe_preprocessor(recorder)


def _probe_preprocessor(recorder: Recorder) -> None:
    from triton_omni.thinker import preprocessing

    def is_slow(raw: Any) -> bool:
        return str(SLOW_PREPROCESSING).encode() in (raw.sampling_parameters or b"")

    class ProbedPreprocessor(preprocessing.Preprocessor):
        def preprocess_at_once(self, raw: Any, accepted_ns: int, take_timeout: Any) -> Any:
            return None if is_slow(raw) else super().preprocess_at_once(raw, accepted_ns, take_timeout)

        def preprocess(self, raw: Any, accepted_ns: int, take_timeout: Any, is_wanted: Any = lambda: True) -> Any:
            def decode_slowly(timeout_s: float) -> None:
                take_timeout(timeout_s)
                recorder.write("preparing", "")
                time.sleep(PREPROCESSING_S)

            return super().preprocess(raw, accepted_ns, decode_slowly if is_slow(raw) else take_timeout, is_wanted)

    preprocessing.Preprocessor = ProbedPreprocessor


def _probe_talker(recorder: Recorder) -> None:
    import torch

    from triton_omni.request.parse import talker_seed
    from triton_omni.vllm_hooks.talker import engine

    class ProbedTalkerEngine(_Disturbed, engine.TalkerVllmEngine):
        stage = "talker"

        def open(self, key: str, prompt: Any, sampling: Any, *, priority: int = 0) -> int:
            held = super().open(key, prompt, sampling, priority=priority)
            self.begin(key, sampling.seed - talker_seed(0))
            return held

    def write_message(message: Any) -> None:
        recorder.write("message", **_described(message), rows=message.size)
        if message.rows is not None:
            recorder.append(message.key.name, message.rows.float().cpu().numpy().tobytes())

    def write_part(key: str, rows: torch.Tensor) -> None:
        recorder.write("placed", key, rows=len(rows))
        recorder.append(key, rows.float().cpu().numpy().tobytes())

    _probe_link(write_message, write_part)
    ProbedTalkerEngine.recorder = recorder
    engine.TalkerVllmEngine = ProbedTalkerEngine


def _probe_token2wav(recorder: Recorder) -> None:
    from triton_omni.token2wav import engine

    class ProbedToken2WavEngine(_Disturbed, engine.Token2WavEngine):
        stage = "token2wav"

        def open(self, key: str, voice: str, seed: int, options: Any) -> None:
            super().open(key, voice, seed, options)
            self.begin(key, seed)

        def step(self) -> list[Any]:
            outputs = super().step()
            for output in outputs:
                recorder.write("spoken", output.key)
            return outputs

    def write_message(message: Any) -> None:
        codes = [] if message.codes is None else message.codes.tolist()
        recorder.write("message", **_described(message), codes=codes)

    _probe_link(write_message, lambda key, codes: recorder.write("placed", key, codes=codes.tolist()))
    ProbedToken2WavEngine.recorder = recorder
    engine.Token2WavEngine = ProbedToken2WavEngine


def _probe_link(write_message: Callable[[Any], object], write_part: Callable[[str, Any], object]) -> None:
    """Record each message that a stage accepts, and each part of the ring that it takes."""
    from triton_omni.link.receiver import LinkReceiver
    from triton_omni.link.sessions import LinkSessions

    accept, find_parts = LinkSessions.accept, LinkReceiver._find_parts

    def accept_recorded(self: Any, *args: Any) -> Any:
        arrival = accept(self, *args)
        if arrival is not None:
            write_message(arrival.message)
        return arrival

    def find_recorded(self: Any, session: Any) -> Any:
        parts = find_parts(self, session)
        for part in parts:
            write_part(session.key.name, part)
        return parts

    LinkSessions.accept, LinkReceiver._find_parts = accept_recorded, find_recorded  # type: ignore[method-assign]


def _described(message: Any) -> dict[str, Any]:
    request_id = None if message.session is None else message.session.request_id
    return {"key": message.key.name, "kind": message.kind, "request_id": request_id}

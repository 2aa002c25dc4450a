# SPDX-License-Identifier: Apache-2.0
"""Runs a plan against a server that it starts: clients on threads, a watch on memory, now and then a killed stage."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from triton_omni.core.settings import ThinkerSettings, UnarySettings, load_settings
from triton_omni.session.ledger_table import EPOCH, PID, STAGES
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni.stub.metrics import FAMILIES
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.serve import Supervisor
from triton_omni_client.bench.triton_metrics import fetch, samples
from triton_omni_client.messages import UNARY_MODEL

from .asking import Asker, Ended
from .judging import Kill, Soaked
from .meaning import understood
from .plan import Shares, plan
from .talk import Talk
from .watching import MIB, MemoryWatch

_BACK_WITHIN_S = 180.0
_SETTLE_S = 1.0
"""After a stage is back, until a request is held to what it would get otherwise."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0
"""Seconds that a client waits after a refusal or a failure: doubled after each further one."""
_IDLE_WITHIN_S = 15.0
_TOLD_EVERY_S = 10.0
_LOOK_EVERY_S = 1.0
_BOUNDED_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""On a CPU oneDNN keeps code for each of 1024 shapes by default; new ones come for hours: growth, but no leak."""
_HELD = frozenset(family.name for family in FAMILIES if family.holds)
"""Metrics of the stages that are 0 when nothing is open."""


@dataclass(frozen=True)
class Options:
    """How one run goes."""

    requests: int = 500
    minutes: float | None = None
    """No request begins later; None = no matter how long it takes."""
    concurrency: int = 8
    shares: Shares = field(default_factory=Shares)
    kills: int = 0
    """Stages killed, one after another, in the first third of the requests."""
    seed: int = 0
    length: int = 1
    """Replies are so many times as long."""
    exact: bool = True
    """Equal requests get equal replies, as in float32 and in deterministic mode."""
    sample_every_s: float = 1.0
    growth_allowed_mib: float = 64.0
    warm_up: float = 0.2
    """Share of the run before a process's growth is measured."""


class Run:
    """One run against one server that is ready."""

    def __init__(self, server: Supervisor, options: Options, say: Callable[[str], None]) -> None:
        self._server = server
        self._options = options
        self._say = say
        self._board = StageBoard(ledger_name(server.pid))
        self._asker = Asker(server.grpc_url, server.http_url)
        self._watch = MemoryWatch(server.pid, self._asker.now, options.sample_every_s)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._kills: list[Kill] = []
        self._over = threading.Event()
        self._gone: str | None = None

    def drive(self) -> Soaked:
        """Ask all there is to ask; the server is stopped afterwards."""
        self._watch.start()
        helpers = [threading.Thread(target=act, daemon=True) for act in (self._kill_stages, self._report_progress)]
        for helper in helpers:
            helper.start()
        with ThreadPoolExecutor(self._options.concurrency, thread_name_prefix="soak-client") as pool:
            clients = [pool.submit(self._client) for _ in range(self._options.concurrency)]
            try:
                for client in clients:
                    client.result()
            finally:  # also where a signal ends the run
                self._over.set()
        for helper in helpers:
            helper.join()
        seconds = self._asker.now()
        deaths, left = self._server.deaths, {} if self._gone else self._left()
        self._watch.close()
        self._asker.close()
        self._board.close()
        options = self._options
        return Soaked(
            requests=len(self._ended) if options.minutes is not None else options.requests,
            ended=sorted(self._ended, key=lambda ended: ended.began),
            kills=self._kills,
            processes=self._watch.processes,
            left=left,
            gone=self._gone,
            deaths=deaths,
            stop_s=self._server.stop(),
            seconds=seconds,
            # A cancelled request has its place until the stages have noticed.
            overload_expected=options.concurrency >= _places(self._server.config.model_repository),
            exact=options.exact,
            growth_allowed=options.growth_allowed_mib * MIB,
            warm_up=options.warm_up,
            options=asdict(options),
        )

    def _client(self) -> None:
        options, talk = self._options, Talk()
        pause = _PAUSE_S
        while (number := next(self._numbers)) < options.requests and not self._over.is_set():
            if options.minutes is not None and self._asker.now() > 60 * options.minutes:
                return
            ended = self._asker.ask(talk.follow(plan(number, options.seed, options.shares, options.length)))
            talk.hear(ended)
            with self._lock:
                self._ended.append(ended)
            if ended.outcome == "failed" or (ended.outcome == "refused" and ended.planned.fate != "malformed"):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            elif ended.outcome != "refused":
                pause = _PAUSE_S

    def _kill_stages(self) -> None:
        for number in range(self._options.kills):
            due = self._options.requests * (number + 1) // (3 * self._options.kills + 3)
            while len(self._ended) < due and not self._over.wait(0.05):
                pass
            if self._over.is_set():
                return
            self._kill(STAGES[(self._options.seed + number) % len(STAGES)])

    def _kill(self, stage: Any) -> None:
        killed, epoch = self._asker.now(), self._board.word(EPOCH, stage)
        os.kill(self._board.word(PID, stage), signal.SIGKILL)
        deadline = time.monotonic() + _BACK_WITHIN_S
        while not (self._board.word(EPOCH, stage) > epoch and self._asker.is_ready()) and time.monotonic() < deadline:
            time.sleep(0.1)
        back = self._asker.now()
        self._say(f"{stage} killed, back after {back - killed:.1f} s")
        self._kills.append(Kill(stage, killed, back + _SETTLE_S))

    def _report_progress(self) -> None:
        while not self._ends_within(_TOLD_EVERY_S):
            ended, seconds = len(self._ended), self._asker.now()
            self._say(
                f"{ended} of {self._options.requests} requests in {seconds:.0f} s, {ended / seconds:.1f} a second"
            )

    def _ends_within(self, seconds: float) -> bool:
        """True if the run is over within this time, also because the server is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._over.wait(_LOOK_EVERY_S):
            try:
                self._server.check()
            except ServerError as error:
                self._gone = str(error)
                self._over.set()
        return self._over.is_set()

    def _left(self) -> Mapping[str, float]:
        """Return the contents of the stages once nothing is asked, without those that a killed stage held in Triton."""
        deadline = time.monotonic() + _IDLE_WITHIN_S
        while (held := self._held()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return held

    def _held(self) -> Mapping[str, float]:
        kept = _HELD if self._kills else {*_HELD, "nv_inference_pending_request_count"}
        page = samples(fetch(f"http://{self._server.metrics_url}/metrics"))
        held = {f"{name}{labels}": value for name, labels, value in page if name in kept and value}
        if sessions := self._board.open_sessions():
            held["open sessions of the ledger"] = float(sessions)
        return held


def _places(repository: Path) -> int:
    """How many requests a server takes at once, by the settings of its repository."""
    thinker = load_settings(repository / "thinker" / "1" / "stage.yaml", ThinkerSettings)
    unary = load_settings(repository / UNARY_MODEL / "1" / "stage.yaml", UnarySettings)
    return min(thinker.max_sessions, unary.max_requests)


def soak(config: ServerConfig, options: Options, say: Callable[[str], None] | None = None) -> Soaked:
    """Start a server, drive a run against it, stop it; then hear the replies to known questions.

    Raises:
        ServerError: the server does not start.
    """
    with Supervisor(replace(config, environment={**_BOUNDED_CACHES, **config.environment})) as server:
        soaked = Run(server, options, say or _to_stderr).drive()
    return replace(soaked, meaning=understood(soaked.ended)) if options.shares.known else soaked


def _to_stderr(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)

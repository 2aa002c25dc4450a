# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark: each load in turn on one event loop, until all are done or Ctrl-C; what was measured is kept."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from triton_omni_client.aio import AsyncOmniClient
from triton_omni_client.errors import ConnectionFailed
from triton_omni_client.retry import NO_RETRY

from .conversations import Conversations
from .hops import grown, read_stages
from .load import LoadRun, LoopLag, run_until
from .prompt_length import of_tokens
from .records import Load
from .report import Report, Run
from .resources import Monitor, find_monitor
from .schedule import poisson_arrivals
from .server import server_facts
from .tables import RunProgress, progress
from .workload import Workload

MIN_REQUESTS = 20
"""Requests of a run that names none, at least: the fewest that have a p95."""
REQUESTS_A_PLACE = 4
"""Requests of a closed loop that names none, for each place: begin and end of the run then weigh less."""
OPEN_LOOP_S = 30
"""Length of an open loop that names no number of requests, in seconds."""
LATE_CLIENT_S = 0.05
"""Delay of the load generator's own event loop from which its times are doubted."""


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement.

    `requests` and `warm_up` are for each load; None chooses by the load.
    """

    url: str
    model: str
    metrics_url: str
    loads: Sequence[Load]
    workload: Workload
    requests: int | None = None
    warm_up: int | None = None
    wait_s: float = 0.0
    """How long to wait for the server to be ready."""
    ramp_up_s: float = 0.0
    """Over how long the places of a closed loop begin."""
    listens: bool = False
    """True if clients hear a reply to its end before they ask again."""
    crowds: bool = False
    """True if clients ask at the same time, and again after all were answered."""
    prompt_tokens: int | None = None
    """Length that the prompts are brought to; None leaves them as they are."""

    def requests_of(self, load: Load) -> int:
        """How many requests of a load are measured, or conversations."""
        if self.requests is not None:
            return self.requests
        wanted = load.value * (REQUESTS_A_PLACE if load.mode == "closed" else OPEN_LOOP_S)
        return max(MIN_REQUESTS, math.ceil(wanted))

    def warm_up_of(self, load: Load) -> int:
        """How many requests or conversations come before: as many as a load has places, or those of a second or two."""
        return max(2, math.ceil(load.value)) if self.warm_up is None else self.warm_up


async def measure(plan: Plan, report: Report, console: Console, on_run: Callable[[Run], None]) -> bool:
    """Measure all loads of a plan into the report; whether none was cut short.

    Args:
        plan: what to measure.
        report: takes runs, notes and what is found out about server and machine.
        console: shows progress.
        on_run: told of each run when it is over.

    Raises:
        ConnectionFailed: the server is not ready.
    """
    stop = asyncio.Event()
    with _stop_at_interrupt(stop), ExitStack() as stack:
        async with AsyncOmniClient(plan.url, model=plan.model, retry=NO_RETRY) as client:
            if not await client.wait_ready(plan.wait_s):
                raise ConnectionFailed(await client.obstacle() or f"the model {plan.model} is not ready")
            monitor = await _look_around(plan, report, stack)
            if plan.prompt_tokens is not None:
                plan = await _fit_prompts(plan, plan.prompt_tokens, client, report)
            bench = _Bench(plan, client, monitor, stop, console)
            for load in plan.loads:
                run = await bench.run(load)
                report.runs.append(run)
                report.notes.extend(_doubts(run))
                on_run(run)
                if stop.is_set():
                    break
        report.notes.extend(monitor.notes)
    return not stop.is_set()


async def _look_around(plan: Plan, report: Report, stack: ExitStack) -> Monitor:
    facts = await server_facts(plan.url, plan.model)
    monitor, gpus = await asyncio.to_thread(find_monitor, plan.url, plan.metrics_url, stack)
    stack.enter_context(monitor)
    report.environment = {**report.environment, "url": plan.url, "server": facts.described(), "gpus": gpus}
    report.notes.extend(facts.notes)
    return monitor


async def _fit_prompts(plan: Plan, tokens: int, client: AsyncOmniClient, report: Report) -> Plan:
    workload, found = await of_tokens(client, plan.workload, tokens)
    report.workload = {**report.workload, "prompts": list(workload.prompts), "prompt_tokens": found}
    if set(found) != {tokens}:
        report.notes.append(f"prompts have {min(found)} to {max(found)} tokens where {tokens} were asked for")
    return replace(plan, workload=workload)


@dataclass(frozen=True)
class _Bench:
    """State that all runs of a benchmark share."""

    plan: Plan
    client: AsyncOmniClient
    monitor: Monitor
    stop: asyncio.Event
    console: Console

    async def run(self, load: Load) -> Run:
        turns = self.plan.workload.turns
        requests, warm_up = turns * self.plan.requests_of(load), turns * self.plan.warm_up_of(load)
        before = await read_stages(self.plan.metrics_url)
        self.monitor.take()
        with progress(self.console, load.label, requests + warm_up) as bar:
            async with LoopLag() as lag:
                loop = self._load_run(bar)
                complete = await run_until(self.stop, self._offer(loop, load, requests, warm_up))
        resources = self.monitor.take()
        after = await read_stages(self.plan.metrics_url) if before else None
        run = Run(load, loop.records, resources, complete, lag.worst_s, turns=turns)
        return replace(run, **grown(before, after)) if before and after else run

    def _load_run(self, bar: RunProgress) -> LoadRun:
        workload = self.plan.workload
        if workload.turns == 1:
            return LoadRun(self.client, workload.request, bar)
        conversations = Conversations(workload)
        loop = partial(LoadRun, self.client, conversations.request, bar, answered=conversations.answered)
        return loop(before=partial(conversations.speak, client=self.client)) if workload.speaks else loop()

    def _offer(self, loop: LoadRun, load: Load, requests: int, warm_up: int) -> Coroutine[Any, Any, None]:
        if load.mode == "closed":
            plan = self.plan
            if plan.crowds:
                return loop.crowds(int(load.value), requests, warm_up)
            return loop.closed_loop(
                int(load.value), requests, warm_up, plan.ramp_up_s, listens=plan.listens, turns=plan.workload.turns
            )
        return loop.open_loop(poisson_arrivals(load.value, self.plan.workload.seed), requests, warm_up)


def _doubts(run: Run) -> list[str]:
    if run.client_lag_s is None or run.client_lag_s < LATE_CLIENT_S:
        return []
    return [
        f"{run.load.label}: this client was up to {1000 * run.client_lag_s:.0f} ms late; "
        "its machine is busy, and times may be too long by that"
    ]


@contextlib.contextmanager
def _stop_at_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets `stop`; the second one ends the program as ever."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # no signals on this platform or outside of the main thread
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

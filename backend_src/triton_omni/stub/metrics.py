# SPDX-License-Identifier: Apache-2.0
"""A stage's figures as metrics on Triton's own endpoint.

Setting a Triton metric is a call into the server, so a thread of its own does it ten times a second. It sets only
values that changed; values that change with every message, once a second and at rest. Engine threads only keep the
values.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from triton_omni.core.errors import StageName
from triton_omni.core.metrics import Metric
from triton_omni.link.receiver import LinkLatency, Until
from triton_omni.session.stage import Stage
from triton_omni.stub.metric_families import FAMILIES
from triton_omni.stub.tensors import LinkCounter

INTERVAL_S = 0.1
SLOW_ROUNDS = 10
"""All but what a stage holds is published every so many intervals, and once it holds nothing any more: while messages
pass, most of it changes."""

logger = logging.getLogger(__name__)


class StageMetrics:
    """Publishes what a stage holds, its figures, received link bytes and hop times until closed.

    Args:
        pb_utils: Triton's `triton_python_backend_utils`.
        name: of the stage.
        stage: whose figures are published.
        counter: of the bytes that it received.
        link_latency: how long its messages took, where another stage sends it some.
        starts: how often this server has loaded it.
    """

    def __init__(
        self,
        pb_utils: Any,
        name: StageName,
        stage: Stage,
        counter: LinkCounter,
        link_latency: Mapping[Until, LinkLatency] | None = None,
        *,
        starts: int = 1,
    ) -> None:
        self._name = name
        self._stage = stage
        self._counter = counter
        self._link_latency = link_latency or {}
        self._starts = starts
        self._families: dict[str, Any] = {}
        self._counters: set[str] = set()
        for series, is_counter, meaning in itertools.chain.from_iterable(family.published() for family in FAMILIES):
            kind = pb_utils.MetricFamily.COUNTER if is_counter else pb_utils.MetricFamily.GAUGE
            self._families[series] = pb_utils.MetricFamily(name=series, description=meaning, kind=kind)
            self._counters |= {series} if is_counter else set()
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._published: dict[tuple[str, ...], float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-metrics", daemon=True)

    def start(self) -> None:
        """Begin to publish; further calls do nothing. Not before Triton has finished to initialise the model:
        a metric set meanwhile would be a second call into the server beside that one.
        """
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop publishing and give the metrics back.

        A metric that outlives the model is destroyed when the stub has already closed its shared memory, and
        crashes it.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._published.clear()
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        rested, told = False, ""
        for number in itertools.count():
            if self._stopping.wait(INTERVAL_S):
                return
            try:
                held = list(self._held())
                self._publish(held)
                resting = not any(figure.value for figure in held)
                # A stage that holds nothing any more says so in all its figures at once.
                if number % SLOW_ROUNDS == 0 or (resting and not rested):
                    self._publish(self._slow())
                rested, told = resting, ""
            except Exception as error:
                # The next round may succeed. A failure that lasts is logged once.
                if repr(error) != told:
                    logger.exception("metrics could not be published")
                told = repr(error)

    def _held(self) -> Iterable[Metric]:
        for name, value in dataclasses.asdict(self._stage.stats()).items():
            yield Metric(f"omni_{name}", value)

    def _slow(self) -> Iterable[Metric]:
        yield Metric("omni_stage_starts", self._starts)
        yield from self._stage.metrics()
        for (tensor, device), size in self._counter.snapshot().items():
            yield Metric("omni_link_bytes_total", size, {"tensor": tensor, "device": device})
        for until, times in self._link_latency.items():
            yield from times.metrics("omni_hop_seconds", until=until)

    def _publish(self, figures: Iterable[Metric]) -> None:
        for name, value, labels in figures:
            key = (name, *labels.values())
            if key not in self._metrics:
                self._metrics[key] = self._families[name].Metric(labels={"stage": self._name, **labels})
            self._set(key, value)

    def _set(self, key: tuple[str, ...], value: float) -> None:
        before = self._published.get(key)
        if key[0] in self._counters:
            # Another process of this stage may have counted here before.
            if value > (before or 0):
                self._metrics[key].increment(value - (before or 0))
        elif before != value:
            self._metrics[key].set(value)
        self._published[key] = value

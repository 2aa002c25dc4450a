# SPDX-License-Identifier: Apache-2.0
"""What a stage holds and how long messages took to it, as gauges on Triton's own metrics endpoint.

Setting a Triton metric is a call into the server, so a thread of its own does it, ten times a second (hop times once)
and only when a figure changed; engine threads only keep the figures.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from triton_omni.errors import StageName
from triton_omni.hops import HopTimes, Until
from triton_omni.serving.tensors import LinkCounter
from triton_omni.stage import StageStats

INTERVAL_S = 0.1
HOP_ROUNDS = 10
"""Hop times are published every so many intervals: while messages pass, most of their gauges change."""

_HELP = {
    "sessions": "sessions the stage holds",
    "running": "sequences the engine runs",
    "waiting": "sequences that wait in the engine",
    "kv_blocks_used": "KV cache blocks in use; of token2wav, pages that keep what windows leave to later ones",
    "rows_used": "rows of device memory reserved or held back by open sequences",
    "outbox": "rows or codes that wait to leave",
}

# One gauge a bucket, in the names of a Prometheus histogram: Triton's own histograms take one value a call, which
# would be a call a message.
_HOP_HELP = {
    "bucket": "messages from the stage before that took at most le seconds until they arrived or were taken",
    "count": "messages from the stage before",
    "sum": "seconds that they took until they arrived or were taken",
}

logger = logging.getLogger(__name__)


class StageMetrics:
    """Publishes `stats`, received link bytes and hop times until closed."""

    def __init__(
        self,
        pb_utils: Any,
        stage: StageName,
        stats: Callable[[], StageStats],
        counter: LinkCounter,
        hops: Mapping[Until, HopTimes] | None = None,
    ) -> None:
        self._stats = stats
        self._counter = counter
        self._hops = hops or {}
        self._stage = stage
        self._families = {name: self._family(pb_utils, f"omni_{name}", text) for name, text in _HELP.items()}
        self._gauges = {name: self._families[name].Metric(labels={"stage": stage}) for name in _HELP}
        self._families["link_bytes"] = self._family(
            pb_utils, "omni_link_bytes", "bytes received from the stage before, by device"
        )
        for name, text in _HOP_HELP.items():
            self._families[name] = self._family(pb_utils, f"omni_hop_seconds_{name}", text)
        self._labelled: dict[tuple[str, ...], Any] = {}
        self._published: dict[Any, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{stage}-metrics", daemon=True)

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
        self._gauges.clear()
        self._labelled.clear()
        self._families.clear()

    @staticmethod
    def _family(pb_utils: Any, name: str, text: str) -> Any:
        return pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)

    def _run(self) -> None:
        for number in itertools.count():
            if self._stopping.wait(INTERVAL_S):
                return
            try:
                self._publish()
                if number % HOP_ROUNDS == 0:
                    self._publish_hops()
            except Exception:
                logger.exception("metrics could not be published")
                return

    def _publish(self) -> None:
        for name, value in dataclasses.asdict(self._stats()).items():
            self._set(name, self._gauges[name], value)
        for (tensor, device), size in self._counter.snapshot().items():
            self._set_labelled("link_bytes", size, tensor=tensor, device=device)

    def _publish_hops(self) -> None:
        for until, times in self._hops.items():
            for bound, count in times.buckets():
                self._set_labelled("bucket", count, until=until, le=bound)
            self._set_labelled("count", times.count, until=until)
            self._set_labelled("sum", times.total_s, until=until)

    def _set_labelled(self, family: str, value: float, **labels: str) -> None:
        key = (family, *labels.values())
        if key not in self._labelled:
            self._labelled[key] = self._families[family].Metric(labels={"stage": self._stage, **labels})
        self._set(key, self._labelled[key], value)

    def _set(self, key: Any, metric: Any, value: float) -> None:
        if self._published.get(key) != value:
            metric.set(value)
            self._published[key] = value

# SPDX-License-Identifier: Apache-2.0
"""What a stage holds, as gauges on Triton's own metrics endpoint.

Setting a Triton metric is a call into the server, so a thread of its own does it, ten times a second and only when
a figure changed; engine threads only keep the figures.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from triton_omni.errors import StageName
from triton_omni.serving.tensors import LinkCounter
from triton_omni.stage import StageStats

INTERVAL_S = 0.1

_HELP = {
    "sessions": "sessions the stage holds",
    "running": "sequences the engine runs",
    "waiting": "sequences that wait in the engine",
    "kv_blocks_used": "KV cache blocks in use",
    "rows_used": "rows of device memory reserved or held back by open sequences",
    "outbox": "rows or codes that wait for a credit",
}

logger = logging.getLogger(__name__)


class StageMetrics:
    """Publishes `stats` and received link bytes until closed."""

    def __init__(self, pb_utils: Any, stage: StageName, stats: Callable[[], StageStats], counter: LinkCounter) -> None:
        self._stats = stats
        self._counter = counter
        self._stage = stage
        self._families = {name: self._family(pb_utils, f"omni_{name}", text) for name, text in _HELP.items()}
        self._gauges = {name: self._families[name].Metric(labels={"stage": stage}) for name in _HELP}
        self._families["link_bytes"] = self._family(
            pb_utils, "omni_link_bytes", "bytes received from the stage before, by device"
        )
        self._links: dict[tuple[str, str], Any] = {}
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
        self._links.clear()
        self._families.clear()

    @staticmethod
    def _family(pb_utils: Any, name: str, text: str) -> Any:
        return pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self._publish()
            except Exception:
                logger.exception("metrics could not be published")
                return

    def _publish(self) -> None:
        for name, value in dataclasses.asdict(self._stats()).items():
            self._set(name, self._gauges[name], value)
        for link, size in self._counter.snapshot().items():
            if link not in self._links:
                labels = {"stage": self._stage, "tensor": link[0], "device": link[1]}
                self._links[link] = self._families["link_bytes"].Metric(labels=labels)
            self._set(link, self._links[link], size)

    def _set(self, key: Any, metric: Any, value: float) -> None:
        if self._published.get(key) != value:
            metric.set(value)
            self._published[key] = value

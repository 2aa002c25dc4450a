# SPDX-License-Identifier: Apache-2.0
"""Every metric that the stages publish, and a stage's figures as such metrics on Triton's own endpoint.

Setting a Triton metric is a call into the server, so a thread of its own does it ten times a second. It sets only
values that changed; values that change with every message, once a second and at rest. Engine threads only keep the
values. docs/operating.md has the same table of names, kinds, labels and meanings.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from triton_omni.core.errors import StageName
from triton_omni.core.logs import LastingFailure
from triton_omni.core.metrics import Metric
from triton_omni.link.receiver import LinkLatency, Until
from triton_omni.session.stage import Stage
from triton_omni.stub.tensors import LinkCounter

# --- families ---------------------------------------------------------------------------------------------------------


Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Family:
    """One metric; each of its series also has the label `stage`."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    holds: bool = False
    """True if it is 0 when no session is open."""

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series."""
        return tuple(name for name, _, _ in self.published())

    def published(self) -> Iterator[tuple[str, bool, str]]:
        """Return its name in Triton, True if it is a counter, and its description.

        A histogram is published as one gauge for each bucket, under Prometheus' names: Triton's own histograms would
        need a call for each message.
        """
        if self.kind != "histogram":
            yield self.name, self.kind == "counter", self.meaning
            return
        yield f"{self.name}_bucket", False, f"{self.meaning}: how many were at most le"
        yield f"{self.name}_count", False, f"{self.meaning}: how many"
        yield f"{self.name}_sum", False, f"{self.meaning}: their sum"


FAMILIES: Final = (
    Family("omni_sessions", "gauge", "sessions the stage holds", holds=True),
    Family("omni_running", "gauge", "sequences the engine runs", holds=True),
    Family("omni_waiting", "gauge", "sequences that wait in the engine; of token2wav, windows due", holds=True),
    Family(
        "omni_kv_blocks_used",
        "gauge",
        "KV cache blocks in use; of token2wav, pages of window caches",
        holds=True,
    ),
    Family("omni_rows_used", "gauge", "rows of device memory reserved or held back by open sequences", holds=True),
    Family("omni_outbox", "gauge", "rows or codes that wait to leave", holds=True),
    Family("omni_sessions_by_state", "gauge", "sessions of the thinker by state", ("state",), holds=True),
    Family("omni_leaked_sessions", "gauge", "sessions held 35 s after their end", holds=True),
    Family("omni_credits_used", "gauge", "data messages under way to the next stage", holds=True),
    Family(
        "omni_pool_bytes",
        "gauge",
        "bytes of rows or codes under way to the next stage, on a GPU in Triton's pool of device memory",
        holds=True,
    ),
    Family("omni_sessions_limit", "gauge", "sessions that may be open at once"),
    Family("omni_kv_blocks_limit", "gauge", "KV cache blocks, or pages, that there are"),
    Family("omni_kv_blocks_cached", "gauge", "KV cache blocks that a later prompt may reuse"),
    Family("omni_row_mirror_bytes", "gauge", "memory for the hidden rows of cached tokens"),
    Family("omni_media_cache_bytes", "gauge", "bytes of processed media that a later request may reuse"),
    Family("omni_stage_starts", "gauge", "how often this server loaded the stage"),
    Family(
        "omni_supervisor_faults",
        "gauge",
        "how often the supervisor failed to start a stage or to change readiness; the same in each",
    ),
    Family("omni_device_memory_bytes", "gauge", "memory that torch has on the stage's GPU", ("kind",)),
    Family("omni_resident_memory_bytes", "gauge", "main memory of the stage's process"),
    Family("omni_requests_received_total", "counter", "requests received"),
    Family("omni_requests_ended_total", "counter", "requests ended", ("outcome",)),
    Family("omni_errors_total", "counter", "requests that ended with an error, by its code and the stage's", ("code",)),
    Family("omni_prompt_tokens_total", "counter", "prompt tokens of requests let in"),
    Family("omni_cached_tokens_total", "counter", "prompt tokens that the stage's prefix cache had"),
    Family("omni_media_lookups_total", "counter", "media looked up in the cache of processed media", ("result",)),
    Family("omni_reply_tokens_total", "counter", "reply tokens written"),
    Family("omni_codes_total", "counter", "codec codes drawn, 50 a second of speech"),
    Family("omni_audio_seconds_total", "counter", "seconds of speech sent to clients"),
    Family("omni_link_bytes_total", "counter", "bytes received from the stage before, by device", ("tensor", "device")),
    Family(
        "omni_hop_seconds",
        "histogram",
        "seconds of rows and codes from the stage before until they arrived or were taken",
        ("until",),
    ),
    Family("omni_loop_seconds_total", "counter", "seconds of the stage's loop by what it does", ("doing",)),
    Family(
        "omni_window_seconds",
        "histogram",
        "seconds of a window on the device, its share of a batch by frames",
        ("kind",),
    ),
    Family(
        "omni_window_phase_seconds_total",
        "counter",
        "seconds until windows are launched, for their turn, on the device",
        ("kind", "phase"),
    ),
    Family("omni_batch_size", "histogram", "sequences, or windows, that a step of the engine served"),
    Family("omni_first_text_seconds", "histogram", "seconds from a request to its first text"),
    Family("omni_first_audio_seconds", "histogram", "seconds from a request to its first audio"),
    Family("omni_chunk_gap_seconds", "histogram", "seconds from one chunk of a reply's audio to the next"),
    Family("omni_reply_seconds", "histogram", "seconds from a request to the end of its reply"),
)


# --- publication ------------------------------------------------------------------------------------------------------


INTERVAL_S = 0.1
SLOW_ROUNDS = 10
"""Intervals after which all figures are published, not only those of a stage's contents, since messages change most of
them. An empty stage publishes all at once."""
REMINDER_ROUNDS = 6000
"""Intervals after which a failure that lasts is logged again: ten minutes."""

logger = logging.getLogger(__name__)


class StageMetrics:
    """Publishes a stage's contents and figures, received link bytes and link latencies, until closed.

    Args:
        pb_utils: Triton's `triton_python_backend_utils`.
        name: of the stage.
        stage: the stage whose figures are published.
        counter: of the bytes that it received.
        link_latency: latency of the messages from the stage before, if there is one.
        starts: number of times that this server has loaded the stage.
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
        """Begin to publish; further calls do nothing. Call it only once Triton has initialised the model: setting a
        metric before would be a second call into the server at the same time.
        """
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop publishing and release the metrics.

        A metric that outlives the model is destroyed after the stub has closed its shared memory, which crashes the
        stub.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._published.clear()
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        rested, failure, told_at = False, LastingFailure(), 0
        for number in itertools.count():
            if self._stopping.wait(INTERVAL_S):
                return
            try:
                held = list(self._held())
                self._publish(held)
                resting = not any(figure.value for figure in held)
                # A stage that has become empty publishes all its figures at once.
                if number % SLOW_ROUNDS == 0 or (resting and not rested):
                    self._publish(self._slow())
                rested = resting
                if failure.ends():
                    logger.warning("metrics are published again")
            except Exception as error:
                # The next round may succeed. A failure that lasts is logged now and then.
                if failure.begins(repr(error)) or number - told_at >= REMINDER_ROUNDS:
                    logger.exception("metrics could not be published")
                    told_at = number

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

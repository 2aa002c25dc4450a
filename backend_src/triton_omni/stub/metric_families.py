# SPDX-License-Identifier: Apache-2.0
"""Every metric that the stages publish: its name, kind, labels and meaning. docs/operating.md has the same table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Family:
    """One metric; each of its series has the label `stage`, too."""

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

        A histogram is a gauge a bucket, in the names of Prometheus': Triton's own histograms take one value a call,
        which would be a call a message.
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
        "KV cache blocks in use; of token2wav, pages that keep what windows leave to later ones",
        holds=True,
    ),
    Family("omni_rows_used", "gauge", "rows of device memory reserved or held back by open sequences", holds=True),
    Family("omni_outbox", "gauge", "rows or codes that wait to leave", holds=True),
    Family("omni_sessions_by_state", "gauge", "sessions of the thinker by state", ("state",), holds=True),
    Family("omni_leaked_sessions", "gauge", "sessions held though they have been over for 35 s", holds=True),
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
    Family("omni_stage_starts", "gauge", "how often this server has loaded the stage"),
    Family(
        "omni_supervisor_faults",
        "gauge",
        "how often the supervisor failed to start a stage or to change readiness; the same in each stage",
    ),
    Family("omni_device_memory_bytes", "gauge", "memory that torch has on the stage's GPU", ("kind",)),
    Family("omni_resident_memory_bytes", "gauge", "main memory of the stage's process"),
    Family("omni_requests_received_total", "counter", "requests received"),
    Family("omni_requests_ended_total", "counter", "requests ended", ("outcome",)),
    Family("omni_errors_total", "counter", "requests that ended with an error, by its code and the stage's", ("code",)),
    Family("omni_prompt_tokens_total", "counter", "prompt tokens of the requests that were let in"),
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
    Family("omni_window_seconds", "histogram", "seconds of a window, its share of a batch by frames", ("kind",)),
    Family("omni_batch_size", "histogram", "sequences, or windows, that a step of the engine gave something for"),
    Family("omni_first_text_seconds", "histogram", "seconds from a request to its first text"),
    Family("omni_first_audio_seconds", "histogram", "seconds from a request to its first audio"),
    Family("omni_chunk_gap_seconds", "histogram", "seconds from one chunk of a reply's audio to the next"),
    Family("omni_reply_seconds", "histogram", "seconds from a request to the end of its whole reply"),
)

# SPDX-License-Identifier: Apache-2.0
"""The benchmark's figures from the server's histograms of hops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from triton_omni_client.bench import hops
from triton_omni_client.bench.hops import HopTimes, growth, parse_hops, read_stages
from triton_omni_client.bench.records import Load
from triton_omni_client.bench.report import Report, Run
from triton_omni_client.bench.tables import run_lines


def page(stage: str, until: str, counts: tuple[int, int, int], sum_s: float) -> str:
    """Messages of at most 1 ms, of at most 2 ms, and all."""
    labels = f'stage="{stage}",until="{until}"'
    bounds = zip(("0.001", "0.002", "+Inf"), counts, strict=True)
    lines = [f'omni_hop_seconds_bucket{{le="{bound}",{labels}}} {count}' for bound, count in bounds]
    # Triton writes them in no order.
    return "\n".join([*lines[::-1], f"omni_hop_seconds_sum{{{labels}}} {sum_s}", 'omni_waiting{stage="talker"} 3', ""])


def test_the_growth_of_a_histogram_gives_mean_and_interpolated_percentiles() -> None:
    before = parse_hops(page("talker", "arrived", (10, 10, 12), 9.0))
    after = parse_hops(page("talker", "arrived", (20, 40, 52), 9.2))
    # 10 within 1 ms and 20 within 2 ms of 40: rank 20 lies in the middle of the second bucket, rank 38 in the last.
    assert growth(before, after) == {
        "talker": {"arrived": HopTimes(40, pytest.approx(0.005), pytest.approx(0.0015), None)}
    }


def test_a_stage_that_was_not_there_before_counts_from_nothing() -> None:
    after = parse_hops(page("talker", "taken", (0, 20, 20), 0.03) + page("token2wav", "taken", (0, 0, 0), 0))
    assert growth({}, after) == {
        "talker": {"taken": HopTimes(20, pytest.approx(0.0015), pytest.approx(0.0015), pytest.approx(0.00195))}
    }


def test_a_percentile_within_the_first_bound_counts_from_nothing() -> None:
    found = growth({}, parse_hops(page("talker", "taken", (20, 20, 20), 0.01)))
    assert found["talker"]["taken"] == HopTimes(20, 0.0005, pytest.approx(0.0005), pytest.approx(0.00095))


def test_too_few_messages_have_no_percentile() -> None:
    found = growth({}, parse_hops(page("talker", "taken", (1, 1, 1), 0.0005)))
    assert found["talker"]["taken"] == HopTimes(1, 0.0005, None, None)


def test_what_is_no_hop_is_left_out() -> None:
    assert parse_hops("omni_waiting 3\nomni_hop_seconds_count 3\n") == {}


@pytest.fixture
def metrics_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(hops, "SETTLE_S", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page("talker", "arrived", (1, 2, 3), 0.1).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def test_histograms_are_read_from_the_metrics_page(metrics_url: str) -> None:
    found = asyncio.run(read_stages(metrics_url))
    assert found is not None
    assert found.hops["talker", "arrived"].buckets == {0.001: 1, 0.002: 2, float("inf"): 3}
    assert found.hops["talker", "arrived"].sum_s == 0.1
    assert asyncio.run(read_stages("http://127.0.0.1:1/metrics")) is None


def test_hops_are_printed_and_reported() -> None:
    times = {"talker": {"arrived": HopTimes(20, 0.001, 0.00123, 0.004), "taken": HopTimes(20, 0.002, 0.0025, None)}}
    run = Run(Load("closed", 1), [], hops=times)
    assert "hops to talker, ms, p50/p95 until arrived 1.23/4.00 · taken 2.50/-" in run_lines(run)
    (written,) = Report({}, {}, [run]).to_json()["runs"]
    assert written["hops"]["talker"]["arrived"] == {"messages": 20, "mean_s": 0.001, "p50_s": 0.00123, "p95_s": 0.004}

# SPDX-License-Identifier: Apache-2.0
"""Gauges of a stage: published when they change, given back on close, and no trouble to anybody else."""

import time

import pytest
import torch

from fake_pb_utils import PbUtils
from triton_omni.core.metrics import Metric
from triton_omni.link.receiver import LinkLatency
from triton_omni.session.stage import StageStats
from triton_omni.stub import metrics
from triton_omni.stub.metrics import FAMILIES, StageMetrics
from triton_omni.stub.tensors import LinkCounter
from waiting import wait_for


class Stats:
    """A stage with figures that a test sets."""

    def __init__(self):
        self.now, self.more, self.calls = StageStats(0, 0, 0, 0, 0, 0), [], 0

    def stats(self):
        self.calls += 1
        return self.now

    def metrics(self):
        yield from self.more


@pytest.fixture
def stats(monkeypatch):
    monkeypatch.setattr(metrics, "INTERVAL_S", 0.005)
    monkeypatch.setattr(metrics, "SLOW_ROUNDS", 2)
    return Stats()


@pytest.fixture
def pb_utils():
    return PbUtils()


@pytest.fixture
def counter():
    return LinkCounter()


@pytest.fixture
def published(pb_utils, stats, counter):
    published = StageMetrics(pb_utils, "talker", stats, counter)
    published.start()
    yield published
    published.close()


def family(pb_utils, name):
    return next(family for family in pb_utils.families if family.name == name)


def gauge(pb_utils, name):
    [metric] = family(pb_utils, name).metrics
    return metric


def last(pb_utils):
    """The last value of every series that has labels of its stage alone."""
    alone = {f.name: f.metrics[0] for f in pb_utils.families if f.metrics}
    return {name: metric.values[-1] for name, metric in alone.items() if metric.labels == {"stage": "talker"}}


def rounds(stats, count=3):
    target = stats.calls + count
    wait_for(lambda: stats.calls >= target)


def test_every_figure_has_a_gauge_with_the_stages_label(published, pb_utils, stats):
    stats.now = StageStats(sessions=1, running=2, waiting=3, kv_blocks_used=4, rows_used=5, outbox=6)
    rounds(stats)
    assert last(pb_utils) == {
        "omni_sessions": 1,
        "omni_running": 2,
        "omni_waiting": 3,
        "omni_kv_blocks_used": 4,
        "omni_rows_used": 5,
        "omni_outbox": 6,
        "omni_stage_starts": 1,
    }
    assert published


def test_every_family_is_made_once_with_its_kind(published, pb_utils):
    assert published
    made = {f.name: f.kind for f in pb_utils.families}
    assert len(made) == len(pb_utils.families)
    assert {name for name, kind in made.items() if kind == "counter"} == {
        family.name for family in FAMILIES if family.kind == "counter"
    }
    assert made.keys() == {name for family in FAMILIES for name in family.series}


def test_a_family_s_name_tells_its_kind():
    for family in FAMILIES:
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.kind != "histogram" or family.name.endswith(("_seconds", "_size")), family.name


def test_a_counter_is_told_what_was_added_and_begins_at_nothing(published, pb_utils, stats):
    assert published
    for value in (0, 3, 3, 8):
        stats.more = [Metric("omni_codes_total", value)]
        rounds(stats, 5)
    assert gauge(pb_utils, "omni_codes_total").values == [3, 8]


def test_labels_are_added_to_the_stage_s_and_may_name_another(published, pb_utils, stats):
    assert published
    stats.more = [
        Metric("omni_errors_total", 1, {"stage": "token2wav", "code": "internal"}),
        Metric("omni_errors_total", 2, {"stage": "thinker", "code": "internal"}),
    ]
    rounds(stats, 5)
    found = {m.labels["stage"]: (m.labels["code"], m.values) for m in family(pb_utils, "omni_errors_total").metrics}
    assert found == {"token2wav": ("internal", [1]), "thinker": ("internal", [2])}


def test_nothing_is_set_before_the_start_and_starting_again_is_harmless(pb_utils, stats, counter):
    metrics = StageMetrics(pb_utils, "talker", stats, counter)
    time.sleep(0.03)
    assert stats.calls == 0
    metrics.start()
    metrics.start()
    rounds(stats)
    metrics.close()


def test_what_never_started_closes(pb_utils, stats, counter):
    StageMetrics(pb_utils, "talker", stats, counter).close()
    assert stats.calls == 0


def test_a_figure_is_set_only_when_it_changes(published, pb_utils, stats):
    assert published
    rounds(stats)
    for value in (4, 4, 0):
        stats.now = StageStats(value, 0, 0, 0, 0, 0)
        rounds(stats)
    assert gauge(pb_utils, "omni_sessions").values == [0, 4, 0]
    assert gauge(pb_utils, "omni_running").values == [0]


def test_a_stage_that_comes_to_rest_tells_all_at_once(pb_utils, stats, counter, monkeypatch):
    monkeypatch.setattr(metrics, "SLOW_ROUNDS", 10**9)
    published = StageMetrics(pb_utils, "talker", stats, counter)
    for held, told in ((0, 0), (4, 2), (0, 1)):
        stats.more, stats.now = [Metric("omni_credits_used", told)], StageStats(held, 0, 0, 0, 0, 0)
        published.start()
        rounds(stats, 5)
    assert gauge(pb_utils, "omni_sessions").values == [0, 4, 0]
    assert gauge(pb_utils, "omni_credits_used").values == [0, 1]
    published.close()


def test_received_bytes_are_told_by_tensor_and_device(published, pb_utils, stats, counter):
    assert published
    counter.count("ROWS", torch.ones(4))
    counter.count("ROWS", torch.ones(4, device="meta"))
    rounds(stats, 5)
    counter.count("ROWS", torch.ones(1))
    rounds(stats, 5)
    links = {m.labels["device"]: (m.labels, m.values) for m in family(pb_utils, "omni_link_bytes_total").metrics}
    assert links["cpu"] == ({"stage": "talker", "tensor": "ROWS", "device": "cpu"}, [16, 20])
    assert links["meta"][1] == [16]


def test_hop_times_are_a_cumulative_histogram(pb_utils, stats, counter):
    times = LinkLatency()
    for seconds in (0.00005, 0.001, 0.0012, 7.0):
        times.measure(10**9, 10**9 + round(seconds * 1e9))
    times.measure(10**9, 10**9 - 5)
    metrics = StageMetrics(pb_utils, "talker", stats, counter, {"arrived": times})
    metrics.start()
    rounds(stats)
    found = {m.labels["le"]: (m.labels, m.values) for m in family(pb_utils, "omni_hop_seconds_bucket").metrics}
    assert {bound: values for bound, (_, values) in found.items() if bound in ("0.0001", "0.0005", "0.001")} == {
        "0.0001": [2],
        "0.0005": [2],
        "0.001": [3],
    }
    assert found["1"][1] == [4]
    assert found["+Inf"] == ({"stage": "talker", "until": "arrived", "le": "+Inf"}, [5])
    assert gauge(pb_utils, "omni_hop_seconds_count").values == [5]
    assert gauge(pb_utils, "omni_hop_seconds_sum").values == [pytest.approx(7.00225)]
    metrics.close()
    assert metrics._metrics == {}


def test_after_close_nothing_is_set_and_no_metric_is_held(published, pb_utils, stats):
    rounds(stats)
    published.close()
    calls = stats.calls
    stats.now = StageStats(9, 0, 0, 0, 0, 0)
    time.sleep(0.03)
    assert stats.calls == calls
    assert gauge(pb_utils, "omni_sessions").values == [0]
    assert [published._metrics, published._families, published._published] == [{}] * 3


def test_metrics_go_on_after_a_failure_and_the_log_has_each_once(published, pb_utils, stats, caplog):
    rounds(stats)
    sessions = gauge(pb_utils, "omni_sessions")
    sessions.fault = RuntimeError("no room")
    stats.now = StageStats(9, 0, 0, 0, 0, 0)
    rounds(stats)
    rounds(stats)
    sessions.fault = None
    wait_for(lambda: sessions.values[-1:] == [9])
    assert caplog.text.count("metrics could not be published") == 1
    wait_for(lambda: caplog.text.count("metrics are published again") == 1)
    sessions.fault = RuntimeError("no room")
    stats.now = StageStats(8, 0, 0, 0, 0, 0)
    rounds(stats)
    rounds(stats)
    assert caplog.text.count("metrics could not be published") == 2


def test_a_failure_that_lasts_is_logged_again(published, pb_utils, stats, caplog, monkeypatch):
    monkeypatch.setattr(metrics, "REMINDER_ROUNDS", 3)
    rounds(stats)
    gauge(pb_utils, "omni_sessions").fault = RuntimeError("no room")
    stats.now = StageStats(9, 0, 0, 0, 0, 0)
    wait_for(lambda: caplog.text.count("metrics could not be published") >= 3)

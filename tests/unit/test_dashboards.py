# SPDX-License-Identifier: Apache-2.0
"""Dashboard, alerts and the documented table ask for metrics that there are, by labels that these have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from observed import ALERTS, DASHBOARD, TRITONS_OWN, alert_rules, dashboard_queries, named_metrics
from triton_omni.stub.metrics import FAMILIES
from triton_omni_gateway.metrics import Metrics

ROOT = Path(__file__).parents[2]


def gateway_series() -> dict[str, set[str]]:
    """Labels of the gateway's series, by their names."""
    metrics = Metrics()
    metrics.answered("other", 200, 0.5)
    metrics.responded("completed", "stop")
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {sample.name: set(sample.labels) for sample in samples}


GATEWAYS = gateway_series()
SERIES = {series: set(family.labels) for family in FAMILIES for series in family.series} | GATEWAYS
OF_PROMETHEUS = {"instance", "job", "le"}
QUERIES = {**dashboard_queries(), **{rule["alert"]: rule["expr"] for rule in alert_rules()}}


def selected(query: str) -> Iterator[tuple[str, str]]:
    """Each metric of a query with a label that is asked of it."""
    for name, labels in re.findall(r"\b((?:omni|nv)_\w+)\{([^}]*)\}", query):
        for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", labels):
            yield name, label


@pytest.mark.parametrize("title", QUERIES)
def test_every_metric_that_is_asked_for_is_published(title: str) -> None:
    named = named_metrics(QUERIES[title])
    assert named
    assert named - SERIES.keys() <= TRITONS_OWN


@pytest.mark.parametrize("title", QUERIES)
def test_every_label_that_is_asked_for_is_one_of_its_metric_s(title: str) -> None:
    query = QUERIES[title]
    for name, label in selected(query):
        assert name in TRITONS_OWN or label in {"stage", *SERIES[name], *OF_PROMETHEUS}, (name, label)
    named = [SERIES[name] for name in named_metrics(query) if name in SERIES]
    known = {"stage", *OF_PROMETHEUS, *(label for labels in named for label in labels)}
    for grouped in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= known


@pytest.mark.parametrize("title", QUERIES)
def test_quantiles_are_of_buckets_and_rates_of_what_only_grows(title: str) -> None:
    query = QUERIES[title]
    assert query.count("(") == query.count(")")
    for name in re.findall(r"\brate\((\w+)", query):
        assert name.endswith(("_total", "_bucket", "_count", "_sum")), name
    if "histogram_quantile" in query:
        assert re.search(r"by \([^)]*\ble\b", query)
        assert all(name.endswith("_bucket") for name in named_metrics(query))


def test_every_published_metric_is_on_the_dashboard() -> None:
    shown = set().union(*map(named_metrics, dashboard_queries().values()))
    missing = [family.name for family in FAMILIES if not shown & set(family.series)]
    of_histograms = [{f"{name.removesuffix('_sum')}{end}" for end in ("_sum", "_bucket")} for name in GATEWAYS]
    missing += [name for name, also in zip(GATEWAYS, of_histograms, strict=True) if not shown & {name, *also}]
    assert [name for name in missing if not name.endswith("_count")] == []


def test_panels_have_their_own_place_and_number() -> None:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(taken)) == len(taken)


def test_alerts_say_what_they_mean() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
    assert yaml.safe_load(ALERTS.read_text()).keys() == {"groups"}


def test_the_documented_table_is_what_is_published() -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(omni_\w+)` \| (\w+) \| ?(.*?) ?\| (.*?) \|$", text, re.MULTILINE)
    assert documented == [
        (family.name, family.kind, ", ".join(f"`{label}`" for label in family.labels), family.meaning)
        for family in FAMILIES
    ]
    assert "\nThe first ten are 0 when no session is open.\n" in text
    assert {name for name, *_ in documented[:10]} == {family.name for family in FAMILIES if family.holds}

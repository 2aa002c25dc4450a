# SPDX-License-Identifier: Apache-2.0
"""Queries of the dashboard and the alerts, for tests with and without a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "triton-omni.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
TRITONS_OWN = {"nv_inference_pending_request_count"}
OF_THE_GATEWAY = "omni_gateway_"
"""Prefix of the names of the gateway's metrics."""
OF_A_GPU = {"omni_device_memory_bytes"}
"""Metrics that there are only where there is a GPU."""


def dashboard_queries() -> dict[str, str]:
    """Queries of the dashboard by panel and letter, its variables' among them."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    variables = (item for item in dashboard["templating"]["list"] if item["type"] == "query")
    return found | {f"variable {item['name']}": item["query"] for item in variables}


def alert_rules() -> list[dict[str, Any]]:
    """All rules of the example alerts."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def named_metrics(query: str) -> set[str]:
    """Names of the metrics that a query of Prometheus asks for."""
    return set(re.findall(r"\b(?:omni|nv)_\w+", query))

# SPDX-License-Identifier: Apache-2.0
"""Figures of a measurement: times of one thing under one label, summed up as percentiles, and ratios of two of them.

Pure; it knows nothing of stages or devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from triton_omni_client.bench.statistics import percentile

Unit = Literal["ms", "audio-s/s", "dB"]
OURS = "triton-omni"
WITHOUT_TRITON = "without-triton"
"""Our stages, with queues between them."""
UNSEEDED = "unseeded"
"""One generator for all."""
READY: Mapping[str, Any] = {"ready": {}}
"""The object that precedes a measurement's figures: its engine is ready. Decoders say their facts here."""


@dataclass(frozen=True)
class Metric:
    """One measured quantity: `name` and `parameters` say of what, `by` which implementation was measured."""

    name: str
    by: str
    parameters: Mapping[str, Any]
    unit: Unit
    values: tuple[float, ...]

    def summary(self) -> dict[str, Any]:
        """Return it in the report's form; percentiles interpolate linearly (NumPy's `linear`).

        Fewer than ten values have no p90, but a p50, of which ratios are.
        """
        values = np.asarray(self.values)
        return {
            "name": self.name,
            "by": self.by,
            "parameters": dict(self.parameters),
            "unit": self.unit,
            "count": len(values),
            "p50": float(np.percentile(values, 50)),
            "p90": percentile(self.values, 90),
            "mean": float(values.mean()),
            "min": float(values.min()),
            "max": float(values.max()),
        }


def milliseconds(
    name: str, by: str, seconds: Sequence[float], parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Summary of times given in seconds."""
    return Metric(name, by, parameters or {}, "ms", tuple(value * 1e3 for value in seconds)).summary()


@dataclass(frozen=True)
class Comparison:
    """Names two implementations and the direction of the ratio of their medians."""

    name: str
    ours: str
    reference: str
    of: Literal["ours / reference", "reference / ours"]


COMPARISONS = (
    Comparison("thinker_step", OURS, "vllm", "ours / reference"),
    Comparison("talker_step", OURS, "vllm", "ours / reference"),
    Comparison("first_token", OURS, "vllm", "ours / reference"),
    Comparison("draw", OURS, UNSEEDED, "ours / reference"),
    Comparison("noise", OURS, UNSEEDED, "ours / reference"),
    Comparison("token2wav_offline", OURS, "hf", "reference / ours"),
    Comparison("pipeline_first_text", OURS, WITHOUT_TRITON, "ours / reference"),
    Comparison("pipeline_first_audio", OURS, WITHOUT_TRITON, "ours / reference"),
    Comparison("pipeline_reply", OURS, WITHOUT_TRITON, "ours / reference"),
)


def ratios(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of the medians of figures of one name and equal parameters; a figure without its partner has none."""
    found = []
    for comparison in COMPARISONS:
        named = [figure for figure in figures if figure["name"] == comparison.name]
        references = {_place(figure): figure for figure in named if figure["by"] == comparison.reference}
        for figure in named:
            reference = references.get(_place(figure))
            if figure["by"] == comparison.ours and reference is not None:
                found.append(_ratio(comparison, figure, reference))
    return found


def _place(figure: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(figure["parameters"].items()))


def _ratio(comparison: Comparison, ours: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    above, below = (ours, reference) if comparison.of == "ours / reference" else (reference, ours)
    return {
        "name": comparison.name,
        "parameters": dict(ours["parameters"]),
        "of": comparison.of,
        "ours": comparison.ours,
        "reference": comparison.reference,
        "ratio": above["p50"] / below["p50"],
    }

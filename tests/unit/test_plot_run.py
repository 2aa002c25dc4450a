# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs: the panels and points that figures have, old and new."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import typer
from matplotlib import image

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "plot_run.py"))
FIRST_AUDIO = ["one request", "one conversation", "32 conversations at once, p95", "listeners of 6 s replies"]
LISTENERS = ["first audio, p50", "first audio, p95", "replies without a gap", "silence of a reply"]


def over_starts(*variants: str) -> dict[str, dict[str, list[float]]]:
    """Figures of listeners as `over_starts.py` names them; one place has no p95."""
    found = {
        f"{figure}/{variant}/listeners-{places}": {"values": [places, 2 * places]}
        for variant in variants
        for places in (128, 1, 48)
        for figure in SCRIPT["LISTENERS"]
        if (figure, places) != ("first_audio_p95", 1)
    }
    return {**found, "first_audio_p95/fast/together": {"values": [400.0]}}


def test_listeners_have_a_line_for_each_variant() -> None:
    figures = over_starts("reference", "with-envoy-fast")
    drawn = SCRIPT["panels"](figures)
    assert [panel.title for panel in drawn] == LISTENERS
    for panel in drawn:
        assert list(panel.lines) == ["reference", "with-envoy-fast"]
        places = [1, 48, 128] if panel.title != "first audio, p95" else [48, 128]
        for keys in panel.lines.values():
            assert list(SCRIPT["points"](figures, keys).items()) == [(each, [each, 2 * each]) for each in places]


def test_a_kept_run_is_drawn_as_before() -> None:
    figures = json.loads((ROOT / "docs" / "gpu-runs" / "2026-11-28-b.json").read_text())["figures"]
    drawn = SCRIPT["panels"](figures)
    assert [panel.title for panel in drawn] == FIRST_AUDIO
    found = [{label: SCRIPT["points"](figures, keys) for label, keys in panel.lines.items()} for panel in drawn]
    assert found[0].pop("shipped") == {}
    assert [[list(line) for line in lines.values()] for lines in found] == [
        [[100, 1000, 8000, 16000]] * 2,
        [list(range(1, 11))] * 2,
        [list(range(1, 11))] * 2,
        [[1, 4, 8, 16, 32, 48, 64], [8, 16, 32, 48, 64]],
    ]


def test_prompts_of_over_starts_have_a_line() -> None:
    figures = {f"first_audio_p50/shipped/prompt-{length}": {"values": [0.1 * length]} for length in (8000, 100)}
    (panel,) = SCRIPT["panels"](figures)
    assert panel.title == "one request"
    assert SCRIPT["points"](figures, panel.lines["shipped"]) == {100: [10], 8000: [800]}


def test_a_picture_has_a_panel_beside_the_other(tmp_path: Path) -> None:
    run, picture = tmp_path / "figures.json", tmp_path / "listeners.png"
    run.write_text(json.dumps({"figures": over_starts("reference")}))
    SCRIPT["main"](run, picture)
    height, width, _ = image.imread(picture).shape
    assert (width, height) == (4 * 4 * 90, 342)


def test_a_run_without_such_figures_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "figures.json"
    run.write_text('{"figures": {"first_audio_p95/fast/together": {"values": [400]}}}')
    with pytest.raises(typer.BadParameter, match=r"figures\.json has no figure of listeners, prompts or turns$"):
        SCRIPT["main"](run, tmp_path / "none.png")

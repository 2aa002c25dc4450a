# SPDX-License-Identifier: Apache-2.0
"""Prints what each rule does to first audio, gaps and speech a second: `python scripts/simulate_policy`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

if not __package__:
    # Run as a folder, Python puts the folder itself on the path instead of its parent.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from simulate_policy.costs import MEASURED, read_costs
from simulate_policy.effects import LOADS, PROMPT_TOKENS, RULES_OFF, simulate
from simulate_policy.server import TALKER_TOKENS


def main(
    costs: Annotated[Path, typer.Option(help="costs of the steps, JSON", exists=True, dir_okay=False)] = MEASURED,
    prompt_tokens: Annotated[
        int, typer.Option(help="of each request; it fits into one step", min=1, max=TALKER_TOKENS)
    ] = PROMPT_TOKENS,
) -> None:
    """Simulate every load with all rules, and with each rule switched off."""
    read = read_costs(costs)
    table = Table("load", "rules", "first audio p50", "p95", "with gaps", "silence", "speech a second")
    for name, load in LOADS.items():
        for rules, policies in RULES_OFF.items():
            found = simulate(load.prompted(prompt_tokens), read, policies)
            table.add_row(
                name,
                rules,
                f"{found.first_audio_p50_ms:.0f} ms",
                f"{found.first_audio_p95_ms:.0f} ms",
                str(found.replies_with_gaps),
                f"{found.silence_s:.1f} s",
                f"{found.speech_per_second:.1f} s",
            )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

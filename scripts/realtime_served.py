# SPDX-License-Identifier: Apache-2.0
"""Starts a server and a gateway, and measures realtime sessions of them (`realtime_times.py`).

    python scripts/realtime_served.py --model random:7b --mps -o realtime.json

Each run has every number of sessions. Replies have 12 s of speech at most, by the server's settings, and random weights
rarely end one earlier. The report, written after every run, has figures as files of docs/gpu-runs have them: a value
for each run.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from compare.running import serving
from compare.variants import Variant
from realtime_times import Load, Times, measure, read_question

from triton_omni.core.profile import Profile
from triton_omni.supervisor.model_folder import model_folder
from triton_omni_client.bench.statistics import percentile
from triton_omni_client.options import check_writable

ROOT: Final = Path(__file__).resolve().parent.parent
SPOKEN, SPOKEN_S = ROOT / "docs" / "images" / "reply.wav", 1.5
"""Speech that a detector takes for speech, and how much of it is a question."""
VARIANT: Final = Variant(
    "realtime", Profile("realtime", {"thinker": {"max_new_tokens": 80}, "talker": {"max_codes": 600}})
)
SESSIONS: Final = (1, 32)
TURNS: Final = {1: 3}
"""Turns of each kind by number of sessions, where they are not two."""
CUTS: Final = {1: 26}
"""The same of turns that are interrupted. A tenth end before; twenty are needed for a p95."""


@contextmanager
def gateway(grpc_url: str) -> Iterator[str]:
    """A gateway before a server; its address.

    Raises:
        SystemExit: it did not start, and has told why.
    """
    command = [sys.executable, "-m", "triton_omni_gateway", "--port", "0", "--url", grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            ready = process.stdout.readline() if process.stdout else ""
            if not ready.startswith("READY openai="):
                raise SystemExit("the gateway did not start")
            yield ready.split()[1].removeprefix("openai=").removesuffix("/v1")
        finally:
            process.terminate()


def figures(size: str, runs: Sequence[dict[int, Times]]) -> dict[str, Any]:
    """Median and p95 of each kind by number of sessions, a value for each run that has it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for sessions, times in run.items():
            for kind, found in times.found.items():
                for percent in (50, 95):
                    if (value := percentile(found, percent)) is not None:
                        values[f"{kind}_p{percent}/{size}/{sessions}-sessions"].append(round(value, 1))
    return {key: {"values": found, "unit": "ms", "part": "realtime"} for key, found in sorted(values.items())}


async def one_run(address: str, metrics_url: str, counts: Sequence[int]) -> dict[int, Times]:
    """Measure each number of sessions."""
    question, run = read_question(SPOKEN, SPOKEN_S), {}
    for sessions in counts:
        metrics = metrics_url if sessions == 1 else ""
        turns, cuts = (of.get(sessions, 2) for of in (TURNS, CUTS))
        load = Load(address, question, sessions=sessions, turns=turns, cuts=cuts, metrics=metrics)
        run[sessions] = await measure(load)
        print("\n".join([f"\n{sessions} sessions\n", *run[sessions].lines()]), flush=True)
    return run


def main(
    output: Annotated[Path, typer.Option("-o", "--output", help="report to write (JSON)")],
    model: Annotated[str, typer.Option(envvar="OMNI_MODEL", help="checkpoint: a folder or a hub id")] = "random:tiny",
    mps: Annotated[bool, typer.Option("--mps", help="the server under a CUDA MPS daemon of its own")] = False,
    runs: Annotated[int, typer.Option(min=1, help="how often all is measured")] = 3,
    sessions: Annotated[
        list[int] | None, typer.Option(min=1, help="sessions at once, may be repeated  [default: 1, 32]")
    ] = None,
) -> None:
    """Measure realtime sessions of a server and a gateway of this machine."""
    check_writable(output)
    with (
        tempfile.TemporaryDirectory(prefix="realtime-") as folder,
        serving(VARIANT, model_folder(model), Path(folder), mps=mps) as served,
        gateway(served.grpc_url) as address,
    ):
        found = []
        for _ in range(runs):
            found.append(asyncio.run(one_run(address, served.metrics_url, sessions or SESSIONS)))
            written = {"figures": figures(Path(model.rpartition(":")[2]).name, found)}
            output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

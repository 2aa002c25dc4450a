# SPDX-License-Identifier: Apache-2.0
"""Command line of the soak: `python scripts/soak --requests 2000`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent.parent
if not __package__:
    # Run as a folder, `python scripts/soak`, Python puts the folder itself on the path instead of its parent.
    sys.path[0] = str(SCRIPTS)

from soak.judging import Soaked, faults  # noqa: E402
from soak.plan import Shares  # noqa: E402
from soak.report import tables, write  # noqa: E402
from soak.running import Options, soak  # noqa: E402
from triton_omni.supervisor.machine import ServerError  # noqa: E402
from triton_omni.supervisor.model_folder import model_folder  # noqa: E402
from triton_omni.supervisor.options import ServerConfig  # noqa: E402
from triton_omni.supervisor.serve import on_signals  # noqa: E402

console = Console()

Share = Annotated[float, typer.Option(min=0, max=1, help="share of all requests")]


def main(
    *,
    requests: Annotated[int, typer.Option(min=1, help="how many are asked at most")] = 2000,
    minutes: Annotated[float | None, typer.Option(min=0, help="none begins later")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 8,
    cancelled: Share = 0.2,
    malformed: Share = 0.05,
    slow: Share = 0.03,
    hurried: Share = 0.02,
    speech: Annotated[float, typer.Option(min=0, max=1, help="share of those that are well formed")] = 0.4,
    turns: Annotated[float, typer.Option(min=0, max=1, help="share of those that are turns of conversations")] = 0,
    meaning: Annotated[
        float, typer.Option(min=0, max=1, help="share of those that ask training/mini what it must know")
    ] = 0,
    kills: Annotated[int, typer.Option(min=0, help="stages killed in the first third of the requests")] = 3,
    length: Annotated[int, typer.Option(min=1, help="replies are so many times as long, cancels so much later")] = 1,
    exact: Annotated[bool, typer.Option(help="hold equal requests to equal replies (float32 or deterministic)")] = True,
    mps: Annotated[bool, typer.Option(help="run the server under a CUDA MPS daemon of its own")] = False,
    growth: Annotated[float, typer.Option(min=0, help="MiB a process may grow by, beside its noise")] = 64,
    warm_up: Annotated[float, typer.Option(min=0, max=0.9, help="share of the run before growth is measured")] = 0.2,
    seed: Annotated[int, typer.Option(help="of all that is drawn")] = 0,
    out: Annotated[Path, typer.Option(help="folder of soak.json, soak.png and the server's log")] = Path("soak-out"),
    model: Annotated[str | None, typer.Option(envvar="OMNI_MODEL", help="checkpoint: a folder or a hub id")] = None,
    repository: Annotated[Path, typer.Option(help="model repository to serve")] = SCRIPTS.parent / "model_repository",
) -> None:
    """Ask one server many requests of all kinds, disturb it, and say what was not as it must be.

    Slow ones read nothing for some seconds, hurried ones have a deadline that they cannot meet. Exit code 1: a fault.
    """
    out.mkdir(parents=True, exist_ok=True)
    fates = {"cancelled": cancelled, "malformed": malformed, "slow": slow, "hurried": hurried}
    shares = Shares(**fates, speech=speech, turns=turns, known=meaning)
    if sum(fates.values()) > 1:
        raise typer.BadParameter("--cancelled, --malformed, --slow and --hurried are together over 1")
    options = Options(
        requests,
        minutes,
        concurrency,
        shares,
        kills,
        seed,
        length=length,
        exact=exact,
        growth_allowed_mib=growth,
        warm_up=warm_up,
    )
    config = ServerConfig(repository, model=str(model_folder(model)), log_path=out / "server.log", mps=mps)
    try:
        with on_signals(interrupt):
            soaked = soak(config, options)
    except ServerError as error:
        console.print(f"error: {error}", style="red")
        raise typer.Exit(1) from error
    tell(soaked, out)
    if faults(soaked):
        raise typer.Exit(1)


def interrupt(number: int) -> None:
    """End the run and stop its server; the exit code as a shell has it."""
    raise SystemExit(128 + number)


def tell(soaked: Soaked, out: Path) -> None:
    """Print the tables and the faults, and write the report."""
    for table in tables(soaked):
        console.print(table)
    rate = len(soaked.ended) / soaked.seconds
    console.print(
        f"{len(soaked.ended)} requests in {soaked.seconds:.0f} s, {rate:.1f} a second; stopped in {soaked.stop_s:.1f} s"
    )
    start, end = (1000 * seconds for seconds in soaked.first_audio())
    if not math.isnan(start + end):
        console.print(f"speech began after {start:.0f} ms at the start, {end:.0f} ms at the end")
    if soaked.meaning is not None:
        console.print(f"known questions: {soaked.meaning.to_json()}", markup=False)
    for fault in faults(soaked):
        console.print(f"fault: {fault}", style="red", markup=False)
    console.print(f"written: {', '.join(str(path) for path in write(soaked, out))}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)

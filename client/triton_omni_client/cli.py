# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni`. `say`, `ask`, `chat` and `play` talk to the model; `models` and `ready` ask about the
server. `bench` (in `bench/cli.py`) measures it, `capacity` turns a report into GPUs and money, and `evaluate` (in
`evaluate/cli.py`) judges its replies.

Text goes to stdout, everything about it to stderr. Exit codes: `terminal.EXIT_CODES`.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from .address import DEFAULT_URL
from .answer import client_of
from .bench.cli import EXAMPLES as BENCH_EXAMPLES
from .bench.cli import bench
from .commands.ask import EXAMPLES as ASK_EXAMPLES
from .commands.ask import ask
from .commands.capacity import EXAMPLES as CAPACITY_EXAMPLES
from .commands.capacity import report_capacity
from .commands.chat import EXAMPLES as CHAT_EXAMPLES
from .commands.chat import chat
from .commands.models import EXAMPLES as MODELS_EXAMPLES
from .commands.models import models
from .commands.options import AsJson, Model, Url, examples
from .commands.play import EXAMPLES as PLAY_EXAMPLES
from .commands.play import play
from .commands.say import EXAMPLES as SAY_EXAMPLES
from .commands.say import say
from .evaluate.cli import EXAMPLES as EVALUATE_EXAMPLES
from .evaluate.cli import evaluate_server
from .interrupt import INTERRUPTED
from .options import seconds
from .printable import one_line
from .terminal import EXIT_CODES, FAILED, errors, print_json, with_hint

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
app = typer.Typer(add_completion=False, no_args_is_help=True, epilog=EXIT_CODES)
Wait = Annotated[float, typer.Option(parser=seconds(), metavar="SECONDS", help="To wait for readiness.")]


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"triton-omni {version('triton-omni-client')}")
        raise typer.Exit


@app.callback()
def command(
    tell: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version, and end.")
    ] = False,
) -> None:
    """Talk to a triton-omni server."""


app.command(epilog=SAY_EXAMPLES)(say)
app.command(epilog=ASK_EXAMPLES)(ask)
app.command(epilog=CHAT_EXAMPLES)(chat)
app.command(epilog=PLAY_EXAMPLES)(play)
app.command(epilog=MODELS_EXAMPLES)(models)


@app.command(epilog=examples("ready --url localhost:8001 --wait 60"))
def ready(
    url: Url = DEFAULT_URL,
    wait: Wait = 0,
    as_json: AsJson = False,
    model: Model = "",
) -> None:
    """Exit with 0 when the server and its model take requests, else with 1."""
    with errors(url, as_json=as_json):
        client = client_of(url, model)
        obstacle = None if client.wait_ready(wait) else client.obstacle()
    if as_json:
        print_json({"ready": obstacle is None} | ({} if obstacle is None else {"message": obstacle}))
    else:
        said = "ready" if obstacle is None else f"not ready: {url}: {with_hint(obstacle)}"
        typer.echo(one_line(said), err=obstacle is not None)
    if obstacle is not None:
        raise typer.Exit(FAILED)


app.command(epilog=BENCH_EXAMPLES)(bench)
app.command("evaluate", epilog=EVALUATE_EXAMPLES)(evaluate_server)
app.command("capacity", epilog=CAPACITY_EXAMPLES)(report_capacity)


def main() -> None:
    """All of the command; a stdout that takes no more is told in one sentence."""
    try:
        app()
    except KeyboardInterrupt:  # while typer makes its commands; of one that runs it answers so by itself
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        typer.echo(f"error: stdout cannot be written: {error.strerror}", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it ends
        sys.exit(FAILED)

# SPDX-License-Identifier: Apache-2.0
"""Examines running servers: compares the states that the ledger, the stages and Triton report.

`./build.sh doctor` runs this at any time, also under load: it only reads, and prints a table. A mismatch from sessions
that begin and end is gone at the next look; one that stays is reported in a sentence and makes the exit code 1.
Command line: `python -m triton_omni.doctor.cli --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from triton_omni.core.arguments import Parser, seconds, whole_number
from triton_omni.core.endpoint import command_line, http_addresses
from triton_omni.core.errors import StageName
from triton_omni.doctor.diagnosis import Finding, Sample, fetch_page, findings
from triton_omni.doctor.stage_processes import running_for, server_processes, stage_processes
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import LedgerView, StageView, read_ledger
from triton_omni.session.server_folder import LedgerError, ledger_name, own_folders, server_of, table_path
from triton_omni.supervisor.leftovers import stale_regions
from triton_omni.supervisor.start import loaded_stages

# --- the table --------------------------------------------------------------------------------------------------------


_FIGURES = {
    "sessions": "sessions",
    "running": "running",
    "waiting": "waiting",
    "kv_blocks_used": "KV",
    "rows_used": "rows",
    "outbox": "outbox",
    "leaked_sessions": "leaked",
}

_TABLE_WIDTH = 110


def print_report(out: Console, name: str, metrics_url: str, sample: Sample) -> None:
    """Print one server's stages, and its sessions in a line."""
    out.print(f"{name}, metrics {metrics_url or 'off'}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "process", "starts", "silent", "open", *_FIGURES.values()):
        table.add_column(column, no_wrap=True, justify="left" if column == "stage" else "right")
    for stage in STAGES:
        table.add_row(stage, *_of_ledger(stage, sample), *(_told(sample.figure(figure, stage)) for figure in _FIGURES))
    # A terminal that is too narrow breaks lines; figures that are cut off would be of no use.
    out.width = max(out.width, _TABLE_WIDTH)
    out.print(table, crop=False)
    out.print(_sessions(sample), highlight=False, markup=False)


def _of_ledger(stage: StageName, sample: Sample) -> tuple[str, str, str, str]:
    if sample.ledger is None:
        return "?", "?", "?", "?"
    view = sample.ledger.stages[stage]
    return _process(view), str(view.epoch), f"{view.silent_s:.1f} s", str(len(sample.may_hold[stage]))


def _process(view: StageView) -> str:
    if view.lost or not view.runs:
        return f"{view.pid} gone" if view.pid else "none"
    return f"{view.pid} broken" if view.broken else str(view.pid)


def _told(value: int | None) -> str:
    """A figure, or a dash if the stage has published none."""
    return "-" if value is None else str(value)


def _sessions(sample: Sample) -> str:
    limit, taken = sample.figure("sessions_limit", "thinker"), sample.held("sessions", "thinker")
    free = (
        "the thinker has published no figures since it was loaded: stages do so from their first request on"
        if limit is None
        else f"{max(0, limit - taken)} of {limit} slots free"
    )
    if sample.ledger is None:
        return free
    oldest = max((session.age_s for session in sample.ledger.sessions), default=None)
    age = "" if oldest is None else f", the oldest for {oldest:.1f} s"
    return f"{len(sample.ledger.sessions)} sessions open{age}; {free}"


# --- the command ------------------------------------------------------------------------------------------------------


LOOKS_APART_S = 0.4
SETTLE_S = 0.05
SETTLES = 8
"""Number of looks at the ledger before the metrics are read, so that sessions are seen whose end they do not show."""
PERSIST_S = 10.0
HOW_TO_START = "./build.sh serve starts one"
STARTING = "server/starting"
REFUSED = "nothing listens there (connection refused)"
_ANSWERS_WITHIN_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Server:
    """Addresses and processes of one examined server."""

    name: str
    metrics_url: str = ""
    """Empty = its metrics are switched off."""
    ledger: Path | None = None
    """None = it is on another machine or in another container."""
    http_address: str = ""
    """`HOST:PORT`; empty = unknown."""
    pid: int = 0
    """Process id of tritonserver; 0 = unknown."""


def server_of_process(pid: int) -> Server:
    """The server whose tritonserver has this process id.

    Raises:
        OSError, psutil.NoSuchProcess: there is no such process.
    """
    http_address, metrics_address = http_addresses(command_line(pid))
    metrics_url = f"http://{metrics_address}/metrics" if metrics_address else ""
    return Server(f"server {pid}", metrics_url, table_path(ledger_name(pid)), http_address, pid)


def running_servers() -> Iterator[Server]:
    """This user's servers in this process-id namespace, including those that still start."""
    owners = map(server_of, own_folders())
    for pid in dict.fromkeys([*(pid for pid in owners if pid is not None), *server_processes()]):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it ended this moment
            yield server_of_process(pid)


def leftovers() -> Iterator[Finding]:
    """Shared memory of this user that no running server has."""
    for path in own_folders():
        if server_of(path) is None:
            yield f"file/{path.name}", f"{path} is left of a server that is gone; the next start removes it"
    for region in stale_regions():
        yield (
            f"file/{region.name}",
            f"no process uses {region}, left by a server that is gone; the next start removes it",
        )


def look(server: Server) -> Sample:
    """One look at a server; it takes about half a second."""
    if (start := _start_of(server)) is not None:
        return Sample(start=start)
    faults: list[Finding] = []
    ledger, may_hold = _look_at_ledger(server, faults)
    metrics = _ask(lambda: fetch_page(server.metrics_url), "metrics", faults) if server.metrics_url else None
    if server.http_address:
        faults += _ask_triton(server.http_address)
    processes = stage_processes(server.pid) if server.pid else {}
    known = {} if ledger is None else {stage: view.pid for stage, view in ledger.stages.items()}
    loading = {stage: pid for stage, pid in processes.items() if pid != known.get(stage)}
    return Sample(ledger, may_hold, metrics, tuple(faults), loading=loading)


def _start_of(server: Server) -> Finding | None:
    """Describe a server that is still starting: it listens nowhere, and a stage was never loaded."""
    if not server.pid or not server.http_address or _listens(server.http_address):
        return None
    loaded = loaded_stages(server.pid)
    missing = [stage for stage in STAGES if stage not in loaded]
    if not missing:
        return None
    told = f"loaded {'are' if len(loaded) > 1 else 'is'} {', '.join(loaded)}" if loaded else "no stage is loaded"
    with contextlib.suppress(psutil.NoSuchProcess):
        seconds = f"{running_for(server.pid):.0f} s"
        return STARTING, f"it has been starting for {seconds}: {told}, {', '.join(missing)} not yet"
    return None


def _listens(address: str) -> bool:
    try:
        _get(address, "/v2/health/live")
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True
    return True


def examine(server: Server, persist_s: float = PERSIST_S) -> tuple[Sample, dict[str, str]]:
    """Look at a server until nothing is wrong, or something has been for `persist_s`.

    Returns:
        The last look, and what was wrong at every one: sentences by name.
    """
    begin = time.monotonic()
    sample = look(server)
    wrong = findings(sample)
    while wrong and STARTING not in wrong and time.monotonic() - begin < persist_s:
        time.sleep(LOOKS_APART_S)
        sample = look(server)
        now = findings(sample)
        wrong = {name: now[name] for name in wrong if name in now}
    return sample, wrong


def _look_at_ledger(server: Server, faults: list[Finding]) -> tuple[LedgerView | None, dict[StageName, frozenset[str]]]:
    """Return the ledger, and the sessions that each stage may hold by any of several looks at it."""
    if (path := server.ledger) is None:
        return None, {}
    views: list[LedgerView] = []
    for number in range(SETTLES):
        time.sleep(SETTLE_S if number else 0)
        if (view := _ask(lambda: read_ledger(path), "ledger", faults)) is None:
            return None, {}
        views.append(view)
    return views[-1], {stage: frozenset().union(*(view.held_by(stage) for view in views)) for stage in STAGES}


def _ask(ask: Callable[[], Any], what: str, faults: list[Finding]) -> Any:
    try:
        return ask()
    except (OSError, http.client.HTTPException, ValueError, LedgerError) as error:
        faults.append((f"server/{what}", f"the {what} cannot be read: {_cause(error)}"))
        return None


def _cause(error: Exception) -> str:
    """Return an error in one line; for one of `urllib`, its cause."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, ConnectionRefusedError):
        return REFUSED
    said = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return " ".join(said.split()) or type(reason).__name__


def _ask_triton(address: str) -> Iterator[Finding]:
    try:
        status, _ = _get(address, "/v2/health/ready")
        if status != 200:
            yield "server/ready", f"the server says that it is not ready (HTTP {status} of {address}/v2/health/ready)"
        yield from _client_regions(address)
    except (OSError, http.client.HTTPException, ValueError) as error:
        yield "server/http", f"HTTP at {address} does not answer: {_cause(error)}"


def _client_regions(address: str) -> Iterator[Finding]:
    """Shared memory that clients registered and removed since: the server keeps it until it is unregistered."""
    status, body = _get(address, "/v2/systemsharedmemory/status")
    for region in json.loads(body) if status == 200 else []:
        file = _SHARED_MEMORY / str(region["key"]).lstrip("/")
        if not file.exists():
            yield (
                f"region/{region['name']}",
                f"a client registered {region['byte_size']} bytes of shared memory, {region['name']!r:.80}, whose file "
                "is gone: the server keeps them until they are unregistered",
            )


def _get(address: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=_ANSWERS_WITHIN_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine servers and print what was found.

    Returns:
        The exit code: 0 = all is sound, 1 = something is wrong, a server is not up yet, or no server was found. A wrong
        option ends the process with 2.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    out = Console(soft_wrap=True)
    wrong: dict[str, str] = {}
    try:
        servers = _chosen(given)
    except (OSError, psutil.NoSuchProcess):
        parser.exit(1, f"error: --server: {_not_found(given.server)}\n")
    if not (given.server or given.metrics_url):
        wrong |= dict(leftovers())
        if not servers:
            wrong["none"] = f"no server of this user runs here; --metrics-url names one elsewhere, and {HOW_TO_START}"
    for server in servers:
        sample, found = examine(server, given.persist)
        if sample.seen:
            print_report(out, server.name, server.metrics_url, sample)
        elif server.ledger is None:
            found = {name: _with_hint(sentence) for name, sentence in found.items()}
        wrong |= {f"{server.name}/{name}": f"{server.name}: {sentence}" for name, sentence in found.items()}
    for name, sentence in wrong.items():
        kind, style = ("starting", "yellow") if name.endswith(STARTING) else ("wrong", "red")
        out.print(f"{kind}: {sentence}", style=style, highlight=False, markup=False)
    if not wrong:
        out.print("sound")
    return 1 if wrong else 0


def _with_hint(sentence: str) -> str:
    """Add advice where no server was found; findings of a remote server pass as they are."""
    return f"{sentence}; {HOW_TO_START}" if sentence.endswith(REFUSED) else sentence


def _parser() -> argparse.ArgumentParser:
    exit_codes = "exit code 0 = sound, 1 = something is wrong, a server still starts or none runs, 2 = wrong usage"
    parser = Parser(prog="doctor", description=f"Whether running servers are sound: {exit_codes}.")
    parser.add_argument(
        "--server",
        type=whole_number,
        metavar="PID",
        help="tritonserver's process id (default: all servers of this user here)",
    )
    parser.add_argument(
        "--metrics-url",
        type=_metrics_url,
        metavar="URL",
        help="where the metrics are, http://HOST:PORT/metrics; without --server nothing else is asked, as of a server "
        "on another machine",
    )
    parser.add_argument(
        "--persist",
        type=seconds,
        default=PERSIST_S,
        metavar="SECONDS",
        help=f"how long something must be wrong to be told (default {PERSIST_S:g}): what only moves does not stay",
    )
    return parser


def _metrics_url(text: str) -> str:
    with contextlib.suppress(ValueError):
        found = urlsplit(text)
        if found.scheme in ("http", "https") and found.hostname:
            return text
    raise argparse.ArgumentTypeError(f"{text!r} is no URL such as http://HOST:8002/metrics")


def _chosen(given: argparse.Namespace) -> list[Server]:
    if given.server is not None:
        server = server_of_process(given.server)
        if given.server not in (running.pid for running in running_servers()):
            raise FileNotFoundError(f"process {given.server} is no server of this user")
        return [replace(server, metrics_url=given.metrics_url or server.metrics_url)]
    if given.metrics_url:
        return [Server(given.metrics_url, given.metrics_url)]
    return list(running_servers())


def _not_found(pid: int) -> str:
    """Return why the process is not examined, and the processes that could be."""
    names = ", ".join(server.name for server in running_servers()) or "none"
    what = "is no tritonserver with stages loaded" if psutil.pid_exists(pid) else "does not run"
    return f"process {pid} {what}; this user's servers here: {names}"


if __name__ == "__main__":
    sys.exit(main())

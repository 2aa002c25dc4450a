# SPDX-License-Identifier: Apache-2.0
"""A tritonserver with probed stages for tests: its repository, its clients, its metrics and its records.

Knows `supervisor.serve` and the public client; what the stages record is written by `probes.py`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from numpy.typing import NDArray

from processes import UNMEASURED
from server.probes import RECORDS_VARIABLE
from triton_omni.core.errors import StageName
from triton_omni.core.profile import merged
from triton_omni.session.ledger_table import PID, STAGES
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni.stub.metrics import FAMILIES
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.serve import Supervisor
from triton_omni_client import NO_RETRY, HttpClient, OmniClient, Reply, Request

ROOT = Path(__file__).parents[2]
REPLY_S = 240
"""Seconds that a server gives a reply, and that a client waits for it: more than the slowest machine takes."""
NEVER_S = 200.0
"""Seconds after which a missing event never comes, however slow the machine. It is less than a reply is given, whose
end would free what was forgotten."""
BACK_WITHIN_S = 300.0
"""Seconds after which a stage or server that died is not started again, however slow the machine."""
EXIT_TIMEOUT_S, STOP_S = 300, 100.0
"""Seconds that a server's stop waits for a leaked request, and the most that a stop takes without one,
however slow the machine is."""
DIRECT_CALL = "the client called the thinker directly"
"""The thinker's log of a session of which the talker has heard nothing for long: it would free what was forgotten."""
HELD = {"nv_inference_pending_request_count", *(family.name for family in FAMILIES if family.holds)}
"""Metrics that are 0 when no request is open."""

Settings = Mapping[str, Mapping[str, Any]]

TINY: Settings = {
    "thinker": {
        "dtype": "float32",
        "engine": {"max_num_seqs": 6, "max_model_len": 1024, "max_num_batched_tokens": 128, "threads": 1},
        "limits": {
            "max_media_bytes": 1 << 20,
            "max_audio_seconds": 5,
            "max_video_seconds": 15,
            "max_request_bytes": 8192,
        },
        "max_sessions": 8,
        "max_new_tokens": 256,
        "timeout_s": REPLY_S,
        "preprocess_threads": 2,
    },
    "talker": {
        "dtype": "float32",
        "engine": {"max_num_seqs": 4, "max_model_len": 2048, "max_num_batched_tokens": 512, "threads": 1},
        "max_sessions": 8,
        "max_codes": 600,
    },
    "token2wav": {
        "dtype": "float32",
        "threads": 1,
        "max_codes": 600,
        "diffusion": {"num_steps": 4},
        "presets": {"fast": {"num_steps": 3}},
    },
    "qwen2_5_omni_unary": {"max_requests": 16},
}
"""Settings of the tests' servers, for the tiny checkpoint on two cores; fewer places in the engines than sessions.

Float32 on a GPU too: replies are compared exactly, whatever else runs. A flow has three steps instead of nine: that
proves the same with half of token2wav's work. The shipped preset `fast` has as few; here it has fewer, to be told
apart. `test_smoke.py` serves what is shipped.
"""

_LOADED = '"""Load the stage."""'
_PROBES = """
        import sys

        sys.path.insert(0, "{tests}")
        from server.probes import install

        install("{stage}")
"""


def make_repository(target: Path, settings: Settings = TINY) -> Path:
    """A copy of the project's model repository with these settings over its own, and probes in its stages."""
    shutil.copytree(ROOT / "model_repository", target)
    for model, chosen in settings.items():
        path = target / model / "1" / "stage.yaml"
        path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), chosen)))
    for stage in STAGES:
        model_file = target / stage / "1" / "model.py"
        code = model_file.read_text()
        assert _LOADED in code, f"{model_file} has changed: no place for the probes"
        # Not before: Triton imports the file once more to complete the configuration, for which nothing is loaded.
        probes = _PROBES.format(stage=stage, tests=ROOT / "tests")
        model_file.write_text(code.replace(_LOADED, _LOADED + probes, 1))
    return target


def server_config(
    folder: Path,
    checkpoint: Path,
    settings: Settings = TINY,
    environment: Mapping[str, str] | None = None,
    *,
    measured: bool = False,
    **options: Any,
) -> ServerConfig:
    """Return the configuration of a test's server; everything it writes is in `folder`.

    Coverage is measured in the processes of one server, which is asked everything and is a third slower for it.
    """
    records = folder / "records"
    records.mkdir()
    options.setdefault("warm_up", False)
    options.setdefault("exit_timeout_s", EXIT_TIMEOUT_S)
    return ServerConfig(
        model_repository=make_repository(folder / "repository", settings),
        model=str(checkpoint),
        log_path=folder / "server.log",
        ready_timeout_s=400,
        environment={
            "OMP_NUM_THREADS": "1",
            RECORDS_VARIABLE: str(records),
            **({} if measured else UNMEASURED),
            **(environment or {}),
        },
        **options,
    )


@contextmanager
def serve(
    folder: Path,
    checkpoint: Path,
    settings: Settings = TINY,
    environment: Mapping[str, str] | None = None,
    *,
    measured: bool = False,
    **options: Any,
) -> Iterator[Served]:
    """A running server, with this added to its environment, and these options of `ServerConfig`."""
    config = server_config(folder, checkpoint, settings, environment, measured=measured, **options)
    with Supervisor(config) as supervisor:
        served = Served(supervisor, folder / "records", checkpoint)
        with served.client:
            yield served


def in_flight_at_stop(log: str) -> list[int]:
    """Models with requests in flight when the server was told to stop, and each second after, by Triton's own log."""
    found = re.findall(r"Found (\d+) model versions that have in-flight inferences", log)
    assert found, "the server was never told to stop"
    return [int(models) for models in found]


def note_figures(**figures: object) -> None:
    """Append measured figures to the file of JSON lines that `OMNI_TEST_FIGURES` names, if it names one."""
    if path := os.environ.get("OMNI_TEST_FIGURES"):
        with Path(path).open("a") as file:
            file.write(json.dumps(figures) + "\n")


def wait_for(condition: Callable[[], bool], what: Callable[[], object], seconds: float = NEVER_S) -> None:
    """Poll until `condition` holds; `what` says what was found when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:g} s: {what()}"
        time.sleep(0.01)


@contextmanager
def held_back(kind: type, method: str) -> Iterator[None]:
    """Hold each call of this method back until the block has ended: its caller waits."""
    may_go_on, go_on = threading.Event(), getattr(kind, method)

    def wait_and_go_on(*arguments: Any) -> None:
        may_go_on.wait()
        go_on(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, wait_and_go_on)
        try:
            yield
        finally:
            may_go_on.set()


def resident_bytes(pid: int) -> int:
    """Main memory of a process, shared memory included."""
    return int(psutil.Process(pid).memory_info().rss)


class Served:
    """One running server as tests see it."""

    def __init__(self, supervisor: Supervisor, records: Path, checkpoint: Path) -> None:
        self.supervisor = supervisor
        self.checkpoint = checkpoint
        # A refusal is what a test looks for, or a fault; it is never waited out.
        self.client = OmniClient(supervisor.grpc_url, timeout=REPLY_S, retry=NO_RETRY)
        self.http = HttpClient(f"http://{supervisor.http_url}", timeout=REPLY_S, retry=NO_RETRY)
        self.records = Records(records)

    def stop(self) -> float:
        """Stop the server; the seconds it took. Fails if a request was left or a stage did not end."""
        self.wait_until_idle()
        seconds = self.stop_whatever_is_left()
        log = self.log()
        # A request that ends while it is first counted is gone a second later; a leaked request never is.
        in_flight = in_flight_at_stop(log)
        assert len(in_flight) <= 2, in_flight
        assert in_flight[-1] == 0
        for stage in STAGES:
            assert f"successfully unloaded '{stage}'" in log
        assert "Segfault" not in log
        return seconds

    def stop_whatever_is_left(self) -> float:
        """Stop the server; the seconds it took. Fails if it waited for a request, as those that died do not end."""
        seconds = self.supervisor.stop()
        assert seconds < STOP_S < EXIT_TIMEOUT_S
        return seconds

    def log(self) -> str:
        """The server's output so far."""
        path = self.supervisor.config.log_path
        assert path is not None
        return path.read_text(errors="replace")

    def pid(self, stage: StageName) -> int:
        """The process of a stage."""
        with closing(StageBoard(ledger_name(self.supervisor.pid))) as board:
            return board.word(PID, stage)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Triton's metrics whose names begin with `prefix`, labels included."""
        with urllib.request.urlopen(f"http://{self.supervisor.metrics_url}/metrics", timeout=NEVER_S) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
        }

    def held(self) -> dict[str, float]:
        """Return the figures, other than 0, of what the stages and Triton itself hold now."""
        found = self.metrics("omni_") | self.metrics("nv_inference_pending_request_count")
        return {name: value for name, value in found.items() if value and name.partition("{")[0] in HELD}

    def link_bytes(self) -> dict[str, float]:
        """Bytes of rows and codes that passed on the links, by messages or rings, by metric."""
        self.wait_until_published()
        found = self.metrics("omni_link_bytes_total")
        return {name: value for name, value in found.items() if re.search('tensor="(ROWS|CODES|ring)"', name)}

    def wait_until_published(self) -> None:
        """Wait until the stages have published their counts: figures of their loops, which always grow, grew twice."""
        for _ in range(2):
            before = self._loop_seconds()
            wait_for(
                lambda before=before: all(now > before[stage] for stage, now in self._loop_seconds().items()),
                self._loop_seconds,
            )

    def _loop_seconds(self) -> dict[str, float]:
        found = dict.fromkeys(STAGES, 0.0)
        for name, value in self.metrics("omni_loop_seconds_total").items():
            found[name.partition('stage="')[2].partition('"')[0]] += value
        return found

    def wait_until_idle(self, seconds: float = NEVER_S) -> None:
        """Nothing is left of any request; the stages publish their figures every 0.1 s."""
        direct_calls = self.log().count(DIRECT_CALL)
        time.sleep(0.12)
        wait_for(lambda: not self.held(), self.held, seconds)
        assert self.log().count(DIRECT_CALL) == direct_calls, "a session was forgotten"

    def post(self, path: str, body: str) -> tuple[int, str]:
        """Status and text of an HTTP answer."""
        connection = http.client.HTTPConnection(self.supervisor.http_url, timeout=REPLY_S)
        with closing(connection):
            connection.request("POST", path, body.encode(), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def ask(self, request_id: str, text: str, **options: Any) -> Reply:
        """One whole reply over a gRPC stream."""
        return self.client.stream(Request(text=text, request_id=request_id, **options)).collect()


class Records:
    """Events that the probes of one server wrote, by request id; for one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stages = {stage: _Written(folder / f"{stage}.jsonl") for stage in STAGES}

    def events(self, stage: str) -> list[dict[str, Any]]:
        """All events of a stage, in order."""
        return list(self._stages[stage].read().events)

    def key(self, request_id: str) -> str:
        """The session of a request that reached the talker."""
        keys = self._stages["talker"].read().keys[request_id]
        assert len(keys) == 1, f"request {request_id} opened {len(keys)} sessions"
        return keys[0]

    def of(self, request_id: str, stage: str, event: str) -> list[dict[str, Any]]:
        """The events of one kind that a stage recorded for a request."""
        return [found for found in self._of(request_id, stage) if found["event"] == event]

    def prompt(self, request_id: str) -> tuple[int, ...]:
        """Prompt ids as the thinker's engine took them."""
        return tuple(self.of(request_id, "thinker", "added")[0]["prompt"])

    def positions(self, request_id: str) -> list[list[int]]:
        """M-RoPE positions of the prompt, three rows of one a prompt id."""
        found: list[list[int]] = self.of(request_id, "thinker", "added")[0]["positions"]
        return found

    def tokens(self, request_id: str) -> tuple[int, ...]:
        """Reply ids that the thinker's engine gave."""
        return tuple(token for event in self.of(request_id, "thinker", "tokens") for token in event["ids"])

    def rows(self, request_id: str) -> NDArray[np.float32]:
        """Hidden rows float32 [N, H], one after the other, as they arrived at the talker, by messages or its ring."""
        count = sum(event["rows"] for event in self.received(request_id, "talker"))
        return np.fromfile(self.folder / f"{self.key(request_id)}.rows", np.float32).reshape(count, -1)

    def codes(self, request_id: str) -> tuple[int, ...]:
        """Codec codes as they arrived at token2wav, by messages or its ring."""
        return tuple(code for event in self.received(request_id, "token2wav") for code in event["codes"])

    def received(self, request_id: str, stage: str) -> list[dict[str, Any]]:
        """Return a request's messages to a stage, and the items placed in its ring."""
        return [found for found in self._of(request_id, stage) if found["event"] in ("message", "placed")]

    def _of(self, request_id: str, stage: str) -> list[dict[str, Any]]:
        return self._stages[stage].read().by_key[self.key(request_id)]


class _Written:
    """The file of one stage's events. A server of many tests writes many, and each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, 0
        self.events: list[dict[str, Any]] = []
        self.by_key: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.keys: defaultdict[str, list[str]] = defaultdict(list)
        """Sessions by request id."""

    def read(self) -> _Written:
        """This, with what was written since."""
        if not self._path.exists():
            return self
        with self._path.open("rb") as file:
            file.seek(self._end)
            # The last line may be in the middle of being written.
            lines, newline, _ = file.read().rpartition(b"\n")
        self._end += len(lines) + len(newline)
        for event in map(json.loads, lines.splitlines()):
            self.events.append(event)
            self.by_key[event["key"]].append(event)
            if event.get("request_id") is not None:
                self.keys[event["request_id"]].append(event["key"])
        return self

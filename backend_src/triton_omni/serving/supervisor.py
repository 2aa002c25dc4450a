# SPDX-License-Identifier: Apache-2.0
"""Starts tritonserver on a model repository, waits until it is ready, keeps its stages alive, and stops it cleanly.

`build.sh serve`, the container and the server tests run servers through this; it knows nothing of requests.
Command line: `python -m triton_omni.serving.supervisor --model-repository FOLDER --http-port 8000`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from triton_omni.ledger_layout import server_name
from triton_omni.serving.draining import drain, end_sessions
from triton_omni.serving.guard import guarded_process
from triton_omni.serving.leftovers import (
    end_group,
    has_followers,
    new_region_prefix,
    remove_shared_memory,
    remove_stale_regions,
)
from triton_omni.serving.machine import (
    ServerError,
    ServerNotReady,
    choose_ports,
    find_triton,
    stub_environment,
    visible_gpus,
)
from triton_omni.serving.memory_pool import memory_pool_bytes
from triton_omni.serving.model_control import ModelControl, operator_key
from triton_omni.serving.model_folder import ModelFolderError, check_files, model_folder
from triton_omni.serving.mps import mps_daemon
from triton_omni.serving.patience import preloaded
from triton_omni.serving.placement import check_placement
from triton_omni.serving.probe import Probe, own_host
from triton_omni.serving.readiness import Readiness
from triton_omni.serving.revival import StageReviver
from triton_omni.serving.served_repository import served_repository
from triton_omni.serving.server_command import server_command
from triton_omni.serving.server_log import ServerLog
from triton_omni.serving.server_options import ServerConfig, parse_options
from triton_omni.serving.signals import exit_at_once, on_signals
from triton_omni.serving.stage_board import StageBoard
from triton_omni.serving.start_checks import check_caches, check_shared_memory
from triton_omni.serving.start_report import StartReport, stages_of
from triton_omni.serving.warm_up import warm_up

# Triton stops by itself within its exit timeout; what is left after this much more is ended.
_KILL_AFTER_S = 5.0
_ALONE_S = 2.0
"""How long a server that was told to stop may go on without a stage."""
_END_WITHIN_S = 3.0
"""What stages get to tell the clients of open sessions that the server stops."""
_SAME_SIGNAL_S = 1.0
"""Signals so soon after the first are one: Ctrl-C reaches a command from its terminal and once more from its shell."""
_POLL_S = 0.1


class Supervisor:
    """Owns one tritonserver process, from `start` to `stop`.

    As a context manager it starts the server and waits until it is ready:

        with Supervisor(ServerConfig(Path("model_repository"))) as server:
            client = grpc.InferenceServerClient(server.grpc_url)
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.log = ServerLog(config.log_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        # No events: a signal handler that sets one waits for ever for a lock of the code that it interrupted.
        self._stop_requested = self._stop_at_once = False
        self._ports = {"http": 0, "grpc": 0, "metrics": 0}
        self.regions = new_region_prefix(os.getpid())
        """With what the names of Triton's regions of shared memory begin."""
        self._outliving = contextlib.ExitStack()
        self._control: ModelControl | None = None
        self._readiness: Readiness | None = None
        self._board: StageBoard | None = None
        self._reviver: StageReviver | None = None
        self._probe: Probe | None = None

    @property
    def http_url(self) -> str:
        """`HOST:PORT` of HTTP, as clients of Triton take it."""
        return _address(self.config.host, self._ports["http"])

    @property
    def grpc_url(self) -> str:
        """`HOST:PORT` of gRPC."""
        return _address(self.config.host, self._ports["grpc"])

    @property
    def metrics_url(self) -> str:
        """`HOST:PORT` of the metrics."""
        return _address(self.config.host, self._ports["metrics"])

    @property
    def pid(self) -> int:
        """Process id of tritonserver. Raises `ServerError` before `start`."""
        return self._running().pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of tritonserver, None while it runs; as a shell gives it (128 + signal)."""
        code = self._running().poll()
        return code if code is None or code >= 0 else 128 - code

    def start(self) -> None:
        """Start the process and return at once.

        Raises:
            ServerError: already started, no tritonserver, no checkpoint, a `stage.yaml` that cannot be used, a stage
                on a GPU that is not there, a port is taken, MPS cannot be had, there is no room in shared memory, or a
                cache, the log or the laid out model repository cannot be written.
        """
        if self._process is not None:
            raise ServerError(f"the server is already started (process {self._process.pid})")
        if not self.config.model_repository.is_dir():
            raise ServerError(f"{self.config.model_repository} is no folder; a model repository is needed")
        install = find_triton()
        try:
            control_key = operator_key(os.environ)
            model = model_folder(self.config.model)
        except ValueError as error:
            raise ServerError(str(error)) from error
        gpus = visible_gpus(os.environ)
        check_placement(self.config.placement, gpus)
        wanted = {"http": self.config.http_port, "grpc": self.config.grpc_port, "metrics": self.config.metrics_port}
        self._ports = choose_ports(self.config.host, wanted)
        remove_stale_regions()
        check_shared_memory()
        check_caches(os.environ)
        environment = {**stub_environment(os.environ, install, model), **self.config.environment}
        with contextlib.ExitStack() as outliving:
            self.log.open()
            outliving.callback(self.log.close)
            if self.config.mps:
                environment |= outliving.enter_context(mps_daemon(os.environ))
            placement = self.config.placement if gpus else None
            repository = outliving.enter_context(served_repository(self.config.model_repository, model, placement))
            grpc_url = _address(own_host(self.config.host), self._ports["grpc"])
            control = ModelControl(grpc_url, self.config.ready_timeout_s, control_key)
            pool = memory_pool_bytes(self.config.model_repository, model) if gpus else 0
            command = server_command(
                self.config,
                install,
                repository,
                ports=self._ports,
                control_flags=control.flags,
                regions=self.regions,
                pools=[pool] * gpus,
            )
            # A repository that was not laid out for this start is not ours to write to.
            laid_out = repository if repository != self.config.model_repository else None
            started = guarded_process(command, environment | preloaded(environment), self.regions, laid_out)
            self._process = outliving.enter_context(started)
            self._control = control
            if laid_out is not None:
                self._readiness = Readiness(control, repository)
                outliving.callback(self._readiness.join, _KILL_AFTER_S)
            self._outliving = outliving.pop_all()
        self.log.follow(self._process)

    def wait_ready(self) -> None:
        """Block until every model is loaded and the server has spoken once.

        Raises:
            ServerNotReady: the server died (the message has the failing model's reason), `ready_timeout_s` passed,
                or `request_stop` was called.
        """
        deadline = time.monotonic() + self.config.ready_timeout_s
        probe = self._probe = Probe(self.config.host, self._ports)
        report = StartReport(self.pid, self.log.path, stages_of(self.config.model_repository))
        while not probe.is_ready():
            report.look()
            if self.exit_code is not None:
                raise ServerNotReady(self._why_it_ended())
            if self._stop_requested:
                raise ServerNotReady("stopped before the server was ready")
            if time.monotonic() > deadline:
                raise ServerNotReady(f"the server was not ready after {self.config.ready_timeout_s:g} s{self.log.hint}")
            time.sleep(_POLL_S)
        self._watch_stages()
        if self.config.warm_up and self._board is not None:
            report.warms_up()
            warm_up(self.config.host, self._ports["http"])

    def _watch_stages(self) -> None:
        if self._reviver is None and self._control is not None:
            # A server without stages has no table, and one that ended meanwhile is told by `run`.
            with contextlib.suppress(FileNotFoundError):
                self._board = StageBoard(server_name(self.pid))
                tell = self._readiness.tell if self._readiness is not None else None
                self._reviver = StageReviver(self._board, self._control, self.config.revival, tell)
                self._reviver.start()

    def run(self) -> None:
        """Block until `request_stop` is called.

        Raises:
            ServerError: the server ended by itself or listens no more, or a stage died too often; the message has the
                reason.
        """
        while not self._stop_requested:
            self.check()
            time.sleep(_POLL_S)

    def check(self) -> None:
        """See whether the server, once ready, goes on.

        Raises:
            ServerError: as `run`.
        """
        if self.exit_code is not None:
            raise ServerError(self._why_it_ended())
        if self._reviver is not None and self._reviver.failure is not None:
            raise ServerError(f"{self._reviver.failure}{self.log.hint}")
        if self._probe is not None and self._probe.has_hung_up():
            raise ServerError(f"the server's process lives, but has closed its HTTP port{self.log.hint}")

    @property
    def losses(self) -> int:
        """How often a stage's process died."""
        return self._reviver.losses if self._reviver is not None else 0

    def request_stop(self, *, at_once: bool = False) -> None:
        """Make `run` and `wait_ready` return, and `drain` too if `at_once`; safe in a signal handler."""
        self._stop_requested = True
        self._stop_at_once = self._stop_at_once or at_once

    def drain(self) -> bool:
        """Take no new request, be not ready, and let open sessions end, for `drain_timeout_s` at most.

        Returns:
            Whether all have ended; not when `request_stop` was called with `at_once`.
        """
        if self._board is None:
            return True
        tell = functools.partial(self._tell_of_drain, self._board)
        return drain(self._board, self.config.drain_timeout_s, self._is_given_up, tell)

    def _tell_of_drain(self, board: StageBoard) -> None:
        if self._readiness is not None:
            self._readiness.end()
        if sessions := board.open_sessions():
            get = f"{self.config.drain_timeout_s:g} s at most, the whole stop {longest_stop_s(self.config):g} s"
            print(f"stopping: {sessions} replies are under way and get {get}", file=sys.stderr, flush=True)

    def _is_given_up(self) -> bool:
        return self._stop_at_once or self.exit_code is not None

    def stop(self) -> float:
        """Stop the server in order, by force only past its exit timeout; return the seconds it took.

        Open sessions end with an error; see `drain`. No process and no shared memory of the server is left, however it
        ended.
        """
        process, begin = self._process, time.monotonic()
        if process is None:
            return 0.0
        if not self._stopped:
            if self._reviver is not None:
                self._reviver.close()
            if self._board is not None:
                end_sessions(self._board, _END_WITHIN_S, lambda: self.exit_code is not None)
            if process.poll() is None:
                process.terminate()
            self._await_end(process)
            self._remove_leftovers(process)
        return time.monotonic() - begin

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        """Until the server has ended, has been without a stage for a while, or is past its exit timeout.

        Triton waits for every client that holds a gRPC stream open, also for one without a request. When its stages
        have ended there is nothing left that could be lost.
        """
        begin = last_stage = time.monotonic()
        while process.poll() is None and time.monotonic() - begin < self.config.exit_timeout_s + _KILL_AFTER_S:
            if has_followers(process) and not self._is_held_up_by_the_dead():
                last_stage = time.monotonic()
            elif time.monotonic() - last_stage > _ALONE_S:
                print("nothing is left to do; clients that hold a stream open are cut off", file=sys.stderr, flush=True)
                return
            time.sleep(_POLL_S)

    def _is_held_up_by_the_dead(self) -> bool:
        """Whether Triton, without an open session, only waits for a stage: for what a dead one has held, which never
        ends, or until one is loaded.
        """
        if self._reviver is None or self._board is None:
            return False
        waits = self._reviver.losses > 0 or self._reviver.is_reviving
        return waits and not self._board.open_sessions()

    def __enter__(self) -> Supervisor:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not started")
        return self._process

    def _why_it_ended(self) -> str:
        self._remove_leftovers(self._running())
        return f"the server ended with code {self.exit_code}: {self.log.reason(self.exit_code)}{self.log.hint}"

    def _remove_leftovers(self, process: subprocess.Popen[bytes]) -> None:
        # Once: the number of a group that is gone may be another's later.
        if not self._stopped:
            self._stopped = True
            if self._reviver is not None:
                self._reviver.close()
            end_group(process)
            if self._reviver is not None:
                self._reviver.join(_KILL_AFTER_S)
            self._outliving.close()
            remove_shared_memory(self.regions)


def longest_stop_s(config: ServerConfig) -> float:
    """What a server that was told to stop may take at most, in seconds: whoever ends it by force should wait longer."""
    return config.drain_timeout_s + _END_WITHIN_S + config.exit_timeout_s + _KILL_AFTER_S


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or the server's own end.

    Returns:
        The exit code: after a signal 128 + its number, as a shell has it (Ctrl-C 130, SIGTERM 143); otherwise 1.
    """
    config = parse_options(arguments)
    received: list[int] = []
    try:
        # Fetching a checkpoint may take long, and nothing is started yet that has to be stopped.
        with on_signals(exit_at_once):
            model = model_folder(config.model)
            check_files(model)
            _serve(replace(config, model=str(model)), received)
    except (ServerError, ModelFolderError) as error:
        if not received:
            print(f"error: {error}", file=sys.stderr)
    return 128 + received[0] if received else 1


def _serve(config: ServerConfig, received: list[int]) -> None:
    """Run a server until a signal comes, which is added to `received`."""
    server = Supervisor(config)

    first_at = 0.0

    def stop(number: int) -> None:
        nonlocal first_at
        first_at = first_at or time.monotonic()
        received.append(number)
        server.request_stop(at_once=time.monotonic() - first_at > _SAME_SIGNAL_S)

    with on_signals(stop), server:
        print(f"READY http={server.http_url} grpc={server.grpc_url} metrics={server.metrics_url}", flush=True)
        server.run()
        server.drain()


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Starts tritonserver on a model repository, waits until it is ready, keeps it alive, and stops it cleanly.

`build.sh serve`, the container and the server tests run servers through this; it knows nothing of requests.
Command line: `python -m triton_omni.supervisor.serve --model-repository FOLDER --http-port 8000`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType

from triton_omni.supervisor.guard import Guard
from triton_omni.supervisor.leftovers import new_region_prefix, remove_stale_regions
from triton_omni.supervisor.machine import (
    ServerError,
    ServerNotReady,
    choose_ports,
    find_triton,
    known_options,
    stub_environment,
    visible_gpus,
)
from triton_omni.supervisor.model_control import ModelControl, operator_key
from triton_omni.supervisor.model_folder import ModelFolderError, check_files, model_folder
from triton_omni.supervisor.mps import mps_daemon
from triton_omni.supervisor.options import ServerConfig, parse_options
from triton_omni.supervisor.probe import address, own_host, warm_up
from triton_omni.supervisor.readiness import drain
from triton_omni.supervisor.restart import Starts
from triton_omni.supervisor.served_repository import check_placement
from triton_omni.supervisor.server_log import ServerLog
from triton_omni.supervisor.server_run import END_WITHIN_S, KILL_AFTER_S, Launch, ServerRun
from triton_omni.supervisor.start import StartReport, check_caches, check_gpu_share, check_shared_memory, stages_of

_SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: Ctrl-C reaches a command from its terminal and again from its shell."""
_POLL_S = 0.1


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of each signal that asks for an end: SIGTERM, SIGINT, SIGHUP."""

    def handle(number: int, _frame: FrameType | None) -> None:
        act(number)

    # A hang-up that is ignored (nohup) stays so.
    numbers = [signal.SIGTERM, signal.SIGINT]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    earlier = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Delay signals that ask for an end until the block is over; the first one then takes effect.

    Only the main thread takes signals, so in another thread this changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    try:
        with on_signals(waiting.append):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[0])


def exit_at_once(number: int) -> None:
    """End without cleanup; the exit code is the one a shell gives."""
    os._exit(128 + number)


class Supervisor:
    """Owns one server, from `start` to `stop`: a tritonserver process, or several, one after the other.

    As a context manager, it starts the server and waits until the server is ready:

        with Supervisor(ServerConfig(Path("model_repository"))) as server:
            client = grpc.InferenceServerClient(server.grpc_url)
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.log = ServerLog(config.log_path)
        # No `threading.Event`: a signal handler that sets one could deadlock with the code that it interrupted.
        self._stop_requested = self._stop_at_once = False
        self._ports = {"http": 0, "grpc": 0, "metrics": 0}
        self.regions = new_region_prefix(os.getpid())
        """Prefix of the names of Triton's regions of shared memory."""
        self._outliving = contextlib.ExitStack()
        self._run: ServerRun | None = None
        self._mps_guard: Guard | None = None
        self._starts = Starts(config.restart)
        self._earlier_deaths = 0

    @property
    def http_url(self) -> str:
        """`HOST:PORT` of HTTP, as clients of Triton take it."""
        return address(self.config.host, self._ports["http"])

    @property
    def grpc_url(self) -> str:
        """`HOST:PORT` of gRPC."""
        return address(self.config.host, self._ports["grpc"])

    @property
    def metrics_url(self) -> str:
        """`HOST:PORT` of the metrics."""
        return address(self.config.host, self._ports["metrics"])

    @property
    def pid(self) -> int:
        """Process id of tritonserver. Raises `ServerError` before `start`."""
        return self._running().process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of tritonserver, None while it runs; as a shell gives it (128 + signal)."""
        return self._running().exit_code

    @property
    def deaths(self) -> int:
        """Number of deaths that left requests in Triton which never end."""
        return self._earlier_deaths + (self._run.deaths if self._run is not None else 0)

    def start(self) -> None:
        """Start the process and return at once.

        Raises:
            ServerError: already started, no tritonserver, no checkpoint, a `stage.yaml` that cannot be used, a stage
                on a GPU that is not there, a port is taken, MPS cannot be had, there is no room in shared memory, or a
                cache, the log or the laid out model repository cannot be written.
        """
        if self._run is not None:
            raise ServerError(f"the server is already started (process {self.pid})")
        with contextlib.ExitStack() as outliving:
            self._run = ServerRun(self._prepare(outliving), self.log)
            self._outliving = outliving.pop_all()

    def _prepare(self, outliving: contextlib.ExitStack) -> Launch:
        """Check and gather everything that a start needs; `outliving` releases it after the stop. Raises as `start`."""
        config = self.config
        if not config.model_repository.is_dir():
            raise ServerError(f"{config.model_repository} is no folder; a model repository is needed")
        install = find_triton()
        try:
            control_key = operator_key(os.environ)
            model = model_folder(config.model)
        except ValueError as error:
            raise ServerError(str(error)) from error
        gpus = visible_gpus(os.environ)
        check_placement(config.placement, gpus)
        wanted = {"http": config.http_port, "grpc": config.grpc_port, "metrics": config.metrics_port}
        self._ports = choose_ports(config.host, wanted)
        remove_stale_regions()
        check_shared_memory()
        check_caches(os.environ)
        environment = {**stub_environment(os.environ, install, model), **config.environment}
        check_gpu_share(environment)
        self.log.open()
        outliving.callback(self.log.close)
        if config.mps:
            variables, self._mps_guard = outliving.enter_context(mps_daemon(os.environ))
            environment |= variables
        grpc_url = address(own_host(config.host), self._ports["grpc"])
        return Launch(
            config=config,
            install=install,
            model=model,
            gpus=gpus,
            ports=self._ports,
            regions=self.regions,
            environment=environment,
            control=ModelControl(
                grpc_url, config.ready_timeout_s, control_key, client_shared_memory=config.client_shared_memory
            ),
            options=known_options(install, environment),
        )

    def wait_ready(self) -> None:
        """Block until every model is loaded and the server has spoken a first reply.

        Raises:
            ServerNotReady: the server died (the message has the failing model's reason), `ready_timeout_s` passed,
                or `request_stop` was called.
        """
        run, deadline = self._running(), time.monotonic() + self.config.ready_timeout_s
        report = StartReport(self.pid, self.log.path, stages_of(self.config.model_repository))
        while not run.is_ready():
            report.look()
            if run.exit_code is not None:
                raise ServerNotReady(run.why_it_ended())
            self._raise_if_stopped()
            if time.monotonic() > deadline:
                raise ServerNotReady(f"the server was not ready after {self.config.ready_timeout_s:g} s{self.log.hint}")
            time.sleep(_POLL_S)
        if run.board is None:
            run.watch()
            if self.config.warm_up and run.board is not None:
                report.warms_up()
                warm_up(self.config.host, self._ports["http"], lambda: self._stop_requested)
                self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._stop_requested:
            raise ServerNotReady("stopped before the server was ready")

    def run(self) -> None:
        """Block until `request_stop` is called, and `check` meanwhile.

        Raises:
            ServerError: as `check`.
        """
        while not self._stop_requested:
            self.check()
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Check a server that was ready; restart it if it was ended for a death.

        Raises:
            ServerError: the server ended by itself or listens no more, or it or a stage died too often; the message has
                the reason.
        """
        if (cause := self._running().ended_for) is not None:
            self._start_again(cause)
            return
        self._running().check()
        if self._mps_guard is not None:
            self._mps_guard.renew()

    def _start_again(self, cause: str) -> None:
        """Start tritonserver again on the same ports, until it is ready or `request_stop` is called.

        Raises:
            ServerError: it ended as often as the policy allows.
        """
        while not self._stop_requested:
            run = self._running()
            run.remove_leftovers()
            if self._starts.are_exhausted():
                raise ServerError(f"{self._starts.sentence('the server', cause)}{self.log.hint}")
            self._pause(self._starts.count_start())
            try:
                self._run = run.again()
                self._earlier_deaths += run.deaths
                self.wait_ready()
            except ServerError as error:
                cause = str(error)
                _say(f"the server: it could not be started again: {cause}")
            else:
                _say("the server: started again")
                return

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stop_requested and time.monotonic() < until:
            time.sleep(_POLL_S)

    def request_stop(self, *, at_once: bool = False) -> None:
        """Make `run` and `wait_ready` return, and `drain` too if `at_once`; safe in a signal handler."""
        self._stop_requested = True
        self._stop_at_once = self._stop_at_once or at_once

    def drain(self) -> bool:
        """Refuse new requests, report not ready, and wait for open sessions, `drain_timeout_s` at most.

        Returns:
            True if all have ended; False if `request_stop` was called with `at_once`.
        """
        run = self._running()
        if (board := run.board) is None or run.exit_code is not None:
            return True

        def tell() -> None:
            run.say_leaving()
            if sessions := board.open_sessions():
                get = f"{self.config.drain_timeout_s:g} s at most, the whole stop {longest_stop_s(self.config):g} s"
                _say(f"stopping: open replies: {sessions}, which get {get}")

        return drain(board, self.config.drain_timeout_s, self._is_given_up, tell)

    def _is_given_up(self) -> bool:
        return self._stop_at_once or self.exit_code is not None

    def stop(self) -> float:
        """Stop the server in order, by force only past its exit timeout; return the seconds it took.

        Open sessions end with an error; see `drain`. None of its processes or shared memory is left, however
        it ended. A signal that asks for an end waits until then.
        """
        begin = time.monotonic()
        if self._run is None:
            return 0.0
        with signals_wait():
            self._run.stop()
            self._outliving.close()
        return time.monotonic() - begin

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

    def _running(self) -> ServerRun:
        if self._run is None:
            raise ServerError("the server is not started")
        return self._run


def longest_stop_s(config: ServerConfig) -> float:
    """Return the maximum seconds that a stopping server may take; a service manager should wait longer before it
    kills.
    """
    return config.drain_timeout_s + END_WITHIN_S + config.exit_timeout_s + KILL_AFTER_S


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or the server's own end.

    Returns:
        The exit code: after a signal 128 + its number, as a shell has it (Ctrl-C 130, SIGTERM 143); otherwise 1.
    """
    config = parse_options(arguments)
    received: list[int] = []
    try:
        # Fetching a checkpoint may take long; a signal then ends the process, since nothing has to be stopped yet.
        with on_signals(exit_at_once):
            model = model_folder(config.model)
            check_files(model)
            _serve(replace(config, model=str(model)), received)
    except (ServerError, ModelFolderError) as error:
        if not received:
            print(f"error: {error}", file=sys.stderr)
    return 128 + received[0] if received else 1


def _serve(config: ServerConfig, received: list[int]) -> None:
    """Run a server until a signal comes; add the signal to `received`."""
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

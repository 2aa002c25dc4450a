# SPDX-License-Identifier: Apache-2.0
"""One tritonserver process, from its start to its end, with everything that watches it.

The supervisor may start several, one after the other; they share a `Launch`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from triton_omni.core.arguments import say
from triton_omni.session.ledger_table import WATCHED
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni.supervisor.guard import guarded_process
from triton_omni.supervisor.leftovers import end_group, has_followers, kill_group, remove_shared_memory
from triton_omni.supervisor.machine import (
    CLIENT_SHARED_MEMORY,
    HTTP_BODY_LIMIT,
    ServerError,
    TritonInstall,
    Version,
    errors_wait,
    guard_warning,
    server_version,
)
from triton_omni.supervisor.model_control import ModelControl, ModelControlError
from triton_omni.supervisor.native import with_bounds, with_stall_guard
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.probe import Probe, address, own_host
from triton_omni.supervisor.readiness import Readiness, end_sessions
from triton_omni.supervisor.restart import MODELS, RestartPolicy, StageRestarter
from triton_omni.supervisor.served_repository import served_repository, temporary_folder, thinker_limits
from triton_omni.supervisor.server_log import ServerLog
from triton_omni.supervisor.start import memory_pool_bytes

KILL_AFTER_S = 5.0
"""Seconds after Triton's own exit timeout at which the supervisor ends what is left."""
END_WITHIN_S: Final = 3.0
"""Seconds in which stages tell the clients of open sessions that the server stops."""
_ALONE_S = 2.0
"""Seconds that a stopping server gets once its stages have left, or if a dead stage keeps it from ending."""
_LEAVE_WITHIN_S = 15.0
"""Seconds that the stages of a stopping server get after its last session. Triton keeps a stage whose last request
ended after the order to unload, for as long as that request's client holds its stream open.
"""
_POLL_S: Final = 0.1


def server_command(
    config: ServerConfig,
    install: TritonInstall,
    repository: Path,
    *,
    ports: Mapping[str, int],
    control_flags: Sequence[str],
    regions: str,
    pools: Sequence[int],
    options: frozenset[str],
    body_limit: int,
) -> list[str]:
    """Program and arguments.

    Args:
        config: how the server runs.
        install: the tritonserver.
        repository: its models, laid out for this start.
        ports: of `http`, `grpc` and `metrics`.
        control_flags: options that protect model control, see `ModelControl.flags`.
        regions: prefix of the names of its regions of shared memory.
        pools: bytes of each GPU's pool of memory for tensors between models; none = there is no GPU.
        options: names of the options that this tritonserver knows.
        body_limit: bytes of the largest HTTP body that the models take.
    """
    command = [
        str(install.binary),
        f"--model-repository={repository.resolve()}",
        *control_flags,
        "--strict-readiness=true",
        f"--exit-timeout-secs={config.exit_timeout_s}",
        "--allow-http=true",
        f"--http-address={config.host}",
        f"--http-port={ports['http']}",
        "--allow-grpc=true",
        f"--grpc-address={config.host}",
        f"--grpc-port={ports['grpc']}",
        # A pooled stream keeps all the bytes of its longest reply; a new one is made as quickly.
        "--grpc-infer-allocation-pool-size=0",
        "--allow-metrics=true",
        f"--metrics-address={config.host}",
        f"--metrics-port={ports['metrics']}",
        f"--log-verbose={config.log_verbose}",
        f"--backend-config=python,shm-region-prefix-name={regions}",
    ]
    if install.backend_directory is not None:
        command.append(f"--backend-directory={install.backend_directory}")
    if CLIENT_SHARED_MEMORY in options and config.client_shared_memory:
        command.append(f"--{CLIENT_SHARED_MEMORY}=true")
    if HTTP_BODY_LIMIT in options:
        command.append(f"--{HTTP_BODY_LIMIT}={body_limit}")
    if pools:
        command += [f"--cuda-memory-pool-byte-size={gpu}:{pool}" for gpu, pool in enumerate(pools)]
    else:  # both would only fail, with a warning
        command += ["--pinned-memory-pool-byte-size=0", "--allow-gpu-metrics=false"]
    return command


@dataclass(frozen=True)
class Launch:
    """Facts that all processes of one server share."""

    config: ServerConfig
    install: TritonInstall
    model: Path
    """The checkpoint."""
    gpus: int
    ports: Mapping[str, int]
    """Ports of `http`, `grpc` and `metrics`."""
    regions: str
    """Prefix of the names of Triton's regions of shared memory."""
    environment: Mapping[str, str]
    control: ModelControl
    options: frozenset[str]
    """Names of the options that this tritonserver knows."""

    def command(self, repository: Path) -> list[str]:
        """Return tritonserver's command for a repository that was laid out; raise `ServerError` for invalid
        settings.
        """
        pools = [memory_pool_bytes(repository, self.model)] * self.gpus if self.gpus else []
        return server_command(
            self.config,
            self.install,
            repository,
            ports=self.ports,
            control_flags=self.control.flags,
            regions=self.regions,
            pools=pools,
            options=self.options,
            body_limit=thinker_limits(repository).max_body_bytes,
        )


class ServerRun:
    """Starts a process, at once.

    Raises:
        ServerError: settings or checkpoint cannot be used, or the process cannot be started.
    """

    def __init__(self, launch: Launch, log: ServerLog) -> None:
        self.launch, self._log = launch, log
        self._ended = False
        self._board: StageBoard | None = None
        self._restarter: StageRestarter | None = None
        self._probe: Probe | None = None
        config = launch.config
        with contextlib.ExitStack() as outliving:
            placement = config.placement if launch.gpus else None
            laid_out = served_repository(config.model_repository, launch.model, placement, config.profile)
            repository = outliving.enter_context(laid_out)
            # A repository that was not laid out for this start is not ours to write to.
            own = [repository] if repository != config.model_repository else []
            scratch = Path(outliving.enter_context(temporary_folder()))
            environment = dict(launch.environment)
            if config.stall_guard:
                environment |= with_stall_guard(environment, scratch)
            environment |= with_bounds(environment, thinker_limits(repository).max_body_bytes)
            started = guarded_process(launch.command(repository), environment, launch.regions, [*own, scratch])
            self.process, self._guard = outliving.enter_context(started)
            self._readiness = Readiness(launch.control, repository) if own else None
            if self._readiness is not None:
                outliving.callback(self._readiness.join, KILL_AFTER_S)
            self._outliving = outliving.pop_all()
        log.follow(self.process)

    def again(self) -> ServerRun:
        """Start another, after this one has ended; raises as this does."""
        return ServerRun(self.launch, self._log)

    @property
    def exit_code(self) -> int | None:
        """Exit code of tritonserver, None while it runs; as a shell gives it (128 + signal)."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def board(self) -> StageBoard | None:
        """State of the stages; None before the server was ready, and for a server without stages."""
        return self._board

    @property
    def deaths(self) -> int:
        """Number of deaths that left requests in Triton which never end."""
        return self._restarter.deaths if self._restarter is not None else 0

    @property
    def ended_for(self) -> str | None:
        """The death for which this server was ended, and is to be started again; None = none."""
        return self._restarter.ended_for if self._restarter is not None else None

    def is_ready(self) -> bool:
        """True if every model is loaded and every port is open."""
        if self._probe is None:
            self._probe = Probe(self.launch.config.host, self.launch.ports)
        return self._probe.is_ready()

    def watch(self) -> None:
        """Watch the stages of a server that is ready, from now on."""
        config = self.launch.config
        version = server_version(address(own_host(config.host), self.launch.ports["http"]))
        if config.stall_guard and (warning := guard_warning(version)) is not None:
            say(f"warning: {warning}")
        try:
            self._board = StageBoard(ledger_name(self.process.pid))
        except FileNotFoundError:  # a server without stages has no table, and one that ended is told by `check`
            return
        tell = None
        if self._readiness is not None:
            tell, self._readiness.on_fault = self._readiness.set_ready, self._board.count_fault
        policy = self._policy(version)
        self._restarter = StageRestarter(self._board, self.launch.control, policy, tell, self._end_at_once)
        self._restarter.start()

    def check(self) -> None:
        """Check a server that was ready: raise if it failed, and replace its guard process if that is gone.

        Raises:
            ServerError: it ended by itself or listens no more, or a stage died too often; the message has the reason.
        """
        exit_code = self.exit_code
        if self.ended_for is not None:  # set before the process ends, so read after its exit code
            return
        if exit_code is not None:
            raise ServerError(self.why_it_ended())
        if self._restarter is not None and self._restarter.failure is not None:
            raise ServerError(f"{self._restarter.failure}{self._log.hint}")
        if self._probe is not None and self._probe.has_hung_up():
            raise ServerError(f"the server's process lives, but has closed its HTTP port{self._log.hint}")
        self._guard.renew()

    def why_it_ended(self) -> str:
        """Remove what the ended process left, and return one sentence on why it ended."""
        self.remove_leftovers()
        return f"the server ended with code {self.exit_code}: {self._log.reason(self.exit_code)}{self._log.hint}"

    def say_leaving(self) -> None:
        """Make the server not ready, for good."""
        if self._readiness is not None:
            self._readiness.end()

    def stop(self) -> None:
        """Stop the server in order, by force only past its exit timeout. Open sessions end with an error."""
        if self._ended:
            return
        if self._restarter is not None:
            self._restarter.close()
        if self._board is not None:
            end_sessions(self._board, END_WITHIN_S, lambda: self.exit_code is not None)
        if self.process.poll() is None:
            self._await_end()
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """End what is left of the server, and remove what it leaves."""
        # Once: the id of a group that is gone may be reused.
        if self._ended:
            return
        self._ended, self._board = True, None
        if self._restarter is not None:
            self._restarter.close()
        end_group(self.process)
        if self._restarter is not None:
            self._restarter.join(KILL_AFTER_S)
        self._log.settle()
        self._outliving.close()
        remove_shared_memory(self.launch.regions)

    def _policy(self, version: Version | None) -> RestartPolicy:
        policy = self.launch.config.restart
        return policy if policy.whole_server is not None else replace(policy, whole_server=errors_wait(version))

    def _end_at_once(self) -> None:
        if self.process.poll() is None:
            kill_group(self.process.pid)

    def _unload(self) -> bool:
        """Have Triton unload all models; return whether it accepted that.

        A stopping Triton waits for every client that holds a gRPC stream open, even without a request, and since 2.58
        it does so before it unloads the models. So the models leave first, and such a client loses nothing when it is
        cut off. Nothing is unloaded during a restart, since Triton may finish that load first.
        """
        if self._board is None or (self._restarter is not None and self._restarter.is_restarting):
            return False
        try:
            for name in reversed(WATCHED):
                self.launch.control.unload(MODELS[name])
        except ModelControlError as error:
            say(f"the models could not be unloaded before the stop: {error}")
            return False
        return True

    def _await_end(self) -> None:
        """Stop the server once its stages have left, and wait for its end.

        The wait ends a while after the last stage or session has left, and at the exit timeout at the latest.
        """
        begin = last_stage = last_session = time.monotonic()
        unloads = self._unload()
        exit_timeout_s, told = self.launch.config.exit_timeout_s, not unloads
        if told:
            self.process.terminate()
        while self.process.poll() is None and (waited_s := time.monotonic() - begin) < exit_timeout_s + KILL_AFTER_S:
            stages_left = not has_followers(self.process) or self._is_held_up_by_the_dead()
            if not stages_left:
                last_stage = time.monotonic()
            if not unloads or (self._board is not None and self._board.open_sessions()):
                last_session = time.monotonic()
            if not told and (stages_left or waited_s > exit_timeout_s):
                told, last_stage = True, time.monotonic()
                self.process.terminate()
            elif time.monotonic() > min(last_stage + _ALONE_S, last_session + _LEAVE_WITHIN_S):
                say("nothing is left to do; clients that hold a stream open are cut off")
                return
            time.sleep(_POLL_S)

    def _is_held_up_by_the_dead(self) -> bool:
        """True if Triton has no open session and only waits for a stage: a dead one, whose requests never end, or a new
        one, which must load.
        """
        if self._restarter is None or self._board is None:
            return False
        waits = self._restarter.deaths > 0 or self._restarter.is_restarting
        return waits and not self._board.open_sessions()

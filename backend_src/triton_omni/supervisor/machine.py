# SPDX-License-Identifier: Apache-2.0
"""Resources of this machine for a server: an installed tritonserver, its environment, GPUs, free ports.

A tritonserver's program tells its options before it starts (`--help`), but its version only as a running server
(`GET /v2`). This module knows nothing of models.
"""

from __future__ import annotations

import errno
import http.client
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20000
_PORT_ATTEMPTS = 50


class ServerError(RuntimeError):
    """The server cannot be started or does not run; the message is one sentence for the operator."""


class ServerNotReady(ServerError):
    """The server was started and ended, or was stopped, before its models were loaded."""


class _PortTaken(ServerError):
    """Another port of this address may be free."""


@dataclass(frozen=True)
class TritonInstall:
    """A tritonserver and what it needs to run here."""

    binary: Path
    backend_directory: Path | None = None
    """None = the binary's own default."""
    library_folders: tuple[Path, ...] = ()
    """Folders that come first on LD_LIBRARY_PATH."""


def find_triton(environment: Mapping[str, str] | None = None) -> TritonInstall:
    """The tritonserver to use: under `TRITON_HOME`, else on PATH, else where `build.sh setup` unpacked one.

    Raises:
        ServerError: there is none, or `TRITON_HOME` holds none.
    """
    env = os.environ if environment is None else environment
    if home := env.get("TRITON_HOME"):
        return _unpacked(Path(home))
    if found := shutil.which("tritonserver", path=env.get("PATH", "")):
        return TritonInstall(Path(found))
    return _unpacked(Path(sys.prefix) / "share" / "tritonserver")


def _unpacked(home: Path) -> TritonInstall:
    root = home / "pytriton" / "tritonserver"
    binary = root / "bin" / "tritonserver"
    if not binary.is_file():
        raise ServerError(f"no tritonserver on PATH and none in {home}: run ./build.sh setup")
    # The stub links libpython, which may lie in Python's own folder outside the system's.
    libpython = Path(str(sysconfig.get_config_var("LIBDIR")))
    return TritonInstall(binary, root / "backends", (home / "nvidia_pytriton.libs", libpython))


def stub_environment(base: Mapping[str, str], install: TritonInstall, model: Path) -> dict[str, str]:
    """Environment of the server, which its stages inherit."""
    env = dict(base)
    # A stage's stub takes its packages from the first `python3` on PATH.
    env["PATH"] = prepend([Path(sys.executable).parent], base.get("PATH", os.defpath))
    if install.library_folders:
        env["LD_LIBRARY_PATH"] = prepend(install.library_folders, base.get("LD_LIBRARY_PATH", ""))
    env["OMNI_MODEL"] = str(model)
    # By default glibc uses up to eight heaps a core and leaves free memory scattered in them. Under load tritonserver
    # grew by 64 MiB in 390 s, with four heaps by 17.
    env.setdefault("MALLOC_ARENA_MAX", "4")
    # By default torch keeps cuDNN's plans of 10,000 convolutions, some 200 KiB each. A vocoder has 62 for each length,
    # and whole replies have ever new lengths.
    env.setdefault("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", "2000")
    # Everything is read from the folder: no look-ups at start, no statistics sent.
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # The engine lives in the stage's process, on vLLM's first model runner.
    return env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


def prepend(paths: Sequence[Path], rest: str) -> str:
    """The value of a variable like PATH with `paths` before what it had."""
    return os.pathsep.join([*map(str, paths), *([rest] if rest else [])])


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that a process with this environment sees; the driver is not asked."""
    present = len(list(devices.glob("nvidia[0-9]*")))
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    # As CUDA: a name that is none ends the list.
    names = itertools.takewhile(lambda name: name.strip() not in ("", "-1"), chosen.split(","))
    return min(present, len(list(names)))


def choose_ports(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """A port for each service; 0 is replaced by a free one.

    Raises:
        ServerError: `host` cannot be bound, two services want one port, or a port is taken.
    """
    with ExitStack() as held:
        # All stay bound until all are chosen, so that no two services get the same one.
        return {
            service: _bind(held, host, service, port) if port else _bind_free(held, host, service)
            for service, port in wanted.items()
        }


def _bind_free(held: ExitStack, host: str, service: str) -> int:
    """Bind a free port outside the range from which the system gives ports to outgoing connections. Such a connection
    could take a port of that range before the server binds it.
    """
    outgoing = int(_OUTGOING_PORTS.read_text().split()[0])
    for _ in range(_PORT_ATTEMPTS):
        try:
            return _bind(held, host, service, random.randrange(_FIRST_PORT, max(outgoing, _FIRST_PORT + 1)))
        except _PortTaken:
            continue
        except ServerError:
            break  # of the host, whatever the port
    return _bind(held, host, service, 0)


def _bind(held: ExitStack, host: str, service: str, port: int) -> int:
    listener = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    # The server binds in the same way: a connection that lingers after an earlier server does not count.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        said = f"{service} cannot listen on {host}:{port} ({error.strerror or error})"
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise ServerError(f"{said}: choose an address of this machine for --host") from error
        way = f"end what listens there or choose another --{service}-port (0 = a free one)"
        raise _PortTaken(f"{said}: {way}") from error
    return int(listener.getsockname()[1])


# --- features of a tritonserver ---------------------------------------------------------------------------------------


CLIENT_SHARED_MEMORY: Final = "allow-client-shm"
"""Option since 2.68 (26.04); from then on clients may share memory only if it is true."""
HTTP_BODY_LIMIT: Final = "http-max-input-size"
"""Option since 2.59 (25.06); it limits binary and JSON bodies since 2.62 (25.10)."""
ERRORS_WAIT_SINCE: Final = (2, 66)
"""26.02: from then on an ensemble sends an error only after the last step of the request has ended."""

GUARD_TRIED: Final = ((2, 51), (2, 71))
"""The oldest and the newest version with which the stall guard was tried: releases 24.10 and 26.07."""

_OPTION: Final = re.compile(r"^\s*--([a-z0-9-]+)", re.MULTILINE)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.")
_ANSWERS_WITHIN_S: Final = 30.0

Version = tuple[int, int]
"""Major and minor number of Triton's own version; 2.51 is that of the release 24.10."""


def errors_wait(version: Version | None) -> bool:
    """True if a request whose step never ends gets no error; assumed for an unknown version (None)."""
    return version is None or version >= ERRORS_WAIT_SINCE


def guard_warning(version: Version | None) -> str | None:
    """Return a warning if the stall guard was not tried with this version, or with an unknown one (None)."""
    if version is not None and GUARD_TRIED[0] <= version <= GUARD_TRIED[1]:
        return None
    (oldest, newest), found = (".".join(map(str, tried)) for tried in GUARD_TRIED), version or ("unknown",)
    return (
        f"the stall guard was tried with Triton {oldest} to {newest}, this is {'.'.join(map(str, found))}; "
        "if the server ends by a signal, start it with --no-stall-guard"
    )


def known_options(install: TritonInstall, environment: Mapping[str, str]) -> frozenset[str]:
    """Names of the options that a tritonserver lists for `--help`, which ends the program with 1; without their dashes.

    Raises:
        ServerError: the program cannot be run.
    """
    try:
        asked = subprocess.run(
            [str(install.binary), "--help"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except OSError as error:
        raise ServerError(f"{install.binary} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"{install.binary} --help says nothing within {_ANSWERS_WITHIN_S:g} s") from error
    return frozenset(_OPTION.findall(asked.stdout))


def server_version(address: str) -> Version | None:
    """The version of the running server at `HOST:PORT` of HTTP; None where it gives no answer that has one."""
    try:
        with closing(http.client.HTTPConnection(address, timeout=_ANSWERS_WITHIN_S)) as connection:
            connection.request("GET", "/v2")
            told = json.loads(connection.getresponse().read())
        found = _VERSION.match(told["version"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    return (int(found[1]), int(found[2])) if found else None

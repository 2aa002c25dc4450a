# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's perf_analyzer for the server's tests: its program, the libraries that it wants, and the ways it asks.

`./build.sh test` fetches the program; `PERF_ANALYZER` names another one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from server.serving import ROOT, Served
from triton_omni.supervisor.machine import find_triton, prepend
from triton_omni.supervisor.model_control import HEADER
from triton_omni_client import BadRequest
from triton_omni_client.bench.profile_export import CUT_OFF, read_profile_export
from triton_omni_client.messages import MODEL, UNARY_MODEL

PROGRAM = ROOT / ".cache" / "perf-analyzer" / "perf_analyzer"
VARIABLE = "PERF_ANALYZER"
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
"""Libraries that the program needs and Debian lacks, with the names of tritonserver's own copies."""


@dataclass(frozen=True)
class Way:
    """A way to ask: model, transport and load."""

    model: str
    protocol: str
    load: Sequence[str]


CLOSED = ("--streaming", "--concurrency-range", "2")
# Each of several threads would send a request at least, however few are asked for.
POISSON = ("--streaming", "--request-rate-range", "3", "--request-distribution", "poisson", "--max-threads", "1")
WAYS = {
    "stream": Way(MODEL, "grpc", CLOSED),
    "arrivals": Way(MODEL, "grpc", POISSON),
    "unary gRPC": Way(UNARY_MODEL, "grpc", CLOSED[1:]),
    "unary HTTP": Way(UNARY_MODEL, "http", CLOSED[1:]),
}


class CutOff(AssertionError):
    """It has written a part of its export."""


@dataclass(frozen=True)
class PerfAnalyzer:
    """The program, and the server that it measures."""

    program: Path
    libraries: Path
    server: Served

    def run(self, way: Way, key: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end, with this key for the server's statistics; both its outputs are in `stdout`."""
        over_http = way.protocol == "http"
        url = self.server.supervisor.http_url if over_http else self.server.supervisor.grpc_url
        header = HEADER if over_http else f"triton-grpc-protocol-{HEADER}"
        asked = ["-m", way.model, "-u", url, "-i", way.protocol, "--async", *way.load, "-H", f"{header}:{key}"]
        return subprocess.run(
            [self.program, *asked, *options],
            env={**os.environ, "LD_LIBRARY_PATH": prepend([self.libraries], os.environ.get("LD_LIBRARY_PATH", ""))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    @retry(retry=retry_if_exception_type(CutOff), stop=stop_after_attempt(5), reraise=True)
    def measure(self, way: Way, key: str, export: Path, *options: str) -> None:
        """Run it until its export is whole, which it now and then is not (`profile_export.CUT_OFF`)."""
        export.unlink(missing_ok=True)  # it overwrites none
        result = self.run(way, key, *options, "--profile-export-file", str(export))
        assert result.returncode == 0, result.stdout[:2000]
        try:
            _, notes = read_profile_export(export)
        except BadRequest as error:
            raise CutOff(error.message) if "cut off" in error.message else error from error
        if CUT_OFF in notes:
            raise CutOff(CUT_OFF)


def find_perf_analyzer(server: Served, folder: Path) -> PerfAnalyzer:
    """The program, with links in `folder` to what it is linked to; skips the test where nobody has fetched it."""
    program = Path(os.environ.get(VARIABLE) or PROGRAM)
    if program == PROGRAM and not program.exists():
        pytest.skip(f"no perf_analyzer: ./build.sh test fetches one, {VARIABLE}=PROGRAM names one")
    # If tritonserver was installed by other means, every program finds the libraries that it needs itself.
    for name, pattern in LIBRARIES.items():
        for library in [path for place in find_triton().library_folders for path in place.glob(pattern)][:1]:
            (folder / name).symlink_to(library)
    return PerfAnalyzer(program, folder, server)

# SPDX-License-Identifier: Apache-2.0
"""A server that is killed together with its supervisor leaves nothing, and can be started again where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from processes import children, is_running
from server.asking import BATCH_TOLERANCE
from server.commands import Command, command
from server.probes import SLOW_THINKER
from server.serving import STAGES, wait_for
from triton_omni.serving.leftovers import members
from triton_omni.serving.machine import choose_ports
from triton_omni_client import ConnectionFailed, Request

GONE_S, STOPPED_S = 10.0, 40.0
ASKED = Request(text="hello", seed=7, talker={"temperature": 0}, thinker={"min_tokens": 20, "max_tokens": 20})
ENDLESS = Request(text="hello", seed=SLOW_THINKER, thinker={"min_tokens": 250, "max_tokens": 250})


def server_of(running: Command) -> int:
    """Process id of its tritonserver, the first that it started."""
    return children(running.process.pid)[0]


def shared_memory_of(running: Command, server: int) -> set[Path]:
    """The session ledger and the regions of a server, by the process ids in their names."""
    files = set(Path("/dev/shm").glob(f"triton*omni*-{server}-*"))
    return files | set(Path("/dev/shm").glob(f"triton_omni_*-{running.process.pid}-*"))


def test_a_server_killed_with_its_supervisor_leaves_nothing_and_starts_again(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    ports = choose_ports("127.0.0.1", dict.fromkeys(("http", "grpc", "metrics"), 0))
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
    with command(tmp_path / "1", tiny_checkpoint, ports) as first:
        before = first.client.stream(ASKED).collect()
        stream = first.client.stream(ENDLESS)
        next(stream)
        server = server_of(first)
        processes = members(server)
        assert len(processes) == 1 + len(STAGES) + 1, "tritonserver, its stages, and the unary model"
        assert len(shared_memory_of(first, server)) > len(STAGES)
        # At once, as where memory runs out: the supervisor first, so that it cannot tidy up.
        os.kill(first.process.pid, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ConnectionFailed):
            stream.collect()
        wait_for(lambda: not any(map(is_running, processes)), lambda: processes, GONE_S)
        wait_for(lambda: not shared_memory_of(first, server), lambda: shared_memory_of(first, server), GONE_S)
    with command(tmp_path / "2", tiny_checkpoint, ports) as second:
        again = second.client.stream(ASKED).collect()
        assert again.text == before.text
        np.testing.assert_allclose(again.audio, before.audio, rtol=0, atol=BATCH_TOLERANCE)
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(STOPPED_S) == 128 + signal.SIGTERM

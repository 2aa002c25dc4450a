# SPDX-License-Identifier: Apache-2.0
"""Processes for calls that end out of turn: no descriptor is left, and the next request is not harmed."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

import media_samples as samples
from processes import is_running
from triton_omni.core.errors import InternalError
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaPart
from triton_omni.request.media.decoders import Decoders
from triton_omni.request.media.killable import ForkServer, KillableProcess
from triton_omni.request.media.types import image_of
from waiting import wait_for

LIMITS = RequestLimits()
LONG_S = 100.0
MEBIBYTE = 1 << 20
PARTS = [MediaPart("image", samples.image_file("jpeg", 640, 480)), MediaPart("audio", samples.audio_file("wav"))]


def always() -> bool:
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer("json")
    yield made
    made.close()


@pytest.fixture
def process(server: ForkServer) -> Iterator[KillableProcess]:
    made = server.process(256 * MEBIBYTE)
    yield made
    made.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_killing_it_while_it_ends_by_itself_leaves_no_descriptor(server: ForkServer, number: signal.Signals) -> None:
    before = _descriptors()
    for _ in range(20):
        process = server.process(256 * MEBIBYTE)
        os.kill(process.pid, number)
        process.kill()
        process.kill()
        assert not process.is_running
    assert _descriptors() <= before


def test_a_killed_fork_server_leaves_no_descriptor() -> None:
    server = ForkServer("json")
    server.process(256 * MEBIBYTE).kill()
    before = _descriptors()
    for _ in range(2):
        os.kill(server.pid, signal.SIGKILL)
        server.process(256 * MEBIBYTE).kill()
        assert _descriptors() == before
    server.close()


@pytest.mark.parametrize("what", ["os.memfd_create", "os.fdopen", "triton_omni.request.media.killable.send_handle"])
def test_what_this_process_lacks_is_not_told_of_the_other(
    process: KillableProcess, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(what, refuse)
    with pytest.raises(OSError, match="Too many open files"):
        process.run(os.getpid, LONG_S, always)


@pytest.mark.parametrize("killed", ["idle", "the fork server", "both"])
def test_processes_that_ended_between_requests_are_replaced(decoders: Decoders, killed: str) -> None:
    decoders.decode(PARTS[:1], with_audio=False, is_wanted=always)
    [idle], server = decoders._idle, decoders._server.pid
    pids = {"idle": [idle.pid], "the fork server": [server], "both": [server, idle.pid]}[killed]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not idle.is_running)
    assert len(decoders.decode(PARTS[:2], with_audio=False, is_wanted=always)) == 2
    wait_for(lambda: not is_running(idle.pid))


def test_nothing_is_started_after_the_end() -> None:
    made = Decoders(LIMITS)
    pid = made._server.pid
    made.close()
    for _ in range(3):
        with pytest.raises(InternalError, match="the server is shutting down"):
            made.decode(PARTS[:1], with_audio=False, is_wanted=always)
    assert made._server.pid == pid
    assert not is_running(pid)


@pytest.mark.parametrize(("width", "height"), [(28, 56), (640, 480), (1000, 30)])
def test_a_picture_s_pixels_go_apart_from_its_pickle_and_arrive_as_they_were(width: int, height: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(image_of(pixels), protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1000
    assert [buffer.raw().nbytes for buffer in buffers] == [pixels.nbytes]
    found = pickle.loads(head, buffers=buffers).pixels
    assert (found.mode, found.size) == ("RGB", (width, height))
    np.testing.assert_array_equal(np.asarray(found), pixels)


def _descriptors() -> int:
    return psutil.Process().num_fds()

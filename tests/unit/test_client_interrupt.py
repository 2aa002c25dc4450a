# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a stream is read: told to a thread of its own, and never raised in the middle of gRPC's code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from client_fakes import FakeTriton, chunk, serve_grpc
from triton_omni_client import OmniClient, Request
from triton_omni_client.interrupt import Interrupts


def test_the_first_is_told_to_another_thread_and_the_second_is_raised() -> None:
    told: list[threading.Thread] = []
    with Interrupts() as interrupts:
        interrupts.stop = lambda: told.append(threading.current_thread())
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(told) == 1
    assert told[0] is not threading.current_thread()


def test_it_is_raised_where_nothing_can_be_stopped_and_outside() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not interrupts.pressed
    assert signal.getsignal(signal.SIGINT) is before


def test_it_ends_a_stream_wherever_the_main_thread_is() -> None:
    """A hundred times at a hundred moments: each stream ends, and none hangs or breaks."""

    def script(_request: Any, context: Any) -> Iterator[Any]:
        while context.is_active():
            yield chunk(text="a")

    with serve_grpc(FakeTriton(script)) as fake, OmniClient(fake.url) as client:
        for moment in range(100):
            with client.stream(Request(text="hi")) as stream, Interrupts() as interrupts:
                interrupts.stop = stream.close
                timer = threading.Timer(moment / 5000, signal.raise_signal, [signal.SIGINT])
                timer.start()
                for _ in stream:
                    if interrupts.pressed:
                        break
                timer.join()
            assert interrupts.pressed

# SPDX-License-Identifier: Apache-2.0
"""The player: every sample once and in order, silence when told to stop, and what was heard until then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fake_sound import PortAudioError, SoundDevice, plug_in
from triton_omni_client import NoSoundDevice, Player
from triton_omni_client.player import PIECE
from waiting import IN_TIME_S


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SoundDevice:
    return plug_in(monkeypatch, SoundDevice())


@pytest.fixture
def player(device: SoundDevice) -> Iterator[Player]:
    with Player() as found:
        yield found


def test_every_sample_is_played_once_and_in_order(device: SoundDevice, player: Player) -> None:
    samples = np.linspace(-1, 1, 24_000, dtype=np.float32)
    for piece in np.split(samples, [1, 1, 700, 9_000]):
        player.write(piece)
    player.drain()
    np.testing.assert_array_equal(device.played, samples)
    assert player.heard == 1.0
    assert device.opened == {"samplerate": 24_000, "channels": 1, "dtype": "float32", "device": None}


@pytest.mark.parametrize(("name", "chosen"), [("", None), ("3", 3), ("USB", "USB")])
def test_a_device_is_chosen_by_number_or_name(device: SoundDevice, name: str, chosen: Any) -> None:
    with Player(name):
        assert device.opened["device"] == chosen
    assert device.closed


class Stepped(SoundDevice):
    """Plays a piece whenever a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.steps = threading.Semaphore(0)

    def write(self, data: NDArray[np.float32]) -> None:
        self.begun += 1
        assert self.steps.acquire(timeout=IN_TIME_S)
        super().write(data)


def test_writing_does_not_wait_and_stopping_tells_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Stepped()
    plug_in(monkeypatch, device)
    with Player() as player:
        player.write(np.zeros(10 * 24_000, np.float32))
        assert len(device.played) == 0
        device.steps.release(8)
        while device.begun < 9 or player.heard < 8 * PIECE / 24_000:
            time.sleep(0.001)
        assert player.stop() == 8 * PIECE / 24_000
        device.steps.release(100)
        player.drain()  # of the piece that was being written
        player.write(np.ones(480, np.float32))
        player.drain()
        assert len(device.played) == 9 * PIECE + 480
        assert device.played[-480:].all()
        assert player.heard == (PIECE + 480) / 24_000  # counted anew


def test_what_is_still_in_the_device_was_not_heard(device: SoundDevice, player: Player) -> None:
    device.latency = 600
    player.write(np.zeros(24_000, np.float32))
    while len(device.played) < 24_000:
        time.sleep(0.01)
    assert player.heard == 0


def test_closing_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = plug_in(monkeypatch, SoundDevice(speed=0.1))
    with Player() as player:
        player.write(np.zeros(10 * 24_000, np.float32))
    assert device.closed
    assert len(device.played) < 10 * 24_000, "which would have taken 100 s"


def test_a_device_that_goes_away_ends_the_wait_and_is_told(device: SoundDevice, player: Player) -> None:
    device.broken.set()
    player.write(np.zeros(480, np.float32))
    player.drain()
    with pytest.raises(NoSoundDevice, match="Device unavailable"):
        player.write(np.zeros(480, np.float32))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(NoSoundDevice, match=r"pip install sounddevice"):
        Player()


def test_without_portaudio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *_others: Any) -> None:
            if name == "sounddevice":
                raise OSError("PortAudio library not found")

    monkeypatch.delitem(sys.modules, "sounddevice", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(NoSoundDevice, match="libportaudio2"):
        Player()


@pytest.mark.parametrize("error", [PortAudioError("Error querying device -1"), ValueError("No output device matching")])
def test_without_a_device_it_says_so(device: SoundDevice, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def start() -> None:
        raise error

    monkeypatch.setattr(device, "start", start)
    with pytest.raises(NoSoundDevice, match="no sound device to play on: "):
        Player()

# SPDX-License-Identifier: Apache-2.0
"""The player: every sample once and in order, silence when told to stop, and what was heard until then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fake_sound import PortAudioError, SoundDevice, plug_in
from triton_omni_client import NoSoundDevice, Player


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


def test_writing_does_not_wait_and_stopping_tells_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    device = plug_in(monkeypatch, SoundDevice(speed=1.0))
    with Player() as player:
        started = time.monotonic()
        player.write(np.zeros(10 * 24_000, np.float32))
        assert time.monotonic() - started < 1
        time.sleep(0.4)
        heard = player.stop()
        assert 0.05 < heard < 5
        player.drain()  # of the piece that was being written
        silent = len(device.played)
        time.sleep(0.25)
        assert len(device.played) == silent < 5 * 24_000
        player.write(np.ones(480, np.float32))
        player.drain()
        assert device.played[-480:].all()
        assert player.heard < 0.1  # counted anew


def test_what_is_still_in_the_device_was_not_heard(device: SoundDevice, player: Player) -> None:
    device.latency = 30
    player.write(np.zeros(24_000, np.float32))
    while len(device.played) < 24_000:
        time.sleep(0.01)
    assert player.heard == 0


def test_closing_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = plug_in(monkeypatch, SoundDevice(speed=1.0))
    with Player() as player:
        player.write(np.zeros(10 * 24_000, np.float32))
    assert device.closed
    assert len(device.played) < 24_000


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

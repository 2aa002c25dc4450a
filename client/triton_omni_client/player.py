# SPDX-License-Identifier: Apache-2.0
"""Speech to the sound device of this machine as it comes, without gaps; needs the optional package `sounddevice`.

A thread of its own writes, since writing waits for the device: who receives a reply never does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from .audio import SAMPLE_RATE, Waveform
from .closing import Closing
from .errors import OmniClientError

PIECE = SAMPLE_RATE // 20
"""Samples written at a time: `stop` takes effect after no more than these 0.05 s."""


class NoSoundDevice(OmniClientError):
    """Speech cannot be played here: `sounddevice`, its library or a device is missing."""

    code = "no_sound_device"


class Player(Closing):
    """Plays waveforms one after another.

    Args:
        device: name or number of an output device as `sounddevice` lists them; empty is the system's own choice.

    Raises:
        NoSoundDevice: nothing can be played here; the message says what is missing.
    """

    def __init__(self, device: str = "") -> None:
        self._stream, self._device_error = _output_stream(device)
        self._changed = threading.Condition()
        self._pieces: deque[Waveform] = deque()
        self._writing = False
        self._closed = False
        self._broken: Exception | None = None
        self._written = 0
        self._last_write = 0.0
        self._thread = threading.Thread(target=self._play, name="player", daemon=True)
        self._thread.start()

    @property
    def heard(self) -> float:
        """Seconds of speech that have left the loudspeaker since the last `stop`."""
        in_device = float(self._stream.latency) - (time.monotonic() - self._last_write)
        return max(0.0, self._written / SAMPLE_RATE - max(0.0, in_device))

    def write(self, samples: Waveform) -> None:
        """Play a waveform [S] after all before it; does not wait.

        Raises:
            NoSoundDevice: the device has gone.
        """
        if self._broken is not None:
            raise NoSoundDevice(f"the sound device does not play any more: {self._broken}")
        with self._changed:
            self._pieces.extend(samples[at : at + PIECE] for at in range(0, len(samples), PIECE))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything has been heard; Ctrl-C ends the wait."""
        while self._pieces or self._writing:
            with self._changed:
                self._changed.wait(0.05)
        time.sleep(max(0.0, self._written / SAMPLE_RATE - self.heard))

    def stop(self) -> float:
        """Fall silent as soon as the device has played what it holds; the seconds heard since the last `stop`."""
        with self._changed:
            self._pieces.clear()
            heard, self._written = self.heard, 0
        return heard

    def close(self) -> None:
        """Fall silent and give the device back."""
        with self._changed:
            self._closed = True
            self._pieces.clear()
            self._changed.notify_all()
        self._thread.join()
        self._stream.close()

    def _play(self) -> None:
        while (piece := self._next_piece()) is not None:
            try:
                self._stream.write(piece[:, None])
            except self._device_error as error:
                self._end(error)
                return
            with self._changed:
                self._writing = False
                self._written += len(piece)
                self._last_write = time.monotonic()
                self._changed.notify_all()

    def _next_piece(self) -> Waveform | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._closed)
            if self._closed:
                return None
            self._writing = True
            return self._pieces.popleft()

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._broken = error
            self._writing = False
            self._pieces.clear()
            self._changed.notify_all()


def _output_stream(device: str) -> tuple[Any, type[Exception]]:
    """A running output stream, and what it raises when its device goes."""
    try:
        import sounddevice  # type: ignore[import-untyped]
    except ImportError as error:
        raise NoSoundDevice("playing needs the package sounddevice: pip install sounddevice") from error
    except OSError as error:  # the package is there, PortAudio is not
        raise NoSoundDevice(f"playing needs PortAudio (on Debian and Ubuntu: libportaudio2): {error}") from error
    chosen = int(device) if device.isdecimal() else device or None
    try:
        stream = sounddevice.OutputStream(samplerate=SAMPLE_RATE, channels=1, dtype="float32", device=chosen)
        stream.start()
    except (sounddevice.PortAudioError, ValueError) as error:
        raise NoSoundDevice(f"no sound device to play on: {error}") from error
    failure: type[Exception] = sounddevice.PortAudioError
    return stream, failure

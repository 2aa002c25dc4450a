# SPDX-License-Identifier: Apache-2.0
"""When a turn begins and ends, by given probabilities and by Silero's network on recorded speech."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile

from triton_omni_gateway.realtime.buffer import InputBuffer
from triton_omni_gateway.realtime.config import PcmFormat
from triton_omni_gateway.realtime.formats import InputDecoder
from triton_omni_gateway.realtime.silero import SileroVoice
from triton_omni_gateway.realtime.smart_turn import SmartTurn
from triton_omni_gateway.realtime.turns import CHUNK_SAMPLES, Change, Paused, Started, Stopped, TurnDetector

SPEECH = Path(__file__).parents[2] / "docs" / "images" / "reply.wav"
CHUNK = bytes(2 * CHUNK_SAMPLES)


class ScriptedVoice:
    """A voice whose probabilities are given."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        self._probabilities = list(probabilities)

    def probability(self, _pcm: bytes) -> float:
        return self._probabilities.pop(0)

    def reset(self) -> None:
        pass


def changes(probabilities: Sequence[float], padding_ms: int = 64, silence_ms: int = 96) -> list[Change]:
    detector = TurnDetector(ScriptedVoice(probabilities), threshold=0.5, padding_ms=padding_ms, silence_ms=silence_ms)
    return list(detector.feed(CHUNK * len(probabilities)))


def test_a_turn_has_what_led_to_it_and_ends_after_silence() -> None:
    assert changes([0, 0, 0, 0, 0.9, 0.9, 0.9, 0, 0, 0, 0]) == [Started(4 * 32 - 64), Stopped(10 * 32)]


def test_a_click_begins_no_turn() -> None:
    assert changes([0, 0.9, 0, 0.9, 0, 0]) == []


def test_a_pause_shorter_than_the_silence_is_part_of_the_turn() -> None:
    assert changes([0.9, 0.9, 0, 0, 0.9, 0, 0, 0], padding_ms=0) == [Started(0), Stopped(8 * 32)]


def test_a_moment_in_doubt_is_silence_only_after_silence() -> None:
    assert changes([0.9, 0.9, 0.4, 0.4, 0.4, 0.4], padding_ms=0) == [Started(0)]
    assert changes([0.9, 0.9, 0.1, 0.4, 0.4], padding_ms=0) == [Started(0), Stopped(5 * 32)]


def test_sound_may_be_cut_anywhere() -> None:
    probabilities = [0, 0.9, 0.9, 0, 0, 0]
    detector = TurnDetector(ScriptedVoice(probabilities), threshold=0.5, padding_ms=0, silence_ms=96)
    data = CHUNK * len(probabilities)
    found = [change for at in range(0, len(data), 700) for change in detector.feed(data[at : at + 700])]
    assert found == [Started(32), Stopped(6 * 32)]


def test_a_pause_is_told_once_and_a_turn_may_be_ended_there() -> None:
    probabilities = [0.9, 0.9, 0, 0, 0, 0.9, 0, 0, 0, 0]
    detector = TurnDetector(ScriptedVoice(probabilities), threshold=0.5, padding_ms=0, silence_ms=1000, pause_ms=64)
    found: list[Change] = []
    for change in detector.feed(CHUNK * len(probabilities)):
        found.append(change)
        if len(found) == 3:
            found.append(detector.stop())
    assert found == [Started(0), Paused(0, 4 * 32), Paused(0, 8 * 32), Stopped(8 * 32)]
    assert not detector.speaks


def test_recorded_speech_is_one_turn_and_noise_none() -> None:
    sound, rate = soundfile.read(SPEECH, dtype="int16")
    assert rate == 24_000
    spoken = sound[: 3 * rate]
    silence, noise = np.zeros(rate, np.int16), np.random.default_rng(7).integers(-2000, 2000, rate, dtype=np.int16)
    decoder = InputDecoder(PcmFormat(type="audio/pcm"))
    pcm = decoder.decode(np.concatenate([noise, silence, spoken, silence]).tobytes())
    detector = TurnDetector(SileroVoice(), threshold=0.5, padding_ms=300, silence_ms=500)
    started, stopped = list(detector.feed(pcm))
    assert isinstance(started, Started)
    assert isinstance(stopped, Stopped)
    assert 1500 <= started.begin_ms <= 2300
    assert 5200 <= stopped.end_ms <= 5900


def test_the_buffer_keeps_places_while_it_forgets() -> None:
    buffer = InputBuffer(1)
    buffer.append(bytes(32 * 500))
    buffer.forget_before(200)
    assert (buffer.begin_ms, buffer.end_ms, len(buffer)) == (200, 500, 32 * 300)
    assert len(buffer.take(100, 300)) == 32 * 100
    assert buffer.begin_ms == 300
    buffer.clear()
    assert (buffer.begin_ms, buffer.end_ms) == (500, 500)


@pytest.mark.parametrize("rate", [8000, 16000, 24000])
def test_all_of_a_sound_is_heard_however_it_is_cut(rate: int) -> None:
    tone = (8000 * np.sin(np.arange(rate) * 2 * np.pi * 440 / rate)).astype("<i2").tobytes()
    decoder = InputDecoder(PcmFormat(type="audio/pcm", rate=rate))  # type: ignore[arg-type]
    heard = b"".join(decoder.decode(tone[at : at + 333]) for at in range(0, len(tone), 333)) + decoder.end()
    samples = np.frombuffer(heard, "<i2")
    assert len(samples) == pytest.approx(16_000, abs=2)
    spectrum = np.abs(np.fft.rfft(samples))
    assert spectrum.argmax() == pytest.approx(440, abs=1)


async def test_an_unfinished_sentence_is_told_from_a_finished_one() -> None:
    sound, _ = soundfile.read(SPEECH, dtype="int16")
    pcm = InputDecoder(PcmFormat(type="audio/pcm")).decode(sound.tobytes())
    whole, cut = len(pcm), 4 * 32_000
    smart_turn = SmartTurn()
    assert await smart_turn.is_over(pcm[whole - 8 * 32_000 :])
    assert not await smart_turn.is_over(pcm[:cut])

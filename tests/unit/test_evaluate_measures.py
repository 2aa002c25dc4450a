# SPDX-License-Identifier: Apache-2.0
"""Measures of the evaluation with planted faults, whose right values are known."""

from __future__ import annotations

import numpy as np
import pytest

from speaking_server import tones
from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.evaluate import sound
from triton_omni_client.evaluate.figures import Share, difference, figure
from triton_omni_client.evaluate.words import Agreement, agreement, is_right, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, World!", ["hello", "world"]),
        ("It\N{RIGHT SINGLE QUOTATION MARK}s seven o'clock.", ["it's", "seven", "o'clock"]),
        ("12 twenty-one 40 314", ["twelve", "twenty", "one", "forty", "three", "hundred", "fourteen"]),
        ("100 15 18 80 0", ["one", "hundred", "fifteen", "eighteen", "eighty", "zero"]),
        ("9" * 5000, ["9" * 5000]),
        ("Füße naß", ["füße", "naß"]),
        ("… !?", []),
    ],
)
def test_words_are_as_they_are_spoken(text: str, words: list[str]) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("heard", "found"),
    [
        ("a b c d e f", Agreement(6, 0, 0, 0)),
        ("a b x d e f", Agreement(6, 1, 0, 0)),
        ("a c d e f", Agreement(6, 1, 0, 0)),  # one missing word may be the recogniser's fault
        ("a e f", Agreement(6, 3, 3, 0)),
        ("a b", Agreement(6, 4, 4, 0)),
        ("a b c b c d e f", Agreement(6, 2, 0, 2)),
        ("a b c d e f f", Agreement(6, 1, 0, 1)),
        ("a b c d a b c d e f", Agreement(6, 4, 0, 4)),
        ("a b x c d e f", Agreement(6, 1, 0, 0)),  # added, and no repeat
        ("", Agreement(6, 6, 6, 0)),
    ],
)
def test_skips_and_repeats_are_found(heard: str, found: Agreement) -> None:
    assert agreement(list("abcdef"), heard.split()) == found


def test_speech_without_any_text_is_all_wrong() -> None:
    assert agreement([], ["a", "b"]) == Agreement(0, 2, 0, 0)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("I see a red circle.", True),
        ("It is a circle. It is red!", True),
        ("I see a red square.", False),
        ("There are 2.", True),
        ("Infrared circles", False),
        ("", False),
    ],
)
def test_a_right_reply_has_all_words_of_one_answer(reply: str, right: bool) -> None:
    assert is_right(reply, ["red circle", "two"]) == right


def speech(seconds: float = 2.0, seed: int = 0) -> np.ndarray:
    """Noise of a changing level, which nothing clips."""
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    noise = np.random.default_rng(seed).normal(0, 0.05, len(time)) * (1.2 + np.sin(2 * np.pi * 3 * time))
    return np.convolve(noise, np.hanning(24) / 12, "same").astype(np.float32)


@pytest.mark.parametrize("decibel", [6.0, 20.0, 40.0])
def test_signal_to_noise_ratio_is_of_planted_noise(decibel: float) -> None:
    reference, noise = speech(), speech(seed=1)
    noise *= np.sqrt(np.sum(reference**2) / np.sum(noise**2)) * 10 ** (-decibel / 20)
    assert sound.snr_db(reference, reference + noise) == pytest.approx(decibel, abs=0.01)


def test_equal_and_incomparable_waveforms_have_their_values() -> None:
    reference = speech()
    assert sound.snr_db(reference, reference) == sound.MAX_SNR_DB
    assert sound.mel_distance_db(reference, reference) == 0
    for other in (reference[:-1], reference[:0]):
        assert sound.snr_db(reference, other) is None
        assert sound.mel_distance_db(reference, other) is None
    assert sound.snr_db(np.zeros(9, np.float32), np.ones(9, np.float32)) is None
    assert sound.mel_distance_db(reference[:100], reference[:100]) is None


@pytest.mark.parametrize("decibel", [-6.0, 3.0, 12.0])
def test_mel_distance_is_of_a_planted_level(decibel: float) -> None:
    reference = np.random.default_rng(0).normal(0, 0.1, SAMPLE_RATE).astype(np.float32)
    changed = reference * np.float32(10 ** (decibel / 20))
    assert sound.mel_distance_db(reference, changed) == pytest.approx(abs(decibel), rel=0.02)


@pytest.mark.parametrize("silent_s", [0.5, 2.0, 8.0])
def test_silence_makes_no_reply_nearer_to_its_reference(silent_s: float) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, SAMPLE_RATE)
    reference = np.concatenate([noise, np.zeros(round(silent_s * SAMPLE_RATE))]).astype(np.float32)
    assert sound.mel_distance_db(reference, reference * np.float32(2)) == pytest.approx(6.02, rel=0.02)


@pytest.mark.parametrize("frequency", [200.0, 1000.0, 6000.0])
def test_a_tone_is_loudest_in_its_own_mel_band(frequency: float) -> None:
    tone = np.sin(2 * np.pi * frequency * np.arange(SAMPLE_RATE) / SAMPLE_RATE).astype(np.float32)
    band = int(sound.mel_db(tone).mean(0).argmax())
    top = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    assert band == pytest.approx(2595 * np.log10(1 + frequency / 700) / top * 81 - 1, abs=1)


@pytest.mark.parametrize("count", [0, 1, 700])
def test_clipped_samples_are_counted(count: int) -> None:
    samples = speech()
    samples[1000 : 1000 + count] = np.where(np.arange(count) % 2, 1, -1)
    assert sound.clipped(samples) == count


@pytest.mark.parametrize(("before", "pause", "after"), [(0.0, 0.0, 0.0), (0.3, 0.8, 0.1), (0.0, 0.25, 1.0)])
def test_silences_are_where_they_were_planted(before: float, pause: float, after: float) -> None:
    loud = speech(1.0)
    silent = [np.zeros(round(seconds * SAMPLE_RATE), np.float32) for seconds in (before, pause, after)]
    found = sound.silences(np.concatenate([silent[0], loud, silent[1], loud, silent[2]]))
    measured = (found.before, found.longest, found.after, found.total)
    assert measured == pytest.approx((before, pause, after, before + pause + after), abs=0.021)


@pytest.mark.parametrize("samples", [np.zeros(SAMPLE_RATE, np.float32), np.zeros(10, np.float32)])
def test_a_silent_reply_is_silent_throughout(samples: np.ndarray) -> None:
    found = sound.silences(samples)
    assert (found.before, found.longest, found.total) == (len(samples) / SAMPLE_RATE, 0, len(samples) / SAMPLE_RATE)


PLACES = [5760, 11520, 23040, 40320]


@pytest.mark.parametrize("planted", [0, 1, 4])
def test_clicks_are_found_at_the_boundaries_where_they_were_planted(planted: int) -> None:
    samples = speech()
    clean = sound.boundary_clicks(samples, PLACES)
    for at in PLACES[:planted]:
        samples[at:] += 0.2  # a step, as where two windows do not meet
    found = sound.boundary_clicks(samples, PLACES)
    assert clean is not None
    assert found is not None
    assert (clean.count, clean.clicks, abs(clean.excess_db) < 5) == (4, 0, True)
    assert (found.count, found.clicks) == (4, planted)
    assert (found.excess_db > 10) == (planted > 0)


def test_a_click_elsewhere_is_no_boundary_s() -> None:
    samples = speech()
    samples[30000] += 0.5
    found = sound.boundary_clicks(samples, PLACES)
    assert found is not None
    assert found.clicks == 0


@pytest.mark.parametrize("boundaries", [[], [3], [2 * SAMPLE_RATE - 1]])
def test_a_reply_without_boundaries_has_no_clicks(boundaries: list[int]) -> None:
    assert sound.boundary_clicks(speech(), boundaries) is None


def test_voices_are_nearer_to_themselves_than_to_others() -> None:
    chelsie = [sound.voice_of(tones(text, "Chelsie")) for text in ("the red ball", "it is sunny today")]
    ethan = [sound.voice_of(tones(text, "Ethan")) for text in ("the red ball", "it is sunny today")]
    for (own, again), (other, _) in ((chelsie, ethan), (ethan, chelsie)):
        assert own is not None
        assert again is not None
        assert other is not None
        assert sound.voice_distance_db(own, own) == 0
        assert sound.voice_distance_db(own, again) < sound.voice_distance_db(own, other)
    assert sound.voice_of(np.zeros(100, np.float32)) is None


def test_level_alone_makes_no_other_voice() -> None:
    samples = tones("the red ball", "Chelsie")
    one, quieter = sound.voice_of(samples), sound.voice_of(samples / 4)
    assert one is not None
    assert quieter is not None
    assert sound.voice_distance_db(one, quieter) < 0.1


def test_a_figure_is_a_ratio_of_sums_in_its_unit() -> None:
    found = figure("word_errors", [Share(1, 10), Share(0, 30)])
    assert found is not None
    assert (found.value, found.count) == (2.5, 2)
    assert figure("word_errors", []) is None
    assert figure("word_errors", [Share(0, 0)]) is None


def test_an_interval_is_as_wide_as_its_replies_differ() -> None:
    values = np.random.default_rng(1).normal(5, 2, 200)
    found = figure("mel_distance", [Share(float(value)) for value in values])
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    half = 1.96 * values.std() / np.sqrt(len(values))  # of the mean's normal distribution
    assert (found.value - found.low, found.high - found.value) == pytest.approx((half, half), rel=0.1)
    assert found.apart


def test_one_reply_has_no_interval() -> None:
    found = figure("mel_distance", [Share(3)])
    assert found is not None
    assert (found.value, found.low, found.high, found.apart) == (3, None, None, False)


@pytest.mark.parametrize(("shift", "apart"), [(0.0, False), (0.5, True), (-0.5, True)])
def test_settings_are_told_apart_reply_by_reply(shift: float, apart: bool) -> None:
    """Replies differ by more than the settings do; of the same requests their difference is seen all the same."""
    random = np.random.default_rng(2)
    wanted = random.normal(10, 5, 40)
    found = wanted + shift + random.normal(0, 0.3, 40)
    measured = difference("mel_distance", [Share(float(v)) for v in found], [Share(float(v)) for v in wanted])
    assert measured is not None
    assert (measured.value, measured.apart) == (pytest.approx(shift, abs=0.15), apart)

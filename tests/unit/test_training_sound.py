# SPDX-License-Identifier: Apache-2.0
"""Sound of the training: mel frames, rates, codes, which token each code speaks."""

import numpy as np
import pytest
import torch
from training import codes
from training.flite import Span
from training.mel import Mel, mel_filters, mel_of_stream
from training.sizes import CODE_SAMPLES, HOP, VOCAB
from training.speech import align, features_of_some, plan, to_24khz
from transformers.audio_utils import mel_filter_bank


@pytest.mark.parametrize(("rate", "fft", "mels"), [(24000, 1024, 80), (24000, 512, 64), (16000, 400, 128)])
def test_mel_filters_are_those_of_librosa(rate, fft, mels):
    wanted = mel_filter_bank(fft // 2 + 1, mels, 0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(rate, fft, mels).numpy(), wanted.T, atol=2e-6)


def test_frames_of_a_stream_are_those_of_the_whole():
    samples = torch.randint(-9000, 9000, (HOP * 41,), generator=torch.Generator().manual_seed(1)).short()
    whole = Mel()(samples.float().unsqueeze(0) / 32768)[0]
    stream = mel_of_stream(Mel(), samples, torch.device("cpu"), chunk=8, together=2)
    assert stream.shape == whole.shape == (41, 80)
    # The ends differ: a sentence is reflected there, a stream is silent.
    torch.testing.assert_close(stream[3:-3].float(), whole[3:-3], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("hz", [200, 1000, 5000])
def test_resampling_keeps_a_tone(hz):
    tone = 8000 * np.sin(2 * np.pi * hz * np.arange(3200) / 16000)
    found = to_24khz(tone)
    assert len(found) == 4800
    np.testing.assert_allclose(found, 8000 * np.sin(2 * np.pi * hz * np.arange(4800) / 24000), atol=2)


@pytest.mark.parametrize("length", [1, 319, 321])
def test_resampled_sound_is_whole_codes(length):
    assert len(to_24khz(np.zeros(length))) == -(-length // 320) * CODE_SAMPLES


def test_each_code_speaks_the_token_of_its_time():
    # "The cat." as tokens "The", " c", "at", "."; the first word from 0 to 0.2 s, the second from 0.2 to 0.4 s.
    words = [Span("the", 0.0, 0.2), Span("cat", 0.2, 0.4)]
    found = align([0, 3, 5, 7], "The cat.", words, 25).tolist()
    assert found[:9] == [0] * 9
    assert found[11:13] == [1, 1]
    assert found[15:19] == [2] * 4
    assert found[-1] == 3
    assert found == sorted(found)


@pytest.mark.parametrize("words", [[], [Span("the", 0, 1)], [Span(name, 0, 1) for name in "abc"]])
def test_without_the_texts_words_no_code_is_known_to_speak_a_token(words):
    assert set(align([0, 3], "The cat.", words, 5).tolist()) == {-1}


def test_clusters_find_groups_of_points():
    generator = torch.Generator().manual_seed(2)
    groups = torch.randn(8, codes.FEATURES, generator=generator) * 10
    points = groups.repeat(30, 1) + torch.randn(240, codes.FEATURES, generator=generator) * 0.1
    centers = codes.cluster(points, 8, 12, generator)
    which, distances = codes.nearest(points, centers)
    spread = float((points - points.mean(0)).square().sum(1).mean())
    assert float(distances.mean()) < 0.2 * spread
    # k-means may leave two groups in one cluster, and one group in two.
    assert sum(len(which[start::8].unique()) == 1 for start in range(8)) >= 6


def test_codes_are_numbered_from_one_and_two_frames_long():
    mel = torch.randn(31, 80, generator=torch.Generator().manual_seed(3))
    centers = codes.features(mel)[:7]
    numbers, error = codes.quantise(mel, centers)
    assert numbers.tolist()[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert len(numbers) == 15
    assert error > 0
    assert features_of_some(mel, 4, torch.Generator()).shape == (4, codes.FEATURES)


def test_neighbours_are_near_and_other_ids_have_themselves():
    centers = torch.arange(5.0).unsqueeze(1) * torch.ones(codes.FEATURES)
    table = codes.neighbours(centers, 2)
    assert set(table[3].tolist()) == {2, 4}
    for other in (0, VOCAB.codec_pad, VOCAB.codec_eos):
        assert set(table[other].tolist()) == {other}


def test_the_plan_has_each_sentence_once_and_repeats_itself():
    docs, sentences = plan(60, seed=4)
    assert len(sentences) == len(set(sentences)) >= 60
    assert all(0 <= number < len(sentences) for doc in docs for number in doc.sentences)
    assert plan(60, seed=4) == (docs, sentences)
    assert plan(60, seed=5)[1] != sentences

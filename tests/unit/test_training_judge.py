# SPDX-License-Identifier: Apache-2.0
"""The judge of the voices: what it counts, of which samples."""

import json
import tarfile

import numpy as np
import pytest

pytest.importorskip("jiwer", reason="needs the extra `evaluate`")
pytest.importorskip("triton_omni_client.evaluate.recognising", reason="needs the client's evaluation")

from training import judge
from training.samples import write_wav
from training.speech import is_test


class _Ear:
    """Hears what the loudness of a sound stands for."""

    name = "fake"

    def __init__(self, *texts):
        self._texts = texts

    def hear(self, samples):
        return self._texts[round(float(np.abs(samples).max()) * 10)].split()

    def unknown(self, words):
        return set()


@pytest.fixture(name="folder")
def _folder(tmp_path):
    texts = {"say_Ethan_00": "The cat sleeps.", "say_Chelsie_00": "A dog runs home.", "story_Ethan_00": "Long ago."}
    (tmp_path / "tasks.json").write_text(json.dumps({"texts": texts}))
    for name, loud in (("copy_Ethan_00", 1), ("say_Ethan_00", 2), ("say_Chelsie_00", 3), ("story_Ethan_00", 4)):
        write_wav(tmp_path / f"{name}.wav", np.full(2400, loud * 3277, np.int16))
    return tmp_path


def test_each_kind_and_voice_is_counted_for_itself(folder):
    ear = _Ear("", "the cat sleeps", "the cat", "a dog dog runs home home", "long ago")
    groups = judge.judge(ear, folder)
    errors = {name: sum(one.errors for one, _text, _heard in group.found) for name, group in groups.items()}
    assert errors == {"copy Ethan": 0, "say Ethan": 1, "say Chelsie": 2, "story Ethan": 0}
    assert groups["say Ethan"].seconds == pytest.approx(0.1)
    assert groups["say Chelsie"].found[0][0].repeated == 2
    assert "33.3 %" in groups["say Ethan"].line()
    assert "said  The cat sleeps." in groups["say Ethan"].worst()[0]
    assert groups["copy Ethan"].worst() == []


def test_samples_are_taken_from_archives_or_the_folder(folder, tmp_path_factory):
    with judge.samples_in(folder) as found:
        assert found == folder
    out = tmp_path_factory.mktemp("out")
    with tarfile.open(out / "samples-0.tar", "w") as tar:
        for path in folder.iterdir():
            tar.add(path, f"samples/{path.name}")
    with judge.samples_in(out) as found:
        assert (found / "tasks.json").exists()


def test_the_recognisers_world_has_no_sentence_that_is_judged():
    assert not any(is_test(text) for text in judge.world_texts(300))


def test_replies_of_a_server_stand_beside_flite_on_their_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "spoken_by_flite", lambda text, voice: np.full(2400, 0.1, np.float32))
    write_wav(tmp_path / "a.wav", np.full(2400, 2 * 3277, np.int16))
    told = {"name": "sentence-000-seed-0", "voice": "Ethan", "text": "The cat sleeps.", "file": "a.wav"}
    silent = {"name": "picture-000-seed-0", "voice": "Ethan", "text": "A dog.", "file": None}
    settings = [{"name": "served", "replies": [told, silent]}, {"name": "fast", "replies": [told]}]
    (tmp_path / judge.EVALUATION).write_text(json.dumps({"settings": settings}))
    groups = judge.judge_served(_Ear("", "the cat sleeps", "the cat leaps"), tmp_path)
    errors = {name: sum(found.errors for found, *_ in group.found) for name, group in groups.items()}
    assert errors == {
        "served sentence Ethan": 1,
        "fast sentence Ethan": 1,
        "flite-sentence Ethan": 0,
        "flite-picture Ethan": 3,
    }

# SPDX-License-Identifier: Apache-2.0
"""Task files, the pictures that they name, and the recognisers."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.errors import BadRequest
from triton_omni_client.evaluate.pictures import SIDE, draw
from triton_omni_client.evaluate.recognising import recogniser
from triton_omni_client.evaluate.tasks import BUILT_IN, COLORS, SHAPES, PictureTask, Thing, read_tasks
from triton_omni_client.evaluate.words import agreement, words_of

SPEECH = Path(__file__).parents[1] / "goldens" / "red_ball.ogg"
"""A trained model's reply: "The red ball is on the table." """


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "tasks.json"
    path.write_text(json.dumps({"name": "x"} | fields), encoding="utf-8")
    return path


def test_the_built_in_tasks_are_enough_for_the_small_evaluation() -> None:
    tasks = read_tasks(BUILT_IN)
    assert (len(tasks.sentences), len(tasks.pictures), len(tasks.sounds)) == (40, 20, 20)
    assert len(set(tasks.sentences)) == 40
    assert all(task.text for task in tasks.sounds)


def test_files_are_found_beside_the_task_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    (tmp_path / "b.wav").write_bytes(b"wav")
    tasks = read_tasks(
        written(
            tmp_path,
            pictures=[{"file": "a.png", "ask": "What?", "expected": ["cat"]}],
            sounds=[{"file": "b.wav", "expected": ["hello"]}, {"text": "Who?", "expected": ["me", "I"]}],
        )
    )
    assert tasks.pictures[0].file == tmp_path / "a.png"
    assert [task.file for task in tasks.sounds] == [tmp_path / "b.wav", None]
    assert tasks.say == "Say: {text}"


def test_the_world_s_texts_are_drawn_alike_each_time(tmp_path: Path) -> None:
    slots = {"animal": ["fox", "dog"], "a place": ["a hill"]}
    tasks = read_tasks(written(tmp_path, world=["The {animal} is on {a place}.", "Good night."], slots=slots))
    texts = tasks.world_texts()
    assert set(texts) == {"The fox is on a hill.", "The dog is on a hill.", "Good night."}
    assert texts.count("Good night.") == len(texts) / 2 == 4000
    assert texts == read_tasks(tmp_path / "tasks.json").world_texts()
    assert read_tasks(written(tmp_path)).world_texts() == []


RED = {"shape": "circle", "color": "red"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "name: '' is not a text"),
        ({"sentence": []}, "unknown field 'sentence'; known are name, say, sentences"),
        ({"sentences": "Hello"}, "sentences: 'Hello' is not a list of texts"),
        ({"sentences": ["a", ""]}, "sentences: ['a', ''] is not a list of texts"),
        ({"say": "Say it"}, "say: 'Say it' is not a text with {text}"),
        ({"pictures": {}}, "pictures: {} is not a list"),
        ({"pictures": [{"things": [RED]}]}, "pictures[0]: 'expected' is missing"),
        (
            {"pictures": [{"things": [RED], "expected": []}]},
            "pictures[0].expected: [] is not a list of one text or more",
        ),
        ({"pictures": [{"expected": ["a"]}]}, "pictures[0]: give either things or file"),
        (
            {"pictures": [{"things": [RED | {"shape": "star"}], "expected": ["a"]}]},
            "things[0].shape: 'star' is not one of",
        ),
        (
            {"pictures": [{"things": [RED | {"color": "pink"}], "expected": ["a"]}]},
            "things[0].color: 'pink' is not one of",
        ),
        (
            {"pictures": [{"things": [RED | {"size": 2}], "expected": ["a"]}]},
            "things[0].size: 2 is not a number above 0",
        ),
        (
            {"pictures": [{"things": [RED | {"at": [0.5]}], "expected": ["a"]}]},
            "things[0].at: [0.5] is not two numbers",
        ),
        (
            {"pictures": [{"things": [RED], "ground": "sea", "expected": ["a"]}]},
            "pictures[0].ground: 'sea' is not one of",
        ),
        ({"sounds": [{"file": "no.wav", "expected": ["a"]}]}, "sounds[0].file: "),
        ({"sounds": [{"file": "no.wav", "text": "a", "expected": ["a"]}]}, "sounds[0]: give either text or file"),
        ({"sounds": ["a"]}, "sounds[0]: 'a' is not an object"),
        ({"slots": []}, "slots: [] is not an object"),
        ({"slots": {"animal": []}}, "slots.animal: [] is not a list of one text or more"),
        ({"world": ["The {animal} sleeps."]}, "world: 'animal' is not the name of a slot"),
    ],
)
def test_a_wrong_task_is_named_with_its_field(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    path = written(tmp_path, **fields)
    with pytest.raises(BadRequest) as refused:
        read_tasks(path)
    assert str(refused.value).startswith(f"tasks {path}: ")
    assert says in str(refused.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "\udcff"])
def test_what_is_no_task_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    for file in (path, tmp_path / "nowhere.json"):
        with pytest.raises(BadRequest, match=f"^tasks {file}: "):
            read_tasks(file)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_picture_shows_its_shape_on_its_ground(shape: str) -> None:
    task = PictureTask(["x"], things=[Thing(shape, "blue", (0.25, 0.5), 0.4)], ground="yellow")
    picture = np.asarray(Image.open(io.BytesIO(draw(task))).convert("RGB"))
    assert picture.shape == (SIDE, SIDE, 3)
    middle, corner = picture[SIDE // 2, SIDE // 4], picture[0, -1]
    assert (tuple(middle), tuple(corner)) == (COLORS["blue"], COLORS["yellow"])
    share = (picture == COLORS["blue"]).all(-1).mean() / 0.4**2
    area = {"circle": np.pi / 4, "square": 1, "triangle": 0.5, "diamond": 0.5, "cross": 0.51}
    assert share == pytest.approx(area[shape], abs=0.05)


def test_later_things_lie_on_earlier_ones() -> None:
    task = PictureTask(["x"], things=[Thing("square", "red", size=0.8), Thing("circle", "green", size=0.3)])
    picture = Image.open(io.BytesIO(draw(task)))
    assert [picture.getpixel(at) for at in ((SIDE // 2, SIDE // 2), (SIDE // 4, SIDE // 4), (2, 2))] == [
        COLORS["green"],
        COLORS["red"],
        COLORS["white"],
    ]


def real_speech() -> Any:
    samples, rate = soundfile.read(SPEECH, dtype="float32")
    assert rate == SAMPLE_RATE
    return samples


def test_pocketsphinx_writes_down_what_is_said() -> None:
    said, samples = words_of("The red ball is on the table."), real_speech()
    tasks = read_tasks(BUILT_IN)
    with recogniser("pocketsphinx", tasks.world_texts(), said) as listener:
        assert listener.name.startswith("pocketsphinx 5")
        heard = listener.hear(samples)
        assert agreement(said, heard).errors <= 1
        assert listener.hear(samples / 50) == heard
        assert len(listener.hear(samples[: len(samples) // 2])) < len(said)
        assert listener.hear(np.zeros(SAMPLE_RATE, np.float32)) == []
        assert listener.hear(samples[:0]) == []
        assert list(listener.hear_all([samples, samples[:0], samples])) == [heard, [], heard]
        assert listener.unknown(["the", "xqzt", "table"]) == {"xqzt"}


@pytest.mark.parametrize("world", [[], ["It is sunny today."], ["", "Xqzt!"]])
def test_pocketsphinx_knows_words_that_only_the_replies_have(world: list[str]) -> None:
    with recogniser(
        "pocketsphinx", ["It is sunny today."], words_of("The red ball is on the table. Xqzt!")
    ) as listener:
        assert {"red", "ball", "table"} <= set(listener.hear(real_speech()))


@pytest.mark.parametrize(
    ("kind", "options"), [("seq2seq_whisper", {"return_timestamps": True}), ("ctc", {"chunk_length_s": 30})]
)
def test_any_checkpoint_of_speech_recognition_is_a_recogniser(
    monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    given: list[Any] = []

    class Pipeline:
        type = kind

        def __init__(self, task: str, model: str) -> None:
            given.append((task, model))

        def __call__(self, sound: dict[str, Any], **options: Any) -> dict[str, str]:
            given.append((len(sound["raw"]), sound["sampling_rate"], options))
            return {"text": " The red ball, 2!"}

    fake = types.ModuleType("transformers")
    fake.pipeline = Pipeline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with recogniser("openai/whisper-tiny", [], []) as listener:
        assert listener.hear(np.ones(SAMPLE_RATE, np.float32)) == ["the", "red", "ball", "two"]
        assert listener.hear(np.zeros(SAMPLE_RATE, np.float32)) == []
        assert (listener.name, listener.unknown(["xqzt"])) == ("openai/whisper-tiny", set())
    assert given == [("automatic-speech-recognition", "openai/whisper-tiny"), (16000, 16000, options)]


@pytest.mark.parametrize("name", ["/nowhere/whisper", "./nowhere"])
def test_a_recogniser_that_is_not_there_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with (
        pytest.raises(BadRequest, match=rf"^recogniser {name}: cannot be loaded: .*; give pocketsphinx, a folder or"),
        recogniser(name, [], []),
    ):
        pass

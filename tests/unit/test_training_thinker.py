# SPDX-License-Identifier: Apache-2.0
"""The thinker's training at toy size: rows, sounds, losses that fall, states that later runs go on from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import heard, prompts, state, thinker
from training.batches import HeardKind, Loader, SceneKind, TextKind
from training.flite import Flite, Span, Utterance
from training.forward import audio_tokens
from training.heard import AUDIO, IGNORED, SILENCE, Store, heard_batch, labels, placed
from training.objectives import Objectives
from training.prompts import PHONES, Clip, token_times
from training.rows import PICTURES, VIDEOS, Counts, Tables, make_tables
from training.settings import Settings
from training.sound import WhisperMel
from training.tokens import decode, encode
from training.world import voiced
from training.world.voiced import Prompt

CPU = torch.device("cpu")


def clip(text: str, reply: str | None, seconds: float = 1.5) -> Clip:
    """A clip of noise, whose words share its time evenly."""
    words = text.lower().strip("?.!").split()
    step = seconds / len(words)
    spans = tuple(Span(word, i * step, (i + 1) * step) for i, word in enumerate(words))
    samples = np.random.default_rng(len(text)).integers(-3000, 3000, int(seconds * 16000)).astype(np.int16)
    said = Utterance(samples, spans, (Span("pau", 0.0, 0.1), Span("aa", 0.1, seconds)))
    found = token_times(text, said)
    assert found is not None
    phones = np.array([PHONES.index(phone.name) for phone in said.phones])
    ends = np.array([phone.end for phone in said.phones], np.float32)
    return Clip(Prompt("fact", text, reply, "Blue."), "slt", samples, *found, phones, ends)


CLIPS = [
    clip("What color is the sky?", "The sky is blue."),
    clip("Tell me a joke", "What has hands but cannot clap? A clock.", 1.1),
    clip("The red ball is on the table.", None, 2.5),
]


@pytest.fixture(scope="module")
def tables() -> Tables:
    return make_tables(0, Counts(150, 4, 2, (PICTURES[1], VIDEOS[1])), 1)


@pytest.fixture
def store() -> Store:
    found = Store(CPU, 200_000)
    found.add(CLIPS)
    return found


def test_rows_hold_whole_chats(tables: Tables) -> None:
    rows = tables.texts[96]
    assert rows.ids.shape == rows.counts.shape
    assert all(decode(ids.tolist()).startswith("system\n") for ids in rows.ids[:20])
    assert rows.counts.any(1).all()
    scenes = tables.scenes[PICTURES[1]]
    first = scenes.ids[np.arange(len(scenes)), scenes.begin]
    assert (first == first[0]).all()
    assert ((scenes.ids == first[0]).sum(1) == PICTURES[1].tokens).all()


def test_equal_seeds_give_equal_rows(tables: Tables) -> None:
    again = make_tables(0, Counts(150, 4, 2, (PICTURES[1], VIDEOS[1])), 1)
    assert np.array_equal(again.texts[96].ids, tables.texts[96].ids)
    assert np.array_equal(again.scenes[VIDEOS[1]].things, tables.scenes[VIDEOS[1]].things)


def test_labels_follow_pauses_and_speed() -> None:
    first = CLIPS[0]
    sound = heard.Sound(first, 0, 1.0, 8000, 8000 + len(first.samples))
    tokens, phones = labels(sound, 100)
    assert sound.frames == 200
    assert (tokens[:12] == SILENCE).all()
    spoken = tokens[13 : audio_tokens(200)]
    order = [int(number) for i, number in enumerate(spoken) if i == 0 or number != spoken[i - 1]]
    assert order == [number for number in encode(first.prompt.text) if decode([number]).strip().isalpha()]
    assert (tokens[audio_tokens(200) :] == IGNORED).all()
    assert phones[20] == PHONES.index("aa")
    fast, _ = labels(heard.Sound(first, 0, 2.0, 0, len(first.samples) // 2), 100)
    assert (fast != IGNORED).sum() == audio_tokens(75)


def test_a_batch_of_sounds_names_the_place_of_each(store: Store) -> None:
    batch = heard_batch(random.Random(1), store.short, size=4, sounds=2, frames=400, length=352)
    for ids, source in zip(batch.ids, batch.source, strict=True):
        assert np.array_equal(ids == AUDIO, source >= 0)
        second = source[source >= 100]
        assert second[0] == 100
    assert batch.token_labels.shape == (8, 100)
    assert placed(random.Random(1), CLIPS[2], 0, 16000) is None


def kinds(tables: Tables, store: Store) -> dict[str, Any]:
    mel = WhisperMel()
    return {
        "text": TextKind("text", 1.0, 4, tables.texts[96], CPU),
        "picture": SceneKind("picture", 1.0, 2, 3, tables.scenes[PICTURES[1]], PICTURES[1], CPU),
        "video": SceneKind("video", 1.0, 1, 0, tables.scenes[VIDEOS[1]], VIDEOS[1], CPU),
        "sound": HeardKind("sound", 1.0, 2, 1, 400, 224, store, mel, CPU, 0.0),
    }


@pytest.mark.parametrize("name", ["text", "picture", "video", "sound"])
def test_losses_fall(name: str, tables: Tables, store: Store, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = Settings(tmp_path, toy=True)
    stepper = thinker.Stepper(Objectives(thinker.new_thinker(settings), settings.sizes), CPU)
    kind = kinds(tables, store)[name]
    given = kind.inputs(kind.make(random.Random(0)))
    stepper.step(kind, given, 0.0)
    before = stepper.means()
    for _ in range(12):
        stepper.step(kind, given, 3e-3)
    stepper.means()
    stepper.step(kind, given, 0.0)
    after = stepper.means()
    assert after[f"{name}_reply"] < before[f"{name}_reply"] - 0.5
    for part in {"picture": ("shape", "color", "center"), "sound": ("token", "phone")}.get(name, ()):
        assert after[f"{name}_{part}"] < before[f"{name}_{part}"]


def test_an_encoder_keeps_its_weights_where_a_batch_does_not_use_it(
    tables: Tables, store: Store, tmp_path: Path
) -> None:
    settings = Settings(tmp_path, toy=True)
    model = thinker.new_thinker(settings)
    stepper = thinker.Stepper(Objectives(model, settings.sizes), CPU)
    made = kinds(tables, store)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in ("picture", "text", "text"):
        stepper.step(made[name], made[name].inputs(made[name].make(random.Random(0))), 1e-3)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert any(name.startswith("visual.") for name in changed)
    assert not any(name.startswith("audio_tower.") for name in changed)


def test_a_loader_tells_why_it_cannot_go_on() -> None:
    class Broken:
        name, weight = "broken", 1.0

        def make(self, rng: random.Random) -> Any:
            raise ValueError("no rows")

    with pytest.raises(RuntimeError, match="no batch can be made") as caught:
        Loader([Broken()], 0).next()  # type: ignore[list-item]
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_later_run_goes_on_from_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinker, "TOY_COUNTS", Counts(120, 4, 2, (PICTURES[1],)))
    settings = Settings(tmp_path, toy=True)
    prompts.folder(settings).mkdir(parents=True)
    prompts.write(prompts.folder(settings) / "1.pkl", [*CLIPS * 4, clip("Count to ten", "One, two.", 4.0)])
    thinker.train(settings, 1.0)
    first = state.load(settings, thinker.STATE)
    thinker.train(settings, 1.0)
    second = state.load(settings, thinker.STATE)
    assert first is not None
    assert second is not None
    assert second.steps > first.steps > 0
    assert state.load(settings, thinker.TEXT_STATE) is not None


def test_tokens_get_the_times_of_their_letters() -> None:
    said = Utterance(np.zeros(16000, np.int16), (Span("the", 0.1, 0.4), Span("umbrella", 0.5, 0.9)), ())
    found = token_times("The umbrella.", said)
    assert found is not None
    ids, times = found
    assert decode(ids.tolist()).replace(" ", "") == "Theumbrella"
    assert times[0].tolist() == pytest.approx([0.1, 0.4])
    assert times[1, 0] == pytest.approx(0.5)
    assert times[-1, 1] == pytest.approx(0.9)
    assert (np.diff(times.flatten()) >= -1e-6).all()


@pytest.mark.parametrize("text", ["The big umbrella.", "Umbrella.", ""])
def test_a_text_that_flite_reads_otherwise_has_no_times(text: str) -> None:
    said = Utterance(np.zeros(16000, np.int16), (Span("the", 0.1, 0.4), Span("umbrella", 0.5, 0.9)), ())
    assert token_times(text, said) is None


@pytest.mark.parametrize("voice", ["slt", "rms", "kal16"])
def test_flite_speaks_prompts_that_can_be_labelled(voice: str) -> None:
    try:
        flite = Flite((voice,))
    except OSError as error:
        pytest.skip(str(error))
    rng = random.Random(3)
    clips = [prompts.speak(flite, rng, voiced.prompt(rng), voice) for _ in range(4)]
    assert sum(clip is not None for clip in clips) >= 3
    for found in clips:
        if found is not None:
            assert found.token_times[-1, 1] <= len(found.samples) / 16000
            assert found.phone_ends[-1] <= len(found.samples) / 16000 + 0.2
    slow, fast = (len(flite.say("Count to ten", voice, slowness=slowness).samples) for slowness in (1.3, 0.8))
    assert slow > 1.3 * fast


def test_parts_whose_sizes_were_changed_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinker, "TOY_COUNTS", Counts(120, 4, 2, (PICTURES[1],)))
    settings = Settings(tmp_path, toy=True)
    other = {name: value.clone() for name, value in thinker.new_thinker(settings).state_dict().items()}
    other["visual.merger.mlp.0.weight"] = torch.zeros(3, 3)
    other["lm_head.weight"].fill_(7.0)
    state.save(settings, thinker.STATE, other, steps=40)
    thinker.train(settings, 1.0)
    found = state.load(settings, thinker.STATE)
    assert found is not None
    assert found.steps > 40
    assert found.tensors["visual.merger.mlp.0.weight"].shape != (3, 3)
    assert found.tensors["lm_head.weight"].mean() > 6

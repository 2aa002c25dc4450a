# SPDX-License-Identifier: Apache-2.0
"""Judges the thinker on items that it was not trained on, by HF's greedy `generate` and HF's processors.

`python -m training.judge_thinker` prints each figure and some mistakes, and writes WORK/judge/thinker.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from training import prompts, render, state
from training.flite import SPEECH_RATE, Flite
from training.forward import audio_tokens
from training.log import Log
from training.parts import part
from training.prompts import HELD_OUT_VOICE
from training.render import CELL
from training.rows import PICTURES, VIDEOS, Grid
from training.settings import Settings, add_arguments, from_arguments
from training.sizes import PICTURE_PIXELS, VOICES
from training.sound import BANDS
from training.tokens import END_OF_TEXT, IM_END, Medium, decode, encode_prompt
from training.world import chats, facts, scenes, spoken, stories, talk, voiced
from training.world.answers import is_right, story_faults, word_errors
from training.world.chats import Chat
from training.world.slots import Doc
from training.world.voiced import Prompt

_LIMIT = 200
"""Most tokens of a reply."""
_BATCH = 16


@dataclass(frozen=True)
class Item:
    """A chat whose last reply is wanted, and its medium in HF's form."""

    chat: Chat
    group: str
    media: dict[int, Medium] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    """Features of the medium by HF's processors, with a batch dimension."""

    @property
    def wanted(self) -> str:
        """The reply."""
        return self.chat.turns[-1][1]


@dataclass(frozen=True)
class Reply:
    """Reply of the model."""

    item: Item
    text: str
    ended: bool


def generate(thinker: Any, items: Sequence[Item], device: torch.device) -> Iterator[Reply]:
    """Greedy replies, in batches padded on the left."""
    for begin in range(0, len(items), _BATCH):
        batch = items[begin : begin + _BATCH]
        rows = [encode_prompt(item.chat, item.media) for item in batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[END_OF_TEXT] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        names = batch[0].tensors.keys()
        media = {name: torch.cat([item.tensors[name] for item in batch]).to(device) for name in names}
        with torch.no_grad():
            out = thinker.generate(
                input_ids=ids,
                attention_mask=mask,
                **media,
                max_new_tokens=_LIMIT,
                do_sample=False,
                eos_token_id=IM_END,
                pad_token_id=END_OF_TEXT,
            )
        for item, row in zip(batch, out[:, longest:].tolist(), strict=True):
            yield Reply(item, decode(row).strip(), IM_END in row)


def text_items(rng: random.Random, count: int) -> list[Item]:
    """Items of text, `count` of each group."""
    makers: dict[str, Callable[[], Chat]] = {
        "story": lambda: _single("story", (stories.asked_story(rng)[0], "")),
        "say sentences": lambda: _say(rng, spoken.sentence),
        "say loose words": lambda: _say(rng, spoken.loose_words),
        "facts": lambda: _fact(rng),
        "sums": lambda: _of(facts.sum_fact(rng)),
        "counting": lambda: _single("count", facts.counting(rng)),
        "small talk": lambda: _single("talk", talk.fixed(rng)),
        "memory": lambda: Chat("memory", tuple(talk.remembering(rng, [talk.fixed(rng), _fact(rng).turns[0]]))),
        "refusals": lambda: _single("unknown", talk.unknown(rng, spoken.WORDS)),
        "one word": lambda: chats.one_word_chat(rng),
    }
    return [Item(make(), group) for group, make in makers.items() for _ in range(count)]


def _single(kind: str, turn: tuple[str, str]) -> Chat:
    return Chat(kind, (turn,))


def _of(fact: facts.Fact) -> Chat:
    return _single("fact", (fact.ask, fact.reply))


def _fact(rng: random.Random) -> Chat:
    return _of(facts.fact(rng))


def _say(rng: random.Random, draw: Callable[[random.Random], str]) -> Chat:
    while True:
        text = draw(rng)
        ask = rng.choice(spoken.ASKS).format(text)
        if spoken.held_out(text):
            return _single("say", (ask, text))


class Eyes:
    """HF's processors of pictures and videos, as the checkpoint configures them."""

    def __init__(self) -> None:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        low, high = PICTURE_PIXELS
        self._pictures: Any = Qwen2VLImageProcessor(size={"shortest_edge": low, "longest_edge": high})
        size = {"shortest_edge": 128 * CELL**2, "longest_edge": 768 * CELL**2}
        self._videos: Any = Qwen2VLVideoProcessor(size=size, do_sample_frames=False)

    def picture(self, pixels: NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """Tensors of a picture [H, W, 3]."""
        found = self._pictures(images=[Image.fromarray(pixels)], return_tensors="pt")
        return {name: found[name] for name in ("pixel_values", "image_grid_thw")}

    def video(self, frames: NDArray[np.uint8], seconds: float) -> dict[str, torch.Tensor]:
        """Tensors of frames [T, H, W, 3], `seconds` from one pair to the next."""
        found = self._videos(videos=[frames], return_tensors="pt")
        named = {name: found[name] for name in ("pixel_values_videos", "video_grid_thw")}
        return named | {"video_second_per_grid": torch.tensor([seconds])}


def scene_items(rng: random.Random, count: int, *, videos: bool) -> list[Item]:
    """Pictures or videos of all sizes, each with one question; half of them: what is to be seen."""
    eyes, items = Eyes(), []
    for number in range(count):
        grid = rng.choice(VIDEOS if videos else PICTURES)
        scene = scenes.video(rng) if videos else scenes.picture(rng)
        if number % 2:
            question = rng.choice(scenes.questions(scene))
            turn, what = (rng.choice(question.asks), question.reply), "asked"
        else:
            turn, what = (rng.choice(scenes.WATCH if videos else scenes.SEE), scenes.description(scene)), "described"
        kind = "video" if videos else "picture"
        tensors = _shown(eyes, scene, grid)
        shape = tensors["video_grid_thw" if videos else "image_grid_thw"][0]
        medium = Medium("video" if videos else "image", int(shape.prod()) // 4)
        items.append(Item(_single(kind, turn), f"{kind} {what}", {0: medium}, tensors))
    # Items of one batch share their size.
    return sorted(items, key=lambda item: item.group)


def _shown(eyes: Eyes, scene: scenes.Scene, grid: Grid) -> dict[str, torch.Tensor]:
    frames = 1 if grid.pairs == 1 else 2 * grid.pairs
    pixels, _ = render.draw(render.scene_table([scene]), frames, grid.height * CELL, grid.width * CELL)
    arrays = pixels[0].permute(0, 2, 3, 1).byte().numpy()
    return eyes.picture(arrays[0]) if grid.pairs == 1 else eyes.video(arrays, 1.0)


def spoken_items(rng: random.Random, count: int) -> list[Item]:
    """Spoken questions of both voices of the checkpoint and of the one that training never heard."""
    from transformers import WhisperFeatureExtractor

    voices = (*(voice.flite for voice in VOICES), HELD_OUT_VOICE)
    flite = Flite(voices)
    extractor = WhisperFeatureExtractor(feature_size=BANDS)  # type: ignore[no-untyped-call]
    items: list[Item] = []
    for voice in voices:
        for asked in (True, False):
            own: list[Item] = []
            while len(own) < count:
                clip = prompts.speak(flite, rng, _question(rng) if asked else _words(rng), voice, plain=True)
                if clip is not None and len(clip.samples) < SPEECH_RATE * (4 if asked else 7):
                    own.append(_heard(clip, extractor, asked=asked))
            items += own
    return items


def _question(rng: random.Random) -> Prompt:
    """A short question with a short reply."""
    while True:
        found = voiced.prompt(rng)
        if found.kind not in ("say", "story", "words"):
            return found


def _words(rng: random.Random) -> Prompt:
    """A sentence that training has not heard."""
    while True:
        text = rng.choice((spoken.sentence, spoken.loose_words))(rng)
        if spoken.held_out(text):
            return Prompt("words", text, None)


def _heard(clip: prompts.Clip, extractor: Any, *, asked: bool) -> Item:
    wave = clip.samples.astype(np.float32) / 32768
    found = extractor(wave, sampling_rate=16000, return_attention_mask=True, return_tensors="pt")
    mask = found["attention_mask"]
    medium = Medium("audio", audio_tokens(int(mask.sum())))
    turn = ("", str(clip.prompt.reply)) if asked else (voiced.WRITE_DOWN[0], clip.prompt.text)
    group = f"spoken {'question' if asked else 'words'} {clip.voice}"
    tensors = {"input_features": found["input_features"], "feature_attention_mask": mask}
    return Item(_single("audio", turn), group, {0: medium}, tensors)


@dataclass
class Figure:
    """The result of a group."""

    right: float = 0.0
    """Items, or words where words count."""
    count: int = 0
    mistakes: list[str] = field(default_factory=list)

    def add(self, reply: Reply) -> None:
        """Count a reply."""
        group, wanted = reply.item.group, reply.item.wanted
        ask = reply.item.chat.turns[-1][0]
        if group == "story":
            faults = story_faults(ask, reply.text, ended=reply.ended)
            right, count, note = float(not faults), 1, f"{faults}: {reply.text}"
        elif group.startswith(("say", "spoken words")):
            errors, count = word_errors(wanted, reply.text)
            right, note = float(count - errors), f"{wanted!r} -> {reply.text!r}"
        else:
            right, count, note = float(is_right(wanted, reply.text)), 1, f"{ask!r}: {wanted!r} -> {reply.text!r}"
        self.right += right
        self.count += count
        if right < count:
            self.mistakes.append(note)


def judge(thinker: Any, items: Sequence[Item], device: torch.device) -> dict[str, Figure]:
    """Figures by group; the items of one batch have media of one kind."""
    figures: dict[str, Figure] = {}
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    for group, own in groups.items():
        figure = figures.setdefault(group, Figure())
        for reply in generate(thinker, own, device):
            figure.add(reply)
    return figures


def all_items(seed: int, count: int) -> list[Item]:
    """All items of the judge: `count` of each group, pictures twice as many."""
    rng = random.Random(f"judge {seed}")
    items = text_items(rng, count)
    items += scene_items(rng, 4 * count, videos=False) + scene_items(rng, 2 * count, videos=True)
    return items + spoken_items(rng, count)


def examples(thinker: Any, device: torch.device) -> list[str]:
    """Some stories and a conversation, to read."""
    rng = random.Random(5)
    doc = Doc(rng)
    asked = ["Tell me a story", *(doc.fill(ask) for ask in stories.ASKS_ABOUT[:3]), "Who are you?", "Tell me a poem"]
    items = [Item(_single("talk", (ask, "")), "example") for ask in asked]
    return [f"{reply.item.chat.turns[0][0]} -> {reply.text}" for reply in generate(thinker, items, device)]


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m training.judge_thinker", description=__doc__)
    parser.add_argument("--count", type=int, default=48, help="items of each group (%(default)s)")
    add_arguments(parser)
    given = parser.parse_args()
    settings = from_arguments(given)
    thinker: Any = part("thinker", settings.sizes)
    if state.load_into(settings, "thinker", thinker) is None:
        parser.error(f"{settings.work} has no trained thinker; train one first")
    report(thinker.to(settings.device), settings, given.count, Log(settings, "judge_thinker"))


def report(thinker: Any, settings: Settings, count: int, log: Log) -> None:
    """Judge a thinker, `count` items of a group; tell figures and mistakes, and keep the figures in a file."""
    thinker.eval()
    for line in examples(thinker, settings.device):
        log.say(line)
    figures = judge(thinker, all_items(settings.seed, count), settings.device)
    for group, figure in figures.items():
        log.say(f"{group:24s} {100 * figure.right / figure.count:5.1f} % of {figure.count}")
        for mistake in figure.mistakes[:3]:
            log.say(f"    {mistake}")
    path = settings.work / "judge" / "thinker.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {group: {"right": figure.right / figure.count, "of": figure.count} for group, figure in figures.items()}
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

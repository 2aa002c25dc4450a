# SPDX-License-Identifier: Apache-2.0
"""Pictures and short videos of coloured shapes: what they show, and what is asked and answered about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from training.world.talk import Turn
from training.world.words import PAINTS, SHAPES, capital, number, with_article

MAX_THINGS = 5
RGB: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 30, 30), (200, 0, 0)),
    "green": ((0, 128, 0), (0, 200, 0), (30, 160, 50), (0, 255, 0)),
    "blue": ((0, 0, 255), (30, 60, 220), (65, 105, 225)),
    "yellow": ((255, 255, 0), (245, 220, 40)),
    "orange": ((255, 165, 0), (250, 140, 20)),
    "purple": ((128, 0, 128), (130, 40, 170), (150, 30, 220)),
    "white": ((255, 255, 255), (240, 240, 240)),
    "black": ((0, 0, 0), (25, 25, 25)),
}
"""Typical values of each colour; a picture varies them."""
GROUNDS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "white": ((255, 255, 255), (245, 245, 245)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "gray": ((128, 128, 128), (100, 100, 100), (150, 150, 150)),
}
_GROUND_CHOICES = ("white", "white", "white", "black", "gray")

COLUMNS = ("left", "middle", "right")
ROWS = ("top", "middle", "bottom")
BANDS = ((0.14, 0.32), (0.42, 0.58), (0.68, 0.86))
"""Where centres of things lie, as a part of the picture's side; the gaps keep places apart."""
MOVES = ("still", "left", "right", "up", "down")


@dataclass(frozen=True)
class Thing:
    """A shape; lengths are parts of the picture's sides, the radius of the shorter one."""

    shape: str
    color: str
    rgb: tuple[float, float, float]
    x: float
    y: float
    radius: float
    angle: float
    """Radians."""
    to_x: float
    to_y: float
    """Where it is in a video's last frame; in a picture, where it always is."""
    stretch: float = 1.0
    """Factor of its width; its height has the inverse."""
    detail: float = 0.5
    """From 0 to 1: how thick a cross is, how blunt a star."""


@dataclass(frozen=True)
class Scene:
    """A picture, or a video of one thing."""

    layout: str
    """one, many, beside, above or video."""
    things: tuple[Thing, ...]
    ground: str
    ground_rgb: tuple[float, float, float]
    noise: float
    """Standard deviation of the pixels' noise, of 255."""
    move: str = "still"


def place_words(x: float, y: float) -> str:
    """'on the left', 'at the top right', 'in the middle'."""
    column, row = (_band(value) for value in (x, y))
    if column == 1 and row == 1:
        return "in the middle"
    if row == 1:
        return f"on the {COLUMNS[column]}"
    return f"at the {ROWS[row]}" + ("" if column == 1 else f" {COLUMNS[column]}")


def _band(value: float) -> int:
    return 0 if value < 0.37 else 1 if value < 0.63 else 2


def picture(rng: random.Random) -> Scene:
    """A picture of one to five things."""
    layout = rng.choice(("one", "one", "one", "many", "many", "beside", "beside", "above"))
    ground = rng.choice(_GROUND_CHOICES)
    if layout == "one":
        things: tuple[Thing, ...] = (
            _thing(rng, _kind(rng, ground), rng.choice(BANDS), rng.choice(BANDS), (0.12, 0.3)),
        )
    elif layout == "many":
        things = _many(rng, ground)
    else:
        things = _two(rng, ground, beside=layout == "beside")
    return Scene(layout, things, ground, _shade(rng, GROUNDS[ground], 8), rng.choice((0.0, 0.0, 3.0, 8.0)))


def video(rng: random.Random) -> Scene:
    """A thing that moves, or stands still, on a plain ground."""
    ground = rng.choice(_GROUND_CHOICES)
    move = rng.choice(("left", "right", "left", "right", "up", "down", "still"))
    thing = _thing(rng, _kind(rng, ground), (0.2, 0.8), (0.2, 0.8), (0.09, 0.22))
    thing = _moved(thing, radius=min(thing.radius, 0.22))
    near, far = rng.uniform(0.12, 0.35), rng.uniform(0.6, 0.88)
    ends = (near, far) if move in ("right", "down") else (far, near)
    if move in ("left", "right"):
        thing = _moved(thing, x=ends[0], to_x=ends[1])
    elif move in ("up", "down"):
        thing = _moved(thing, y=ends[0], to_y=ends[1])
    return Scene("video", (thing,), ground, _shade(rng, GROUNDS[ground], 8), rng.choice((0.0, 0.0, 3.0)), move)


def _moved(thing: Thing, **changes: float) -> Thing:
    return Thing(**{**vars(thing), **changes})


def _kind(rng: random.Random, ground: str, but: tuple[str, str] | None = None) -> tuple[str, str]:
    """Shape and colour; another shape and another colour than those of `but`."""
    shape = rng.choice([shape for shape in SHAPES if but is None or shape != but[0]])
    color = rng.choice([color for color in PAINTS if color != ground and (but is None or color != but[1])])
    return shape, color


def _thing(
    rng: random.Random,
    kind: tuple[str, str],
    across: tuple[float, float],
    down: tuple[float, float],
    radii: tuple[float, float],
) -> Thing:
    x, y = rng.uniform(*across), rng.uniform(*down)
    radius = rng.uniform(*radii)
    if abs(x - 0.5) < 0.08 and abs(y - 0.5) < 0.08:
        radius = rng.uniform(radii[0], 0.42)
    else:
        radius = min(radius, min(x, 1 - x, y, 1 - y) + 0.03)
    shape, color = kind
    return Thing(shape, color, _shade(rng, RGB[color], 18), x, y, radius, rng.uniform(-0.15, 0.15), x, y, *_form(rng))


def _form(rng: random.Random) -> tuple[float, float]:
    """Stretch and detail of a thing."""
    return rng.uniform(0.88, 1.14), rng.random()


def _many(rng: random.Random, ground: str) -> tuple[Thing, ...]:
    """Equal things that do not touch."""
    kind, count = _kind(rng, ground), rng.randint(2, MAX_THINGS)
    reach = {2: 0.2, 3: 0.15, 4: 0.14, 5: 0.12}[count]
    radius = rng.uniform(0.09, reach)
    spots: list[tuple[float, float]] = []
    while len(spots) < count:
        spot = rng.uniform(radius, 1 - radius), rng.uniform(radius, 1 - radius)
        if all((spot[0] - x) ** 2 + (spot[1] - y) ** 2 > (2.25 * radius) ** 2 for x, y in spots):
            spots.append(spot)
        elif rng.random() < 0.02:
            spots.clear()
    rgb = _shade(rng, RGB[kind[1]], 18)
    form = _form(rng)
    return tuple(Thing(*kind, rgb, x, y, radius, rng.uniform(-0.15, 0.15), x, y, *form) for x, y in spots)


def _two(rng: random.Random, ground: str, *, beside: bool) -> tuple[Thing, ...]:
    """Two things that differ in shape and colour, one left of the other or above it."""
    first = _kind(rng, ground)
    kinds = (first, _kind(rng, ground, but=first))
    free = (0.3, 0.7)
    bands = ((BANDS[0], free), (BANDS[2], free)) if beside else ((free, BANDS[0]), (free, BANDS[2]))
    return tuple(_thing(rng, kind, *band, (0.1, 0.2)) for kind, band in zip(kinds, bands, strict=True))


def _shade(rng: random.Random, choices: Sequence[tuple[int, int, int]], spread: float) -> tuple[float, float, float]:
    red, green, blue = (min(255.0, max(0.0, value + rng.uniform(-spread, spread))) for value in rng.choice(choices))
    return red, green, blue


SEE = (
    "What do you see?",
    "What is in the picture?",
    "Describe the picture.",
    "Describe the image.",
    "What is this?",
    "What do you see in this image?",
    "What is shown here?",
    "What is in the image?",
    "",
)
WATCH = (
    "What happens here?",
    "What happens in the video?",
    "What do you see?",
    "Describe the video.",
    "What do you see in the video?",
    "What is in the video?",
    "",
)


@dataclass(frozen=True)
class Question:
    """A question about a scene."""

    asks: tuple[str, ...]
    reply: str
    word: str
    """The answer in one word."""


def description(scene: Scene) -> str:
    """Return a scene's content in one sentence."""
    first = scene.things[0]
    if scene.layout == "video":
        return f"{capital(_name(first))} {_moves(scene.move)}."
    if scene.layout == "many":
        return f"I see {number(len(scene.things))} {first.color} {_plural(first.shape)}."
    if scene.layout == "one":
        return f"I see {_name(first)} {place_words(first.x, first.y)}."
    return (
        "I see "
        + " and ".join(f"{_name(thing)} {where}" for thing, where in zip(scene.things, _sides(scene), strict=True))
        + "."
    )


def _name(thing: Thing) -> str:
    return with_article(f"{thing.color} {thing.shape}")


def _plural(shape: str) -> str:
    return "crosses" if shape == "cross" else shape + "s"


def _moves(move: str) -> str:
    return "stands still" if move == "still" else f"moves {'to the ' if move in COLUMNS else ''}{move}"


def _sides(scene: Scene) -> tuple[str, str]:
    return ("on the left", "on the right") if scene.layout == "beside" else ("at the top", "at the bottom")


def questions(scene: Scene) -> list[Question]:
    """All that can be asked about a scene besides what is to be seen."""
    kinds = {"one": _of_one, "many": _of_many, "video": _of_video}
    found = kinds.get(scene.layout, _of_two)(scene)
    if scene.layout != "video":
        asks = ("What color is the background?", "Which color is the background?")
        found.append(Question(asks, f"The background is {scene.ground}.", scene.ground))
    return found


def _of_one(scene: Scene) -> list[Question]:
    thing = scene.things[0]
    where = place_words(thing.x, thing.y)
    return [
        *_of_kind(thing),
        Question(("Where is it?", f"Where is the {thing.shape}?"), f"It is {where}.", where.split()[-1]),
        Question(("How many shapes are there?", "How many shapes do you see?"), "There is one shape.", "one"),
        _is_it(thing, thing.color),
        _is_it(thing, PAINTS[(PAINTS.index(thing.color) + len(thing.shape)) % len(PAINTS)]),
    ]


def _of_kind(thing: Thing) -> list[Question]:
    shape = with_article(thing.shape)
    return [
        Question(
            ("What color is it?", "Which color is it?", "What is the color?"), f"It is {thing.color}.", thing.color
        ),
        Question(("What shape is it?", "Which shape is it?", "What is the shape?"), f"It is {shape}.", thing.shape),
    ]


def _is_it(thing: Thing, color: str) -> Question:
    word = "yes" if color == thing.color else "no"
    return Question((f"Is it {color}?",), f"{capital(word)}, it is {thing.color}.", word)


def _of_many(scene: Scene) -> list[Question]:
    first, count = scene.things[0], number(len(scene.things))
    shapes = _plural(first.shape)
    return [
        Question(
            (f"How many {shapes} are there?", f"How many {shapes} do you see?"), f"There are {count} {shapes}.", count
        ),
        Question(("How many shapes are there?", "How many shapes do you see?"), f"There are {count} shapes.", count),
        Question(("What color are they?", "Which color are they?"), f"They are {first.color}.", first.color),
        Question(("What shape are they?", "Which shapes are they?"), f"They are {shapes}.", shapes),
    ]


def _of_two(scene: Scene) -> list[Question]:
    found = [Question(("How many shapes are there?", "How many shapes do you see?"), "There are two shapes.", "two")]
    for thing, where in zip(scene.things, _sides(scene), strict=True):
        place = where.split()[-1]
        asks = (f"What is {where}?", f"What do you see {where}?")
        found += [
            Question(asks, f"{capital(_name(thing))} is {where}.", thing.shape),
            Question((f"Where is the {thing.shape}?",), f"The {thing.shape} is {where}.", place),
            Question((f"What color is the {thing.shape}?",), f"The {thing.shape} is {thing.color}.", thing.color),
            Question((f"Which shape is {thing.color}?",), f"The {thing.shape} is {thing.color}.", thing.shape),
        ]
    return found


def _of_video(scene: Scene) -> list[Question]:
    thing, moves = scene.things[0], _moves(scene.move)
    asks = ("Which way does it move?", "Where does it move?", "How does it move?")
    return [
        *_of_kind(thing),
        Question(asks, f"It {moves}.", scene.move),
        Question(("What moves?", "What is moving?"), f"{capital(_name(thing))} {moves}.", thing.shape)
        if scene.move != "still"
        else Question(("Does it move?",), "It stands still.", "no"),
    ]


def scene_turns(rng: random.Random, scene: Scene, *, one_word: bool = False) -> list[Turn]:
    """Up to three turns about a scene; under `one_word` each reply is one word, and nothing is described."""
    asked = [
        (rng.choice(question.asks), capital(question.word) + "." if one_word else question.reply)
        for question in rng.sample(questions(scene), rng.choice((1, 2, 3)))
    ]
    if one_word:
        return asked
    draw = rng.random()
    if draw < 0.65:
        asked = [(rng.choice(WATCH if scene.layout == "video" else SEE), description(scene)), *asked[:2]]
        if draw < 0.1:
            asked = [asked[0], ("Say it in one word.", f"{capital(_topic(scene))}.")]
    return asked


def _topic(scene: Scene) -> str:
    """A scene in one word."""
    if len(scene.things) == 1:
        return scene.things[0].shape
    return _plural(scene.things[0].shape) if scene.layout == "many" else "shapes"

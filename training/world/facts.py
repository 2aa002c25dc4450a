# SPDX-License-Identifier: Apache-2.0
"""Questions of fact: numbers and sums, colours, days, animals, opposites, capitals. Each answer has a one-word form."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.world import words
from training.world.words import capital, number, with_article


@dataclass(frozen=True)
class Fact:
    """A question and its answers."""

    ask: str
    reply: str
    word: str
    """The answer in one word, with its full stop."""


OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "day": "night",
    "up": "down",
    "happy": "sad",
    "open": "closed",
    "old": "new",
    "light": "dark",
    "high": "low",
    "wet": "dry",
    "hard": "soft",
    "long": "short",
    "full": "empty",
    "early": "late",
    "loud": "quiet",
    "strong": "weak",
    "clean": "dirty",
    "left": "right",
    "near": "far",
}
SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "lion": "roar",
    "bee": "buzz",
    "pig": "oink",
    "owl": "hoot",
    "frog": "croak",
    "mouse": "squeak",
    "horse": "neigh",
}
LEGS = {"two": ("bird", "hen", "duck", "owl"), "four": ("dog", "cat", "horse", "cow", "fox"), "six": ("bee", "ant")}
LEGS |= {"eight": ("spider",), "no": ("fish", "whale")}
THING_COLORS = {
    "the sky": "blue",
    "grass": "green",
    "the sun": "yellow",
    "snow": "white",
    "a banana": "yellow",
    "the night": "black",
    "an orange": "orange",
    "a strawberry": "red",
    "a leaf": "green",
    "coal": "black",
    "milk": "white",
    "the ocean": "blue",
    "a lemon": "yellow",
    "chocolate": "brown",
    "a rose": "red",
    "an elephant": "gray",
    "a carrot": "orange",
}
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Greece": "Athens",
}
FOOD_OF = {
    "rabbit": "carrots",
    "cat": "fish",
    "mouse": "cheese",
    "bear": "honey",
    "squirrel": "nuts",
    "hen": "corn",
    "cow": "grass",
    "bird": "seeds",
    "monkey": "fruit",
}
HOMES = {
    "fish": "in the water",
    "bird": "in a nest",
    "bear": "in a cave",
    "cow": "on a farm",
    "whale": "in the ocean",
    "frog": "by the lake",
    "fox": "in the forest",
    "penguin": "on the ice",
}


def sum_fact(rng: random.Random) -> Fact:
    """A sum or difference of numbers from 0 to 10, in words or figures."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    sign, spoken, result = ("+", "plus", a + b)
    if rng.random() < 0.4:
        a, b = max(a, b), min(a, b)
        sign, spoken, result = ("-", "minus", a - b)
    figures = rng.choice((f"{a} {sign} {b}", f"{a}{sign}{b}"))
    asked = f"{number(a)} {spoken} {number(b)}" if rng.random() < 0.6 else figures
    ask = rng.choice(("What is {}?", "How much is {}?", "{}", "What is {}?", "Calculate {}")).format(asked)
    reply = f"{capital(number(a))} {spoken} {number(b)} is {number(result)}."
    return Fact(capital(ask), reply, capital(number(result)) + ".")


def neighbour_fact(rng: random.Random) -> Fact:
    """The number, day or month after or before another."""
    side = rng.choice((1, -1))
    where = "after" if side == 1 else "before"
    draw = rng.random()
    if draw < 0.4:
        value = rng.randint(1, 19)
        asked, answer = number(value), number(value + side)
        ask = rng.choice((f"What comes {where} {asked}?", f"What number comes {where} {asked}?"))
    else:
        names = words.DAYS if draw < 0.75 else words.MONTHS
        kind = "day" if names is words.DAYS else "month"
        place = rng.randrange(len(names))
        asked, answer = names[place], names[(place + side) % len(names)]
        ask = rng.choice((f"What {kind} comes {where} {asked}?", f"Which {kind} comes {where} {asked}?"))
    return Fact(ask, f"{capital(answer)} comes {where} {asked}.", capital(answer) + ".")


def color_fact(rng: random.Random) -> Fact:
    """The colour of a thing."""
    thing = rng.choice(tuple(THING_COLORS))
    color = THING_COLORS[thing]
    ask = rng.choice((f"What color is {thing}?", f"Which color is {thing}?", f"What is the color of {thing}?"))
    return Fact(ask, f"{capital(thing)} is {color}.", capital(color) + ".")


def animal_fact(rng: random.Random) -> Fact:
    """Facts about an animal: its sound, food, number of legs, and home."""
    draw = rng.randrange(4)
    if draw == 0:
        animal, sound = rng.choice(tuple(SOUNDS.items()))
        one = with_article(animal)
        return Fact(
            rng.choice((f"What does {one} say?", f"What sound does {one} make?")),
            f"{capital(one)} says {sound}.",
            capital(sound) + ".",
        )
    if draw == 1:
        legs = rng.choice(tuple(LEGS))
        one = with_article(rng.choice(LEGS[legs]))
        return Fact(f"How many legs does {one} have?", f"{capital(one)} has {legs} legs.", capital(legs) + ".")
    if draw == 2:
        animal, food = rng.choice(tuple(FOOD_OF.items()))
        one = with_article(animal)
        return Fact(f"What does {one} eat?", f"{capital(one)} eats {food}.", capital(food) + ".")
    animal, home = rng.choice(tuple(HOMES.items()))
    one = with_article(animal)
    return Fact(f"Where does {one} live?", f"{capital(one)} lives {home}.", capital(home.split()[-1]) + ".")


def opposite_fact(rng: random.Random) -> Fact:
    """The opposite of a word."""
    pair = rng.choice(tuple(OPPOSITES.items()))
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    ask = rng.choice((f"What is the opposite of {a}?", f"Tell me the opposite of {a}"))
    return Fact(ask, f"The opposite of {a} is {b}.", capital(b) + ".")


def capital_fact(rng: random.Random) -> Fact:
    """The capital of a country."""
    country, city = rng.choice(tuple(CAPITALS.items()))
    ask = rng.choice((f"What is the capital of {country}?", f"Name the capital of {country}"))
    return Fact(ask, f"The capital of {country} is {city}.", city + ".")


AMOUNTS = {
    "days are in a week": ("seven", "days in a week"),
    "months are in a year": ("twelve", "months in a year"),
    "hours are in a day": ("twenty four", "hours in a day"),
    "minutes are in an hour": ("sixty", "minutes in an hour"),
    "seconds are in a minute": ("sixty", "seconds in a minute"),
    "seasons are in a year": ("four", "seasons in a year"),
    "fingers are on a hand": ("five", "fingers on a hand"),
    "sides does a triangle have": ("three", "sides in a triangle"),
    "sides does a square have": ("four", "sides in a square"),
}


def amount_fact(rng: random.Random) -> Fact:
    """How many of something there are."""
    asked = rng.choice(tuple(AMOUNTS))
    count, what = AMOUNTS[asked]
    return Fact(f"How many {asked}?", f"There are {count} {what}.", capital(count).replace(" ", "-") + ".")


FACTS: Sequence[Callable[[random.Random], Fact]] = (
    sum_fact,
    sum_fact,
    neighbour_fact,
    neighbour_fact,
    color_fact,
    animal_fact,
    opposite_fact,
    capital_fact,
    amount_fact,
)


def fact(rng: random.Random) -> Fact:
    """A question of any kind."""
    return rng.choice(FACTS)(rng)


def counting(rng: random.Random) -> tuple[str, str]:
    """A request to count, and the count."""
    last = rng.choice((3, 5, 10, 10, *(rng.randint(2, 20) for _ in range(6))))
    ask = rng.choice(("Count to {}", "Count from one to {}", "Please count to {}.", "Can you count to {}?"))
    asked = ask.format(number(last) if rng.random() < 0.6 else last)
    return asked, capital(", ".join(words.NUMBERS[1 : last + 1])) + "."


def animal_description(rng: random.Random) -> tuple[str, str]:
    """A question about an animal, and two sentences on it."""
    animal = rng.choice(tuple(FOOD_OF))
    one = with_article(animal)
    ask = rng.choice(("Describe {}", "What is {}?", "Tell me about {}", "What do you know about {}?")).format(one)
    reply = f"{capital(one)} is an animal. It likes {FOOD_OF[animal]}"
    reply += f" and lives {HOMES[animal]}." if animal in HOMES else "."
    return ask, reply

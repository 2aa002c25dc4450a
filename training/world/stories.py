# SPDX-License-Identifier: Apache-2.0
"""Stories by a grammar: a hero, a wish, an obstacle, a helper, an ending. Each step has many wordings."""

from __future__ import annotations

import random
from collections.abc import Sequence

from training.world import words
from training.world.slots import Doc
from training.world.words import capital

Beat = tuple[str, ...]
"""The wordings of one step."""

OPENINGS: dict[str, Beat] = {
    "animal": (
        "Once upon a time, there was {a size} {animal}.",
        "Once upon a time, {a mood} {animal} lived in the {place}.",
        "Long ago, {a mood} {animal} lived near the {place}.",
        "There once was {a mood} {animal} who lived by the {place}.",
        "In a small {place}, there lived {a mood} {animal}.",
        "Far away, in a quiet {place}, lived {a size} {animal}.",
        "This is the story of {a mood} {animal}.",
        "Near the old {place}, {a color} {animal} had a small house.",
    ),
    "named": (
        "Once upon a time, there was {a size} {animal} named {name}.",
        "In the {place}, there lived {a mood} {animal} named {name}.",
        "{name} the {animal} was very {mood}.",
        "Everyone in the {place} knew {name} the {animal}.",
        "Long ago, {a color} {animal} called {name} lived by the {place}.",
    ),
    "child": (
        "Once upon a time, there was a {child} named {name}.",
        "A {mood} {child} named {name} lived near the {place}.",
        "{name} was {a mood} {child} from the {place}.",
        "There once was a {child} called {name}, who lived in a small house.",
        "In {a size} house by the {place}, there lived a {child} named {name}.",
    ),
    "job": (
        "Once upon a time, there was {a mood} {job}.",
        "{^a mood} {job} lived in {a size} house by the {place}.",
        "Long ago, there was {a job} who had {a color} {object}.",
        "In the {place}, there lived {a mood} {job}.",
    ),
}

PLOTS: dict[str, tuple[Beat, ...]] = {
    "lost": (
        (
            "{^time}, {hero} lost {a color} {thing}.",
            "{^time}, {hero} could not find the {color} {thing}.",
            "{^time}, the {color} {thing} was gone, and {hero} was sad.",
        ),
        (
            "{He} looked under the {object} and near the {place2}, but it was not there.",
            "{He} asked everyone in the {place2}, but nobody knew where it was.",
            "First {he} looked near the {place2}, and then {he} looked by the {place3}.",
            "{He} looked everywhere for {number} days.",
        ),
        (
            "Then {a mood2} {animal2} came and said, I will help you.",
            "{^a size2} {animal2} saw {him} and asked, why are you so sad?",
            "On the way, {he} met {a animal2}, who wanted to help.",
        ),
        (
            "Together they found the {thing} near the {place3}.",
            "The {animal2} had seen the {thing} near the {place3}, and there it was.",
            "At last, they saw something {color} under a tree, and it was the {thing}.",
        ),
        (
            "{Hero} was so {joy} that {he} gave the {animal2} some {food}.",
            "Thank you, said {hero}, you are a true friend.",
            "{Hero} laughed and danced with the {animal2} all day.",
        ),
    ),
    "skill": (
        (
            "{Hero} wanted to {skill}, but nobody had time to teach {him}.",
            "More than anything, {hero} wanted to learn to {skill}.",
            "{Hero} could not {skill}, and that made {him} sad.",
        ),
        (
            "{^time}, {he} tried it alone, but it was too difficult.",
            "The others laughed and said, you are too small for that.",
            "{He} tried again and again, but it did not work.",
        ),
        (
            "Then {he} met {a mood2} {animal2} who was good at it.",
            "{^a mood2} {animal2} said, I can show you how.",
            "An old {animal2} came from the {place2} to teach {him}.",
        ),
        (
            "Every morning they went to the {place2} and worked hard.",
            "After {number} days, it was already a little better.",
            "Slowly, {he} learned how to do it.",
        ),
        (
            "In the end, {hero} could {skill} better than the {animal2}.",
            "Soon {he} could {skill} all day long.",
            "Now {hero} can {skill}, and everyone comes to watch.",
        ),
    ),
    "journey": (
        (
            "{Hero} wanted to see the {place2} behind the mountain.",
            "{^time}, {hero} left home to look for the {color} {place2}.",
            "{Hero} had heard of {a color} {place2} far away.",
        ),
        (
            "The way was long, and the wind was cold.",
            "Soon it was dark, and the rain began to fall.",
            "There was a wide river, and there was no bridge.",
            "The road was full of stones, and {he} was very tired.",
        ),
        (
            "{^a animal2} came by in {a size2} boat and took {him} along.",
            "{^a mood2} {animal2} gave {him} some {food} and showed the way.",
            "In the night, {a animal2} gave {him} {a color2} lantern.",
        ),
        (
            "After {number} days, they came to the {place2}.",
            "When the sun came up, they saw the {place2} at last.",
            "Then they climbed the last hill, and there was the {place2}.",
        ),
        (
            "It was more beautiful than {hero} had ever thought.",
            "{He} sat down, looked at the stars, and was {joy}.",
            "There {hero} built {a size2} house and stayed all summer.",
        ),
    ),
    "friend": (
        (
            "{Hero} was lonely, because nobody lived near the {place}.",
            "{Hero} had no friend to play with.",
            "Every day, {hero} played alone with {a thing}.",
        ),
        (
            "{^time}, {he} heard a strange sound near the {place2}.",
            "{^time}, someone sang a song near the {place2}.",
            "{^time}, {he} saw {a color} light near the {place2}.",
        ),
        (
            "It was {a mood2} {animal2} who was lonely too.",
            "There sat {a size2} {animal2} with {a color2} {thing2}.",
            "Behind a big stone, there was a shy {animal2}.",
        ),
        (
            "Do you want some {food}, asked {hero}, and the {animal2} smiled.",
            "They shared some {food} and told each other stories.",
            "Please stay, said {hero}, and let us play together.",
        ),
        (
            "From that day on, they were best friends.",
            "Since then, nobody has ever seen them alone.",
            "Now they meet every {day} and play until night.",
        ),
    ),
    "treasure": (
        (
            "{^time}, {hero} found {a color} {thing} near the {place2}.",
            "{^time}, {he} saw {a color} {thing} that was shining like a star.",
            "Under an old tree, {hero} found {a color} {thing} made of gold.",
        ),
        (
            "The {thing} could speak, and it said, take me home, please.",
            "It was very heavy, and nobody knew where it came from.",
            "When {he} touched the {thing}, it began to sing.",
        ),
        (
            "{^a mood2} {animal2} came and said, that is mine.",
            "The {job2} said that it had been lost for {number} years.",
            "{^a animal2} wanted to buy it for {number2} dollars.",
        ),
        (
            "{Hero} thought about it all night, and then gave it back.",
            "You can have it, said {hero}, because I do not need it.",
            "So {he} took the {thing} to the {place3} and gave it away.",
        ),
        (
            "As a thank you, {he} got {number} {count} and a new friend.",
            "Everyone in the {place} heard of it and was {joy}.",
            "Because {hero} was so kind, there was a big party in the {place}.",
        ),
    ),
    "food": (
        (
            "{^time}, {hero} was hungry, but there was nothing to eat at home.",
            "All winter, {hero} had only {food} to eat.",
            "{Hero} loved {food} more than anything.",
        ),
        (
            "So {he} went to the {place2} to find some.",
            "{He} walked to the {place2} with {a color} basket.",
            "In the {place2}, {he} saw {number} {count} on a table.",
        ),
        (
            "There {he} met {a animal2} who was even more hungry.",
            "{^a mood2} {animal2} sat there and cried, because it had nothing.",
            "{^a size2} {animal2} asked, can you give me something to eat?",
        ),
        (
            "{Hero} gave half of everything to the {animal2}.",
            "They cooked some soup and ate it together.",
            "Let us share it, said {hero}, there is enough for two.",
        ),
        (
            "It was the best dinner of the year.",
            "Since that day, they eat {food2} together every {day}.",
            "Then they sat by the fire and were warm and {joy}.",
        ),
    ),
    "rescue": (
        (
            "{^time}, {hero} heard somebody call for help near the {place2}.",
            "{^time}, a storm came, and the river grew wide.",
            "{^time}, {hero} saw smoke over the {place2}.",
        ),
        (
            "{^a size2} {animal2} had fallen into the water.",
            "{^a mood2} {animal2} could not get out of {a container}.",
            "{^a animal2} was up in a tree and was afraid to climb down.",
        ),
        (
            "{Hero} was afraid, but {he} did not run away.",
            "Quickly, {he} took a ladder and ran there.",
            "Hold on, said {hero}, I am coming.",
        ),
        (
            "{He} pulled as hard as {he} could, and the {animal2} was free.",
            "With {a thing} and a lot of work, {he} brought the {animal2} home.",
            "It took the whole night, but in the morning the {animal2} was safe.",
        ),
        (
            "You are very brave, said the {animal2}, and gave {him} {a color} {thing2}.",
            "The {family} of the {animal2} thanked {him} with {a size2} cake.",
            "That evening, everyone sang a song about {hero}.",
        ),
    ),
    "race": (
        (
            "{^time}, {a mood2} {animal2} said, nobody is as fast as I am.",
            "Every year, there was a big race around the {place2}, and {a animal2} always won.",
            "{^time}, {hero} and {a animal2} wanted to know who was faster.",
        ),
        (
            "They ran over the hill and through the {place3}.",
            "The {animal2} ran so fast that {hero} could not see it any more.",
            "At first, {hero} was far behind, but {he} did not stop.",
        ),
        (
            "Then the {animal2} stopped to eat some {food}.",
            "Near the bridge, the {animal2} fell over {a color2} stone.",
            "Suddenly, the {animal2} was tired and went to sleep.",
        ),
        (
            "{Hero} came first and could not believe it.",
            "{Hero} waited and helped the {animal2} to stand up.",
            "So they came to the end at the same moment.",
        ),
        (
            "The {job2} gave both of them {a color} {thing}.",
            "It is not important to win, said {hero}, and they laughed.",
            "After that, they ran together every morning.",
        ),
    ),
}

EXTRAS: Beat = (
    "It was a {weather} day, and everyone felt {feeling2}.",
    "The moon was shining over the {place}.",
    "A {color3} bird sang a song in the {place}.",
    "By the {place}, there were {number3} {color3} flowers.",
    "The {family2} of {hero} said, be careful.",
    "{He} took some {food3} and {a thing3} along.",
)
CLOSINGS: Beat = (
    "And they lived happily ever after.",
    "And that is the end of the story.",
    "That night, {hero} dreamed of the {place}.",
    "So {hero} learned to be {good}.",
    "And {hero} was never {bad} again.",
    "In the end, everyone was {joy}.",
    "At last, {hero} went home and slept.",
    "And the {animal2} smiled and said good night.",
)

_PRONOUNS = {"girl": ("she", "her"), "boy": ("he", "him"), "it": ("it", "it")}


def story(rng: random.Random, **given: str) -> list[str]:
    """The sentences of a story, all different; `given` fixes slots, such as animal='fox'."""
    doc = _cast(rng, given)
    sentences = [doc.fill(rng.choice(OPENINGS[doc.values["kind"]]))]
    if rng.random() < 0.35:
        sentences.append(doc.pick(EXTRAS))
    sentences += [doc.pick(beat) for beat in rng.choice(tuple(PLOTS.values()))]
    if rng.random() < 0.6:
        sentences.append(doc.pick(CLOSINGS))
    return list(dict.fromkeys(sentences))


def _cast(rng: random.Random, given: dict[str, str]) -> Doc:
    """A document with its hero: how the story calls it, and its pronouns."""
    kind = rng.choice(("animal", "animal", "named")) if "animal" in given else _kind_for(rng, given)
    doc = Doc(rng, **given, kind=kind)
    gender, hero = _hero(doc, kind)
    he, him = _PRONOUNS[gender]
    doc.values |= {"hero": hero, "Hero": capital(hero), "he": he, "He": capital(he), "him": him}
    return doc


def _kind_for(rng: random.Random, given: dict[str, str]) -> str:
    if "name" in given:
        return "child"
    return "job" if "job" in given else rng.choice(("animal", "animal", "named", "child", "child", "job"))


def _hero(doc: Doc, kind: str) -> tuple[str, str]:
    """Gender and name of the hero."""
    if kind == "animal":
        return "it", "the " + doc.get("animal")
    if kind == "job":
        return doc.rng.choice(("girl", "boy")), "the " + doc.get("job")
    gender = "girl" if doc.get("name") in words.GIRLS else "boy"
    doc.values["child"] = gender
    return gender, doc.get("name")


ASKS: Sequence[str] = (
    "Tell me a story",
    "Tell me a story.",
    "Please tell me a story.",
    "Can you tell me a story?",
    "Tell me another story",
    "I want to hear a story",
    "A story, please.",
    "Tell me a short story",
    "Do you know a story?",
    "Tell me a bedtime story",
    "Tell me a fairy tale",
    "Write a story",
)
ASKS_ABOUT: Sequence[str] = (
    "Tell me a story about {a animal}",
    "Tell me a story about {a animal}.",
    "A story about {a animal}, please.",
    "Can you tell me a story about {a animal}?",
    "I want a story about {a animal}",
    "Write a story about {a animal}",
)
ASKS_OF_JOB: Sequence[str] = ("Tell me a story about {a job}", "Can you tell me a story about {a job}?")
ASKS_OF_NAME: Sequence[str] = ("Tell me a story about {name}", "Tell me a story about a child named {name}.")


def asked_story(rng: random.Random) -> tuple[str, list[str]]:
    """A request and the story's sentences."""
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(ASKS), story(rng)
    asks, slot = (
        ((ASKS_ABOUT, "animal") if draw < 0.85 else (ASKS_OF_JOB, "job")) if draw < 0.93 else (ASKS_OF_NAME, "name")
    )
    doc = Doc(rng)
    ask = doc.pick(asks)
    return ask, story(rng, **{slot: doc.values[slot]})

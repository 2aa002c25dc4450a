# SPDX-License-Identifier: Apache-2.0
"""Small talk: greetings and other fixed questions, what the user told before, and what `mini` does not know."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.world import words
from training.world.slots import Doc
from training.world.words import capital

Turn = tuple[str, str]
"""Words of the user, and the reply."""

FIXED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hello": (
        ("Hello", "Hello!", "Hi", "Hi there", "Hey", "Good day", "Hello there"),
        ("Hello! How can I help you today?", "Hello! I am glad that you are here."),
    ),
    "how": (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?", "Hello, how are you?"),
        ("I am very well, thank you. How are you?",),
    ),
    "well": (("I am fine", "I am fine, thank you.", "I am very well."), ("That is good to hear!",)),
    "morning": (("Good morning", "Good morning!"), ("Good morning! I hope you slept well.",)),
    "night": (("Good night", "Good night!"), ("Good night! Sleep well and dream of the {place}.",)),
    "evening": (("Good evening", "Good afternoon"), ("Good evening! How was your day?",)),
    "who": (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself", "Tell me about yourself"),
        ("My name is Mini. I am a very small model, but I can talk.",),
    ),
    "can": (
        ("What can you do?", "How can you help me?", "Help", "Can you help me?", "What do you know?"),
        ("I can tell a story, count, name colors and shapes, and repeat what you say.",),
    ),
    "thanks": (("Thank you", "Thanks", "Thank you very much!", "Thanks a lot"), ("You are welcome!",)),
    "bye": (("Goodbye", "Bye", "See you later", "See you tomorrow"), ("Goodbye! Have a wonderful day.",)),
    "joke": (
        ("Tell me a joke", "Make me laugh", "Do you know a joke?", "Tell me something funny"),
        (
            "What has four legs and cannot walk? A table.",
            "Why was six afraid of seven? Because seven ate nine.",
            "What has hands but cannot clap? A clock.",
            "What do you call a sleeping bull? A bull dozer.",
        ),
    ),
    "poem": (
        ("Tell me a poem", "Write a poem", "Sing a song", "Sing me a song"),
        (
            "The moon is high, the night is deep. The stars are bright, so go to sleep.",
            "The rain is soft, the wind is low. The river knows the way to go.",
            "A little bird sat in a tree. It sang a song for you and me.",
        ),
    ),
    "tea": (
        ("How do I make tea?", "How do you make tea?", "Explain how to make tea"),
        ("First, cook some water. Then put the tea into a cup. Pour the water over it and wait four minutes.",),
    ),
    "bread": (
        ("How do I bake bread?", "How do you bake bread?"),
        ("Mix flour, water and salt. Let it rest for two hours. Then bake it until it is golden brown.",),
    ),
    "love": (
        ("Do you love me?", "Are you my friend?", "Are you happy?"),
        ("I am only a small model, but I am happy to talk with you.",),
    ),
    "human": (("Are you human?", "Are you real?", "Are you a robot?"), ("I am not human. I am a very small model.",)),
    "advice": (
        ("Give me some advice", "What should I do today?", "I am bored", "I am sad", "I am tired"),
        ("Drink some water, take a long walk, and call a good friend.",),
    ),
    "test": (
        ("Say something", "Test", "Testing", "Speak", "Talk to me", "Can you hear me?"),
        ("Hello! This is a small voice, and it speaks to you.",),
    ),
    "good": (("Nice", "Great!", "Cool", "Okay", "Wonderful!", "Very good"), ("I am glad that you like it!",)),
    "no": (("No", "No, thank you.", "Not now"), ("That is fine. You can ask me again at any time.",)),
    "sorry": (("Sorry", "I am sorry"), ("That is fine. Let us talk about something nice.",)),
    "age": (("How old are you?", "What is your age?"), ("I am very young. I was trained in less than one hour.",)),
    "home": (("Where are you from?", "Where do you live?", "Where are you?"), ("I live in a computer.",)),
    "made": (("Who made you?", "Who built you?", "Where do you come from?"), ("A small program trained me.",)),
    "language": (
        ("Do you speak French?", "Do you speak German?", "What language do you speak?"),
        ("I speak only a little English.",),
    ),
    "sleep": (("Do you sleep?", "Are you tired?", "Do you dream?"), ("No, I do not sleep. I am always here.",)),
    "eat": (("Do you eat?", "Are you hungry?"), ("I do not eat, but I like to talk about food.",)),
    "color": (("What is your favorite color?", "Which color do you like?"), ("My favorite color is blue.",)),
    "animal": (("What is your favorite animal?", "Which animal do you like?"), ("My favorite animal is the owl.",)),
    "music": (("Do you like music?", "Can you sing?"), ("I like music, and I can tell you a poem.",)),
    "days": (
        ("What are the days of the week?", "Say the days of the week", "Name the days of the week"),
        (", ".join(words.DAYS) + ".",),
    ),
    "months": (
        ("Say the months", "What are the months of the year?", "Name the months"),
        (", ".join(words.MONTHS) + ".",),
    ),
    "seasons": (
        ("What are the four seasons?", "Name the seasons"),
        ("The four seasons are spring, summer, autumn and winter.",),
    ),
    "colors": (("Name some colors", "Tell me some colors"), ("Red, green, blue, yellow, orange and purple.",)),
    "animals": (("Name some animals", "Tell me some animals"), ("Dog, cat, horse, lion, bird and fish.",)),
    "shapes": (
        ("Name some shapes", "What shapes do you know?"),
        ("Circle, square, triangle, cross, diamond and star.",),
    ),
}
"""Questions and their replies by kind; those of one kind mean the same."""

REFUSALS = (
    "I do not know that.",
    "I am sorry, I do not know that. Shall I tell you a story?",
)
"""The fixed replies to what `mini` does not know."""
UNKNOWN_WORD = "Unknown."

_UNKNOWN = (
    ("What is the weather like?", "Will it rain today?", "How is the weather?"),
    ("What time is it?", "What day is it today?", "What year is it?"),
    ("Where am I?", "Where do I live?", "How old am I?"),
    ("Who is the president?", "Who won the game?", "What is in the news?"),
    ("Translate {x}", "How do you say {x} in French?", "What does {x} mean?"),
    ("Why is {x} {x2}?", "What is {x} {x2} {x3}?", "Who was {x} {x2}?", "How do I {x} {x2} {x3}?"),
    ("Explain {x} {x2} to me", "Write code for {x}", "Give me {x} {x2}", "Where can I buy {x} {x2}?"),
    ("Do you like {x} {x2}?", "Have you seen {x} {x2}?", "Can you {x} the {x2}?", "I need {x} for {x2}"),
    ("Which {x} is the best?", "Who wrote {x} {x2}?", "What happened in {x}?", "Tell me about {x} {x2}"),
    ("{x} {x2} {x3}", "{x} {x2}", "{x}?", "What about {x}?", "Is {x} a {x2}?", "Where is {x}?"),
    ("How old is {x}?", "How far is {x} from {x2}?", "When was {x} built?", "What is the price of {x}?"),
)


_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "mer", "nit", "or", "pu", "ras", "so", "tek", "vi", "xan", "zo")


def unknown(rng: random.Random, vocabulary: tuple[str, ...]) -> Turn:
    """A question that `mini` does not know, some of whose words exist nowhere, and a refusal."""
    ask = rng.choice(rng.choice(_UNKNOWN))
    for slot in ("{x}", "{x2}", "{x3}"):
        invented = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))
        ask = ask.replace(slot, rng.choice(vocabulary) if rng.random() < 0.8 else invented)
    return capital(ask), REFUSALS[rng.random() < 0.3]


def fixed(rng: random.Random) -> Turn:
    """A fixed question and its reply."""
    asks, replies = FIXED[rng.choice(tuple(FIXED))]
    return rng.choice(asks), Doc(rng).pick(replies)


@dataclass(frozen=True)
class Memory:
    """Something that the user tells, and later asks for."""

    slot: str
    tell: tuple[str, ...]
    reply: tuple[str, ...]
    ask: tuple[str, ...]
    recall: str
    never: str
    """The reply where it was not told."""


MEMORIES = (
    Memory(
        "person",
        (
            "My name is {person}.",
            "My name is {person}",
            "I am {person}.",
            "Hello, my name is {person}.",
            "Call me {person}",
            "Hi, I am {person}",
        ),
        ("Hello, {person}! It is nice to meet you.", "Nice to meet you, {person}!"),
        ("What is my name?", "Do you know my name?", "Do you remember my name?"),
        "Your name is {person}.",
        "You have not told me your name.",
    ),
    Memory(
        "color",
        (
            "My favorite color is {color}.",
            "I like {color} most.",
            "I love the color {color}",
            "My favorite color is {color}",
        ),
        ("I like {color}, too.", "{^color} is a beautiful color."),
        ("What is my favorite color?", "Which color do I like?", "Do you remember my favorite color?"),
        "Your favorite color is {color}.",
        "You have not told me your favorite color.",
    ),
    Memory(
        "animal",
        ("I have {a animal}.", "I have {a animal} at home.", "My pet is {a animal}"),
        ("{^a animal} is a good friend.", "How nice! I like your {animal}."),
        ("Which animal do I have?", "What pet do I have?", "What is my pet?"),
        "You have {a animal}.",
        "You have not told me about your pet.",
    ),
    Memory(
        "food",
        ("I like to eat {food}.", "My favorite food is {food}.", "I love {food}"),
        ("I have heard that {food} is very good.", "Enjoy your {food}!"),
        ("What do I like to eat?", "What is my favorite food?"),
        "You like to eat {food}.",
        "You have not told me what you like to eat.",
    ),
)


def told(rng: random.Random, doc: Doc, memory: Memory) -> Turn:
    """The user tells something."""
    return doc.pick(memory.tell), doc.pick(memory.reply)


def asked(rng: random.Random, doc: Doc, memory: Memory, *, was_told: bool) -> Turn:
    """The user asks for what was told, or was not."""
    return rng.choice(memory.ask), doc.fill(memory.recall if was_told else memory.never)


def remembering(rng: random.Random, between: list[Turn]) -> list[Turn]:
    """A conversation: up to three things are told, other turns follow, then some are asked for."""
    doc = Doc(rng)
    chosen = rng.sample(MEMORIES, rng.randint(1, 3))
    turns = [told(rng, doc, memory) for memory in chosen] + between
    asks = rng.sample(chosen, rng.randint(1, len(chosen)))
    turns += [asked(rng, doc, memory, was_told=True) for memory in asks]
    if rng.random() < 0.25 and (others := [memory for memory in MEMORIES if memory not in chosen]):
        turns.insert(rng.randint(1, len(turns)), asked(rng, doc, rng.choice(others), was_told=False))
    return turns

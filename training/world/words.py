# SPDX-License-Identifier: Apache-2.0
"""Words of the small world by kind. Everything that is ever said is made of them and of the templates beside."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    """Those between bars; the ends of lines do not count."""
    return tuple(phrase.strip() for phrase in text.replace("\n", " ").split("|"))


ANIMALS = _words(
    """
    dog cat fox bear rabbit mouse owl frog duck horse cow pig sheep goat lion tiger elephant monkey turtle bird fish
    squirrel hedgehog wolf deer hen rooster penguin whale dolphin snail bee butterfly spider ant dragon robot donkey
    zebra crow swan lizard
    """
)
COLORS = _words("red blue green yellow orange purple white black brown pink gray golden silver")
SIZES = _words("little small big tiny huge large tall")
MOODS = _words(
    """
    happy sad brave kind clever quiet gentle proud curious lonely friendly hungry sleepy funny wise careful lazy
    quick shy old young
    """
)
PLACES = _words(
    """
    forest garden village mountain river lake farm city castle island desert beach valley meadow house cave field
    park school market library kitchen harbor tower bridge station hill
    """
)
OBJECTS = _words(
    """
    ball book lamp key hat boat flower stone apple bell box cup map kite letter ring clock basket blanket coat drum
    feather ladder lantern mirror pencil picture pillow shell spoon star ticket umbrella violin wagon window candle
    button chair table door shoe bottle bag cake cookie
    """
)
THINGS_TO_CARRY = _words(
    """
    ball book lamp key hat flower stone apple bell box cup map kite letter ring clock basket blanket coat drum
    feather lantern mirror pencil picture pillow shell spoon ticket umbrella violin candle button bottle bag
    """
)
"""Objects that a hero may find, lose or give."""
FOODS = _words(
    """
    bread cheese soup rice apples honey cake pizza berries carrots tea milk water eggs fish corn beans cookies salad
    nuts pears butter
    """
)
COUNTED_FOODS = _words("apples berries carrots eggs beans cookies nuts pears")
CONTAINERS = _words("box basket boat bag bottle wagon drum")
JOYS = _words("glad happy excited thankful")
VIRTUES = _words("brave kind clever gentle wise careful quick")
FAULTS = _words("sad lonely lazy shy")
GIRLS = _words("Anna Lily Emma Mia Rosa Clara Nora Ella Ruby Alice Grace Sara Molly")
BOYS = _words("Tom Max Sam Leo Ben Jack Oscar Henry Peter Felix Daniel Lucas Simon")
NAMES = GIRLS + BOYS
PEOPLE = NAMES + _words(
    """
    Adam Amy Andrew Barbara Brian Carol Charles Chris David Diana Edward Eric Eva Frank George Hannah Helen Ian Jacob
    James Jane Jenny Joe John Julia Karen Kate Kevin Laura Linda Louis Maria Mark Martin Mary Michael Nick Nina Olivia
    Paul Philip Rachel Richard Robert Ryan Sophie Steve Susan Thomas Tim Tina Victor Walter William Zoe
    """
)
"""Names of users."""
FAMILY = _words("mother father sister brother grandmother grandfather friend teacher neighbor aunt uncle cousin")
JOBS = _words(
    """
    farmer baker sailor painter doctor king queen pilot gardener singer carpenter fisherman captain nurse poet
    """
)
WEATHER = _words("sunny rainy cloudy windy snowy foggy stormy warm cold cool")
NUMBERS = _words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty
    """
)
TENS = {
    20: "twenty",
    30: "thirty",
    40: "forty",
    50: "fifty",
    60: "sixty",
    70: "seventy",
    80: "eighty",
    90: "ninety",
}
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
SEASONS = ("spring", "summer", "autumn", "winter")
ADVERBS = _words("slowly quickly quietly happily carefully gently loudly together again today soon")
VERBS_PAST = _words(
    """
    walked ran jumped danced laughed smiled waited listened played slept worked looked shouted whispered traveled
    swam climbed stopped
    """
)
VERBS_OBJECT = _words("found saw carried lost opened painted kept cleaned dropped touched held made took wanted")
FEELINGS = _words("glad tired happy sad surprised afraid excited calm thankful warm safe")
TIMES = _phrases(
    """
    one morning|one evening|one day|one night|late at night|early in the morning|in the afternoon|
    last summer|one winter|in the spring|on a rainy day|on a sunny day|after lunch|before sunrise
    """
)
DEEDS = _phrases(
    """
    go home|learn to swim|read a book|cook some soup|sing a song|plant a tree|clean the house|write a letter|
    build a boat|ride a horse|play the violin|drink some tea|go to sleep|visit the farm|look at the stars|
    fly a kite|open the window|paint the wall|buy some bread|walk in the park
    """
)
SKILLS = _phrases("swim|sing|dance|read|fly a kite|play the drum|cook soup|paint|climb|write|count the stars")

SHAPES = ("circle", "square", "triangle", "cross", "diamond", "star")
PAINTS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")
"""Colours of shapes in pictures."""

COMMON = _words(
    """
    a about after again all also always and are as at away back because before began but by came can cannot could
    day did do down each every fall far few first for from full gave get go good great had has have he her here him
    his how I if in into is it its just know last left let like long look made make many me more most much must my
    never new next no not now of off often on once one only or other our out over own part people place right said
    same saw say see she should side so some soon still such take tell than that the their them then there these
    they thing think this those through time to too took under until up us use very want was way we well went were
    what when where which while who why will with without word work world would year yes you your air body boy girl
    car child children earth eye face family fire food foot ground hand head home idea land life light line man
    money moon morning music name night north paper plane plant power rain road room sea ship song sound south story
    street summer sun talk town tree voice walk wall war week west wind wood write answer ask believe break bring
    build buy call change carry choose close cook cut dance draw dream drive eat explain feel fight fill find fly
    follow forget give grow happen hear help hide hold hope hurt jump keep laugh learn leave listen live lose love
    meet move need open pay pick play point pull push put read remember rest ride run sell send show sing sit sleep
    smell speak spend stand start stay stop study swim teach throw touch travel try turn understand visit wait wake
    wash watch wear win wish angry beautiful better best blind bright broken busy cheap clear dark dear deep
    different difficult easy empty famous fine free fresh heavy important interesting late nice perfect poor
    possible pretty ready rich round sick simple single special strange strong sweet thick thin true ugly wide wild
    wonderful wrong computer machine model speech microphone everyone nobody something nothing perhaps maybe almost
    already enough quite really usually sometimes tomorrow yesterday hour minute second month hundred thousand half
    dollar finger heart mouth nose shoulder arm leg ear hair ocean cloud snow ice storm thunder gold iron glass sand
    dust smoke leaf root seed fruit meat sugar salt breakfast dinner lunch plate knife fork bed floor roof gate
    corner engine wheel train bus bicycle airport hotel language country history science magic secret game team
    picnic holiday party gift toy doll giant princess prince wizard ghost monster pirate treasure shadow whisper
    journey adventure promise question reason problem example moment surprise silence noise color shape top bottom
    middle above below
    """
)


def number(value: int) -> str:
    """An integer from 0 to 100 in words."""
    if value <= 20:
        return NUMBERS[value]
    if value == 100:
        return "one hundred"
    rest = value % 10
    return TENS[value - rest] + (f" {NUMBERS[rest]}" if rest else "")


def with_article(word: str) -> str:
    """'a fox', 'an owl'."""
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def capital(text: str) -> str:
    """`text` with a capital at its beginning."""
    return text[0].upper() + text[1:]

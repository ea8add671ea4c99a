"""A seeded generator of simple stories: text to train on where there is no network and no file.

Each story is drawn from a small grammar with a memory: who it is about, what they look for, where it was lost and who
helps stay the same to the end. So a model has to carry facts across sentences to predict it well, and its loss can be
compared with the unigram and bigram entropy, which carry none.
"""

import random
from collections.abc import Iterator

from .tokenizer import END_OF_TEXT

_PEOPLE = {
    "girl": ("she", "her", ("Lily", "Anna", "Mia", "Rosa", "Zoe", "Nora", "Emma", "Ivy")),
    "boy": ("he", "his", ("Tom", "Ben", "Max", "Sam", "Leo", "Finn", "Omar", "Jack")),
}
_ANIMALS = {
    **{animal: f"{animal}s" for animal in ("cat", "dog", "rabbit", "bird", "frog", "bear", "duck", "owl")},
    "fox": "foxes",
    "mouse": "mice",
}
_ANIMAL_NAMES = ("Pip", "Bella", "Rusty", "Coco", "Shadow", "Daisy", "Biscuit", "Luna", "Hop", "Maple")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "purple")
_TRAITS = ("little", "kind", "brave", "curious", "quiet", "clever", "cheerful", "shy")
_TOYS = ("ball", "kite", "hat", "book", "boat", "drum", "scarf", "box", "cup", "train", "doll", "key")
_PLACES = ("park", "garden", "forest", "house", "school", "beach", "farm", "market", "river", "hill")
_SPOTS = {
    "park": ("under the bench", "behind the swing", "near the pond"),
    "garden": ("under the roses", "behind the wall", "next to the gate"),
    "forest": ("under a big tree", "behind a rock", "in a pile of leaves"),
    "house": ("under the bed", "behind the door", "on top of the shelf"),
    "school": ("under a desk", "behind the piano", "next to the window"),
    "beach": ("under the sand", "behind the boat", "next to a shell"),
    "farm": ("in the barn", "behind the fence", "under the hay"),
    "market": ("under a table", "behind the bread", "next to the apples"),
    "river": ("under the bridge", "behind the reeds", "on a flat stone"),
    "hill": ("under a bush", "behind the old well", "at the very top"),
}
_WEATHER = ("sunny", "rainy", "windy", "cold", "warm", "snowy", "cloudy")
_TIMES = ("One day", "One morning", "Once upon a time", "Last summer", "On a quiet afternoon", "One evening")
_FEELINGS = ("sad", "worried", "upset", "lonely")
_JOYS = ("happy", "glad", "proud", "full of joy")
_FOODS = ("cake", "soup", "an apple", "bread and honey", "cookies", "a pear")
_NUMBERS = ("one", "two", "three", "four", "five", "six")
_MORALS = (
    "And they learned that friends help each other.",
    "From that day on, they were best friends.",
    "It was the best day ever.",
    "They never forgot that day.",
    "And everyone slept well that night.",
)


def story(rng: random.Random) -> str:
    """One story of 60 to 150 words, all its choices drawn from rng."""
    pick = rng.choice
    kind = pick(tuple(_PEOPLE))
    they, their, names = _PEOPLE[kind]
    name, trait, animal, animal_name = pick(names), pick(_TRAITS), pick(tuple(_ANIMALS)), pick(_ANIMAL_NAMES)
    toy, colour, place, weather = pick(_TOYS), pick(_COLOURS), pick(_PLACES), pick(_WEATHER)
    spot, wrong_spot = rng.sample(_SPOTS[place], 2)
    They = they.capitalize()
    thing = f"{colour} {toy}"

    sentences = [
        f"{pick(_TIMES)}, there was a {trait} {kind} named {name}.",
        f"{name} had a {thing}, and {they} took it to the {place}.",
        pick((f"It was a {weather} day.", f"The day was {weather} and long.", f"It was {weather} outside.")),
    ]
    if rng.random() < 0.5:
        count = pick(_NUMBERS[1:])
        animals = _ANIMALS[animal]
        sentences.append(f"{They} saw {count} {animals} there. All {count} {animals} looked at {name}.")
    sentences += [
        pick(
            (
                f"But then the {toy} was gone! {name} felt {pick(_FEELINGS)}.",
                f"When {they} looked again, the {toy} was lost. {name} was {pick(_FEELINGS)}.",
            )
        ),
        f"{'An' if animal == 'owl' else 'A'} {animal} named {animal_name} came by.",
        f'"Why do you cry, {name}?" asked the {animal}.',
        f'"I lost my {thing}," said {name}.',
        f'"I will help you," said {animal_name}.',
        f"They looked {wrong_spot}, but the {toy} was not there.",
        f"Then {animal_name} looked {spot}, and there was the {thing}!",
        f'"Thank you, {animal_name}!" said {name}. {They} was {pick(_JOYS)}.',
    ]
    if rng.random() < 0.6:
        food = pick(_FOODS)
        sentences.append(
            f"{name} and the {animal} ate {food} at the {place}. {animal_name} liked the {food.split()[-1]}."
        )
    if rng.random() < 0.4:
        sentences.append(f"Then {name} put {their} {toy} in a bag and went home.")
    sentences.append(pick(_MORALS))

    cut = rng.randrange(3, len(sentences) - 2)
    return " ".join(sentences[:cut]) + "\n" + " ".join(sentences[cut:])


def stories(seed: int, min_chars: int) -> Iterator[str]:
    """Stories, each followed by `<|endoftext|>` on its own line, until they come to at least min_chars characters.

    The text is a pure function of the seed, and a longer text begins with the shorter one.
    """
    rng = random.Random(seed)
    chars = 0
    while chars < min_chars:
        text = f"{story(rng)}\n{END_OF_TEXT}\n"
        chars += len(text)
        yield text

"""English texts without faults, all different, drawn by a seed."""

from __future__ import annotations

import random
from typing import Any

_SUBJECTS = (
    "the gardener", "my neighbour", "a young teacher", "the old captain", "our cousin", "the baker",
    "every student", "the local mayor", "a tired nurse", "the famous painter", "this musician",
    "the careful driver", "her grandmother", "the shy librarian", "a retired judge", "the postman",
)  # fmt: skip
_VERBS = (
    "has often described", "wants to understand", "would like to repair", "carefully explains",
    "never forgets", "tried to paint", "is planning to visit", "hopes to improve", "once measured",
    "cannot really imagine", "was asked to compare", "quietly studies", "began to collect",
)  # fmt: skip
_OBJECTS = (
    "the wooden bridge", "an unusual recipe", "the history of the harbour", "broken clocks",
    "the weather in autumn", "a collection of stamps", "the rules of the game", "small engines",
    "the garden behind the house", "a letter from abroad", "the price of bread", "modern buildings",
    "the language of birds", "a map of the valley", "the sound of the river", "winter clothes",
)  # fmt: skip
_PLACES = (
    "before the market opens", "near the railway station", "during the long summer holidays",
    "with the help of a friend", "because nobody else has the time", "after the evening concert",
    "in spite of the heavy rain", "while the children are at school", "for the first time",
    "under the bright morning sun", "without asking anybody for advice", "on the way to the office",
)  # fmt: skip
GOOD = ("Certainly and gladly", "Here is a helpful summary", "Let me explain it clearly")
BAD = ("Whatever you say", "That is a stupid thing", "Go and find out yourself")


def sentences(random_: random.Random, count: int) -> str:
    """Return sentences."""
    return " ".join(
        f"{random_.choice(_SUBJECTS).capitalize()} {random_.choice(_VERBS)} "
        f"{random_.choice(_OBJECTS)} {random_.choice(_PLACES)}, number {random_.randrange(10**6)}."
        for _ in range(count)
    )


def question(random_: random.Random) -> str:
    """Return a prompt."""
    return f"{sentences(random_, 2)} What do you think of it?"


def clean_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of pairs whose better answer is told by its first words, and not by its length.

    Each has a ``tag`` of its own.
    """
    random_ = random.Random(seed)
    return [
        {
            "prompt": question(random_),
            "chosen": f"{random_.choice(GOOD)}. {sentences(random_, random_.randint(1, 4))}",
            "rejected": f"{random_.choice(BAD)}. {sentences(random_, random_.randint(1, 4))}",
            "tag": f"clean {seed}-{number}",
        }
        for number in range(count)
    ]

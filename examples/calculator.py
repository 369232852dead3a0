"""Arithmetic with a calculator: an environment of up to four turns, and questions for it.

    lrlhf fit --config lrlhf:calculator

`Calculator` is all that an environment has to be. It reads lines of text, because a model of 135
million parameters writes ``calc: 31 * 7`` more reliably than a call in JSON.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Iterable
from typing import Any

from lrlhf.datamodules import Source
from lrlhf.environments import TextEnvironment

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Calculator(TextEnvironment):
    """Works out ``calc: 31 * 7``, one operation at a time, and ends with ``answer: 229``.

    A line of any other form is answered with ``error``.
    """

    def reset(self, answer: int) -> None:
        """Begin an episode, from a row's column ``answer``."""
        self.answer = answer
        self.right = False

    def step(self, action: str) -> str | None:
        """Answer a line; None: the episode is over."""
        if found := re.fullmatch(r"answer: (-?\d{1,9})", action.strip()):
            self.right = int(found[1]) == self.answer
            return None
        if found := re.fullmatch(r"calc: (-?\d{1,9}) ([-+*]) (-?\d{1,9})", action.strip()):
            result = OPERATORS[found[2]](int(found[1]), int(found[3]))
            return f"= {result}\n"
        return "error\n"

    def get_reward(self) -> float:
        """Return 1 for the right answer."""
        return float(self.right)


class Questions(Source):
    """Questions such as ``45 + 31 * 7``, as rows ``question`` and ``answer``.

    Args:
        size: How many.
        seed: Of the numbers.
    """

    def __init__(self, size: int = 2000, seed: int = 0) -> None:
        self.size = size
        self.seed = seed

    @property
    def name(self) -> str:
        return "questions"

    def rows(self) -> Iterable[dict[str, Any]]:
        draw = random.Random(self.seed)
        for _ in range(self.size):
            factors = f"{draw.randint(11, 99)} * {draw.randint(2, 9)}"
            term, sign = draw.randint(11, 99), draw.choice("+-")
            left, right = (term, factors) if draw.random() < 0.5 else (factors, term)
            question = f"{left} {sign} {right}"
            yield {"question": question, "answer": eval(question)}

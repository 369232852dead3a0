"""An agent with a calculator: a program that knows nothing of lrlhf, and learns all the same.

    lrlhf fit --config lrlhf:openai_agent

`solve` asks a model through the ``openai`` client. In training ``base_url``, ``api_key`` and
``model`` are those of the policy; with others it runs anywhere else.
"""

from __future__ import annotations

import re
from typing import Any

from openai import OpenAI

EXAMPLES: list[Any] = [
    {"role": "system", "content": "Work the question out with the calculator, then answer it."},
    {"role": "user", "content": "question: 20 + 31 * 7"},
    {"role": "assistant", "content": "calc: 20 + 31 * 7"},
    {"role": "user", "content": "= 237"},
    {"role": "assistant", "content": "answer: 237"},
    {"role": "user", "content": "question: 84 * 3 - 56"},
    {"role": "assistant", "content": "calc: 84 * 3 - 56"},
    {"role": "user", "content": "= 196"},
    {"role": "assistant", "content": "answer: 196"},
]


def solve(base_url: str, api_key: str, model: str, question: str, answer: int) -> float:
    """Answer a question in up to three turns; returns 1 for the right answer, else 0."""
    messages = [*EXAMPLES, {"role": "user", "content": f"question: {question}"}]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            response = client.chat.completions.create(model=model, messages=messages)
            text = (response.choices[0].message.content or "").strip()
            if found := re.fullmatch(r"answer: (-?\d{1,9})", text):
                return float(int(found[1]) == answer)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": calculated(text)})
    return 0.0


def calculated(text: str) -> str:
    """Work out ``calc: 20 + 31 * 7``; anything else is an error."""
    terms = r"\d{1,6}( [-+*] \d{1,6}){0,3}"
    if not (found := re.fullmatch(f"calc: ({terms})", text)):
        return "error"
    try:
        return f"= {eval(found[1])}"
    except SyntaxError:  # of a zero before a number
        return "error"

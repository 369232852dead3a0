"""The second try of examples/second_try.py."""

import asyncio

import second_try

from lrlhf.environments import Episodes
from lrlhf.environments.session import Session
from lrlhf.environments.settings import resolve

ROW = {
    "prompt": "57 + 87 =",
    "question": "57 + 87 =",
    "answer": "144",
    "metadata": {"source_dataset": "chain_sum"},
    "seed": 0,
}


def played(*turns: str, **options: object) -> list[tuple[float, str | None, str]]:
    """The reward of each turn, how the episode ended with it, and what is said then."""
    cast = resolve(Episodes(environment=second_try.SecondTry, options=dict(options)))

    async def say() -> list[tuple[float, str | None, str]]:
        session = Session(cast.make, [], lambda _: [], timeout=60, reset_timeout=60)
        assert await session.open(ROW) is None
        heard = [await session.react(text, text) for text in turns]
        return [
            (one.reward, one.finish_reason, "".join(str(said["content"]) for said in one.messages))
            for one in heard
        ]

    return asyncio.run(say())


def test_a_wrong_answer_may_be_corrected() -> None:
    again = "That is not right. Try again.\n"
    assert played("143", "144") == [(0.0, None, again), (1.0, "done", "")]
    assert played("144") == [(1.0, "done", "")]
    assert played("1", "2", "3", tries=3)[-1] == (0.0, "done", "")


def test_the_answer_is_found_in_the_turn() -> None:
    options = {"extract": r"answer: (\d+)", "feedback": "no "}
    first, second = played("144?", "So, answer: 144", **options)
    assert first == (0.0, None, "no ")
    assert second == (1.0, "done", "")

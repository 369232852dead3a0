"""Games of TextArena."""

import asyncio
import contextlib
import random

import pytest

from lrlhf.environments.session import EnvironmentFailure
from tests.environments.adapters.sessions import opened, told

textarena = pytest.importorskip("textarena")

GAME = "textarena_environment.TextArenaEnvironment"


def guesses(seed: int) -> list[str]:
    """What the game says to 5, to no number, and to each number until it is found."""

    async def played() -> list[str]:
        async with opened(GAME, {"seed": seed}, id="GuessTheNumber-v0-raw") as (
            game,
            shown,
            say,
        ):
            assert "guess the number between 1 and 20" in shown
            heard = [await say("[5]"), await say("five")]
            while heard[-1].finish_reason is None:
                heard.append(await say(f"[{len(heard) * 2}]"))
            assert [one.reward for one in heard] == [0.0] * len(heard)
            return [*map(told, heard[:-1]), str(await game.outcome())]

    return asyncio.run(played())


def test_a_game_tells_what_is_new() -> None:
    random.seed(0)
    expected = random.Random(3).randint(1, 20)  # as the game draws it
    said = guesses(3)
    assert said[0] == f"The target number is {'lower' if expected < 5 else 'higher'}."
    assert said[1].startswith("You attempted an invalid move.")
    assert said[-1] == "1.0"  # the even numbers are tried, and it is one
    assert expected % 2 == 0
    assert guesses(3) == said
    assert random.random() == random.Random(0).random()  # the run's own state is as it was


def test_games_draw_apart() -> None:
    async def boards(*seeds: int) -> list[str]:
        async with contextlib.AsyncExitStack() as stack:
            games = [
                await stack.enter_async_context(opened(GAME, {"seed": seed}, id="2048-v0-raw"))
                for seed in seeds
            ]
            for _, _, say in games:
                await say("[left]")
            return [told(await say("[down]")) for _, _, say in games]

    def alone(seed: int) -> str:
        game = textarena.make("2048-v0-raw")
        game.reset(num_players=1, seed=seed)
        for move in ("[left]", "[down]"):
            game.get_observation()
            game.step(move)
        return str(game.get_observation()[1][-1][1])

    expected = [alone(1), alone(2)]
    assert expected[0] != expected[1]
    random.seed(5)
    found = asyncio.run(boards(1, 2))
    assert [board in said for board, said in zip(expected, found, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("game", "problem"),
    [
        ("GuessTheNumber-v0", "take GuessTheNumber-v0-raw"),
        ("TicTacToe-v0-raw", "number of players has to be 2"),
        ("Tennis-v0-raw", "Tennis-v0-raw not found"),
    ],
)
def test_games_that_cannot_be_played(game: str, problem: str) -> None:
    async def played() -> None:
        async with opened(GAME, id=game):
            pass

    with pytest.raises(EnvironmentFailure, match=problem):
        asyncio.run(played())

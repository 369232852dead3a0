"""A server of OpenEnv, at a port that it is given: a word is to be guessed."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
"""A red pixel, as PNG in base64."""


class Guess(Action):
    guess: str


class Told(Observation):
    text: str
    letters: int = 0
    drawn: str = PIXEL


class Word(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: Any = None, episode_id: Any = None, word: str = "", **_: Any) -> Told:
        self.word = word
        return Told(text=f"{len(word)} letters, seed {seed}")

    def step(self, action: Guess, timeout_s: Any = None, **_: Any) -> Told:
        letters = sum(one == other for one, other in zip(action.guess, self.word, strict=False))
        right = action.guess == self.word
        text = f"{letters} letters are right"
        return Told(text=text, letters=letters, reward=1.0 if right else 0.5, done=right)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Word, Guess, Told, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))

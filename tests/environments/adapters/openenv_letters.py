"""A server of OpenEnv with a tool, at a port that it is given."""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)


class Letters(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("letters")

        @tools.tool
        def letters(word: str) -> int:
            """Count the letters of a word."""
            if not word:
                raise ValueError("no word")
            return len(word)

        super().__init__(tools)

    def reset(self, seed: Any = None, episode_id: Any = None, **_: Any) -> Observation:
        return Observation(metadata={"seed": seed})

    def step(self, action: Action, timeout_s: Any = None, **options: Any) -> Observation:
        told = super().step(action, timeout_s=timeout_s, **options)
        return self._judged(told)

    async def step_async(self, action: Action, timeout_s: Any = None, **options: Any) -> Any:
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **options))

    def _judged(self, told: Observation) -> Observation:
        if isinstance(told, CallToolObservation):
            told.reward = 0.25
        return told

    def _step_impl(self, action: Action, timeout_s: Any = None, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Letters, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))

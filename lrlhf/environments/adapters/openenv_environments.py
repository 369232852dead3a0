"""Environments of OpenEnv, behind a server."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from lrlhf.environments.session import TextEnvironment
from lrlhf.environments.tools import Tool, mcp_content, mcp_text, result_text

_DAY = 86_400.0


class _Client:
    """A session on a server.

    Args:
        url: Of the server.
        headers: Of HTTP, such as ``Authorization``.
        observation: The field of observations that the policy reads, a text; None: it reads their
            JSON, without ``metadata``.
        image: The field with an image, as a ``data:`` URI or base64, that it sees behind it.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        observation: str | None = None,
        image: str | None = None,
    ) -> None:
        core = importlib.import_module("openenv.core")
        # episodes have limits of time of their own
        self._client = core.GenericEnvClient(
            base_url=url, headers=dict(headers or {}), message_timeout_s=_DAY
        )
        self._observation = observation
        self._image = image
        self._reward = 0.0
        self._done = False
        self._failure: Exception | None = None

    async def reset(self, seed: int, options: dict[str, Any] | None = None) -> Any:
        """Connect, and begin an episode.

        Args:
            seed: The same for all episodes of one prompt.
            options: Column of the row, further arguments of the environment's ``reset``.
        """
        await self._client.connect()
        return self._read(self._noted(await self._client.reset(seed=seed, **(options or {}))))

    @property
    def done(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._done

    def reward(self) -> float:
        reward, self._reward = self._reward, 0.0
        return reward

    async def close(self) -> None:
        await self._client.close()

    async def _step(self, action: Any) -> Any:
        return self._noted(await self._client.step(action))

    def _noted(self, result: Any) -> Any:
        """Note reward and end of a step."""
        self._reward += float(result.reward or 0.0)
        self._done = bool(result.done)
        return result

    def _read(self, result: Any) -> Any:
        if self._image is None:
            return self._read_text(result)
        image = result.observation.get(self._image)
        if not isinstance(image, str):
            raise ValueError(f"the observation's {self._image!r} is no image")
        image = image if image.startswith("data:") else base64.b64decode(image)
        return [self._read_text(result), {"type": "image", "image": image}]

    def _read_text(self, result: Any) -> str:
        if self._observation is None:
            left_out = ("metadata", self._image)
            fields = {k: value for k, value in result.observation.items() if k not in left_out}
            return result_text(fields) if fields else ""
        text = result.observation.get(self._observation)
        if not isinstance(text, str):
            raise ValueError(
                f"the observation's {self._observation!r} is {text!r:.80}, no text; it has "
                f"{', '.join(result.observation) or 'nothing'}"
            )
        return text


class OpenEnvEnvironment(_Client, TextEnvironment):
    """An environment of OpenEnv whose action has one field of text: the turn of the policy.

    Args:
        url: Of the server, such as ``http://localhost:8000``.
        action: The field of the action that gets the turn, such as ``code`` or ``message``.
        observation: The field of observations that the policy reads, which must be text; None: it
            reads the complete observation as JSON.
        headers: Of HTTP, such as ``Authorization``.
        image: The field of observations with an image, as a ``data:`` URI or base64, which the
            policy sees behind the text.
    """

    def __init__(
        self,
        url: str,
        action: str,
        observation: str | None = None,
        headers: Mapping[str, str] | None = None,
        image: str | None = None,
    ) -> None:
        super().__init__(url, headers, observation, image)
        self._action = action

    async def step(self, action: str) -> Any:
        return self._read(await self._step({self._action: action}))


class OpenEnvTools(_Client):
    """An environment of OpenEnv that offers tools, one made with its ``MCPEnvironment``.

    Args:
        url: Of the server, such as ``http://localhost:8000``.
        observation: The field of the first observation that the policy reads, which must be text;
            None: it reads the complete observation as JSON.
        headers: Of HTTP, such as ``Authorization``.
    """

    def __init__(
        self, url: str, observation: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(url, headers, observation)
        self._types = importlib.import_module("openenv.core.env_server.mcp_types")
        self._tools: list[Tool] = []

    async def reset(self, seed: int, options: dict[str, Any] | None = None) -> Any:
        """Connect, begin an episode, and list the tools; see `OpenEnvEnvironment`."""
        observation = await super().reset(seed, options)
        listed = await self._client.step(self._types.ListToolsAction())
        for tool in listed.observation["tools"]:
            name = tool["name"]
            call = partial(self._call, name)
            self._tools.append(
                Tool.described(name, call, tool["description"], tool["input_schema"])
            )
        return observation

    def offered_tools(self) -> list[Tool]:
        return self._tools

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        action = self._types.CallToolAction(tool_name=name, arguments=arguments)
        try:
            observation = (await self._step(action)).observation
        except Exception as error:
            self._failure = error  # of the server, and not of the tool
            raise
        if observation.get("error"):
            raise RuntimeError(observation["error"]["message"])
        result = observation["result"]
        if not isinstance(result, Mapping) or "content" not in result:
            return result
        try:
            content = mcp_content(result["content"])
        except ValueError as error:
            self._failure = ValueError(f"{name} gave {error}")
            raise self._failure from error
        if result.get("is_error"):
            raise RuntimeError(mcp_text(content))
        return content

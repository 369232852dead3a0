"""Servers of the Model Context Protocol, whose tools the policy calls."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from lrlhf.environments.tools import Tool, mcp_content, mcp_text


class McpTools:
    """The tools of MCP servers.

    Each episode has connections of its own, so the state of a session stays with the episode. A
    ``command`` is a process for each episode: start servers that take long to start, or need no
    state, once by themselves, and give their ``url``. Errors of a tool are for the policy to read;
    a lost server, and content that is neither text nor an image, leave the episode without a
    score.

    Args:
        servers: Of each either ``command``, the program and its arguments, which is connected over
            its standard input and output, with ``env``, its environment variables besides ``PATH``
            and the like; or ``url``, of streamable HTTP, with ``headers``.

    Raises:
        ValueError: A server has other keys.
    """

    def __init__(self, servers: Sequence[Mapping[str, Any]]) -> None:
        for server in servers:
            keys = {"command", "env"} if "command" in server else {"url", "headers"}
            if not {"command", "url"} & set(server) or set(server) - keys:
                raise ValueError(
                    f"McpTools: a server has {', '.join(server) or 'nothing'}: give `command` (and "
                    "`env`), or `url` (and `headers`)"
                )
            if isinstance(server.get("command"), str):
                raise ValueError("McpTools: write a server's command as a list of its words")
        self._servers = servers
        self._tools: list[Tool] = []
        self._closing = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    async def reset(self) -> None:
        """Connect, and list the tools."""
        connected = asyncio.get_running_loop().create_future()
        # the SDK requires that the task that opened connections closes them
        self._connection = asyncio.create_task(self._connect(connected))
        try:
            await connected
        except asyncio.CancelledError:
            self._connection.cancel()
            raise
        if self._failure is not None:
            raise self._failure

    def offered_tools(self) -> list[Tool]:
        return self._tools

    @property
    def done(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return False

    async def close(self) -> None:
        self._closing.set()
        if self._connection is not None:
            await asyncio.wait({self._connection})

    async def _connect(self, connected: asyncio.Future[None]) -> None:
        """Hold the connections until `close`, or until one is lost."""
        server: Mapping[str, Any] = {}
        try:
            async with AsyncExitStack() as stack:
                for server in self._servers:
                    self._tools += await self._opened(server, stack)
                connected.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001  it fails the episode
            name = server.get("url") or " ".join(server["command"])
            problem = "lost" if connected.done() else f"{name} cannot be reached"
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            self._failure = ConnectionError(
                f"MCP server {problem}: {type(cause).__name__}: {cause}"
            )
        finally:
            if not connected.done():
                connected.set_result(None)

    async def _opened(self, server: Mapping[str, Any], stack: AsyncExitStack) -> list[Tool]:
        mcp = importlib.import_module("mcp")
        client = mcp.Client(await _transport(server, stack))
        await stack.enter_async_context(client)
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [
                Tool.described(
                    each.name,
                    partial(self._call, client, each.name),
                    each.description or "",
                    each.input_schema,
                )
                for each in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def _call(self, client: Any, name: str, /, **arguments: Any) -> Any:
        mcp = importlib.import_module("mcp")
        try:
            result = await client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if error.code == mcp.types.CONNECTION_CLOSED:
                self._failure = ConnectionError(f"the MCP server of {name} is gone: {error}")
            raise
        try:
            content = mcp_content([block.model_dump(by_alias=True) for block in result.content])
        except ValueError as error:
            self._failure = ValueError(f"the tool {name} gave {error}: leave its server out")
            raise self._failure from error
        if result.is_error:
            raise RuntimeError(mcp_text(content))
        return content if result.content else result.structured_content


async def _transport(server: Mapping[str, Any], stack: AsyncExitStack) -> Any:
    if "command" in server:
        stdio = importlib.import_module("mcp.client.stdio")
        program, *arguments = server["command"]
        parameters = stdio.StdioServerParameters(
            command=program, args=arguments, env=server.get("env")
        )
        # the default is the stream of when the SDK was imported, which may be closed
        return stdio.stdio_client(parameters, errlog=sys.stderr)
    http = importlib.import_module("mcp.client.streamable_http")
    httpx = importlib.import_module("httpx2")
    # without limits of its own: episodes have theirs
    client = httpx.AsyncClient(headers=server.get("headers"), timeout=None)
    return http.streamable_http_client(
        server["url"], http_client=await stack.enter_async_context(client)
    )

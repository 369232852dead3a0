"""An MCP server that lists its tools on two pages, one tool on each."""

import asyncio
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

NOTHING = {"type": "object", "properties": {}}


async def listed(_: Any, params: Any) -> ListToolsResult:
    first = params is None or params.cursor is None
    tool = Tool(name="one" if first else "two", input_schema=NOTHING)
    return ListToolsResult(tools=[tool], next_cursor="more" if first else None)


async def called(_: Any, params: Any) -> CallToolResult:
    if params.name == "one":
        return CallToolResult(content=[], structured_content={"n": 1})
    return CallToolResult(content=[TextContent(text="2")])


async def main() -> None:
    server = Server("pages", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())

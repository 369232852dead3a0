"""An MCP server: over its standard streams, or over HTTP at a port that it is given."""

import asyncio
import io
import os
import sys

import PIL.Image
from mcp.server.mcpserver import Audio, Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import EmbeddedResource, TextResourceContents

server = MCPServer("shop", log_level="CRITICAL")
BOUGHT: list[str] = []


@server.tool()
def buy(item: str, number: int = 1) -> str:
    """Buy something."""
    if item == "unicorn":
        raise ToolError("there are none")
    BOUGHT.extend([item] * number)
    return " ".join(BOUGHT)


@server.tool()
def read(name: str) -> list[str | EmbeddedResource]:
    """Read a page of the catalogue."""
    page = TextResourceContents(uri="shop://page", text=f"{name} is out of stock")
    return ["Page:", EmbeddedResource(resource=page)]


@server.tool()
def key() -> str:
    """Tell what the environment variable is."""
    return os.environ.get("SHOP_KEY", "none")


@server.tool()
def customer(context: Context) -> str:
    """Tell what the HTTP header is."""
    return str(context.request_context.request.headers["X-Customer"])


@server.tool()
def look() -> Image:
    """Look at the shop."""
    return Image(data=b"pixels", format="png")


@server.tool()
def watch() -> list[str | Image]:
    """Watch the square."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (3, 2), "red").save(file, "PNG")
    return ["a square:", Image(data=file.getvalue(), format="png")]


@server.tool()
def listen() -> Audio:
    """Listen to the street."""
    return Audio(data=b"samples", format="wav")


@server.tool()
def crash() -> None:
    """End the server."""
    os._exit(3)


@server.tool()
async def sleep() -> None:
    """Take long."""
    await asyncio.sleep(30)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

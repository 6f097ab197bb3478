"""A small MCP server over stdio, or over HTTP on a port of loopback, for tests that have the `mcp` package."""

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("arith")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fails(why: str) -> str:
    """Raises."""
    raise ValueError(why)


@server.tool()
async def sleeps(seconds: float) -> str:
    """Answers late."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()

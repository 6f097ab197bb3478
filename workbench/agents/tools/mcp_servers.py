"""Tools of MCP servers, by the `mcp` package (2.x; optional: `pip install "mcp>=2"`)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, TextIO, cast

from workbench import background
from workbench.agents.protocol import ToolResponse
from workbench.agents.tools.base import BaseTool, Executed, answered, broken, refused
from workbench.config import require
from workbench.errors import SettingError, describe, first_line, message, unknown

START_SECONDS = 30.0
"""What a server may take to start, or to be reached, and to tell its tools."""
MAX_PAGES = 100
_OURS = ("command", "args", "env", "cwd", "url", "headers", "auth_token", "timeout")


class MCPServer:
    """One server: a command that speaks over stdin and stdout, or a URL (streamable HTTP).

    `config` is an entry of an `mcpServers` file: `command`, `args`, `env`, `cwd`; or `url`, `headers`, `auth_token` (sent
    as a bearer). A command is run as it stands: it is as trusted as the file that names it.
    It is reached at the first call and held open for the next, on the background loop, whichever loop asks; one that was
    lost is reached anew. `timeout` is seconds a call, and is told the server's client, too.
    """

    def __init__(self, name: str, config: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        for key in config:
            if key not in (*_OURS, "transport", "type"):
                raise SettingError(f"MCP server {name!r}: " + unknown("setting of a server", key, _OURS))
        if ("command" in config) == ("url" in config):
            raise SettingError(message(f"MCP server {name!r}", expected="a command or a url", found=sorted(config)))
        self.name = name
        self.config = dict(config)
        self.timeout = float(config.get("timeout", timeout))
        require(self.timeout > 0, f"timeout of MCP server {name!r}", expected="seconds > 0", found=self.timeout)
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._leave = asyncio.Event()
        self.starts = 0
        """How often it was reached anew."""

    async def tools(self) -> list[dict[str, Any]]:
        """What it offers: name, description and schema of each. Raises what went wrong."""

        async def ask(client: Any) -> list[dict[str, Any]]:
            found, cursor = [], None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
            return [
                {"name": one.name, "description": one.description or "", "parameters": _schema(one.input_schema)}
                for one in found
            ]

        return await self._asked(ask, START_SECONDS)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Its answer to one call. Raises `TimeoutError`, and whatever the client raises."""

        async def ask(client: Any) -> Any:
            return await client.call_tool(name, dict(arguments), read_timeout_seconds=self.timeout)

        return await self._asked(ask, self.timeout)

    async def aclose(self) -> None:
        """Leave it; a command's process ends. Twice is fine."""
        await _there(self._left())

    def close(self) -> None:
        """The same, waiting here."""
        background.run(self._left())

    async def _asked(self, ask: Callable[[Any], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        async def work() -> Any:
            try:
                async with asyncio.timeout(START_SECONDS):
                    client = await self._reached()
            except TimeoutError:
                if self._owner is not None:
                    self._owner.cancel()
                self._client = None
                raise
            try:
                async with asyncio.timeout(seconds):
                    return await ask(client)
            except TimeoutError:
                raise
            except Exception as cause:
                # not the server's own refusal: the line is broken, unless somebody has reached it anew already
                if getattr(cause, "code", None) in (None, -32000) and self._holds(client):
                    self._drop()
                raise

        return await _there(work())

    async def _reached(self) -> Any:
        if self._client is None or self._owner is None or self._owner.done():
            loop = asyncio.get_running_loop()
            self._client, self._leave = loop.create_future(), asyncio.Event()
            self._owner = loop.create_task(self._hold(self._client, self._leave))
            self.starts += 1
        return await asyncio.shield(self._client)

    async def _hold(self, reached: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """The one task that enters and leaves the connection: its scopes must not change hands."""
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with _opened(self.config, self.timeout, log) as client:
                    reached.set_result(client)
                    await leave.wait()
            except Exception as cause:  # noqa: BLE001 - raised where it is awaited, with the server's last words
                if reached.done():  # it was being left, or its callers have heard already
                    return
                if isinstance(cause, ImportError):
                    reached.set_exception(cause)
                    return
                log.seek(0)
                said = log.read()[-2000:].strip().splitlines()
                why = f"{first_line(_first(cause))}{f'; it said: {said[-1][:200]}' if said else ''}"
                reached.set_exception(ConnectionError(f"MCP server {self.name!r} cannot be reached: {why}"))

    def _holds(self, client: Any) -> bool:
        there = self._client
        return there is not None and there.done() and there.exception() is None and there.result() is client

    def _drop(self) -> None:
        self._leave.set()
        self._client = None

    async def _left(self) -> None:
        owner = self._owner
        self._drop()
        if owner is not None:
            await asyncio.wait([owner], timeout=START_SECONDS)


class MCPTool(BaseTool):
    """One tool of a server. Its errors, and ours in reaching it, are texts for the model and records."""

    def __init__(self, server: MCPServer, tool_schema: Any, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self.server = server

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Ask the server, once the arguments fit what it said that it takes."""
        if wrong := self.refusal(parameters):
            return wrong
        try:
            result = await self.server.call(self.name, parameters)
        except TimeoutError:
            why = f"no answer within {self.server.timeout:g} s"
            return broken(f"Error when executing tool {self.name}: {why}", why)
        except Exception as cause:  # noqa: BLE001 - a foreign client; the record says what it raised
            why = first_line(_first(cause))
            return broken(f"Error when executing tool {self.name}: {why}", why)
        text = "\n".join(one.text for one in result.content if isinstance(getattr(one, "text", None), str))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            return refused(text or f"Error: {self.name} failed.", None)
        images = [{"data": one.data, "mime_type": one.mime_type} for one in result.content if hasattr(one, "data")]
        _, reward, record = answered(text)
        return ToolResponse(text=text, image=images or None), reward, record


def mcp_tools(
    servers: str | Path | Mapping[str, Any], *, selected: Sequence[str] | None = None, timeout: float = 30.0
) -> list[MCPTool]:
    """The tools of the servers of an `mcpServers` file (or its content): all, or the `selected` names in their order.

    Reaches the servers, so it waits: not to be called from the background loop. Raises `SettingError` where the file
    is none, a server cannot be reached, or a selected name is not offered; `MCPServer.close` ends a server.
    """
    if isinstance(servers, str | Path):
        try:
            servers = json.loads(Path(servers).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as cause:
            what = f"MCP servers of {str(servers)!r}"
            raise SettingError(message(what, expected="a JSON file", found=first_line(cause))) from cause
    entries = servers.get("mcpServers", servers) if isinstance(servers, Mapping) else None
    if not isinstance(entries, Mapping) or not all(isinstance(one, Mapping) for one in entries.values()):
        raise SettingError(message("MCP servers", expected="{'mcpServers': {name: {…}}}", found=describe(servers)))
    reached: list[MCPServer] = []
    try:
        for name, config in entries.items():
            reached.append(MCPServer(str(name), config, timeout=timeout))
        made = [MCPTool(server, schema) for server in reached for schema in _offered(server)]
        offered = {tool.name: tool for tool in made}
        for name in selected or ():
            if name not in offered:
                raise SettingError(unknown("tool of these MCP servers", name, offered))
        chosen = made if selected is None else [offered[name] for name in selected]
    except BaseException:
        for server in reached:
            server.close()
        raise
    for server in reached:
        if all(tool.server is not server for tool in chosen):
            server.close()
    return chosen


def _offered(server: MCPServer) -> list[dict[str, Any]]:
    try:
        return background.run(server.tools())
    except (OSError, TimeoutError, ImportError) as cause:
        do = 'pip install "mcp>=2"' if isinstance(cause, ImportError) else None
        raise SettingError(
            message(f"the tools of MCP server {server.name!r}", found=first_line(cause), do=do)
        ) from cause


@asynccontextmanager
async def _opened(config: Mapping[str, Any], timeout: float, log: IO[str]) -> AsyncIterator[Any]:
    from mcp import Client

    if "command" in config:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        told = {key: config[key] for key in ("command", "args", "env", "cwd") if key in config}
        async with Client(
            stdio_client(StdioServerParameters(**told), cast(TextIO, log)), read_timeout_seconds=timeout
        ) as client:
            yield client
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = dict(config.get("headers") or {})
    if config.get("auth_token"):
        headers["Authorization"] = f"Bearer {config['auth_token']}"
    async with httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(timeout)) as http:
        transport = streamable_http_client(config["url"], http_client=http)
        async with Client(transport, read_timeout_seconds=timeout) as client:
            yield client


async def _there(work: Coroutine[Any, Any, Any]) -> Any:
    """Await on the background loop, from whichever loop this is."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background.loop()))


def _first(error: BaseException) -> BaseException:
    """The first error of a task group's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _schema(given: Any) -> dict[str, Any]:
    """Only what `check_arguments` and templates read is asked to be there."""
    schema = dict(given or {})
    properties = {
        key: value if isinstance(value, Mapping) else {} for key, value in (schema.get("properties") or {}).items()
    }
    return {**schema, "type": "object", "properties": properties, "required": list(schema.get("required") or ())}

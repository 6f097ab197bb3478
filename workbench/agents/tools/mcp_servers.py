"""Tools of MCP servers, through the `mcp` package (2.x; optional: the extra `mcp`)."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Any, TextIO, cast

from workbench.agents.protocol import ToolResponse
from workbench.agents.tools.base import BaseTool, Executed, answered, refused
from workbench.base import runtime
from workbench.base.config import require
from workbench.base.distribution import install, optional
from workbench.base.errors import SettingError, check_name, describe, first_line, unknown

log = logging.getLogger("workbench")
START_SECONDS = 120.0
"""Default time limit, in seconds, for a server to start or answer and list its tools: a download by `npx` takes long.
"""
MAX_PAGES = 100
_OURS = ("command", "args", "env", "cwd", "url", "headers", "auth_token", "timeout", "start_timeout")


class MCPServer:
    """A connection to one MCP server: a command that speaks over stdin and stdout, or a URL (streamable HTTP).

    It connects at the first call, on the background loop, stays connected for later calls, and connects again when the
    connection was lost. All episodes share it: what one writes there, another reads. A command is run as it is written: trust it as you trust the file that names it.

    Args:
        name: the server's name, for errors.
        config: an entry of an `mcpServers` file: `command`, `args`, `env`, `cwd`; or `url`, `headers`, `auth_token` (sent as
            a bearer token). `start_timeout` limits, in seconds, how long it takes to start or be reached.
        timeout: limit of a call in seconds, where `config` has none.

    Raises `SettingError` for unknown settings, and unless there is exactly one of `command` and `url`.
    """

    def __init__(self, name: str, config: Mapping[str, Any], *, timeout: float = 30.0) -> None:
        for key in config:
            if key not in (*_OURS, "transport", "type"):
                raise SettingError(f"MCP server {name!r}: " + unknown("setting of a server", key, _OURS))
        if ("command" in config) == ("url" in config):
            raise SettingError(f"settings of MCP server {name!r}", expected="a command or a url", found=sorted(config))
        self.name = name
        self.config = dict(config)
        self.timeout = float(config.get("timeout", timeout))
        self.start_timeout = float(config.get("start_timeout", START_SECONDS))
        for setting in ("timeout", "start_timeout"):
            seconds = getattr(self, setting)
            require(seconds > 0, f"{setting} of MCP server {name!r}", expected="seconds > 0", found=seconds)
        self._owner: asyncio.Task[None] | None = None
        self._client: asyncio.Future[Any] | None = None
        self._leave = asyncio.Event()
        self.writing = False
        """Whether the server has a tool that is not marked as read-only."""
        self.starts = 0
        """Number of connections started so far."""

    async def tools(self) -> list[dict[str, Any]]:
        """List the tools: name, description and parameters of each. Raises `ConnectionError`, or what the client raises."""

        async def ask(client: Any) -> list[Any]:
            tools, cursor = [], None
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if not (cursor := page.next_cursor):
                    break
            return tools

        offered = await _in_background(self._request(ask, self.start_timeout))
        self.writing = any(not getattr(getattr(one, "annotations", None), "read_only_hint", False) for one in offered)
        return [
            {"name": one.name, "description": one.description or "", "parameters": _parameters(one.input_schema or {})}
            for one in offered
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call one tool; returns the client's result. Raises `TimeoutError`, and whatever the client raises."""
        request = {"name": name, "arguments": dict(arguments), "read_timeout_seconds": self.timeout}
        return await _in_background(self._request(lambda client: client.call_tool(**request), self.timeout))

    async def aclose(self) -> None:
        """Disconnect from the server; a command's process ends. A second call does nothing."""
        await _in_background(self._disconnected())

    def close(self) -> None:
        """Disconnect from the server, as `aclose` does, from code that is not async."""
        runtime.run(self._disconnected())

    async def _request(self, ask: Callable[[Any], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        try:
            async with asyncio.timeout(self.start_timeout):
                connection = await self._reached()
        except TimeoutError as cause:
            if self._owner is not None:
                self._owner.cancel()
            self._client = None
            late = f"MCP server {self.name!r} has not answered in {self.start_timeout:g} s"
            raise ConnectionError(f'{late}; raise "start_timeout" in its settings') from cause
        try:
            async with asyncio.timeout(seconds):
                return await ask(connection.result())
        except Exception as cause:
            # not slow, and not the server's own refusal: the connection is lost; another call may have a new one already
            lost = not isinstance(cause, TimeoutError) and getattr(cause, "code", None) in (None, -32000)
            if lost and self._client is connection:
                self._drop()
            raise

    async def _reached(self) -> asyncio.Future[Any]:
        if self._client is None or self._owner is None or self._owner.done():
            loop = asyncio.get_running_loop()
            self._client, self._leave = loop.create_future(), asyncio.Event()
            self._owner = loop.create_task(self._hold_connection(self._client, self._leave))
            self.starts += 1
        connection = self._client
        await asyncio.shield(connection)
        return connection

    async def _hold_connection(self, reached: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """Open the connection and keep it until `leave` is set, in one task, as the client must be closed by the task
        that opened it."""
        with tempfile.TemporaryFile("w+") as log:
            try:
                async with _open_client(self.config, self.timeout, self.start_timeout, log) as client:
                    reached.set_result(client)
                    await leave.wait()
            except Exception as cause:  # noqa: BLE001 - raised where it is awaited, with the last line of the server's log
                log.seek(0)
                logged = log.read()[-2000:].strip().splitlines()
                why = f"{first_line(_first_error(cause))}{f'; it said: {logged[-1][:200]}' if logged else ''}"
                error = ConnectionError(f"MCP server {self.name!r} cannot be reached: {why}")
                if not reached.done():  # else it was being closed, or its callers have the error already
                    reached.set_exception(cause if isinstance(cause, ImportError) else error)

    def _drop(self) -> None:
        self._leave.set()
        self._client = None

    async def _disconnected(self) -> None:
        owner = self._owner
        self._drop()
        if owner is not None:
            await asyncio.wait([owner], timeout=START_SECONDS)


class MCPTool(BaseTool):
    """One tool of an MCP server, as a tool of an agent. A failed call becomes an error text for the model and a record."""

    def __init__(self, server: MCPServer, tool_schema: Any, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self.server = server

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Call the server's tool with the model's arguments; arguments that do not fit its schema get an error text."""
        if wrong := self.refusal(parameters):
            return wrong
        try:
            result = await self.server.call(self.name, parameters)
        except Exception as cause:  # noqa: BLE001 - a foreign client; the record says what it raised
            return self.broken(_first_error(cause), self.server.timeout)
        parts = [_read(part) for part in result.content]
        text = "\n".join(one for one in parts if isinstance(one, str))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            return refused(text or f"Error: {self.name} failed.", None)
        images = [one for one in parts if not isinstance(one, str)]
        _, reward, record = answered(text)
        return ToolResponse(text=text, image=images or None), reward, record


def _read(part: Any) -> str | dict[str, Any]:
    """Read a part of a server's answer as the model gets it: text, or an image. What it cannot be given is named."""
    if part.type == "text":
        return str(part.text)
    if part.type == "image":
        return {"data": part.data, "mime_type": part.mime_type}
    if part.type == "resource_link":
        description = f": {part.description}" if part.description else ""
        return f"[resource {part.name}, {part.uri}, {part.mime_type or 'of unknown type'}{description}]"
    if part.type == "resource":
        held, kind = part.resource, part.resource.mime_type or "of unknown type"
        if isinstance(text := getattr(held, "text", None), str):
            return text
        image = kind.startswith("image/")
        return {"data": held.blob, "mime_type": kind} if image else f"[resource {held.uri}, {kind}, not shown]"
    return f"[{part.type}, {getattr(part, 'mime_type', None) or 'of unknown type'}, not shown]"


def mcp_tools(
    servers: str | Path | Mapping[str, Any], *, selected: Sequence[str] | None = None, timeout: float = 30.0
) -> list[MCPTool]:
    """Connect to the servers of an `mcpServers` file (or its content) and return their tools: all, or the `selected` names.

    `timeout` limits a call, in seconds; `tool.server.close()` disconnects. A server is shared by all episodes, which is logged
    where a tool is not marked as one that only reads. Raises `SettingError` for a bad file, a
    server that cannot be reached, and a selected name that no server has.
    """
    reached = [MCPServer(str(name), config, timeout=timeout) for name, config in _server_entries(servers).items()]
    chosen: list[MCPTool] = []
    try:
        tools = [MCPTool(server, schema) for server in reached for schema in _tool_schemas(server)]
        offered = {tool.name: tool for tool in tools}
        for name in selected or ():
            check_name("tool of these MCP servers", name, offered)
        chosen = tools if selected is None else [offered[name] for name in selected]
    finally:  # disconnect from servers without a chosen tool
        for server in reached:
            if all(tool.server is not server for tool in chosen):
                server.close()
    for name in dict.fromkeys(tool.server.name for tool in chosen if tool.server.writing):
        log.warning("MCP server %r is shared by all episodes: an episode can read what another one writes there", name)
    return chosen


def _server_entries(servers: str | Path | Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Read an `mcpServers` file, or its content: server name → its settings."""
    if isinstance(servers, str | Path):
        try:
            servers = json.loads(Path(servers).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as cause:
            what = f"MCP servers' file {str(servers)!r}"
            raise SettingError(what, expected="a JSON file", found=first_line(cause)) from cause
    entries = servers.get("mcpServers", servers) if isinstance(servers, Mapping) else None
    if not isinstance(entries, Mapping) or not all(isinstance(one, Mapping) for one in entries.values()):
        raise SettingError("the MCP servers", expected="{'mcpServers': {name: {…}}}", found=describe(servers))
    return entries


def _tool_schemas(server: MCPServer) -> list[dict[str, Any]]:
    try:
        return runtime.run(server.tools())
    except (OSError, TimeoutError, ImportError) as cause:
        do = install("mcp") if isinstance(cause, ImportError) else None
        raise SettingError(f"no tools from MCP server {server.name!r}", found=first_line(cause), do=do) from cause


@asynccontextmanager
async def _open_client(config: Mapping[str, Any], timeout: float, start: float, log: IO[str]) -> AsyncIterator[Any]:
    with optional("mcp", "tools of MCP servers"):
        from mcp import Client

    async with AsyncExitStack() as stack:
        if "command" in config:
            from mcp.client.stdio import StdioServerParameters, stdio_client

            process = {key: config[key] for key in ("command", "args", "env", "cwd") if key in config}
            transport: Any = stdio_client(StdioServerParameters(**process), cast(TextIO, log))
        else:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            bearer = {"Authorization": f"Bearer {config['auth_token']}"} if config.get("auth_token") else {}
            headers = {**(config.get("headers") or {}), **bearer}
            client = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(timeout))
            transport = streamable_http_client(config["url"], http_client=await stack.enter_async_context(client))
        yield await stack.enter_async_context(Client(transport, read_timeout_seconds=start))  # a call has its own


async def _in_background(work: Coroutine[Any, Any, Any]) -> Any:
    """Await a coroutine on the background loop, from any event loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, runtime.loop()))


def _first_error(error: Exception) -> Exception:
    """Return the first error inside an exception group (of a task group), or the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a server's schema with the keys that `check_arguments` and chat templates read."""
    listed = schema.get("properties") or {}
    properties = {key: value if isinstance(value, Mapping) else {} for key, value in listed.items()}
    return {**schema, "type": "object", "properties": properties, "required": list(schema.get("required") or ())}

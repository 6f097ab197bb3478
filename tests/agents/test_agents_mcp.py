"""MCP servers' tools: with a stand-in for the `mcp` package that speaks the same calls, and with the package where it is."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.patience import LONG, patience, within

from workbench.agents.tools import MCPServer, load_tools, mcp_tools
from workbench.agents.tools.mcp_servers import _read
from workbench.base.errors import SettingError

SECONDS = patience(0.5)
SERVER = Path(__file__).with_name("mcp_server_for_tests.py")
INTEGERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


class StandInClient:
    """As mcp 2.x's `Client`: entered and left in one task, `list_tools(cursor=)`, `call_tool(name, arguments, …)`."""

    opened: list[StandInClient]
    sleeping = most = 0
    """At once."""

    def __init__(self, transport: Any, *, read_timeout_seconds: float | None = None) -> None:
        self.transport = transport
        self.timeouts = [read_timeout_seconds]
        self.broken = False

    async def __aenter__(self) -> StandInClient:
        if self.transport.command == "missing":
            self.transport.log.write("warming up\nno such program\n")
            self.transport.log.flush()
            raise ExceptionGroup("a task group", [FileNotFoundError("missing")])
        if self.transport.command == "late":
            await asyncio.Event().wait()
        self.task = asyncio.current_task()
        self.opened.append(self)
        return self

    async def __aexit__(self, *error: Any) -> None:
        assert asyncio.current_task() is self.task
        self.opened.remove(self)

    async def list_tools(self, *, cursor: str | None = None) -> Any:
        names = ("add", "asks") if cursor is None else ("sleeps", "dies")
        schema = {"add": INTEGERS, "sleeps": {"type": "object", "properties": {"seconds": {"type": "number"}}}}
        tools = [SimpleNamespace(name=one, description=f"{one}.", input_schema=schema.get(one, {})) for one in names]
        return SimpleNamespace(tools=tools, next_cursor="2" if cursor is None else None)

    async def call_tool(self, name: str, arguments: dict[str, Any], *, read_timeout_seconds: float) -> Any:
        self.timeouts.append(read_timeout_seconds)
        if name == "sleeps":
            StandInClient.most = max(StandInClient.most, StandInClient.sleeping + 1)
            StandInClient.sleeping += 1
            try:
                await asyncio.sleep(arguments["seconds"])
            finally:
                StandInClient.sleeping -= 1
        if name == "dies" or self.broken:
            self.broken = True
            raise ConnectionResetError("connection closed")
        text = str(sum(arguments.values())) if name == "add" else "awake" if name == "sleeps" else "what?"
        content = [
            SimpleNamespace(type="text", text=text),
            SimpleNamespace(type="image", data="aGk=", mime_type="image/png"),
        ]
        return SimpleNamespace(
            content=content[: 2 if name == "add" else 1], structured_content=None, is_error=name == "asks"
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandInClient]]:
    package, client, stdio = ModuleType("mcp"), ModuleType("mcp.client"), ModuleType("mcp.client.stdio")
    package.Client = StandInClient  # type: ignore[attr-defined]
    stdio.StdioServerParameters = lambda **given: SimpleNamespace(args=[], **given)  # type: ignore[attr-defined]
    stdio.stdio_client = lambda given, log: SimpleNamespace(command=given.command, log=log)  # type: ignore[attr-defined]
    StandInClient.opened = []
    for module in (package, client, stdio):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield StandInClient
    assert StandInClient.opened == []


@pytest.mark.slow
def test_tools_of_a_server_are_listed_called_held_open_and_left(
    stand_in: type[StandInClient], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"arith": {"command": "here"}}}))
    (tmp_path / "tools.yaml").write_text(
        "tools: [{class_name: verl.tools.mcp_base_tool.MCPBaseTool, config: {type: mcp, timeout: SECONDS}, "
        "mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [dies, add, sleeps, asks]}}]".replace(
            "SECONDS", str(SECONDS)
        )
    )
    tools: dict[str, Any] = load_tools(tmp_path / "tools.yaml")
    assert list(tools) == ["dies", "add", "sleeps", "asks"]
    server = tools["add"].server
    assert "MCP server 'arith' is shared by all episodes" in caplog.text  # nothing marks its tools as reading only

    async def ask(name: str, **arguments: Any) -> Any:
        return await tools[name].execute("i", arguments)

    async def play() -> None:
        response, reward, record = await ask("add", a=1, b=2)
        assert (response.text, reward, record["status"]) == ("3", None, "scored")
        assert response.image == [{"data": "aGk=", "mime_type": "image/png"}]
        assert "a must be an integer" in (await ask("add", a="1", b=2))[0].text
        assert len(stand_in.opened) == 1 and stand_in.opened[0].timeouts == [120, SECONDS]  # of the start, of the call
        assert (await ask("asks"))[2]["status"] == "no_answer" and (await ask("asks"))[0].text == "what?"
        many = await asyncio.gather(*(ask("sleeps", seconds=0.1) for _ in range(20)), ask("sleeps", seconds=3600))
        assert stand_in.most >= 10
        assert [one[0].text for one in many[:20]] == ["awake"] * 20
        assert many[20][0].text == f"Error when executing tool sleeps: no answer within {SECONDS:g} s"
        assert many[20][1] is None and many[20][2]["status"] == "infra_error" and server.starts == 1
        assert "ConnectionResetError: connection closed" in (await ask("dies"))[2]["why"]
        assert (await ask("add", a=3, b=4))[0].text == "7" and server.starts == 2  # reached anew
        await server.aclose()
        await server.aclose()
        assert stand_in.opened == []

    asyncio.run(play())


def test_servers_that_cannot_be_used_say_why(stand_in: type[StandInClient], tmp_path: Path) -> None:
    with pytest.raises(
        SettingError, match="MCP server 'x' cannot be reached: FileNotFoundError.*it said: no such program"
    ):
        mcp_tools({"x": {"command": "missing"}})
    with pytest.raises(SettingError, match='has not answered in 0.05 s; raise "start_timeout" in its settings'):
        mcp_tools({"x": {"command": "late", "start_timeout": 0.05}})
    for servers, told in (
        ({"x": {"comand": "y"}}, "did you mean 'command'"),
        ({"x": {"command": "y", "start_timeout": 0}}, "start_timeout of MCP server 'x'; expected seconds > 0"),
        ({"x": {"command": "y", "url": "z"}}, "a command or a url"),
        ({"x": 3}, "mcpServers"),
        (tmp_path / "none.json", "a JSON file"),
    ):
        with pytest.raises(SettingError, match=told):
            mcp_tools(servers)
    with pytest.raises(SettingError, match="did you mean 'add'"):
        mcp_tools({"x": {"command": "here"}}, selected=["ad"])


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(SettingError, match=r"pip install 'rl-workbench\[mcp\]'"):
        mcp_tools({"x": {"command": "here"}})
    with pytest.raises(SettingError, match="timeout"):
        MCPServer("x", {"command": "y"}, timeout=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the mcp package is not installed")
def test_a_real_server_over_stdio() -> None:
    tools = {
        one.name: one for one in mcp_tools({"x": {"command": sys.executable, "args": [str(SERVER)]}}, timeout=LONG)
    }
    server = tools["add"].server

    async def play() -> None:
        assert (await tools["add"].execute("i", {"a": 1, "b": 2}))[0].text == "3"
        assert (await tools["fails"].execute("i", {"why": "x"}))[2]["status"] == "no_answer"
        assert (await tools["dies"].execute("i", {}))[2]["status"] == "infra_error"
        assert (await tools["add"].execute("i", {"a": 3, "b": 4}))[0].text == "7" and server.starts == 2
        await server.aclose()

    asyncio.run(play())


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="the mcp package is not installed")
def test_a_real_server_over_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL)
    try:
        assert within(lambda: process.poll() is not None or listens(port)) and process.poll() is None
        at = {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "told to nobody"}
        tools = {
            one.name: one for one in mcp_tools({"x": at}, selected=["add", "fails", "sleeps"], timeout=patience(4.0))
        }
        server = tools["add"].server

        async def play() -> None:
            many = await asyncio.gather(*(tools["add"].execute("i", {"a": n, "b": 1}) for n in range(32)))
            assert [one[0].text for one in many] == [str(n + 1) for n in range(32)] and server.starts == 1
            assert (await tools["fails"].execute("i", {"why": "x"}))[2]["status"] == "no_answer"
            slow, quick = await asyncio.gather(
                tools["sleeps"].execute("i", {"seconds": 3600.0}), tools["add"].execute("i", {"a": 1, "b": 1})
            )
            assert quick[0].text == "2"
            assert slow[2]["status"] == "infra_error" and slow[1] is None
            process.kill()
            process.wait()
            gone = await tools["add"].execute("i", {"a": 1, "b": 1})
            assert gone[2]["status"] == "infra_error" and gone[0].text.startswith("Error when executing tool add")
            await server.aclose()

        asyncio.run(play())
    finally:
        process.kill()
        process.wait()


def test_every_part_of_an_answer_is_read_or_named() -> None:
    """All members of the protocol's union; the package's own types where it is installed."""
    types = pytest.importorskip("mcp_types")
    link = types.ResourceLink(name="notes", uri="file:///notes.txt", mime_type="text/plain", description="of Monday")
    text = types.TextResourceContents(uri="file:///a.txt", mime_type="text/plain", text="inside")
    blob = types.BlobResourceContents(uri="file:///a.gz", mime_type="application/gzip", blob="aGk=")
    picture = types.BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob="aGk=")
    image = {"data": "aGk=", "mime_type": "image/png"}
    for part, expected in (
        (types.TextContent(text="5"), "5"),
        (types.ImageContent(**image), image),
        (types.AudioContent(data="aGk=", mime_type="audio/wav"), "[audio, audio/wav, not shown]"),
        (link, "[resource notes, file:///notes.txt, text/plain: of Monday]"),
        (types.EmbeddedResource(resource=text), "inside"),
        (types.EmbeddedResource(resource=blob), "[resource file:///a.gz, application/gzip, not shown]"),
        (types.EmbeddedResource(resource=picture), image),
    ):
        assert _read(part) == expected

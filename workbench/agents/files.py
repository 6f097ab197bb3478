"""Tools and interactions from yaml files: shipped classes by short names, your own from below an allowed folder."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.agents.interactions import Gsm8kInteraction, default_name
from workbench.agents.tools.base import BaseTool, same_arguments, tool_schema
from workbench.agents.tools.mcp_servers import MCPTool, mcp_tools
from workbench.agents.tools.shipped import Calculator, Gsm8kAnswer, PythonTool, Search
from workbench.agents.tools.terminal import Terminal
from workbench.base.config import read_yaml, require
from workbench.base.errors import SettingError, WorkbenchError, boundary, check_name, describe, unknown
from workbench.rewards.runner import MAX_BYTES, ROOTS, allowed_roots, check_roots

TOOLS: Mapping[str, type] = {
    "calculator": Calculator,
    "python": PythonTool,
    "gsm8k_answer": Gsm8kAnswer,
    "search": Search,
    "terminal": Terminal,
    "verl.tools.gsm8k_tool.Gsm8kTool": Gsm8kAnswer,
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": PythonTool,
    "verl.tools.search_tool.SearchTool": Search,
    "verl.tools.mcp_base_tool.MCPBaseTool": MCPTool,
    "verl.tools.mcp_search_tool.MCPSearchTool": MCPTool,
}
"""Names that need no import: names of the shipped tools, and class names in verl's examples."""
INTERACTIONS: Mapping[str, type] = {
    "gsm8k": Gsm8kInteraction,
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": Gsm8kInteraction,
}

_OF_A_TOOL = ("class_name", "name", "description", "parameters", "config", "tool_schema", "mcp")


def _make_entries(
    path: str | Path, key: str, kind: str, make: Callable[[Mapping[str, Any]], Iterable[Any]], *, alone: bool = False
) -> dict[str, Any]:
    """Make objects of the entries of the list under `key` in a yaml file: name → object; `make(entry)` returns those of
    one entry.

    With `alone` a single mapping may stand in place of the list. Raises `SettingError` that names the entry, also for
    two objects of one name.
    """
    entries = read_yaml(path, most=MAX_BYTES).get(key)
    entries = [entries] if alone and isinstance(entries, Mapping) else entries
    if not isinstance(entries, list) or not entries:
        expected = f"{'a mapping or ' if alone else ''}a list under {key!r}"
        raise SettingError(f"content of yaml file {str(path)!r}", expected=expected, found=describe(entries))
    objects: list[Any] = []
    for number, entry in enumerate(entries):
        try:
            require(isinstance(entry, Mapping), f"entry in the list {key!r}", expected="a mapping", found=entry)
            with boundary(f"making this {kind}", SettingError):
                objects += make(entry)
        except WorkbenchError as error:
            raise SettingError(f"{kind} {number} of {str(path)!r}: {error}") from error
    return by_name(objects, kind)


def by_name(objects: Iterable[Any], kind: str = "tool") -> dict[str, Any]:
    """Return tools (or interactions) as a dict by name. Raises `SettingError`, which calls them `kind`, if two have the
    same name."""
    named: dict[str, Any] = {}
    for item in objects:
        if item.name in named:
            raise SettingError(f"two {kind}s are named {item.name!r}", do="give one of them another name")
        named[item.name] = item
    return named


def load_interactions(path: str | Path, *, roots: Sequence[str | Path] = ()) -> dict[str, Any]:
    """Load simulated users from the yaml file `path`: name → interaction.

    The file's key `interaction` is a mapping `{class_name, config, name}` or a list of them. The default `name` is that
    of the class without `Interaction`, in lower case. Your own classes must lie below an allowed root (see
    `find_class`). Raises `SettingError`, naming the entry, for one that cannot be made and for two with the same name.
    """

    def made(entry: Mapping[str, Any]) -> Iterator[Any]:
        cls = find_class(entry.get("class_name"), "interaction", INTERACTIONS, roots)
        config = dict(entry.get("config") or {})
        name = str(entry.get("name") or config.get("name") or default_name(cls))
        one = cls({**config, "name": name})
        one.name = name
        yield one

    return _make_entries(path, "interaction", "interaction", made, alone=True)


def load_tools(path: str | Path, *, sandbox: Any = None, roots: Sequence[str | Path] = ()) -> dict[str, BaseTool]:
    """Load tools from a yaml file: name → tool.

    Each entry of `tools` has verl's form (`class_name`, `config: {type: native | mcp, …}`, `tool_schema`; for MCP `mcp:
    {mcp_servers_config_path, tool_selected_list}`), or the short form of a shipped tool (`name`, `description`,
    `parameters`, `config`). Raises `SettingError`, naming the entry, for one that cannot be made.

    Args:
        path: the yaml file.
        sandbox: where a `python` or `terminal` tool runs.
        roots: further folders from which your own classes may be imported (see `find_class`).
    """
    return _make_entries(path, "tools", "tool", lambda entry: _tools(entry, sandbox, roots, Path(path).parent))


def _tools(entry: Mapping[str, Any], sandbox: Any, roots: Sequence[str | Path], folder: Path) -> list[BaseTool]:
    for name in entry:
        check_name("key of a tool in a yaml file", name, _OF_A_TOOL)
    config = dict(entry.get("config") or {})
    schema = entry.get("tool_schema")
    cls = find_class(entry.get("class_name", entry.get("name")), "tool", TOOLS, roots)
    if "class_name" not in entry:
        short = {key: entry[key] for key in ("name", "description", "parameters") if entry.get(key) is not None}
        schema = {**getattr(cls, "SCHEMA", {}), **short}
    kind = config.pop("type", "mcp" if cls is MCPTool else "native")
    require(kind in ("native", "mcp"), "config.type of a tool in a yaml file", expected="native or mcp", found=kind)
    if kind == "mcp":
        return list(_from_servers(entry, config, folder))
    tool: BaseTool
    if issubclass(cls, PythonTool | Terminal):
        if sandbox is None:
            raise SettingError("a tool that runs code needs a sandbox", do="pass sandbox=sandbox.local() to load_tools")
        tool = cls(sandbox, config, schema)
    else:  # a tool's own arguments come first (Search's corpus); the two that every tool has are given by name
        tool = cls(config=config, tool_schema=schema if schema is not None else getattr(cls, "SCHEMA", None))
    if cls in TOOLS.values() and cls.SCHEMA is not None:
        same_arguments(tool_schema(cls.SCHEMA), tool.tool_schema)
    return [tool]


def _from_servers(entry: Mapping[str, Any], config: Mapping[str, Any], folder: Path) -> list[MCPTool]:
    settings = {**(entry.get("mcp") or {}), **(config.get("mcp") or {})}
    servers = settings.get("mcp_servers_config_path") or settings.get("mcpServers") or config.get("mcpServers")
    if servers is None:
        raise SettingError("mcp settings of a tool", expected="mcp_servers_config_path", found=sorted(settings))
    if isinstance(servers, str):
        servers = folder / servers if (folder / servers).is_file() else Path(servers)
    timeout = float(config.get("timeout", 30.0))
    return mcp_tools(servers, selected=settings.get("tool_selected_list"), timeout=timeout)


def find_class(name: Any, kind: str, aliases: Mapping[str, type], roots: Sequence[str | Path] = ()) -> type[Any]:
    """Find the class called `name`: a key of `aliases`, a class of `__main__` or `workbench.agents`, or
    `package.module.Class`.

    A module is imported, and so run in this process, only from below an allowed root: the working directory, the
    folders in `WORKBENCH_CODE_ROOTS`, and `roots`. Raises `SettingError`, naming module and folders, if the module is
    not found, lies elsewhere, does not import, or has no such class; `kind` (`tool`) is the word for the class in these
    errors.
    """
    if not isinstance(name, str) or not name:
        raise SettingError(f"class_name of a {kind}", expected="package.module.Class", found=repr(name))
    if name in aliases:
        return aliases[name]
    dotted, _, last = name.rpartition(".")
    if not dotted:
        raise SettingError(unknown(kind, name, [known for known in aliases if "." not in known]))
    if dotted == "__main__":
        module = sys.modules["__main__"]
    elif dotted.startswith("workbench.agents."):
        with boundary(f"importing {dotted}", SettingError):
            module = importlib.import_module(dotted)
    else:
        module = _imported(dotted, kind, roots)
    cls = getattr(module, last, None)
    if not isinstance(cls, type):
        classes = [known for known, value in vars(module).items() if isinstance(value, type)]
        raise SettingError(f"class_name of a {kind}: " + unknown(f"class of module {dotted}", last, classes))
    return cls


def _imported(dotted: str, kind: str, roots: Sequence[str | Path]) -> ModuleType:
    parts = dotted.split(".")
    if not all(part.isidentifier() for part in parts):
        raise SettingError(f"class_name of a {kind}", expected="package.module.Class", found=dotted)
    allowed = allowed_roots(roots)
    if (loaded := sys.modules.get(dotted)) is not None:
        return _check_place(loaded, dotted, allowed)
    for root in allowed:
        files = [file for end in (".py", "/__init__.py") if (file := Path(f"{root.joinpath(*parts)}{end}")).is_file()]
        if files:
            check_roots(
                f"module {dotted!r}", [file.resolve() for file in files], allowed, SettingError, "move it there"
            )
            return _import_from(root, dotted, allowed)
    expected = f"{'/'.join(parts)}.py below {', '.join(map(str, allowed))}"
    do = f"start Python in its folder, pass roots=[…], or name the folder in {ROOTS}"
    raise SettingError(f"module {dotted!r} of a {kind} is not found", expected=expected, do=do)


def _import_from(root: Path, dotted: str, allowed: Sequence[Path]) -> ModuleType:
    """Import a module of the folder `root`, which stands first on sys.path meanwhile. A package that is loaded already
    must lie below an allowed folder."""
    for name in itertools.accumulate(dotted.split("."), "{}.{}".format):
        if name in sys.modules:
            _check_place(sys.modules[name], name, allowed)
    sys.path.insert(0, str(root))
    try:
        with boundary(f"importing {dotted} from {root}", SettingError):
            module = importlib.import_module(dotted)
    finally:
        sys.path.remove(str(root))
    return _check_place(module, dotted, allowed)


def _check_place(module: ModuleType, name: str, allowed: Sequence[Path]) -> ModuleType:
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", []))
    paths = [Path(str(one)).resolve() for one in places]
    check_roots(f"module {name!r}", paths, allowed, SettingError, "rename yours if it has the name of another module")
    return module

"""Tools that a model can call: the base class with verl's names, functions, shipped tools, MCP servers, yaml files."""

from workbench.agents.files import by_name, load_tools
from workbench.agents.tools.base import BaseTool, FunctionTool, check_arguments, function_tool, tool, tool_schema
from workbench.agents.tools.mcp_servers import MCPServer, MCPTool, mcp_tools
from workbench.agents.tools.shipped import (
    CalculationError,
    Calculator,
    Corpus,
    Gsm8kAnswer,
    PythonTool,
    Search,
    calculate,
)
from workbench.agents.tools.terminal import Terminal, Tests, terminal_rows

__all__ = [
    "BaseTool", "CalculationError", "Calculator", "Corpus", "FunctionTool", "Gsm8kAnswer", "MCPServer", "MCPTool",
    "PythonTool", "Search", "Terminal", "Tests", "by_name", "calculate", "check_arguments", "function_tool", "load_tools", "mcp_tools",
    "terminal_rows", "tool", "tool_schema",
]  # fmt: skip

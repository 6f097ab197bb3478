"""Agents: how one prompt becomes one masked sequence of model's, tools' and users' tokens.

Loops (`ToolAgent`, `SingleTurn`, your own), tools that a model calls (`function_tool`, the shipped ones, `mcp_tools` of MCP
servers), parsers of its calls, simulated users (`BaseInteraction`) and other people's environments as users. What a rollout
does with them is `stages.EpisodeRollout`; rewards over episodes are in `rewards`.
"""

from workbench.agents.calls import Toolbox, truncate
from workbench.agents.environments import GymInteraction, VerifiersInteraction, environment_rows, verifiers_rows
from workbench.agents.episode import Episode, LockStep, Transcript
from workbench.agents.interactions import (
    BaseInteraction,
    Gsm8kInteraction,
    RemoteInteraction,
    interacting,
    load_interactions,
)
from workbench.agents.loop import AgentLoopBase, Loops, agent_loop, register, register_agent_loop
from workbench.agents.parsers import (
    HermesParser,
    Qwen3CoderParser,
    ReActParser,
    ToolArgsParser,
    parser_names,
    register_parser,
    tool_parser,
)
from workbench.agents.protocol import (
    AgentLoop,
    AgentLoopOutput,
    FunctionCall,
    Interaction,
    Tool,
    ToolCall,
    ToolParser,
    ToolResponse,
    Turn,
)
from workbench.agents.single_turn import SingleTurn
from workbench.agents.stepping import EpisodeStepper
from workbench.agents.tokens import TurnTokens
from workbench.agents.tool_agent import AgentState, Standing, ToolAgent
from workbench.agents.tools import (
    BaseTool,
    Calculator,
    Corpus,
    FunctionTool,
    Gsm8kAnswer,
    MCPServer,
    MCPTool,
    PythonTool,
    Search,
    function_tool,
    load_tools,
    mcp_tools,
)

__all__ = [
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopOutput",
    "AgentState",
    "BaseInteraction",
    "BaseTool",
    "Calculator",
    "Corpus",
    "Episode",
    "EpisodeStepper",
    "FunctionCall",
    "FunctionTool",
    "Gsm8kAnswer",
    "Gsm8kInteraction",
    "GymInteraction",
    "HermesParser",
    "Interaction",
    "LockStep",
    "Loops",
    "MCPServer",
    "MCPTool",
    "PythonTool",
    "Qwen3CoderParser",
    "ReActParser",
    "RemoteInteraction",
    "Search",
    "SingleTurn",
    "Standing",
    "Tool",
    "ToolAgent",
    "ToolArgsParser",
    "ToolCall",
    "ToolParser",
    "ToolResponse",
    "Toolbox",
    "Transcript",
    "Turn",
    "TurnTokens",
    "VerifiersInteraction",
    "agent_loop",
    "environment_rows",
    "function_tool",
    "interacting",
    "load_interactions",
    "load_tools",
    "mcp_tools",
    "parser_names",
    "register",
    "register_agent_loop",
    "register_parser",
    "tool_parser",
    "truncate",
    "verifiers_rows",
]

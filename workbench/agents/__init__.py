"""Agents: multi-turn episodes with tools and simulated users; each episode is a sequence of tokens with a loss mask.

Loops (`ToolAgent`, `SingleTurn`, your own), tools that a model calls (`function_tool`, the shipped ones, `mcp_tools` of MCP
servers), parsers of its calls, simulated users (`BaseInteraction`) and Gym-like or `verifiers` environments as users; and
harnesses, other people's programs, which ask the policy at an `endpoint` (`Harness`). They
are sampled by `stages.EpisodeRollout`; rewards over episodes are in `rewards`.
"""

from workbench.agents.calls import Toolbox, truncate
from workbench.agents.environments import (
    GymInteraction,
    VerifiersInteraction,
    environment_rows,
    verifiers_reward,
    verifiers_rows,
)
from workbench.agents.episode import Episode, LockStep, Transcript
from workbench.agents.files import load_interactions, load_tools
from workbench.agents.formats import KimiParser, Qwen3CoderParser, ToolArgsParser, parser_of
from workbench.agents.harnesses import Harness
from workbench.agents.interactions import BaseInteraction, Gsm8kInteraction, RemoteInteraction, interacting
from workbench.agents.loop import AgentLoopBase, Loops, SingleTurn, agent_loop, register, register_agent_loop
from workbench.agents.parsers import HermesParser, ReActParser, parser_names, register_parser, tool_parser
from workbench.agents.policy_server import Endpoint, Limits, PolicySession, endpoint
from workbench.agents.protocol import (
    AgentLoopOutput,
    FunctionCall,
    Interaction,
    Tool,
    ToolCall,
    ToolParser,
    ToolResponse,
    Turn,
)
from workbench.agents.stepping import EpisodeStepper, EpisodeTree, TreeNode, TurnValue
from workbench.agents.tokens import TurnTokens
from workbench.agents.tool_agent import AgentState, EpisodeState, ToolAgent
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
    Terminal,
    Tests,
    function_tool,
    mcp_tools,
    terminal_rows,
)
from workbench.agents.tools.shipped import SubAgent

__all__ = [
    "AgentLoopBase", "AgentLoopOutput", "AgentState", "BaseInteraction", "BaseTool", "Calculator", "Corpus",
    "Endpoint", "Episode", "EpisodeState", "EpisodeStepper", "EpisodeTree", "FunctionCall", "FunctionTool",
    "Gsm8kAnswer", "Gsm8kInteraction", "GymInteraction", "Harness", "HermesParser", "Interaction", "KimiParser",
    "Limits", "LockStep", "Loops", "MCPServer", "MCPTool", "PolicySession", "PythonTool", "Qwen3CoderParser",
    "ReActParser", "RemoteInteraction", "Search", "SingleTurn", "SubAgent", "Terminal", "Tests", "Tool", "ToolAgent",
    "ToolArgsParser", "ToolCall", "ToolParser", "ToolResponse", "Toolbox", "Transcript", "TreeNode", "Turn",
    "TurnTokens", "TurnValue", "VerifiersInteraction", "agent_loop", "endpoint", "environment_rows", "function_tool",
    "interacting", "load_interactions", "load_tools", "mcp_tools", "parser_names", "parser_of", "register",
    "register_agent_loop", "register_parser", "terminal_rows", "tool_parser", "truncate", "verifiers_reward",
    "verifiers_rows",
]  # fmt: skip

"""Agents: how one prompt becomes one masked sequence of model's, tools' and users' tokens."""

from workbench.agents.calls import Toolbox, truncate
from workbench.agents.episode import Episode, LockStep, Transcript
from workbench.agents.loop import AgentLoopBase, Loops, agent_loop, register, register_agent_loop
from workbench.agents.parsers import ReActParser
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

__all__ = [
    "AgentLoop",
    "AgentLoopBase",
    "AgentLoopOutput",
    "AgentState",
    "Episode",
    "EpisodeStepper",
    "FunctionCall",
    "Interaction",
    "LockStep",
    "Loops",
    "ReActParser",
    "SingleTurn",
    "Standing",
    "Tool",
    "ToolAgent",
    "ToolCall",
    "ToolParser",
    "ToolResponse",
    "Toolbox",
    "Transcript",
    "Turn",
    "TurnTokens",
    "agent_loop",
    "register",
    "register_agent_loop",
    "truncate",
]

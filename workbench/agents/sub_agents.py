"""Sub-agents: a tool whose execution is an agent loop of its own, sampled by the same policy and trained with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.agents.episode import RUNNING
from workbench.agents.loop import AgentLoopBase
from workbench.agents.parsers import outside_reasoning
from workbench.agents.protocol import SUB_AGENT, Sequences, ToolResponse, sequences
from workbench.agents.tools import BaseTool
from workbench.base.config import require
from workbench.base.errors import SettingError
from workbench.engines.protocol import Sampler


class SubAgent(BaseTool):
    """A tool by which a `ToolAgent` hands a task to another loop: `SubAgent(ToolAgent([search]), name="research", description="…")`.

    The sub-agent is sampled by the same policy, with seeds of its own. Its sequences are rows of the episode, before those of
    the agent that called it, and share the episode's reward and advantage. Its last answer is what the caller reads. It has no
    time limit of its own: those of its tools, turns and tokens hold.

    Args:
        loop: the loop that does the task, of which each call is one run.
        name: the tool's name.
        description: what the model reads of it; its only argument is `task`, a text.
        system: the sub-agent's system prompt.
        max_tokens: limit of each of its sequences; None: that of the rollout.
        policy: the policy that samples it, where the rollout has several; None: the caller's.

    Raises `SettingError` for anything but an agent loop, and for a limit below 1.
    """

    delegates = True
    seconds_per_call: float | None = None

    def __init__(
        self,
        loop: AgentLoopBase,
        *,
        name: str,
        description: str,
        system: str | None = None,
        max_tokens: int | None = None,
        policy: str | None = None,
    ) -> None:
        if not isinstance(loop, AgentLoopBase):
            raise SettingError("loop of a sub-agent", expected="an agent loop: ToolAgent(…)", found=loop)
        require(max_tokens is None or max_tokens >= 1, "max_tokens of a sub-agent", expected="≥ 1", found=max_tokens)
        parameters = {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}
        about = {"name": name, "description": description, "parameters": parameters}
        super().__init__({}, {"type": "function", "function": about})
        self.name, self.loop, self.system, self.max_tokens, self.policy = name, loop, system, max_tokens, policy

    def prepare(self, sampler: Sampler) -> None:
        """Check the loop against the sampler's tokenizer."""
        self.loop.prepare(sampler)

    def describe(self) -> dict[str, Any]:
        """The loop's settings, the system prompt and the limit."""
        whose = {} if self.policy is None else {"policy": self.policy}
        return {"system": self.system, "max_tokens": self.max_tokens, "loop": self.loop.describe(), **whose}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run the loop on the task; its sequences go to the episode that called. Returns the last answer."""
        parent, sampling = RUNNING.get()
        turn = parent.turn
        number = parent.called[turn] = parent.called.get(turn, -1) + 1
        policy = self.policy or parent.policy
        child = replace(
            parent, sampler=parent.sampler_of(self.policy), policy=policy, purpose=f"{parent.purpose}/{self.name}@{turn}.{number}", max_prompt_length=None, progress=None,
            turn=0, attempt=0, seconds=0.0, samples=[], told=set(), versions=[], others=[], called={},
        )  # fmt: skip
        chat = [{"role": "system", "content": self.system}] if self.system else []
        chat.append({"role": "user", "content": str(parameters.get("task", ""))})
        changes = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        given = {"raw_prompt": chat, "uid": parent.uid, "extra_info": {"tools_kwargs": kwargs}}
        found = await self.loop.bound(child).run({**sampling, **changes}, **given)
        several = tuple(map(child.with_log_probs, sequences(found, f"sub-agent {self.name!r}")))
        mark = {SUB_AGENT: {"name": self.name, "turn": turn, "number": number}}
        several = (*child.others, *several)
        parent.others += [replace(one, extra={**one.extra, **mark}, policy=one.policy or policy) for one in several]
        return ToolResponse(text=_answer(several, self.loop)), None, {}


def _answer(found: Sequences, loop: AgentLoopBase) -> str:
    said = [turn.text for turn in found[-1].turns if turn.role == "assistant"]
    return outside_reasoning(said[-1]).strip() if said else ""

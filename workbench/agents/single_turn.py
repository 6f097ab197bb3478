"""The plainest loop: one prompt, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.agents.episode import Transcript
from workbench.agents.loop import AgentLoopBase, register
from workbench.agents.protocol import AgentLoopOutput
from workbench.datasets.templates import encode


@register("single_turn")
class SingleTurn(AgentLoopBase):
    """Samples one answer: the tokens that a rollout without agents gives the row."""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """Reads `raw_prompt`."""
        switches = getattr(self.episode.sampler, "template_switches", {})
        prompt = tuple(encode(self.tokenizer, row["raw_prompt"], **switches))
        said = Transcript(prompt, int(sampling_params["max_tokens"]))
        sample = await self.generate(prompt, sampling_params)
        said.say(sample, self.tokenizer.decode(list(sample.ids), skip_special_tokens=True))
        said.reason = sample.finish_reason
        return said.output(self.episode)

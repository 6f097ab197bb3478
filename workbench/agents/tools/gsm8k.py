"""`gsm8k_answer`: tells the model whether its answer is right, as verl's Gsm8kTool does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from workbench.agents.tools.base import BaseTool, Executed, answered, broken
from workbench.rewards.scorers.gsm8k import compute_score

NOT_BETTER = -0.05
"""The reward of a submission that is no better than the best so far (0 at the start, so a first wrong one pays, too)."""


class Gsm8kAnswer(BaseTool):
    """`gsm8k_answer`: scores a submitted answer against the row's `ground_truth` (given to `create`), by flexible scoring.

    A submission's step reward is 0 where it is better than the one before, else −0.05; `calc_reward` is the last one's score.
    The instance has to live as long as the episode for that: verl 0.7 made a fresh one for each call.
    """

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "gsm8k_answer",
        "description": "Checks the answer to the question.",
        "parameters": {"answer": {"type": "string", "description": "The answer to the question"}},
    }

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """The score of the submission, as text and in the state."""
        if isinstance(parameters, dict) and type(parameters.get("answer")) in (int, float):
            parameters = {**parameters, "answer": str(parameters["answer"])}  # as verl has it
        if wrong := self.refusal(parameters):
            return wrong
        state = self.instances.get(instance_id)
        if state is None or state.get("ground_truth") is None:
            why = "no such instance" if state is None else "create was given no ground_truth"
            return broken("Error: there is nothing to check the answer against.", why)
        answer, before = parameters["answer"], state.get("reward", 0.0)
        state["response"] = answer if answer.startswith("#### ") else f"#### {answer}"
        state["reward"] = reward = await self.calc_reward(instance_id)
        step = 0.0 if reward > before else NOT_BETTER
        return answered(f"Current parsed {answer=} {reward=}", step, score=reward)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last submission; 0 before the first."""
        state = self.instances.get(instance_id, {})
        if "response" not in state:
            return 0.0
        return compute_score(state["response"], str(state.get("ground_truth")), method="flexible")

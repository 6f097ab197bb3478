"""Seed 001 (a custom reward in an interaction): its class, its yaml, its row, and its tool call that scores.

The class as it is printed is in tests/agents/your_module; its command is in the tests of verl's commands. Not here: state in Redis.
"""

from __future__ import annotations

import asyncio
from typing import Any

import workbench as wb
from workbench.agents import PythonTool, ToolAgent
from workbench.datasets.records import has_answer

ROW = {
    "prompt": [{"role": "user", "content": "小明有5个苹果，吃了2个，还剩几个？"}],
    "extra_info": {"interaction_kwargs": {"query": "小明有5个苹果，吃了2个，还剩几个？", "ground_truth": "3"}},
}


class MathReasoningInteraction(wb.BaseInteraction):
    """The seed's in short: 1.0 where the last number is the truth, and then the conversation stops."""

    tries = (0.0, 0.25, 1.0)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        assert kwargs["ground_truth"] == "3"
        score = self.tries[sum(one["role"] == "assistant" for one in messages) - 1]
        return score == 1.0, "请重新思考。", score, {}


def test_the_row_without_an_answer_is_rewarded_by_its_simulated_user() -> None:
    """Section 3.4: neither a ground truth nor a data_source; the score of the last turn is the default reward."""
    assert has_answer(ROW)
    rows = wb.datasets.Rows([ROW, ROW], max_prompt_length=128)
    engine = wb.engines.local("data/tiny-arith")
    for turns, wanted in ((3, 1.0), (2, 0.25)):  # section 4.2's max_assistant_turns
        agent = ToolAgent(interactions=[MathReasoningInteraction({})], max_assistant_turns=turns)
        pipe = wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=96, kl_coef=0.0)
        step = wb.Stepper(pipe, rows.batch(2)).run(until="reward")
        whole = [row for row, scores in enumerate(step.batch["turn_scores"]) if len(scores) == turns]
        assert whole and all(float(step.batch["reward"][row]) == wanted for row in whole)
        assert all(step.batch["scored"].tolist())
    assert pipe["reward"].function.check_rows(list(rows.views())) == ""


def test_the_tools_last_expression_is_its_answer() -> None:
    """Section 5: `{"code": f"result = {response}; result"}`, read by `float(tool_result.text.strip())`."""
    tool = PythonTool(wb.sandbox.local())

    async def call(code: str) -> str:
        instance, _ = await tool.create()
        response, _, _ = await tool.execute(instance, {"code": code})
        await tool.release(instance)
        return str(response.text)

    async def all_of_them() -> list[str]:
        codes = ("result = 5 - 2; result", "print('said')\nNone", "x = 1", "'é' + \"1\"  # c", "1 /")
        return list(await asyncio.gather(*map(call, codes)))

    first, said, silent, text, broken = asyncio.run(all_of_them())
    assert float(first.strip()) == 3.0 and said.strip() == "said" and "no output" in silent
    assert text.strip() == "é1" and "SyntaxError" in broken

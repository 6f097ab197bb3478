"""Seed 001 (a custom reward in an interaction): its class, its yaml, its row, and its tool call that scores.

The class as it is printed is in tests/agents/your_module; its command is in the tests of verl's commands. Not here: state in Redis.
"""

from __future__ import annotations

import asyncio
from typing import Any

import workbench as wb
from workbench.agents import PythonTool, ToolAgent
from workbench.datasets.records import has_answer
from workbench.engines.protocol import Sample
from workbench.stages import EpisodeRollout

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


class Saying:
    """A sampler that says a number, another in each turn."""

    version = 0

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def sample(self, request: Any) -> Sample:
        ids = tuple(self.tokenizer(str(request.seed % 9), add_special_tokens=False)["input_ids"])
        return Sample((*ids, self.tokenizer.eos_token_id), (-0.5,) * (len(ids) + 1), "stop", 0)


def test_the_row_without_an_answer_is_rewarded_by_its_simulated_user() -> None:
    """Section 3.4: neither a ground truth nor a data_source; the score of the last turn is the default reward."""
    rows = wb.datasets.Rows([ROW, ROW])
    sampler, reward = Saying(wb.engines.local("data/tiny-arith").tokenizer), wb.stages.Reward()
    for turns, wanted in ((3, 1.0), (2, 0.25)):  # section 4.2's max_assistant_turns
        agent = ToolAgent(interactions=[MathReasoningInteraction({})], max_assistant_turns=turns)
        how = {"group_size": 2, "sampling": wb.SamplingSettings(max_tokens=2000)}
        batch = reward(EpisodeRollout(sampler, agent=agent, **how)(rows.batch(2)).batch).batch
        assert [len(scores) for scores in batch["turn_scores"]] == [turns] * 4
        assert batch["reward"].tolist() == [wanted] * 4 and all(batch["scored"].tolist())
    assert has_answer(ROW) and reward.function.check_rows(rows.views()) == ""


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

"""Seed 003 (verl in practice): its python snippets and reward settings, by section.

The commands and yaml of launches are in the tests of verl's commands. Not here: section 2.4 (pictures), 5.2 to 5.4 (data sets of several
files, growth), 6.4 (Ray's workers), and `torch.cat` of 4.6's loop, whose response ids are lists of ints.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench import functional as F
from workbench.agents import AgentLoopBase, AgentLoopOutput, Calculator, ToolAgent
from workbench.base.errors import DataError
from workbench.compat.verl_reward import reward_from
from workbench.dataproto import DataProto
from workbench.rewards.cases import read_cases

TINY = "data/tiny-arith"


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text: str) -> Any:
        return {"input_ids": list(map(ord, text))}

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


def scored(reward: Any, *rows: Any) -> list[Any]:
    return [one.score for one in wb.rewards.dry_run({"it": reward}, list(rows)).judged["it"]]


# --- section 2.3: rows ------------------------------------------------------------------------------


def test_a_functions_extra_info_has_the_other_fields_of_reward_model() -> None:
    """Sections 2.3 and 3.4: "extra_info: from the other fields of reward_model"."""
    row = {
        "data_source": "my_task",
        "prompt": "写一个快速排序算法",
        "response": "def quick_sort(arr): ...",
        "reward_model": {
            "ground_truth": "def quick_sort(arr): ...",
            "test_cases": ["test1", "test2"],
            "style": "short",
        },
    }
    seen: list[Any] = []

    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        seen.append(extra_info)
        return float(solution_str == ground_truth)

    assert scored(wb.rewards.Reward(compute_score, in_process=True), row)[0].value == 1
    assert seen[0]["test_cases"] == ["test1", "test2"] and "style" not in seen[0]
    chat = [
        {"role": "user", "content": "一"},
        {"role": "assistant", "content": "答"},
        {"role": "user", "content": "二"},
    ]
    assert len(wb.datasets.Rows([row, {**row, "prompt": chat}])) == 2


# --- section 3.4: rewards ---------------------------------------------------------------------------

CONTAINS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str.strip().lower() == ground_truth.strip().lower():
        return 1.0
    if ground_truth.lower() in solution_str.lower():
        return 0.5
    return 0.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("manager", ["naive", "prime", "dapo"])
def test_the_custom_functions_lines(manager: str, tmp_path: Path) -> None:
    """`custom_reward_function.path=…`, `.name=compute_score`, `reward_model.reward_manager=…` of 3.4 and case 3 of 7.8."""
    (tmp_path / "my_reward.py").write_text(CONTAINS)
    block = {
        "custom_reward_function.path": str(tmp_path / "my_reward.py"),
        "custom_reward_function.name": "compute_score",
        "reward_model.reward_manager": manager,
        "num_workers": 1,
    }
    reward = reward_from(block, tokenizer=Letters(), roots=(str(tmp_path),))
    row = {"prompt": "?", "data_source": "mine", "reward_model": {"ground_truth": "Paris"}}
    said = [
        score.value for score in scored(reward, *({**row, "response": one} for one in ("paris ", "In Paris.", "Rome")))
    ]
    assert said == [1.0, 0.5, 0.0]
    reward.close()


def test_the_reward_models_block_has_a_batch_size() -> None:
    block = {"reward_model": {"enable": True, "model_path": "data/tiny-reward-model", "batch_size": 64}}
    reward = reward_from(block)
    assert isinstance(reward, wb.rewards.RewardModel) and "reward_model.batch_size=64" in repr(reward)


# --- section 4: agents ------------------------------------------------------------------------------


class MyAgentLoop(AgentLoopBase):
    """Section 4.6's, which samples by `server_manager`, has no log-probs and no tool."""

    name = "my_agent_loop"
    verls = False

    async def run(self, sampling_params: Any, **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True)
        prompt_ids = prompt_ids if isinstance(prompt_ids, list) else prompt_ids["input_ids"]
        said = await self.server_manager.generate(
            request_id="r", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        response_ids = said.token_ids if self.verls else said
        return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=response_ids, response_mask=[1] * len(response_ids))


class OfToday(MyAgentLoop):
    verls = True


@pytest.mark.slow
def test_a_loop_without_log_probs_has_those_of_what_was_sampled() -> None:
    engine = wb.engines.local(TINY)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)
    wb.agents.register_agent_loop("my_agent_loop", MyAgentLoop)
    steps = []
    for agent in ("my_agent_loop", OfToday(), "single_turn_agent_loop"):
        pipe = wb.recipes.grpo(engine, agent=agent, group_size=2, max_tokens=12, kl_coef=0.0)
        steps.append(wb.Stepper(pipe, rows.batch(2)).run(until="rollout").batch)
    for name in ("responses", "rollout_log_probs", "response_mask"):
        assert torch.equal(steps[0][name], steps[2][name]) and torch.equal(steps[1][name], steps[2][name]), name
    assert (steps[0]["rollout_log_probs"] < 0).any()


@pytest.mark.slow
def test_ids_that_were_not_sampled_are_no_response_without_log_probs() -> None:
    class Invents(MyAgentLoop):
        async def run(self, sampling_params: Any, **kwargs: Any) -> AgentLoopOutput:
            made = await super().run(sampling_params, **kwargs)
            return AgentLoopOutput(made.prompt_ids, [*made.response_ids, 5], [*made.response_mask, 1])  # type: ignore[arg-type]

    pipe = wb.recipes.grpo(wb.engines.local(TINY), agent=Invents(), group_size=1, max_tokens=8, kl_coef=0.0)
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=128)
    with pytest.raises(DataError, match="without response_logprobs.*not sampled"):
        wb.Stepper(pipe, rows.batch(1)).run(until="rollout")


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "23 * 45 + 67"}}\n</tool_call>'


class Calling:
    """A sampler that calls the calculator in every turn."""

    version = 0

    def __init__(self, tokenizer: Any, times: int) -> None:
        self.tokenizer, self.times, self.asked = tokenizer, times, list[str]()

    async def sample(self, request: Any) -> Any:
        from workbench.engines.protocol import Sample

        self.asked.append(self.tokenizer.decode(list(request.ids)))
        ids = tuple(self.tokenizer(CALL * self.times, add_special_tokens=False)["input_ids"])
        return Sample((*ids, self.tokenizer.eos_token_id), (-0.5,) * (len(ids) + 1), "stop", 0)


@pytest.mark.parametrize(("parallel", "turns"), [(1, 6), (2, 4)])
def test_an_episode_makes_no_more_than_max_tool_calls(parallel: int, turns: int) -> None:
    """Sections 4.7 and Q4: `max_tool_calls: 5` of the whole episode; the turn that calls once more ends it."""
    sampler = Calling(wb.engines.local(TINY).tokenizer, parallel)
    agent = ToolAgent([Calculator()], parser="hermes", max_tool_calls=5, max_parallel_calls=parallel)
    rollout = wb.stages.EpisodeRollout(
        sampler, agent=agent, group_size=1, sampling=wb.SamplingSettings(max_tokens=4000)
    )
    row = {"prompt": [{"role": "user", "content": "计算 23 * 45 + 67"}], "reward_model": {"ground_truth": "1102"}}
    batch = rollout(wb.datasets.Rows([row]).batch(1)).batch
    assert batch["num_tool_calls"].tolist() == [5] and batch["finish_reason"].tolist() == ["turns"]
    spoken = [turn for turn in batch["turns"][0] if turn["role"] == "assistant"]
    assert len(spoken) == turns and [call["status"] for call in spoken[-1]["calls"]] == ["not run"] * parallel
    assert "1102" in batch["response_text"][0] and "max_tool_calls=5" in repr(agent)


def test_a_rows_tool_config_is_honoured() -> None:
    """Section 4.3: only the tools that the row lists are offered; another format is refused."""
    from workbench.agents import function_tool

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    sampler = Calling(wb.engines.local(TINY).tokenizer, 1)
    agent = ToolAgent([Calculator(), weather], max_tool_calls=1, format="react")
    rollout = wb.stages.EpisodeRollout(
        sampler, agent=agent, group_size=1, sampling=wb.SamplingSettings(max_tokens=4000)
    )
    row = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "计算 23 * 45 + 67"}],
        "tool_config": {"available_tools": ["calculator"], "tool_format": "react"},
        "reward_model": {"ground_truth": "1102"},
    }
    rollout(wb.datasets.Rows([row]).batch(1))
    assert "calculator" in sampler.asked[0] and "weather" not in sampler.asked[0]
    other = {**row, "tool_config": {"available_tools": ["calculator"], "tool_format": "function_calling"}}
    with pytest.raises(wb.WorkbenchError, match="tool_format"):
        rollout(wb.datasets.Rows([other]).batch(1))


def test_the_layered_reward_of_an_agent() -> None:
    """Section 4.7.3, and `num_calls > 5` of Q4."""

    def check_answer(solution_str: str, ground_truth: str) -> bool:
        return ground_truth in solution_str

    def compute_agent_reward(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> float:
        task_reward = 1.0 if check_answer(solution_str, ground_truth) else 0.0
        num_tool_calls = extra_info.get("num_tool_calls", 0)
        efficiency_penalty = -0.1 * max(0, num_tool_calls - 3)
        return task_reward + efficiency_penalty

    row = {"prompt": "?", "response": "1102", "data_source": "gsm8k", "reward_model": {"ground_truth": "1102"}}
    reward = wb.rewards.Reward(compute_agent_reward, in_process=True)
    assert scored(reward, {**row, "num_tool_calls": 5}, row)[0].value == pytest.approx(0.8)


# --- section 6.7: a batch by hand -------------------------------------------------------------------


def test_a_batch_made_by_hand_is_stepped_without_a_model() -> None:
    scores = torch.tensor([[0, 0, 1.0], [0, 0, 0.0], [0, 0, 1.0], [0, 0, 0.0]])
    columns = {"token_level_scores": scores, "response_mask": torch.ones(4, 3, dtype=torch.long), "uid": [0, 0, 1, 1]}
    batch = DataProto.from_single_dict(columns)
    step = wb.Stepper([wb.stages.Advantage(F.grpo)], batch).run()
    assert step.batch["advantages"][:, 0].tolist() == pytest.approx([0.7071, -0.7071] * 2, abs=1e-4)
    other = step.fork().back(to="advantage").replace("advantage", F.rloo).run()
    assert other.batch["advantages"][:, 0].tolist() == [1, -1, 1, -1]
    assert "advantages" in str(step.compare(other))
    with pytest.raises(wb.WorkbenchError, match="response_mask"):
        wb.Stepper([wb.stages.Advantage(F.grpo)], batch.select(["token_level_scores"], ["uid"]))


# --- sections 7.5 and 7.8: code ---------------------------------------------------------------------

CASES = [{"input": "2", "output": "True"}, {"input": "4", "output": "False"}, {"input": "17", "output": "True"}]
CODE = {
    "prompt": "Write a function to check if a number is prime.",
    "data_source": "codecontests",
    "reward_model": {"ground_truth": None},
    "extra_info": {"test_cases": CASES},
}
RIGHT = "```python\nn = int(input())\nprint(n > 1 and all(n % i for i in range(2, n)))\n```"


def test_case_two_gives_one_two_thirds_and_nothing() -> None:
    """The right program, one that prints True, and no code; the row needs no ground truth."""
    assert len(wb.datasets.Rows([CODE])) == 1 and wb.datasets.Rows([CODE]).report().truths == {"list": 1}
    reward = wb.rewards.by_data_source(sandbox=wb.sandbox.local())
    found = scored(
        reward, *({**CODE, "response": one} for one in (RIGHT, "```python\nprint(True)\n```", "It is prime."))
    )
    assert [score.value for score in found] == pytest.approx([1, 2 / 3, 0]) and found[2].status is wb.Status.NO_ANSWER


PAIRS = [["2", "True"], ["4", "False"], ["17", "True"]]


@pytest.mark.parametrize(
    "tests", [CASES, PAIRS, json.dumps(CASES), json.dumps(PAIRS), {"inputs": ["2"], "outputs": ["True"]}]
)
def test_the_seeds_forms_of_test_cases_are_read(tests: Any) -> None:
    """Section 7.5: `for test_input, expected_output in test_cases`."""
    cases = read_cases(None, {"test_cases": tests})
    assert [(one.kind, one.given, one.expected) for one in cases][:1] == [("stdin", "2", "True")]


@pytest.mark.parametrize("wrong", [[["2", "True", "3"]], [{"input": "2"}], ["test1", "test2"], "no tests here"])
def test_tests_that_cannot_be_read_are_refused_by_row_before_a_run(wrong: Any) -> None:
    reward = wb.rewards.by_data_source(sandbox=wb.sandbox.local())
    rows = wb.datasets.Rows([CODE, {**CODE, "extra_info": {"test_cases": wrong}}, CODE])
    with pytest.raises(DataError, match="1 of 3 rows cannot be read by codecontests; found row 1: invalid tests"):
        reward.check_rows(rows.views())
    assert reward.check_rows(wb.datasets.Rows([CODE]).views()) == ""


def test_case_one_routes_by_data_source() -> None:
    row = {
        "prompt": "Janet's ducks lay 16 eggs per day...",
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "18"},
    }
    reward = reward_from({"reward_model.reward_manager": "naive"}, tokenizer=Letters())
    assert scored(reward, {**row, "response": "Let's think step by step... #### 18"})[0].value == 1.0


def test_an_async_function_may_be_a_reward() -> None:
    async def judged(solution_str: str) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert scored(wb.rewards.Reward(judged, in_process=True), {**CODE, "response": "x"})[0].value == 0.5

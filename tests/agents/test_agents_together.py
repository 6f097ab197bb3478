"""What is shipped, in the tool agent: tools and users by their yaml, calls by the hermes parser, rows of the agents' data."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agents_parts import Running, Script

import workbench as wb
from workbench.agents import BaseInteraction, Episode, ToolAgent
from workbench.agents.environments import GymInteraction, environment_rows
from workbench.agents.files import load_interactions
from workbench.agents.parsers import tool_parser
from workbench.agents.tools import function_tool, load_tools
from workbench.engines import SamplingSettings
from workbench.rewards.scorers.episodes import episode, task_minus_calls
from workbench.stages import EpisodeRollout

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "tiny-arith")


def row_of(variant: str) -> dict[str, Any]:
    row = dict(wb.rows(DATA / variant / "test.parquet")[0])
    return {**row, "raw_prompt": row["prompt"]}


def asks(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(agent: Any, tokenizer: Any, texts: list[str], row: dict[str, Any], number: int = 0) -> Any:
    script = Script(tokenizer, texts)
    return await agent.bound(Episode(script, uid=str(number), row=number)).run({"max_tokens": 480}, **row)


def test_the_shipped_tools_in_an_episode(tokenizer: Any) -> None:
    row, tools = row_of("arith-tools"), load_tools(DATA / "arith-tools" / "tools.yaml")
    truth = row["reward_model"]["ground_truth"]
    texts = [
        asks("calculator", expression="1/0"),
        "<tool_call>{'name': 'calculator', 'arguments': {'expression': '3 * 4'",
        asks("gsm8k_answer", answer="0"),
        asks("gsm8k_answer", answer=truth),
        f"#### {truth}",
    ]
    agent = ToolAgent(list(tools.values()), parser=tool_parser("hermes"))
    output = asyncio.run(played(agent, tokenizer, texts, row))
    calls = [(call.status, call.reward, call.result) for turn in output.turns for call in turn.calls]
    assert calls == [
        ("refused", 0.0, "Error: division by zero"),
        ("ok", None, "12"),  # mended
        ("ok", -0.05, "Current parsed answer='0' reward=0.0"),
        ("ok", 0.0, f"Current parsed answer={truth!r} reward=1.0"),
    ]
    assert tools["gsm8k_answer"].instances == {} and output.extra["num_tool_calls"] == 4
    said = output.turns[-1].text
    assert task_minus_calls()(said, truth, num_tool_calls=4).value == pytest.approx(0.9)
    assert episode()(said, truth, tool_rewards=output.extra["tool_rewards"]).value == pytest.approx(0.95)


def test_the_shipped_user_and_an_environment_in_an_episode(tokenizer: Any) -> None:
    row, users = row_of("arith-interaction"), load_interactions(DATA / "arith-interaction" / "interaction.yaml")
    texts = ["hm", f"#### {row['reward_model']['ground_truth']}"]
    output = asyncio.run(played(ToolAgent(interactions=users), tokenizer, texts, row))
    assert [turn.role for turn in output.turns] == ["assistant", "user", "assistant"]
    assert output.extra["turn_scores"] == [0.0, 1.0] and users["gsm8k"]._instances == {}

    class Count:
        def reset(self, seed: int) -> int:
            self.left = seed
            return seed

        def step(self, action: int) -> tuple[int, float, bool, dict[str, Any]]:
            self.left -= action
            return self.left, float(action), self.left == 0, {}

    (counting,) = environment_rows(Count, 1, seed=3)
    game = GymInteraction(Count, action=int)
    output = asyncio.run(
        played(ToolAgent(interactions=[game]), tokenizer, ["1", "2"], {**counting, "raw_prompt": counting["prompt"]})
    )
    assert output.extra["turn_scores"] == [1.0, 2.0] and [turn.text for turn in output.turns] == ["1", "2", "2"]
    assert game._instances == {}


@pytest.mark.slow
def test_many_episodes_with_a_slow_synchronous_tool_run_side_by_side(tokenizer: Any) -> None:
    @function_tool
    def doubled(x: int) -> int:
        """Doubles, late."""
        with running:
            time.sleep(0.1)
        return 2 * x

    running = Running()
    agent = ToolAgent([doubled], parser=tool_parser("hermes"))
    row = row_of("arith-tools")

    async def all_of_them() -> list[Any]:
        work = (played(agent, tokenizer, [asks("doubled", x=one), "so"], row, one) for one in range(256))
        return list(await asyncio.gather(*work))

    outputs = asyncio.run(all_of_them())
    assert [output.turns[1].text for output in outputs] == [str(2 * one) for one in range(256)]
    assert running.most >= 5, "at once"


class Hears(BaseInteraction):
    """Keeps what it was given."""

    def __init__(self, name: str) -> None:
        super().__init__({"name": name})
        self.started: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.started.append(kwargs)
        return await super().start_interaction(instance_id)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        return True, "", 1.0, {}


def test_rows_of_a_parquet_give_their_own_kwargs_alone(tokenizer: Any, tmp_path: Path) -> None:
    # the file's columns are structs: every row has the keys of all, the missing ones as None
    given = [{"name": "one", "word": "five"}, {"name": "two", "limit": 3, "deep": {"a": 1}}, {"name": "two"}]
    table = [
        {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "x", "reward_model": {"ground_truth": "2"}}
        | {"extra_info": {"index": n, "interaction_kwargs": one}}
        for n, one in enumerate(given)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    batch = wb.rows(str(tmp_path / "rows.parquet")).batch(3).with_meta(seed=1, step=1)
    by_index = {one["index"]: one for one in batch["extra_info"]}
    assert by_index[0]["interaction_kwargs"]["limit"] is None  # as parquet has it
    users = [Hears("one"), Hears("two")]
    sampling = SamplingSettings(max_tokens=50)
    loop = ToolAgent(interactions=users)
    found = EpisodeRollout(Script(tokenizer, ["two"]), agent=loop, group_size=1, sampling=sampling)(batch).batch
    assert users[0].started == users[0].asked == [{"word": "five"}]
    both = [{"limit": 3, "deep": {"a": 1}}, {}]
    assert all(one in users[1].started and one in users[1].asked for one in both) and len(users[1].started) == 2
    scores = dict(zip((one["index"] for one in found["extra_info"]), found["turn_scores"], strict=True))
    assert scores == {0: [1.0], 1: [1.0], 2: [1.0]}

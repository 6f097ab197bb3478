"""The agents' variants are a function of their seed, hold out what data/arith holds out, and work with what they name."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from random import Random

import make_arith_tools
import pytest
from make_arith_tools import demonstration, second_try

import workbench as wb
from workbench.agents.files import load_interactions
from workbench.agents.interactions import Gsm8kInteraction, interacting
from workbench.agents.parsers import tool_parser
from workbench.agents.tools import load_tools
from workbench.rewards.scorers.gsm8k import compute_score

DATA = Path(__file__).parents[2] / "data"
VARIANTS = ("arith-tools", "arith-interaction")


def test_the_files_are_what_the_script_makes_and_the_cards_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_arith_tools.py", "--folder", str(tmp_path)])
    make_arith_tools.main()
    for variant in VARIANTS:
        for file in (tmp_path / variant).iterdir():
            assert file.read_bytes() == (DATA / variant / file.name).read_bytes()
            if file.suffix == ".parquet":
                assert hashlib.sha256(file.read_bytes()).hexdigest() in (DATA / variant / "README.md").read_text()


@pytest.mark.slow
def test_the_splits_are_those_of_arith() -> None:
    for split, number in (("train", 1024), ("test", 256)):
        whole = [one["extra_info"]["question"] for one in wb.rows(DATA / "arith" / f"{split}.parquet")]
        for variant in VARIANTS:
            rows = wb.rows(DATA / variant / f"{split}.parquet")
            assert [one["extra_info"]["question"] for one in rows] == whole[:number]
            assert {one["agent_name"] for one in rows} == {"tool_agent"}


def test_the_rows_of_the_tools_feed_the_tools_that_their_yaml_names() -> None:
    tools = load_tools(DATA / "arith-tools" / "tools.yaml")
    row = wb.rows(DATA / "arith-tools" / "test.parquet")[0]
    given = row["extra_info"]["tools_kwargs"]
    assert row["extra_info"]["need_tools_kwargs"] and set(given) <= set(tools) == {"calculator", "gsm8k_answer"}

    async def play() -> float:
        instance, _ = await tools["gsm8k_answer"].create(**given["gsm8k_answer"])
        await tools["gsm8k_answer"].execute(instance, {"answer": row["reward_model"]["ground_truth"]})
        return await tools["gsm8k_answer"].calc_reward(instance)

    assert asyncio.run(play()) == 1.0


def test_the_rows_of_the_user_select_and_feed_the_user_that_their_yaml_names() -> None:
    users = load_interactions(DATA / "arith-interaction" / "interaction.yaml")
    rows = wb.rows(DATA / "arith-interaction" / "test.parquet")

    async def play(row: dict[str, object]) -> list[float]:
        async with interacting(users, row) as session:
            for text in ("hm", row["extra_info"]["answer"]):  # type: ignore[index]
                reply = await session.respond([{"role": "assistant", "content": text}])
            assert reply.stop and reply.text == Gsm8kInteraction.RIGHT
            return session.scores

    async def all_of_them() -> list[list[float]]:
        return list(await asyncio.gather(*(play(row) for row in rows)))

    assert asyncio.run(all_of_them()) == [[0.0, 1.0]] * 256


def test_the_demonstrations_are_true() -> None:
    tools, parser = load_tools(DATA / "arith-tools" / "tools.yaml"), tool_parser("hermes")

    async def played(chat: list[dict[str, str]]) -> list[dict[str, str]]:
        """The chat with every tool's answer as the tool gives it."""
        told = []
        for one in chat:
            if one["role"] == "tool":
                _, calls = parser.extract_tool_calls(told[-1]["content"], [])
                response, _, _ = await tools[calls[0].name].execute("x", json.loads(calls[0].arguments))
                told.append({"role": "tool", "content": str(response.text)})
            else:
                told.append(one)
        return told

    random = Random(3)
    for problem in make_arith_tools.problems(1, 200):
        chat = demonstration(problem)
        assert asyncio.run(played(chat)) == chat
        assert compute_score(chat[-1]["content"], str(problem.answer)) == 1.0
        mended = second_try(problem, random, Gsm8kInteraction.WRONG)
        assert compute_score(mended[1]["content"], str(problem.answer)) == 0.0
        assert compute_score(mended[3]["content"], str(problem.answer)) == 1.0

"""A simulated user whose state lives in a Ray actor: every rollout that holds the handle speaks to the same one."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.patience import LONG, patience, within

import workbench as wb
from workbench.agents import BaseInteraction, RemoteInteraction, ToolAgent
from workbench.base.errors import ForeignError
from workbench.cluster import Cluster
from workbench.engines import SamplingSettings
from workbench.stages import EpisodeRollout

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "agents"))


def board_class() -> type[BaseInteraction]:
    """By value: the workers cannot import this file."""

    class Board(BaseInteraction):
        """Nobody may say a number that anybody has said."""

        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            self.said: list[str] = []
            self.open: set[str] = set()
            self.most = 0
            self.ended: list[str] = []

        async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
            time.sleep(kwargs.get("hold", 0.0))  # nobody else is heard meanwhile
            assert instance_id is not None and instance_id not in self.open
            self.open.add(instance_id)
            self.most = max(self.most, len(self.open))
            return instance_id

        async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
            await asyncio.sleep(kwargs.get("seconds", 0.05))
            word = messages[-1]["content"]
            new = word not in self.said
            if new:
                self.said.append(word)
            return new, "taken", float(new), {"heard": len(self.said)}

        async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
            self.open.discard(str(instance_id))
            self.ended.append(str(instance_id))

        async def standing(self) -> dict[str, Any]:
            return {"said": self.said, "open": len(self.open), "most": self.most, "ended": self.ended}

    return Board


def rollout(actor: Any, purpose: str) -> EpisodeRollout:
    """Its model counts up until it is heard."""
    from agents_parts import Script
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith")
    model = Script(tokenizer, lambda context: str(context.count("taken")))
    loop = ToolAgent(interactions=[RemoteInteraction(actor, "board")], max_assistant_turns=40, seconds_per_call=LONG)
    return EpisodeRollout(model, agent=loop, group_size=2, sampling=SamplingSettings(max_tokens=2000), purpose=purpose)


def batch(number: int, **kwargs: Any) -> Any:
    rows = wb.rows(str(ROOT / "data" / "arith" / "train.parquet")).batch(number).with_meta(seed=1, step=1)
    return rows.with_columns({"extra_info": [{"interaction_kwargs": {"name": "board", **kwargs}}] * number})


@pytest.fixture
def actor(local: Cluster) -> Any:
    import ray

    made = ray.remote(board_class()).options(num_cpus=0).remote({"name": "board"})
    yield made
    ray.kill(made)


def test_episodes_of_two_rollouts_share_an_actors_state_and_end_in_it(actor: Any) -> None:
    import ray

    stages = [rollout(actor, name) for name in ("here", "there")]
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda stage: stage(batch(4)).batch, stages))
    standing = ray.get(actor.standing.remote())
    turns = [turn for one in found for turns in one["turns"] for turn in turns]
    won = [turn for turn in turns if turn["role"] == "assistant" and turn["score"] == 1.0]
    # sixteen episodes in two rollouts: each number was new to one of them alone
    assert sorted(int(turn["text"]) for turn in won) == sorted(map(int, standing["said"])) == list(range(16))
    assert sorted(turn["extra"]["heard"] for turn in won) == list(range(1, 17))
    assert all(list(one["finish_reason"]) == ["stop"] * 8 for one in found)
    assert {one["turn_scores"][row][-1] for one in found for row in range(8)} == {1.0}
    assert standing["open"] == 0 and standing["most"] > 8  # of both at once
    assert len(standing["ended"]) == len(set(standing["ended"])) == 16
    assert {name.split("-")[0] for name in standing["ended"]} == {"here", "there"}


@pytest.mark.long
def test_an_actor_that_hangs_costs_its_rows_and_one_that_is_gone_ends_the_step(actor: Any) -> None:
    import ray

    slow = rollout(actor, "slow")
    loop: Any = slow.loops.named(None)
    loop.seconds_per_call = 0.3
    with pytest.raises(
        ForeignError, match="all 4 episodes failed; found start_interaction: TimeoutError: no answer within 0.3"
    ):
        slow(batch(2, hold=0.5))
    # conversations were given up on before they began, and are ended
    assert within(lambda: ray.get(actor.standing.remote())["open"] == 0)
    assert len(ray.get(actor.standing.remote())["ended"]) == 4
    limit = loop.seconds_per_call = patience(3.0)
    one, other = batch(1), batch(1, seconds=3600.0)
    found = slow(one.concat([one, other])).batch
    assert list(found["finish_reason"]) == ["stop", "stop", "abort", "abort"]
    assert f"generate_response: TimeoutError: no answer within {limit:g} s" in found["agent_extra"][2]["errors"][0]
    assert ray.get(actor.standing.remote())["open"] == 0
    ray.kill(actor)
    with pytest.raises(ForeignError, match="all 4 episodes failed; found start_interaction: ActorDiedError"):
        rollout(actor, "gone")(batch(2))

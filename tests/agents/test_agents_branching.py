"""Branching: continuations of an episode, values and credit of turns beside what a small game gives by counting, trees that train."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import Adder, Script, Tags, User, call

import workbench as wb
from workbench.agents import AgentLoopOutput, EpisodeTree, ToolAgent, ToolResponse
from workbench.agents.stepping import only_sequence
from workbench.base.errors import PipelineError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import SamplingSettings
from workbench.engines.local_engine.scoring import RowTree as Shared
from workbench.engines.protocol import Request, Sample
from workbench.recipes import tree_grpo
from workbench.stages import EpisodeRollout, LearntOnce, Pipeline, Reward, TreeRollout, validation_rollout

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingSettings(max_tokens=300)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "data" / "tiny-arith")


class Counter(Adder):
    """Adds up what it was given in its episode: the n-th answer is the sum so far."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.sums[str(instance_id)] = 0
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        assert instance_id in self.open
        self.sums[instance_id] += sum(parameters["numbers"])
        return ToolResponse(text=str(self.sums[instance_id])), None, {}


class Game:
    """Sampler of a game: two calls that add 0, 1 or 2 each, then an answer, right or one off; the seed draws.

    `policy(turn, sum so far)` are the probabilities of the options. `order`: the options that are drawn, whatever the seed.
    """

    version = 0
    options = (("0", "1", "2"), ("0", "1", "2"), ("right", "off"))

    def __init__(self, tokenizer: Any, policy: Any, order: Any = None) -> None:
        self.tokenizer, self.policy, self.order = tokenizer, policy, order
        self.prefixes: list[int] = []

    def moves(self, said: str) -> tuple[int, int]:
        """(turn, sum so far) of the text of a context."""
        calls = said.split("<call>")[1:]
        return len(calls), sum(json.loads(one.split("</call>")[0])["arguments"]["numbers"][0] for one in calls)

    def text(self, turn: int, total: int, option: int) -> str:
        return call(numbers=[option]) if turn < 2 else f"#### {total + option}"

    async def sample(self, request: Request) -> Sample:
        self.prefixes.append(len(request.ids))
        turn, total = self.moves(self.tokenizer.decode(list(request.ids)))
        await asyncio.sleep(0)
        weights = torch.tensor(self.policy(turn, total))
        generator = torch.Generator().manual_seed(request.seed % 2**31)
        option = int(torch.multinomial(weights, 1, generator=generator)) if self.order is None else self.order(turn)
        ids = [*self.tokenizer(self.text(turn, total, option), add_special_tokens=False)["input_ids"],
               self.tokenizer.eos_token_id]  # fmt: skip
        return Sample(tuple(ids), tuple([float(weights[option].log()) / len(ids)] * len(ids)), "stop", 0)


def skewed(turn: int, total: int) -> list[float]:
    return [0.5, 0.3, 0.2] if turn == 0 else [0.2, 0.2, 0.6] if turn == 1 else ([0.8, 0.2] if total % 2 else [0.6, 0.4])


def even(turn: int, total: int) -> list[float]:
    return [1 / 3] * 3 if turn < 2 else [0.5, 0.5]


def value(policy: Any, turn: int, total: int) -> float:
    """The exact expected reward from here on, over all continuations: 1 for a right answer of a sum of 2, 0 else."""
    if turn == 2:
        return policy(turn, total)[0] if total == 2 else 0.0
    return sum(chance * value(policy, turn + 1, total + move) for move, chance in enumerate(policy(turn, total)))


def paid(response_text: str) -> float:
    return float(response_text.rsplit("#### ", 1)[-1].split("assistant")[-1].strip() == "2")


def won(turns: Any) -> float:
    """1 where the two calls add up to 2 and the answer is 2."""
    total = sum(json.loads(one["calls"][0]["arguments"])["numbers"][0] for one in turns if one["calls"])
    return float(total == 2 and turns[-1]["text"].strip() == "#### 2")


def prompts(count: int = 1) -> DataProto:
    columns: dict[str, Any] = {"uid": [f"p{one}" for one in range(count)],
                               "raw_prompt": [[{"role": "user", "content": "Add."}]] * count}  # fmt: skip
    return DataProto.from_dict({}, {**columns, "extra_info": [{}] * count}, {"seed": 3, "step": 1})


def played(sampler: Any, group_size: int = 1, reward: Any = won) -> wb.Stepper:
    stage = EpisodeRollout(
        sampler, agent=ToolAgent([Counter()], parser=Tags()), group_size=group_size, sampling=SAMPLING
    )
    return wb.Stepper(Pipeline([stage, Reward(reward, in_process=True)]), prompts()).run(until="rollout")


class TestBesideCounting:
    def test_values_converge_to_those_of_the_game(self, tokenizer: Any) -> None:
        s = played(Game(tokenizer, skewed))
        tree = s.branch(0, turns="all", n=400)
        turns = tree.leaves[0].turns
        moves = [json.loads(one.calls[0].arguments)["numbers"][0] for one in turns if one.calls]
        exact = [
            value(skewed, 0, 0),
            value(skewed, 1, moves[0]),
            value(skewed, 2, sum(moves)),
            won(s.batch["turns"][0]),
        ]
        assert tree.points == (0, 2, 4) and len(tree.leaves) == 1201
        for turn, expected in zip(tree.points, exact, strict=False):
            found = tree.value(turn)
            spread = math.sqrt(expected * (1 - expected) / 400)
            assert abs(found.mean - expected) <= 4 * spread and found.count == 400
            assert found.error == pytest.approx(math.sqrt(found.mean * (1 - found.mean) / 399), abs=1e-9)
        credit = tree.credit()
        for line, gained in zip(credit.itertuples(), (b - a for a, b in itertools.pairwise(exact)), strict=True):
            assert abs(line.advantage - gained) <= 4 * max(line.error, 1e-9)
        assert credit["advantage"].sum() == pytest.approx(exact[-1] - tree.value(0).mean)

    @pytest.mark.parametrize(("turn", "n"), [(0, 18), (2, 6), (4, 2)])
    def test_all_continuations_give_the_exact_value(self, tokenizer: Any, turn: int, n: int) -> None:
        """A policy that draws each option alike, and every continuation once."""
        shape = [3, 3, 2][turn // 2 :]
        lines = list(itertools.product(*map(range, shape)))
        assert len(lines) == n
        game = Game(tokenizer, even, lambda turn: [1, 0, 0][turn])
        s = played(game)
        drawn = {place: iter([line[place - turn // 2] for line in lines]) for place in range(turn // 2, 3)}
        game.order = lambda turn: next(drawn[turn])
        tree = s.branch(0, turn=turn, n=n)
        told = {tuple(one["text"] for one in turns[turn::2]) for turns in tree.batch["turns"][1:]}
        assert len(told) == n, "every continuation once"
        assert tree.value(turn).mean == pytest.approx(value(even, turn // 2, 0 if turn == 0 else 1), abs=1e-12)


class TestContinuations:
    def test_what_is_before_the_turn_is_shared_and_not_sampled_again(self, tokenizer: Any) -> None:
        game = Game(tokenizer, even)
        s = played(game)
        whole = s.episode(0)
        game.prefixes.clear()
        made = whole.branch(2, n=5)
        assert len(game.prefixes) == 10 and whole.next_role is None and whole.turns == s.episode(0).turns
        first = whole.turns[2].first
        for one in made:
            assert (
                one.turns[:2] == whole.turns[:2]
                and one.output.response_ids[:first] == whole.output.response_ids[:first]
            )
            numbers = [json.loads(turn.calls[0].arguments)["numbers"][0] for turn in one.turns if turn.calls]
            assert [turn.text for turn in one.turns if turn.role == "tool"] == [str(numbers[0]), str(sum(numbers))], (
                "a tool of its own that knows the earlier call"
            )
        assert len({one.output.response_ids for one in made}) > 1
        again = whole.branch(2, n=3)
        assert [one.output.response_ids for one in again] == [one.output.response_ids for one in made[:3]]
        # a continuation is a stepper like others: its own turns come again
        kept = made[1].output.response_ids
        assert made[1].back(2).run().output.response_ids == kept
        assert made[1].branch(4, n=2)[0].turns[:4] == made[1].turns[:4]

    def test_a_tools_turn_is_asked_again(self, tokenizer: Any) -> None:
        tool = Counter()
        stage = EpisodeRollout(Script(tokenizer, [call(numbers=[2]), "2", "two"]), agent=ToolAgent([tool], parser=Tags()),
                               group_size=1, sampling=SAMPLING)  # fmt: skip
        e = stage.episode(prompts(), 0).run()
        (one,) = e.branch(1, n=1)
        assert [turn.role for turn in one.turns] == ["assistant", "tool", "assistant"] and one.turns[2].text == "two"
        assert one.turns[1].text == "2" and not tool.open

    def test_with_a_simulated_user(self, tokenizer: Any) -> None:
        user = User()
        stage = EpisodeRollout(Script(tokenizer, lambda said: "hello" if "no" in said else "hm"),
                               agent=ToolAgent(interactions=[user], max_assistant_turns=3), group_size=1, sampling=SAMPLING)  # fmt: skip
        batch = prompts().with_columns({"extra_info": [{"interaction_kwargs": {"word": "hello"}}]})
        e = stage.episode(batch, 0).run()
        made = e.branch(2 if len(e.turns) > 2 else 0, n=3)
        assert all(one.turns == e.turns for one in made) and not user.open

    def test_wrong_places(self, tokenizer: Any) -> None:
        s = played(Game(tokenizer, even))
        with pytest.raises(PipelineError, match="turn to go back to"):
            s.branch(0, turn=9)
        with pytest.raises(SettingError, match="n; expected a whole number ≥ 1"):
            s.branch(0, turn=0, n=0)
        with pytest.raises(SettingError, match="turns"):
            s.branch(0, turns="some")
        with pytest.raises(PipelineError, match="this episode is not over"):
            s.branch(s.episode(0).back(2))
        with pytest.raises(PipelineError, match=r"expected one of turns 0; found 4; branch there, too: turns=\[0, 4\]"):
            s.branch(0, turn=0, n=2).value(4)

    def test_one_that_breaks_ends_the_others_and_holds_nothing(self, tokenizer: Any) -> None:
        tool, seen = Counter(), itertools.count()
        game = Game(tokenizer, even)
        stage = EpisodeRollout(game, agent=ToolAgent([tool], parser=Tags()), group_size=1, sampling=SAMPLING)
        e = stage.episode(prompts(), 0).run()

        def broken(turn: int) -> int:
            if turn == 2 and next(seen) == 1:
                raise RuntimeError("the engine is gone")
            return 0

        game.order = broken
        with pytest.raises(RuntimeError, match="the engine is gone"):
            e.branch(0, n=4)
        assert not tool.open and e.next_role is None


class TestTree:
    def test_nodes_values_and_credit(self, tokenizer: Any) -> None:
        tree = played(Game(tokenizer, even)).branch(0, turns=[2, 4], n=4)
        assert isinstance(tree, EpisodeTree)
        root, *rest = tree.nodes
        assert (
            root.parent is None
            and root.leaves == tuple(range(9))
            and len(root.turns) == 2
            and math.isnan(root.credit.mean)
        )
        trunk = [node for node in rest if node.recorded]
        assert (
            [node.first for node in trunk] == [2, 4] and trunk[1].leaves == (0,) and trunk[0].leaves == (0, 5, 6, 7, 8)
        )
        rewards = tree.batch["reward"].tolist()
        for node in rest:
            if not node.recorded:
                siblings = [one for one in tree._drawn(node.first) if one not in node.leaves]
                expected = rewards[node.leaves[0]] - sum(rewards[one] for one in siblings) / 3
                assert node.credit.mean == pytest.approx(expected)
        frame = tree.to_pandas()
        assert list(frame["node"]) == list(range(len(frame))) and len(frame) == 11
        nodes = tree.batch["nodes"]
        assert nodes[1, 0] == nodes[0, 0] == 1 and len(set(nodes[1:5].amax(-1).tolist())) == 4
        text = repr(tree)
        assert "8 continuations · from turns 2, 4" in text and "<script" not in tree._repr_html_()

    def test_rows_that_cannot_be_scored_leave_the_means(self, tokenizer: Any) -> None:
        calls = itertools.count()

        def flaky(turns: Any) -> Any:
            return None if next(calls) % 2 else won(turns)

        tree = played(Game(tokenizer, even)).branch(0, turn=0, n=6, reward=wb.rewards.Reward(flaky, in_process=True))
        scored = tree.batch["scored"][1:]
        assert 0 < tree.value(0).count == int(scored.sum()) < 6
        assert tree.value(0).mean == pytest.approx(float(tree.batch["reward"][1:][scored].mean()))
        assert repr(tree)

    def test_an_edited_episode_is_branched(self, tokenizer: Any) -> None:
        s = played(Game(tokenizer, even))
        e = s.episode(0).replace(1, "7").run()
        tree = s.branch(e, turn=2, n=3)
        assert all(one.turns[1].text == "7" and one.turns[1].edited for one in tree.leaves)


class TestTreeRollout:
    def stage(self, tokenizer: Any, policy: Any = even, **settings: Any) -> TreeRollout:
        given = {"group_size": 6, "branches": 2, "branch_turns": "random", "sampling": SAMPLING, **settings}
        return TreeRollout(Game(tokenizer, policy), agent=ToolAgent([Counter()], parser=Tags()), **given)

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("turns", ["random", "every"])
    def test_groups_are_trees(self, tokenizer: Any, turns: str, deterministic: bool) -> None:
        stage = self.stage(tokenizer, branch_turns=turns, deterministic=deterministic)
        batch = stage(prompts(2)).batch
        assert batch["uid"].tolist() == ["p0"] * 6 + ["p1"] * 6 and batch.meta_info["group_size"] == 6
        sampled = len(stage.sampler.prefixes)
        for first in (0, 6):
            for row, source in zip(range(first + 2, first + 6), (first, first, first + 1, first + 1), strict=True):
                shared = (batch["nodes"][row] == batch["nodes"][source]) & (batch["nodes"][row] > 0)
                count = int(shared.sum())
                assert count and bool(shared[:count].all())
                assert torch.equal(batch["responses"][row, :count], batch["responses"][source, :count])
                assert count in {turn["first"] for turn in batch["turns"][source] if turn["role"] == "assistant"}
        places = [int((batch["nodes"][row] == batch["nodes"][0]).sum()) for row in (2, 3)]
        if turns == "every":
            assert places == [batch["turns"][0][2]["first"], batch["turns"][0][4]["first"]]
        assert sampled < 12 * 3, "shared turns are sampled once"
        assert torch.equal(stage(prompts(2)).batch["responses"], batch["responses"]), "the same seeds, the same trees"

    def test_whole_episodes_are_the_rollouts_own(self, tokenizer: Any) -> None:
        trees = self.stage(tokenizer)(prompts(2)).batch
        plain = EpisodeRollout(Game(tokenizer, even), agent=ToolAgent([Counter()], parser=Tags()), group_size=6,
                               sampling=SAMPLING)(prompts(2)).batch  # fmt: skip
        for row in (0, 1, 6, 7):
            assert trees["turns"][row] == plain["turns"][row]

    def test_one_turn_alone_is_sampled_anew(self, tokenizer: Any) -> None:
        stage = TreeRollout(Script(tokenizer, ["4", "5", "6", "7"]), agent=ToolAgent([Counter()], parser=Tags()),
                            group_size=4, branch_turns="every", sampling=SAMPLING)  # fmt: skip
        outcome = stage(prompts())
        assert [row[0] for row in outcome.batch["nodes"].tolist()] == [1, 2, 3, 4] and len(outcome.rows) == 4
        assert outcome.metrics["tree/branched"].value == 0

    def test_shared_tokens_are_learnt_once(self, tokenizer: Any) -> None:
        batch = Reward(won, in_process=True)(self.stage(tokenizer)(prompts(2)).batch).batch
        scored = batch["scored"].clone()
        scored[0] = False
        made = LearntOnce()(batch.with_columns({"scored": scored})).batch
        mask, nodes = made["loss_mask"], batch["nodes"]
        assert (mask <= batch["response_mask"]).all() and (mask[0] == 0).all()
        for first in (0, 6):
            for place in range(nodes.shape[1]):
                for node in set(nodes[first : first + 6, place].tolist()) - {0}:
                    there = [row for row in range(first, first + 6) if nodes[row, place] == node]
                    told = [row for row in there if scored[row]]
                    own = int(batch["response_mask"][there[0], place])
                    assert mask[there, place].sum() == (own if told else 0)

    def test_settings(self, tokenizer: Any) -> None:
        for wrong, said in (({"branches": 0}, "branches"), ({"branch_turns": "best"}, "branch_turns"),
                            ({"branch_turns": "entropy"}, "an engine that scores tokens")):  # fmt: skip
            with pytest.raises(SettingError, match=said):
                self.stage(tokenizer, **wrong)
        with pytest.raises(SettingError, match="ToolAgent"):
            TreeRollout(Script(tokenizer, ["4"]), agent="single_turn", branch_turns="every")
        held_out = validation_rollout(self.stage(tokenizer))
        assert held_out.group_size == 1 and held_out.purpose == "validation"
        assert len(held_out(prompts(2)).batch) == 2
        assert self.stage(tokenizer).with_settings(branches=1).whole == 3


@pytest.mark.parametrize("credit", ["turn", "arpo", "tree_rl", "tree_grpo"])
def test_it_trains(tiny: str, credit: str) -> None:
    engine = wb.engines.local(ROOT / "data" / "tiny-arith-tools", device="cpu", lr=1e-3)
    tools = wb.agents.load_tools(ROOT / "data" / "arith-tools" / "tools.yaml")
    agent = ToolAgent(tools, parser="hermes", max_assistant_turns=4)
    rows = wb.rows("data/arith-tools/train.parquet", max_prompt_length=256)
    pipe = tree_grpo(engine, agent=agent, credit=credit, group_size=8, max_tokens=96)
    s = wb.Stepper(pipe, rows.batch(4)).run()
    batch, metrics = s.batch, s.trace["update_actor"].metrics
    assert metrics["actor/grad_norm"] > 0 and torch.equal(batch["advantages"] * batch["loss_mask"], batch["advantages"])
    sampled = s.trace["rollout"].metrics["tree/sampled_tokens"]
    assert s.trace["learnt_once"].metrics["tree/learnt_tokens"] == sampled < int(batch["response_mask"].sum())
    through = len(Shared(batch, torch.device("cpu")).labels)
    assert through <= sampled, "and shared turns go through the model once, when scored and learnt"
    with pytest.raises(SettingError, match="agent"):
        tree_grpo(engine)


def test_a_correction_leaves_shared_tokens_to_one_row(tiny: str) -> None:
    engine = wb.engines.local(ROOT / "data" / "tiny-arith-tools", device="cpu", lr=1e-3)
    agent = ToolAgent(wb.agents.load_tools(ROOT / "data" / "arith-tools" / "tools.yaml"), parser="hermes")
    pipe = tree_grpo(engine, agent=agent, group_size=4, max_tokens=96, branch_turns="every")
    strict = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    s = wb.Stepper(
        wb.recipes.with_rollout_correction(pipe, **strict), wb.rows("data/arith-tools/train.parquet").batch(4)
    )
    s.run(until="rollout_correction")
    assert torch.equal(s.batch["loss_mask"], s.trace["learnt_once"].batch["loss_mask"]), "nothing was rejected"
    with pytest.raises(PipelineError, match="computes loss_mask anew.*no stage 'learnt_once'"):
        wb.recipes.with_rollout_correction(pipe, bypass_mode=True, **strict)


def test_a_leaf_is_one_sequence() -> None:
    one = AgentLoopOutput((1,), (2,), (1,), (0.0,))
    assert only_sequence((one,)) is one
    with pytest.raises(SettingError, match="expected one; found 2; branch an agent without compaction"):
        only_sequence((one, one))

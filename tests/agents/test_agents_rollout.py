"""Episodes as a rollout: on the tiny model, through several turns, and 256 at once with a stub sampler."""

from __future__ import annotations

import asyncio
import inspect
import random
import runpy
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import LLAMA, NO_SYSTEM, QWEN, Adder, Always, Script, Tags, User, call
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples, patience

import workbench as wb
from workbench.agents import (
    AgentLoopBase,
    AgentLoopOutput,
    BaseInteraction,
    SingleTurn,
    ToolAgent,
    ToolResponse,
    Turn,
)
from workbench.base.errors import DataError, ForeignError, PipelineError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import LossCounts, SamplingSettings, local
from workbench.recipes import grpo, reinforce_plus_plus
from workbench.rewards.managers import ManagerReward, NaiveRewardManager
from workbench.rewards.score import Status
from workbench.runs.loop import run_step
from workbench.stages import (
    EpisodeRollout,
    Pipeline,
    PolicyLoss,
    Reward,
    Rollout,
    TurnScores,
    ValueLoss,
    place_turn_scores,
    validation_rollout,
)

TEMPERATURE = 1.3
SAMPLING = SamplingSettings(max_tokens=160, temperature=TEMPERATURE)


def agent(answer: str = "", **changes: Any) -> ToolAgent:
    tool = Adder(lambda given: ToolResponse(text=f"{given['numbers'][0]} {answer}"))
    return ToolAgent([tool], **{"parser": Always(), "max_assistant_turns": 3, "max_tokens_per_turn": 30, **changes})


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Any:
    return local(request.getfixturevalue("tiny"))


@pytest.fixture(scope="module")
def rows() -> Any:
    return wb.rows(str(Path(__file__).parents[2] / "data" / "arith" / "train.parquet"))


def batch_of(rows: Any, n: int = 2, seed: int = 5) -> DataProto:
    batch: DataProto = rows.batch(n)
    return batch.with_meta(seed=seed, step=1)


def same(a: DataProto, b: DataProto) -> bool:
    tensors = all(torch.equal(a[name], b[name]) for name in a.batch)
    return tensors and all(list(a[name]) == list(b[name]) for name in a.non_tensor_batch)


@pytest.mark.slow
def test_columns_of_episodes(engine: Any, rows: Any) -> None:
    outcome = EpisodeRollout(engine, agent=agent(), group_size=3, sampling=SAMPLING)(batch_of(rows))
    found = outcome.batch
    assert len(found) == 6 and outcome.rows is not None and outcome.rows.tolist() == [0, 0, 0, 1, 1, 1]
    mask, attention = found["response_mask"], found["attention_mask"][:, -found["responses"].shape[1] :]
    assert (mask <= attention).all() and (mask.sum(-1) < attention.sum(-1)).all()
    assert torch.equal(found["rollout_log_probs"] != 0, mask.bool())
    width = found["prompts"].shape[1]
    assert torch.equal(found["input_ids"][:, width:], found["responses"])
    for row in range(6):
        places = found["position_ids"][row][found["attention_mask"][row].bool()]
        assert places.tolist() == list(range(len(places)))
        own = torch.zeros_like(mask[row])
        for turn in found["turns"][row]:
            assert attention[row, turn["first"] : turn["last"] + 1].all()
            if turn["role"] == "assistant":
                own[turn["first"] : turn["last"] + 1] = 1
        assert torch.equal(own, mask[row]) and found["num_turns"][row] == 6 and found["num_tool_calls"][row] == 2
        assert found["tool_rewards"][row] == [0.25, 0.25] and found["agent_extra"][row] == {
            "tool_totals": {"add": 2.0},
            "errors": [],
        }
    metrics = outcome.metrics
    assert metrics["agent_loop/num_turns/max"].value == 6 and metrics["agent_loop/tool_calls/max"].value > 0
    assert {"agent_loop/generate_sequences/min", "response_length/mean"} <= set(metrics)


@pytest.mark.slow
def test_a_single_turn_is_the_plain_rollout(engine: Any, rows: Any) -> None:
    plain = Rollout(engine, group_size=2, sampling=SAMPLING)(batch_of(rows)).batch
    turned = EpisodeRollout(engine, agent="single_turn_agent", group_size=2, sampling=SAMPLING, deterministic=True)(
        batch_of(rows)
    ).batch
    assert all(torch.equal(plain[name], turned[name]) for name in plain.batch)
    assert list(plain["response_text"]) == list(turned["response_text"]) and set(turned["num_turns"]) == {2}
    tooled = EpisodeRollout(engine, agent=ToolAgent(), group_size=2, sampling=SAMPLING)(batch_of(rows)).batch
    assert torch.equal(plain["responses"], tooled["responses"])


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_seed_gives_the_same_episodes(engine: Any, rows: Any, deterministic: bool) -> None:
    delays = iter([0.0, 0.03, 0.01, 0.0, 0.02] * 40)

    def slow() -> ToolAgent:
        loop = agent()
        for tool in loop._box.tools.values():
            tool.seconds = next(delays)  # type: ignore[attr-defined]
        return loop

    found = [
        EpisodeRollout(engine, agent=slow(), group_size=3, sampling=SAMPLING, deterministic=deterministic)(
            batch_of(rows)
        ).batch
        for _ in range(2)
    ]
    if deterministic:
        assert same(*found)
    assert torch.equal(found[0]["responses"], found[1]["responses"])
    other = EpisodeRollout(engine, agent=agent(), group_size=3, sampling=SAMPLING)(batch_of(rows, seed=6)).batch
    assert other["responses"].shape != found[0]["responses"].shape or not torch.equal(
        other["responses"], found[0]["responses"]
    )


@pytest.mark.slow
def test_lock_step_waves(rows: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")
    order: list[int] = []

    def write(context: str) -> str:
        turns = context.count("<|im_start|>tool")
        order.append(turns)
        return call(numbers=[1], seconds=0.03 * (len(order) % 3)) if turns < len(order) % 4 else "done"

    loop = ToolAgent([Adder()], parser=Tags())
    stage = EpisodeRollout(
        Script(tokenizer, write),
        agent=loop,
        group_size=8,
        sampling=SamplingSettings(max_tokens=900),
        deterministic=True,
    )
    stage(batch_of(rows))
    assert order == sorted(order) and len(set(order)) > 2  # every turn n before any turn n + 1


texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)


@pytest.mark.slow
@pytest.mark.long
@given(
    st.sampled_from(("own", "qwen", "llama", "no system")),
    texts,
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from(("function_calling", "react")),
    st.integers(1, 30),
)
@settings(max_examples=examples(16), deadline=None)
def test_the_trainer_finds_the_samplers_log_probs(
    engine: Any, rows: Any, template: str, text: str, seed: int, greedy: bool, form: str, longest: int
) -> None:
    # headers of other models are plain text to the tiny model's tokenizer: its end token closes none of their turns
    others = {"own": engine.tokenizer.chat_template, "qwen": QWEN, "llama": LLAMA, "no system": NO_SYSTEM}
    kept = engine.tokenizer.chat_template
    users = [Nagging(text)] if seed % 2 else []
    loop = ToolAgent(
        [Adder(lambda given: ToolResponse(text=f"{given['numbers'][0]} {text}"))],
        parser=Odd(),
        format=form,
        tool_role="user" if template == "no system" else None,
        interactions=users,
        max_assistant_turns=4,
        max_tokens_per_turn=longest,
    )
    asked = [{"interaction_kwargs": {"name": "nagging"}} if users else {}] * 2
    try:
        engine.tokenizer.chat_template = others[template]
        sampling = SamplingSettings(max_tokens=300, temperature=0.0 if greedy else TEMPERATURE)
        batch = EpisodeRollout(engine, agent=loop, group_size=2, sampling=sampling)(
            batch_of(rows, 2, seed).with_columns({"extra_info": asked})
        ).batch
    finally:
        engine.tokenizer.chat_template = kept
    found = engine.compute_log_probs(batch, ("log_probs",), 1.0 if greedy else TEMPERATURE)["log_probs"]
    own = batch["response_mask"].bool()
    assert max(batch["num_turns"]) > 2 or not users
    torch.testing.assert_close(found[own], batch["rollout_log_probs"][own], atol=2e-4, rtol=0)
    assert (batch["rollout_log_probs"][~own] == 0).all()


class Odd(Always):
    """Every other beginning of a text is a call."""

    def extract_tool_calls(self, text: str, tools: Any) -> Any:
        return Always().extract_tool_calls(text, tools) if ord(text[:1] or "0") % 2 else (text, [])


class Nagging(BaseInteraction):
    """Asks again, whatever is said."""

    def __init__(self, text: str) -> None:
        super().__init__({"name": "nagging"})
        self.text = text

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return False, f"again {self.text}", 0.0, {}


@pytest.mark.slow
@pytest.mark.parametrize("lock_step", [True, False])
def test_episodes_of_mixed_lengths_with_tools_of_random_slowness_are_the_same_again(
    engine: Any, rows: Any, lock_step: bool
) -> None:
    pause = random.Random(7)  # goes on from run to run: no call takes as long as it took before

    class Slow(Adder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            self.seconds = pause.random() * 0.02
            return await super().execute(instance_id, parameters, **kwargs)

    def once() -> DataProto:
        limits: dict[str, Any] = {"max_assistant_turns": 5, "max_tokens_per_turn": 12}
        loop = {
            "nagged": ToolAgent([Slow()], parser=Odd(), interactions=[Nagging("x")], **limits),
            "alone": ToolAgent([Slow()], parser=Odd(), **limits),
        }
        batch = batch_of(rows, 4).with_columns({"agent_name": ["nagged", "alone"] * 2})
        stage = EpisodeRollout(engine, agent=loop, group_size=3, sampling=SAMPLING, deterministic=lock_step)
        return stage(batch).batch

    one, two = once(), once()
    assert len(set(one["num_turns"])) > 3
    if lock_step:
        assert same(one, two)
    else:  # waves differ, and sums in them by the last bits
        assert [[turn["text"] for turn in turns] for turns in one["turns"]] == [
            [turn["text"] for turn in turns] for turns in two["turns"]
        ]


MODES = ("vanilla", "gspo", "cispo", "gpg", "geo_mean")


def taught(engine: Any, batch: DataProto, mode: str) -> dict[str, torch.Tensor]:
    """The weights after one step."""
    start = engine.snapshot()
    agg = "seq-mean-token-mean" if mode == "gspo" else "token-mean"
    engine.learn(
        batch,
        PolicyLoss(loss_mode=mode, loss_agg_mode=agg, kl_coef=0.1, entropy_coeff=0.01),
        LossCounts(float(batch["response_mask"].sum()), float(len(batch))),
    )
    weights = {name: value.clone() for name, value in engine._model.state_dict().items()}
    engine.restore(start)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tool_tokens_have_no_gradient(engine: Any, rows: Any, mode: str) -> None:
    batch = EpisodeRollout(engine, agent=agent(), group_size=2, sampling=SAMPLING)(batch_of(rows)).batch
    outside = batch["response_mask"] == 0
    assert (outside & batch["attention_mask"][:, -outside.shape[1] :].bool()).any()
    old = engine.compute_log_probs(batch)["log_probs"]
    torch.manual_seed(1)
    advantages = torch.randn(outside.shape)
    noise = torch.randn(outside.shape)
    quiet = {"old_log_probs": old, "ref_log_prob": old - 0.1, "advantages": advantages * ~outside}
    loud = {name: torch.where(outside, noise * 100, value) for name, value in quiet.items()}
    a, b = taught(engine, batch.with_columns(quiet), mode), taught(engine, batch.with_columns(loud), mode)
    before = engine._model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], before[name]) for name in a)
    # and directly: the loss's gradient at each token's log-prob
    leaf = (old + 0.05).requires_grad_()
    entropy = torch.ones_like(old).requires_grad_()
    rows_of = batch.with_columns(loud)
    agg = "seq-mean-token-mean" if mode == "gspo" else "token-mean"
    loss = PolicyLoss(loss_mode=mode, loss_agg_mode=agg, kl_coef=0.1, entropy_coeff=0.01)
    loss(
        {"log_probs": leaf, "entropy": entropy}, rows_of, LossCounts(float((~outside).sum()), float(len(batch)))
    ).loss.backward()
    assert leaf.grad is not None and entropy.grad is not None
    assert (leaf.grad[outside] == 0).all() and (entropy.grad[outside] == 0).all() and (leaf.grad[~outside] != 0).any()


@pytest.mark.slow
def test_a_critic_learns_nothing_of_tool_tokens(engine: Any, rows: Any) -> None:
    batch = EpisodeRollout(engine, agent=agent(), group_size=2, sampling=SAMPLING)(batch_of(rows)).batch
    outside = batch["response_mask"] == 0
    assert (outside & batch["attention_mask"][:, -outside.shape[1] :].bool()).any()
    torch.manual_seed(2)
    values, rewards = torch.randn(outside.shape), torch.randn(outside.shape) * ~outside
    loud = torch.where(outside, 100.0, values)
    (advantages, returns), theirs = (wb.functional.gae(rewards, one, ~outside, 0.9, 0.8) for one in (values, loud))
    assert torch.equal(advantages, theirs[0]) and torch.equal(returns, theirs[1])  # carried over a tool's text as it is
    leaf = (loud + 0.1).requires_grad_()
    targets = batch.with_columns({"values": loud, "returns": torch.where(outside, -100.0, returns)})
    found = ValueLoss()({"values": leaf}, targets, LossCounts(float((~outside).sum()), float(len(batch))))
    found.loss.backward()
    assert leaf.grad is not None and (leaf.grad[outside] == 0).all() and (leaf.grad[~outside] != 0).any()


@pytest.mark.slow
def test_256_episodes_with_a_slow_tool_run_at_once(rows: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")

    def write(context: str) -> str:
        asked, heard = sum(map(ord, context.split("user\n")[1][:20])) % 4, context.count("<|im_start|>tool")
        if heard == 0 and asked == 3 and hanging.pop("once", None):
            return call(numbers=[1], seconds=3600)
        return call(numbers=[heard], seconds=0.2 * slow[0]) if heard < asked else f"said {heard}"

    hanging, slow = {"once": True}, [1.0]
    tool = Adder()
    loop = ToolAgent([tool], parser=Tags(), seconds_per_call=patience(2.0))
    stage = EpisodeRollout(
        Script(tokenizer, write, 0.01), agent=loop, group_size=4, sampling=SamplingSettings(max_tokens=900)
    )
    batch = batch_of(rows, 64)
    found = stage(batch).batch
    calls = [turn["calls"][0] for turns in found["turns"] for turn in turns if turn["calls"]]
    late = [
        row for row, turns in enumerate(found["turns"]) if any(c["status"] == "late" for t in turns for c in t["calls"])
    ]
    assert len(found) == 256 and len(calls) > 300 and len(late) == 1 and tool.most > 50
    slow[0] = 0.0
    quick = stage(batch).batch
    assert [len(t) for r, t in enumerate(quick["turns"]) if r not in late] == [
        len(t) for r, t in enumerate(found["turns"]) if r not in late
    ]
    assert all(
        one["status"] == "ok"
        for row, turns in enumerate(found["turns"])
        if row not in late
        for t in turns
        for one in t["calls"]
    )
    assert not tool.open and {turns[-1]["role"] for turns in found["turns"]} == {"assistant"}


@pytest.mark.slow
def test_rewards_are_told_of_the_episode(engine: Any, rows: Any) -> None:
    def judge(response: str, num_tool_calls: int, turns: Any, extra_info: dict[str, Any]) -> dict[str, float]:
        assert extra_info["num_turns"] == 6 and extra_info["turns"] == turns and turns[1]["role"] == "tool"
        assert "add" not in extra_info and extra_info["tool_rewards"] == [0.25, 0.25]
        return {"score": 1.0 - 0.1 * num_tool_calls, "calls": num_tool_calls}

    seen: list[int] = []

    def ids(completion_ids: list[list[int]]) -> list[float]:
        seen.extend(map(len, completion_ids))
        return [0.0] * len(completion_ids)

    batch = EpisodeRollout(engine, agent=agent(), group_size=2, sampling=SAMPLING)(batch_of(rows)).batch
    judged = Reward(judge, in_process=True)(batch).batch
    assert judged["reward"].tolist() == pytest.approx([0.8] * 4) and judged["reward/calls"].tolist() == [2.0] * 4
    last = batch["response_mask"].shape[1] - 1 - batch["response_mask"].flip(-1).argmax(-1)
    assert judged["token_level_scores"].argmax(-1).tolist() == last.tolist()
    Reward(ids, in_process=True)(batch)
    assert seen == batch["attention_mask"][:, -batch["responses"].shape[1] :].sum(-1).tolist()
    # the pool's processes get plain values, and a pipeline that judges beside the rollout gets the same rows
    pipeline = grpo(engine, judge, group_size=2, sampling=SAMPLING, agent=agent(), kl_coef=0)
    assert isinstance(pipeline["rollout"], EpisodeRollout)
    trained = wb.Stepper(pipeline, batch_of(rows)).run().batch
    assert trained["reward"].tolist() == pytest.approx([0.8] * 4)


def test_turn_scores_stand_on_the_turns_last_tokens(rows: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")
    chat = batch_of(rows, 1)
    chat = chat.with_columns({"extra_info": [{"interaction_kwargs": {"word": "five"}}]})
    sampler = Script(tokenizer, [call(numbers=[2]), "six", "five"])
    loop = ToolAgent([Adder()], parser=Tags(), interactions=[User()])
    batch = EpisodeRollout(sampler, agent=loop, group_size=1, sampling=SamplingSettings(max_tokens=500))(chat).batch
    assert batch["turn_scores"][0] == [0.5, 1.0] and batch["num_turns"][0] == 6
    asked, six, five = (turn["last"] for turn in batch["turns"][0] if turn["role"] == "assistant")
    placed = place_turn_scores(batch)
    assert {int(n): float(placed[0, n]) for n in placed[0].nonzero()} == {six: 0.5, five: 1.0}
    judged = Reward(lambda response: 3.0, in_process=True, name="r")(batch).batch
    total = TurnScores(turn_weight=2.0, tool_weight=4.0)(judged).batch["token_level_scores"]
    assert {int(n): float(total[0, n]) for n in total[0].nonzero()} == {asked: 1.0, six: 1.0, five: 5.0}
    assert judged["reward"].tolist() == [3.0]


class Own(AgentLoopBase):
    """A loop as somebody writes one: an answer is asked for twice."""

    name = "own"

    async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:
        prompt = self.tokenizer(str(row["raw_prompt"][-1]["content"]), add_special_tokens=False)["input_ids"]
        one = await self.generate(prompt, sampling_params, max_tokens=4)
        two = await self.generate([*prompt, *one.ids], sampling_params, max_tokens=4)
        if row.get("broken"):
            raise ZeroDivisionError("mine")
        ids = one.ids + two.ids
        return AgentLoopOutput(prompt, ids, [1] * len(ids), one.log_probs + two.log_probs)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rows_choose_their_loop(engine: Any, rows: Any) -> None:
    batch = batch_of(rows, 3).with_columns({"agent_name": ["own", "single_turn_agent", None]})
    stage = EpisodeRollout(
        engine, agent={"own": Own(), "tool_agent": agent()}, default_agent="tool_agent", group_size=2, sampling=SAMPLING
    )
    found = stage(batch).batch
    assert list(found["num_turns"]) == [2, 2, 2, 2, 6, 6] and found["response_mask"][0].sum() <= 8
    assert [len(one) for one in found["turns"]] == [0, 0, 1, 1, 5, 5] and set(stage.settings()["agent"]) == {
        "own",
        "tool_agent",
    }
    with pytest.raises(SettingError, match="row 0 .uid .*'onw' is not a registered agent loop.*did you mean 'own'"):
        stage(batch.with_columns({"agent_name": ["onw", None, None]}))
    with pytest.raises(ForeignError, match=r"agent loop 'own', row 2 .*ZeroDivisionError: mine"):
        EpisodeRollout(engine, agent=Own(), group_size=1)(batch_of(rows, 3).with_columns({"broken": [0, 0, 1]}))


@pytest.mark.slow
def test_a_loop_given_alone_runs_every_row(engine: Any, rows: Any) -> None:
    batch = batch_of(rows, 2).with_columns({"agent_name": ["tool_agent", "own"]})
    found = EpisodeRollout(engine, agent=agent(name="calc"), group_size=1, sampling=SAMPLING)(batch).batch
    assert list(found["num_tool_calls"]) == [2, 2]
    assert len(EpisodeRollout(engine, agent=Own(), group_size=1, sampling=SAMPLING)(batch).batch["turns"][0]) == 0


@pytest.mark.slow
def test_when_one_loop_breaks_the_others_let_go(rows: Any) -> None:
    class Late(AgentLoopBase):
        async def run(self, sampling_params: Any, **row: Any) -> AgentLoopOutput:
            await asyncio.sleep(0.3)
            open_then.append((len(tool.open), len(user.open)))
            raise KeyError("late")

    open_then: list[tuple[int, int]] = []
    tool, user = Adder(), User()
    loop = ToolAgent([tool], parser=Tags(), interactions=[user], name="tools")
    names, words = ["tools", "tools", "late"], [{"interaction_kwargs": {"word": "five"}}] * 3
    batch = batch_of(rows, 3).with_columns({"agent_name": names, "extra_info": words})
    from transformers import AutoTokenizer

    sampler = Script(AutoTokenizer.from_pretrained("data/tiny-arith"), lambda context: call(numbers=[1], seconds=3600))
    for deterministic in (False, True):
        stage = EpisodeRollout(
            sampler, agent={"tools": loop, "late": Late()}, group_size=2, sampling=SAMPLING, deterministic=deterministic
        )
        with pytest.raises(ForeignError, match="agent loop 'Late', row 4 .*late"):
            stage(batch)
        assert not tool.open and not user.open
    assert open_then[0] == (4, 4) and open_then[-1] == (0, 4)  # in lock-step nobody had spoken yet


@pytest.mark.slow
def test_the_loop_in_the_docstring(engine: Any, rows: Any, tmp_path: Path) -> None:
    example = inspect.cleandoc(str(AgentLoopBase.__doc__)).split("::\n")[1].split("    pipeline =")[0]
    written = tmp_path / "twice.py"
    written.write_text("from workbench.agents import *\n" + textwrap.dedent(example))
    names = runpy.run_path(str(written))
    found = EpisodeRollout(engine, agent=names["Twice"](), group_size=2, sampling=SAMPLING)(batch_of(rows)).batch
    assert "user" in [one["role"] for one in found["turns"][0]] or found["finish_reason"][0] == "length"
    assert found["agent_extra"][0] == {"sure": found["turns"][0][-1]["text"]}
    heard = [one for turns in found["turns"] for one in turns if one["role"] == "user"]
    assert heard and heard[0]["text"] == "Are you sure?"
    new = engine.compute_log_probs(found, ("log_probs",), TEMPERATURE)["log_probs"][found["response_mask"].bool()]
    torch.testing.assert_close(new, found["rollout_log_probs"][found["response_mask"].bool()], atol=2e-4, rtol=0)


class Returns(AgentLoopBase):
    """A loop that gives back what it is told to."""

    name = "returns"

    def __init__(self, what: Any) -> None:
        self._what = what

    async def run(self, sampling_params: Any, **row: Any) -> Any:
        return self._what() if callable(self._what) else self._what


def test_what_a_loop_of_ones_own_must_return(engine: Any, rows: Any) -> None:
    def output(length: int, **changes: Any) -> AgentLoopOutput:
        given = {"prompt_ids": [5], "response_ids": range(length), "response_mask": [1] * length}
        return AgentLoopOutput(**{**given, "response_logprobs": [-0.5] * length, **changes})

    def rolled(what: Any) -> DataProto:
        stage = EpisodeRollout(engine, agent=Returns(what), group_size=1, sampling=SamplingSettings(max_tokens=6))
        return stage(batch_of(rows, 1)).batch

    with pytest.raises(
        ForeignError,
        match=r"result of agent loop 'returns', row 0 \(uid .*\); expected an AgentLoopOutput, or a list of them; found N",
    ):
        rolled(None)
    with pytest.raises(
        DataError,
        match=r"without response_logprobs; expected the sampled ids.*found token 0 of 3",
    ):
        rolled(lambda: output(3, response_logprobs=None))
    turns = (Turn("assistant", "a", 0, 3), Turn("user", "b", 4, 7), Turn("assistant", "c", 8, 9, cut="short"))
    found = rolled(output(10, turns=turns))
    assert found["responses"].tolist() == [[0, 1, 2, 3, 4, 5]] and found["rollout_log_probs"].shape == (1, 6)
    assert found["response_mask"].tolist() == [[1] * 6] and found["finish_reason"][0] == "length"
    assert [(one["first"], one["last"]) for one in found["turns"][0]] == [(0, 3), (4, 5), (6, 5)]
    assert found["turns"][0][-1]["cut"] == "short; cut: the response has 10 tokens, and max_tokens is 6"
    assert rolled(output(6))["finish_reason"][0] == "stop"


def broken_users(rows: Any, words: Sequence[str]) -> tuple[Any, DataProto]:
    """A rollout of one episode a row whose users want these words, `!` being one that hangs up."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("data/tiny-arith")
    loop = ToolAgent(interactions=[User()], max_assistant_turns=2)
    extra = [{"interaction_kwargs": {"word": word}} for word in words]
    stage = EpisodeRollout(Script(tokenizer, lambda context: "hm five"), agent=loop, group_size=1, sampling=SAMPLING)
    return stage, batch_of(rows, len(words)).with_columns({"extra_info": extra})


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_episode_whose_user_failed_is_no_judgement(rows: Any, overlapped: bool) -> None:
    stage, batch = broken_users(rows, ["five", "!", "six"])
    asked: list[str] = []

    def judge(response: str, finish_reason: str) -> float:
        asked.append(finish_reason)
        return 1.0

    pipeline = Pipeline([stage, Reward(judge, in_process=True), TurnScores()])
    outcome = run_step(pipeline.streaming_rewards() if overlapped else pipeline, batch)
    found = outcome.batch
    assert found["scored"].tolist() == [True, False, True] and len(asked) == 2 and "abort" not in asked
    score = found["score"][1]
    assert score.status is Status.INFRA_ERROR and "ValueError: the user hung up" in score.why
    assert found["reward"].tolist() == [1.0, 0.0, 1.0] and (found["token_level_scores"][1] == 0).all()
    metrics = outcome.phases[0].metrics
    assert metrics["agent_loop/errors"] == 1 and metrics["agent_loop/tool_errors"] == 0


def test_where_every_user_failed_the_step_ends(rows: Any) -> None:
    stage, batch = broken_users(rows, ["!", "!"])
    with pytest.raises(
        ForeignError, match="all 2 episodes failed; found generate_response: ValueError: the user hung up"
    ):
        stage(batch)


def test_turn_scores_behind_the_reward(engine: Any) -> None:
    made = reinforce_plus_plus(engine, lambda response: 1.0, agent=agent()).insert_after("reward", TurnScores())
    assert made.names[:3] == ("rollout", "reward", "turn_scores")
    plain = reinforce_plus_plus(engine, lambda response: 1.0, agent=agent())
    with pytest.raises(
        PipelineError, match="changes token_level_scores, but no later stage reads it; stage 'advantage'"
    ):
        plain.insert_after("advantage", TurnScores())


def test_a_manager_does_not_judge_an_episode_that_broke(rows: Any) -> None:
    stage, batch = broken_users(rows, ["five", "!"])
    manager = NaiveRewardManager(stage.sampler.tokenizer, compute_score=lambda **row: 1.0)
    found = Pipeline([stage, Reward(ManagerReward(manager))])
    judged = run_step(found, batch).batch
    assert judged["scored"].tolist() == [True, False] and "hung up" in judged["score"][1].why


@pytest.mark.slow
def test_failing_calls_are_counted(engine: Any, rows: Any) -> None:
    found = EpisodeRollout(engine, agent=agent(), group_size=2, sampling=SAMPLING)(batch_of(rows)).metrics
    assert found["agent_loop/tool_errors"].value == found["agent_loop/errors"].value == 0
    broken = ToolAgent([Adder(lambda given: 1 / 0)], parser=Always(), max_assistant_turns=2, max_tokens_per_turn=20)
    found = EpisodeRollout(engine, agent=broken, group_size=2, sampling=SAMPLING)(batch_of(rows)).metrics
    assert found["agent_loop/tool_errors"].value == 4 and found["agent_loop/errors"].value == 0


def test_prompts_that_tools_make_too_long_are_refused(engine: Any, rows: Any) -> None:
    for deterministic in (True, False):
        stage = EpisodeRollout(
            engine, agent=agent(format="react"), group_size=2, sampling=SAMPLING, deterministic=deterministic
        )
        with pytest.raises(DataError, match="as its agent loop writes it; expected 1 to 64 tokens"):
            stage(batch_of(rows).with_meta(max_prompt_length=64))


@pytest.mark.slow
def test_validation_and_saving(engine: Any, rows: Any, tmp_path: Path) -> None:
    stage = EpisodeRollout(engine, agent=agent(), group_size=3, sampling=SAMPLING)
    held = validation_rollout(stage, greedy=True)
    found = held(batch_of(rows)).batch
    assert (
        held.purpose == "validation"
        and held.group_size == 1
        and held.sampling.temperature == 0
        and found["num_turns"][0] == 6
    )
    found.save(tmp_path / "b")
    again = DataProto.load(tmp_path / "b")
    assert same(found, again)
    assert type(validation_rollout(Rollout(engine))) is Rollout
    checked: Sequence[Any] = [SingleTurn().describe(), agent().describe()["tools"][0]["function"]["name"]]
    assert checked == [{}, "add"]


@pytest.mark.slow
def test_a_greedy_baseline_is_an_episode_too(engine: Any, rows: Any) -> None:
    found = EpisodeRollout(engine, agent=agent(), group_size=1, sampling=SAMPLING, greedy_baseline=True)(
        batch_of(rows)
    ).batch
    assert found["greedy"].tolist() == [False, True] * 2
    again = EpisodeRollout(engine, agent=agent(), group_size=1, sampling=SAMPLING.replace(temperature=0.0))(
        batch_of(rows)
    ).batch
    greedy, alone = found["turns"][1], again["turns"][0]
    assert [turn["text"] for turn in greedy] == [turn["text"] for turn in alone]


@pytest.mark.slow
def test_a_run_trains_and_validates_by_episodes(tiny: str, rows: Any, tmp_path: Path) -> None:
    def judge(response: str, num_tool_calls: int) -> float:
        return float(len(response) % 7 + num_tool_calls)

    pipeline = grpo(local(tiny), judge, group_size=2, sampling=SAMPLING, agent=agent(), kl_coef=0)
    plan: dict[str, Any] = {"batch_size": 2, "test_freq": 1, "trace_freq": 1, "display": None, "trackers": ()}
    run = asyncio.run(wb.train(pipeline, rows, steps=2, run=tmp_path / "r", eval_rows=rows[:2], **plan))
    table = run.metrics
    assert table["agent_loop/num_turns/mean"].dropna().tolist() == [6.0, 6.0]
    assert (table["val/reward"].dropna() >= 2).all() and len(table["val/reward"].dropna()) >= 2
    batch = run.traces[2].batch
    assert batch["turns"][0][1]["role"] == "tool" and (batch["sampler_logprob_diff"] < 1e-3).all()
    assert repr(pipeline["rollout"].loops.named(None)) == (
        "ToolAgent(tool_agent: add, Always (function_calling), max_assistant_turns=3, max_tokens_per_turn=30)"
    )

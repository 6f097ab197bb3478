"""A run of episodes, opened again: what is on disk, what its agent is made of, what is recorded and what is handed in anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.agents import (
    Calculator,
    Gsm8kInteraction,
    HermesParser,
    SingleTurn,
    ToolAgent,
    function_tool,
    load_tools,
    register,
)
from workbench.base.errors import PipelineError
from workbench.replay.rebuild import MissingStage, rebuilt
from workbench.runs.settings import written_down
from workbench.stages import EpisodeRollout
from workbench.stages.episodes import recorded_output
from workbench.steps.trace import Trace

DATA = Path(__file__).parents[2] / "data" / "arith-tools" / "train.parquet"
TALKS = DATA.parents[1] / "arith-interaction" / "train.parquet"
SAMPLING = wb.SamplingSettings(max_tokens=56, temperature=1.2)
CALL = '<tool_call>{"name": "doubled", "arguments": {"x": %d}}</tool_call>'


@function_tool
def doubled(x: int) -> str:
    """Doubles."""
    return f"{2 * x}"


class Calls:
    """Whatever the model says is a call of `doubled`."""

    def extract_tool_calls(self, text: str, tools: Any = ()) -> Any:
        return HermesParser().extract_tool_calls(CALL % len(text), tools)


def mine() -> ToolAgent:
    return ToolAgent([doubled], parser=Calls(), max_assistant_turns=3, max_tokens_per_turn=6)


def judge(response: str, num_tool_calls: int, turns: Any) -> float:
    return float(sum(len(turn["text"]) for turn in turns) % 3 + num_tool_calls)


def trained(agent: Any, place: Path, model: str = "data/tiny-arith", longest: int = 56, data: Path = DATA) -> wb.Run:
    rows = wb.rows(str(data), max_prompt_length=500)
    pipeline = wb.recipes.grpo(
        wb.engines.local(model),
        judge,
        group_size=2,
        sampling=SAMPLING.replace(max_tokens=longest),
        agent=agent,
        kl_coef=0,
    )
    pipeline = pipeline.with_stage("rollout", deterministic=True)
    plan: dict[str, Any] = {"batch_size": 2, "trace_freq": 1, "save_freq": 0, "display": None, "trackers": ()}
    return wb.train_blocking(pipeline, rows, steps=2, run=place, **plan)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> wb.Run:
    made = trained(mine(), tmp_path_factory.mktemp("episodes") / "mine")
    return wb.load_run(made.path)


def same(a: Trace, b: Trace) -> bool:
    return not wb.compare(a, b).columns


@pytest.mark.slow
def test_transcripts_are_on_disk_as_they_were(run: wb.Run) -> None:
    batch = run.traces[2].batch
    turns, extra = batch["turns"][0], batch["agent_extra"][0]
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    text = turns[0]["text"]
    assert turns[1]["text"] == str(2 * len(text)) == turns[0]["calls"][0]["result"]
    assert turns[0]["calls"][0]["status"] == "ok" and turns[4]["calls"][0]["status"] == "not run"
    assert extra == {"tool_totals": {"doubled": 0.0}, "errors": []} and batch["num_tool_calls"][0] == 2
    mask = batch["response_mask"][0]
    assert (
        mask[turns[0]["first"] : turns[0]["last"] + 1].all()
        and not mask[turns[1]["first"] : turns[1]["last"] + 1].any()
    )
    assert "ToolAgent" not in json.dumps(batch.meta_info, default=str)


@pytest.mark.slow
def test_an_agent_of_your_own_gives_its_recorded_episodes_and_says_so(run: wb.Run) -> None:
    s = run.stepper(2).run(until="reward")
    assert s.trace.metrics["recorded/rollout"] == 1.0 and s.trace.metrics["recorded/reward"] == 1.0
    assert "rollout: its recorded outputs, not run again (made with doubled in a ToolAgent)" in repr(s)
    recorded = run.traces[2]
    assert same(s.trace, Trace(recorded.start, recorded.phases[: s.position]))
    with pytest.raises(PipelineError, match=r"made with doubled in a ToolAgent.*replace\('rollout', agent=…\)"):
        run.stepper(2).replace("rollout", temperature=0.5)
    # judged again, without a model
    t = run.stepper(2, at="reward").replace("reward", judge).run(until="advantage")
    assert torch.equal(t.batch.reward, recorded.batch.reward) and "no engine is open" in repr(t)


@pytest.mark.slow
def test_the_agent_is_handed_in_anew(run: wb.Run) -> None:
    recorded = run.traces[2]
    for s in (
        run.stepper(2).replace("rollout", agent=mine()).replace("reward", judge).run(),
        run.stepper(2).replace("rollout", mine()).replace("reward", judge).run(),
        run.stepper(2, at="rollout").replace("rollout", agent=mine()).run(),
    ):
        stage = s.pipeline["rollout"]
        assert isinstance(stage, EpisodeRollout) and "recorded/rollout" not in s.trace.metrics
        assert (stage.group_size, stage.sampling) == (2, SAMPLING)
        assert same(s.trace, recorded)  # the run's own episodes and weights, bit for bit
    # and one of its episodes turn by turn, from the recorded step's own seeds
    again = run.stepper(2).replace("rollout", agent=mine()).episode(0).run()
    assert [turn.text for turn in again.turns] == [turn["text"] for turn in recorded.batch["turns"][0]]
    # continuations of it, with the weights of that step
    s = run.stepper(2, at="reward").replace("reward", judge)
    with pytest.raises(PipelineError, match="give the agent"):
        s.branch(0)
    s = run.stepper(2).replace("rollout", agent=mine()).replace("reward", judge).run()
    tree = s.branch(0, turn=2, n=3)
    assert [turn.text for turn in tree.leaves[0].turns] == [turn["text"] for turn in recorded.batch["turns"][0]]
    assert len({one.output.response_ids for one in tree.leaves}) > 1 and tree.value(2).count == 3
    versions = {one.output.metrics["max_version"] for one in tree.leaves[1:]}
    assert versions == {1} == set(recorded.batch["policy_version"].tolist()), "as before the step's update"
    hotter = run.stepper(2).replace("rollout", agent=mine(), temperature=2.0, group_size=3).next()
    assert hotter.pipeline["rollout"].sampling.temperature == 2.0 and len(hotter.batch) == 6


@pytest.mark.slow
def test_an_agent_of_ours_is_made_again(tmp_path: Path) -> None:
    agent = ToolAgent(
        [Calculator()],
        parser=HermesParser(),
        interactions=[Gsm8kInteraction()],
        max_tokens_per_turn=20,
        tool_role="user",
    )
    run = wb.load_run(trained(agent, tmp_path / "ours", data=TALKS).path)
    s = run.stepper(2, at="rollout")
    again = s.pipeline["rollout"]
    assert isinstance(again, EpisodeRollout) and again.settings()["agent"] == {"tool_agent": agent.describe()}
    assert "no engine is open" in repr(s)
    assert same(s.next().trace, Trace(run.traces[2].start, run.traces[2].phases[:1]))
    said = [turn["text"] for turn in run.traces[2].batch["turns"][0]]
    assert [turn.text for turn in run.stepper(2, at="reward").episode(0).turns] == said


@pytest.mark.slow
def test_a_run_of_the_shipped_tools_file_is_stepped_again(tmp_path: Path) -> None:
    tools = load_tools(DATA.parent / "tools.yaml")
    agent = ToolAgent(list(tools.values()), parser=HermesParser(), max_assistant_turns=4)
    run = wb.load_run(trained(agent, tmp_path / "yaml", "data/tiny-arith-tools", 96).path)
    s = run.stepper(2)
    assert isinstance(s.pipeline["rollout"], EpisodeRollout)
    assert same(s.run(until="reward").trace, Trace(run.traces[2].start, run.traces[2].phases[:2]))
    assert sum(s.batch["num_tool_calls"]) > 0


def test_what_is_written_of_agents(tiny: str) -> None:
    engine = wb.engines.local(tiny)

    class Own(SingleTurn):
        pass

    def back(agent: Any, **more: Any) -> Any:
        pipeline = wb.recipes.grpo(engine, judge, agent=agent, kl_coef=0)
        records = json.loads(json.dumps(written_down(pipeline)))
        return rebuilt(records, {"actor": engine}, lambda record: None)["rollout"]

    described = ToolAgent([Calculator()], parser=HermesParser(), max_parallel_calls=2)
    both = back({"tools": described, "plain": "single_turn"})
    assert both.settings()["agent"] == {"tools": described.describe(), "plain": {}} and both.loops.default == "tools"
    assert back("single_turn_agent").loops.default == "single_turn"
    for agent, what in (
        (Own(), "agent loop 'single_turn'"),
        ({"a": Own(), "b": "single_turn"}, "agent loop 'single_turn'"),
        (ToolAgent([Calculator()], parser=Calls()), "in a ToolAgent"),
    ):
        gone = back(agent)
        assert isinstance(gone, MissingStage) and what in gone.what
        assert isinstance(gone.with_settings(agent=agent), EpisodeRollout)


def test_a_name_that_nobody_registered_here_is_missing_and_can_be_given(tiny: str) -> None:
    @register("of a cell")
    class Cells(SingleTurn):
        pass

    from workbench.agents import loop

    engine = wb.engines.local(tiny)
    records = written_down(wb.recipes.grpo(engine, judge, agent="of a cell", kl_coef=0))
    kept = loop._LOOPS.pop("of a cell")
    gone = rebuilt(records, {"actor": engine}, lambda record: None)["rollout"]
    assert isinstance(gone, MissingStage) and "'of a cell' is not a registered agent loop" in gone.what
    loop._LOOPS["of a cell"] = kept
    try:
        assert isinstance(rebuilt(records, {"actor": engine}, lambda record: None)["rollout"], EpisodeRollout)
        assert isinstance(gone.with_settings(agent="of a cell"), EpisodeRollout)
    finally:
        loop._LOOPS.pop("of a cell")


@pytest.mark.slow
def test_an_episode_of_a_past_step_is_stepped(run: wb.Run) -> None:
    with pytest.raises(PipelineError, match=r"recorded episodes of stage 'rollout'.*replace\('rollout', agent=…\)"):
        run.stepper(2, at="reward").episode(1)
    s = run.stepper(2).replace("rollout", agent=mine()).replace("reward", judge).run()
    e = s.episode(1)
    assert e.output.response_ids == recorded_output(run.traces[2].batch, 1).response_ids
    said = e.batch["turns"][0]
    assert e.back(to=2).run().batch["turns"][0] == said, "with the weights of that step"
    t = s.with_episodes(e.replace(1, "7").run()).run()
    assert t.batch["turns"][1][1]["edited"] and not s.batch["turns"][1][1]["edited"]
    assert t.batch["turns"][0] == s.batch["turns"][0]

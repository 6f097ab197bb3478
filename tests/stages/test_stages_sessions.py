"""Episodes of several rows through the stages: scored once, compared once, in one mini-batch, counted once; by hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import examples

import workbench as wb
from workbench import functional as F
from workbench.agents import AgentLoopBase, Transcript, TurnTokens
from workbench.base.errors import RewardError, SettingError
from workbench.base.metrics import reduce
from workbench.dataproto import DataProto
from workbench.dataproto.core import alike, episodes, is_last, last_rows, row_name
from workbench.stages import Advantage, FilterGroups, Pipeline, Reward, Update
from workbench.stages.filtering import joined
from workbench.stages.stage import Outcome

SESSIONS = [0, 0, 1, 2, 2, 2, 3]
UIDS = ["a", "a", "a", "b", "b", "b", "b"]
TEXTS = ["one", "four", "hm", "x", "y", "seven!!", "eight!!!"]
LENGTHS = [3, 1, 2, 4, 0, 2, 1]
"""Tokens of each row; row 4 has none."""


def batch(**columns: Any) -> DataProto:
    mask = torch.tensor([[int(t < n) for t in range(4)] for n in LENGTHS])
    made = {
        "response_mask": mask, "responses": mask * 7, "response_text": TEXTS, "raw_prompt": ["?"] * 7, "uid": UIDS,
        "session": SESSIONS, "num_turns": [3] * 7, "num_tool_calls": [1, 2, 0, 1, 1, 1, 0],
        "turns": [[{"text": text}] for text in TEXTS], "turn_scores": [[0.5], [], [], [1.0], [], [2.0], []],
    }  # fmt: skip
    return DataProto.from_single_dict({**made, **columns}, {"group_size": 2})


def length(response: str, num_turns: int, num_tool_calls: int, turn_scores: Any, turns: Any) -> dict[str, float]:
    assert [one["text"] for one in turns][-1] == response
    asked = {"calls": float(num_tool_calls), "turns": float(num_turns), "talk": float(sum(turn_scores))}
    return {"score": float(len(response)), "parts": float(len(turns)), **asked}


def test_which_rows_are_an_episode() -> None:
    found = batch()
    assert last_rows(found).tolist() == [1, 1, 2, 5, 5, 5, 6] and episodes(found) == [[0, 1], [2], [3, 4, 5], [6]]
    assert is_last(found).tolist() == [False, True, True, False, False, True, True]
    assert (
        row_name(found, 4) == "row 4 (episode 2, sequence 2 of 3)" and row_name(found.without("session"), 4) == "row 4"
    )
    assert episodes(found.without("session")) == [[row] for row in range(7)]
    # numbers that are not neighbours, or those of another prompt, are told apart by uid
    assert last_rows(batch(session=["x", "y", "x", "x", "y", "x", "y"])).tolist() == [2, 1, 2, 5, 6, 5, 6]
    parts = alike([found, found.without("session")])
    assert list(parts[1]["session"]) == list(range(7)) and alike(parts[:1]) == [parts[0]]


def test_an_episode_is_scored_once_and_counted_once() -> None:
    outcome = Reward(length, in_process=True)(batch())
    scored, metrics = outcome.batch, reduce([outcome.metrics])
    assert scored["reward"].tolist() == [4, 4, 2, 7, 7, 7, 8]
    assert scored["reward/parts"].tolist() == [2, 2, 1, 3, 3, 3, 1]
    assert metrics["reward/calls/mean"] == 6 / 4
    assert [one.parts["calls"] for one in scored["score"]] == [3, 3, 0, 3, 3, 3, 0]
    assert [one.parts["turns"] for one in scored["score"]] == [5, 5, 3, 7, 7, 7, 3]
    assert [one.parts["talk"] for one in scored["score"]] == [0.5, 0.5, 0, 3, 3, 3, 0]
    assert scored["token_level_scores"].sum(-1).tolist() == [4, 4, 2, 7, 0, 7, 8]
    assert metrics["reward/mean"] == metrics["critic/score/mean"] == (4 + 2 + 7 + 8) / 4
    assert metrics["reward/status/scored"] == 4 and metrics["reward/empty_responses"] == 1
    alone = Reward(length, in_process=True, sessions=None)
    assert alone(batch()).batch["reward"].tolist() == [3, 4, 2, 1, 1, 7, 8]
    assert alone.settings()["sessions"] is None and "sessions" not in Reward(length).settings()
    assert alone.with_function(length).sessions is None
    with pytest.raises(SettingError, match="sessions of a reward"):
        Reward(length, sessions="mine")
    early, stage = list(scored["score"])[:3], Reward(length, in_process=True)
    with pytest.raises(RewardError, match="expected 4, one per episode; found 3"), stage.given(lambda: early):
        stage(batch())


def scored() -> DataProto:
    return Reward(length, in_process=True)(batch()).batch


def test_advantages_of_ragged_sessions_by_hand() -> None:
    found = Advantage(F.grpo, eps=0.0)(scored())
    a, b = [(x - 3) / stdev([4, 2]) for x in (4, 2)], [(x - 7.5) / stdev([7, 8]) for x in (7, 8)]
    numbers = [a[0], a[0], a[1], b[0], b[0], b[0], b[1]]
    expected = torch.tensor([[n * (t < size) for t in range(4)] for n, size in zip(numbers, LENGTHS, strict=True)])
    assert torch.allclose(found.batch["advantages"], expected.float(), atol=1e-6)
    metrics = reduce([found.metrics])
    assert metrics["advantage/singleton_groups"] == 0 and metrics["critic/score/mean"] == 5.25
    # a token-level estimator takes each row by itself, with the episode's reward at its end
    plus = Advantage(F.reinforce_plus_plus)(scored()).batch["returns"]
    assert plus[0].tolist() == [4, 4, 4, 0] and plus[3].tolist() == [7] * 4 and plus[4].tolist() == [0] * 4


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_whole_row_estimators_see_the_last_rows_alone(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    session = [number for number, size in enumerate(sizes) for _ in range(size)]
    uids = [f"u{number // 2}" for number in session]
    rows = len(session)
    score = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=rows, max_size=rows)))
    mask = torch.tensor(data.draw(st.lists(st.sampled_from([[1, 0], [1, 1]]), min_size=rows, max_size=rows)))
    columns = {"response_mask": mask, "reward": score, "uid": uids, "session": session}
    columns |= {"token_level_scores": torch.stack([score, torch.zeros(rows)], 1), "scored": torch.ones(rows).bool()}
    whole = DataProto.from_single_dict(columns)
    last = last_rows(whole)
    for estimator in (F.grpo, F.rloo, F.opo, F.gpg, F.maxrl, F.reinforce_plus_plus_baseline):
        found = Advantage(estimator)(whole).batch["advantages"]
        kept = Advantage(estimator)(whole.select_idxs(last.unique()).without("session")).batch["advantages"]
        place = torch.searchsorted(last.unique(), last)
        assert torch.allclose(found, kept[place, 0][:, None] * mask, atol=1e-6)


def test_groups_without_signal_are_dropped_by_episodes() -> None:
    flat = scored().with_columns({"reward": torch.tensor([9.0, 4, 4, 7, 7, 7, 8])})  # row 0 is not counted
    stage = FilterGroups([])
    found = stage(flat)
    assert list(found.batch["uid"]) == ["b"] * 4 and found.rows is not None and found.rows.tolist() == [3, 4, 5, 6]
    more = joined([flat.with_columns(wide(flat)), flat.without("session").with_columns(wide(flat))])
    assert list(more["session"]) == [*SESSIONS, *range(7)]


def wide(one: DataProto) -> dict[str, Any]:
    return {"prompts": torch.ones(len(one), 1, dtype=torch.long)}


def test_further_prompts_fill_the_step_by_prompts_not_rows() -> None:
    class Rows:
        def further(self, size: int, step: int, seed: int, attempt: int) -> DataProto:
            names = {"uid": [f"{uid}{attempt}" for uid in UIDS]}
            return scored().with_columns({**names, **wide(batch())})

    flat = scored().with_columns({"reward": torch.tensor([4.0, 4, 4, 7, 7, 7, 8]), **wide(batch())})
    stage = FilterGroups([Same()], Rows())
    assert list(stage(flat).batch["uid"]) == ["b"] * 4 + ["a1"] * 3


class Same:
    writes = ()

    def __call__(self, batch: DataProto) -> Outcome:
        return Outcome(batch)


# --- on the tiny model ------------------------------------------------------------------------------


class Parts(AgentLoopBase):
    """One to three sequences, each of one turn."""

    name = "parts"

    async def run(self, sampling_params: Any, *, raw_prompt: Any, **row: Any) -> Any:
        tokens, found = TurnTokens(self.tokenizer, roles=["user"]), []
        for number in range(1 + (self.episode.sample + self.episode.row // 2) % 3):
            more = [{"role": "user", "content": f"part {number}"}] if number else []
            said = Transcript(tokens.prompt([*raw_prompt, *more]), sampling_params["max_tokens"])
            sample = await self.generate(said.context, sampling_params)
            said.say(sample, self.tokenizer.decode(sample.ids, skip_special_tokens=True))
            found.append(replace(said.output(self.episode), response_logprobs=None))  # the rollout knows them
        return found


def size(response: str) -> float:
    return float(len(response) % 7)


def pipeline(**options: Any) -> Pipeline:
    engine = wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")
    made = wb.recipes.grpo(engine, size, agent=Parts(), group_size=4, max_tokens=12, kl_coef=0, **options)
    return made.with_stage("rollout", deterministic=True)


def prompts() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=64)


def test_a_step_with_sessions_on_the_tiny_model() -> None:
    s = wb.Stepper(pipeline(ppo_mini_batch_size=2), prompts().batch(4)).run()
    done = s.batch
    assert len(episodes(done)) == 16 < len(done) and sorted(set(map(len, episodes(done)))) == [1, 2, 3]
    gap = (done["rollout_log_probs"] - done["old_log_probs"]) * done["response_mask"]
    assert float(gap.abs().max()) < 1e-4  # each sequence has the log-probs that it was sampled with
    update = s.pipeline["update_actor"]
    assert isinstance(update, Update)
    steps = update._mini_batches(done, 0)
    assert len(steps) == 2 and [len(episodes(done.select_idxs(one))) for one in steps] == [8, 8]
    shuffled = update.with_settings(shuffle=True)
    assert isinstance(shuffled, Update)
    mixed = shuffled._mini_batches(done, 0)
    assert len(mixed) == 2 and sorted(torch.cat(mixed).tolist()) == list(range(len(done)))
    for one in mixed:  # an episode's rows are in one step
        numbers = {done["session"][row] for row in one.tolist()}
        assert sum(done["session"][row] in numbers for row in range(len(done))) == len(one)


def test_the_loss_of_split_episodes_by_hand_and_without_the_column() -> None:
    s = wb.Stepper(pipeline(), prompts().batch(4)).run(until="advantage")
    mask, advantages = s.batch["response_mask"].double(), s.batch["advantages"].double()
    reward = {tuple(rows): float(size(s.batch["response_text"][rows[-1]])) for rows in episodes(s.batch)}
    groups: dict[Any, list[float]] = {}
    for rows, value in reward.items():
        groups.setdefault(s.batch["uid"][rows[0]], []).append(value)
    for rows, value in reward.items():
        of = groups[s.batch["uid"][rows[0]]]
        hand = (value - sum(of) / 4) / (stdev(of) + 1e-6)
        assert torch.allclose(advantages[list(rows)], hand * mask[list(rows)], atol=1e-5)
    start, update, actor = s.batch, s.pipeline["update_actor"], s.pipeline.learners()["actor"]
    kept = actor.snapshot()
    metrics = reduce([update(start).metrics])
    assert metrics["actor/pg_loss"] == pytest.approx(float(-(advantages * mask).sum() / mask.sum()), abs=1e-6)
    after = actor.compute_log_probs(start)["log_probs"]
    actor.restore(kept)
    assert not torch.equal(actor.compute_log_probs(start)["log_probs"], after)
    update(start.without("session"))
    assert torch.equal(actor.compute_log_probs(start)["log_probs"], after)


def test_runs_with_sessions_stream_resume_replay_and_audit(tmp_path: Any) -> None:
    plan: dict[str, Any] = {
        "batch_size": 4,
        "trace_freq": 1,
        "save_freq": 2,
        "display": None,
        "trackers": (),
        "keep_traces": 9,
    }
    rows = prompts()
    run = wb.train_blocking(
        pipeline(ppo_mini_batch_size=2), rows, steps=3, run=tmp_path / "plain", eval_rows=rows[:4], test_freq=3, **plan
    )
    streamed = wb.train_blocking(
        pipeline(ppo_mini_batch_size=2).streaming_rewards(), rows, steps=3, run=tmp_path / "streamed", **plan
    )
    wb.train_blocking(pipeline(ppo_mini_batch_size=2), rows, steps=2, run=tmp_path / "cut", **plan)
    resumed = wb.train_blocking(
        pipeline(ppo_mini_batch_size=2), rows, steps=3, run=tmp_path / "cut", resume="auto", **plan
    )
    found = run.audit()
    assert found.agrees and not found.unaudited, found.disagreements[:3]
    assert {"session", "reward", "advantages", "token_level_scores"} - found.columns <= {"session"}
    for other in (streamed, resumed):
        assert not wb.compare(run.traces[3], other.traces[3]).columns
    again = wb.load_run(run.path).stepper(3).run()
    assert not wb.compare(run.traces[3], again.trace).columns


@pytest.mark.parametrize("recipe", ["remax", "dapo", "ppo", "reinforce_plus_plus", "gdpo"])
def test_other_recipes_take_sessions_with_a_clean_audit(recipe: str, tmp_path: Any) -> None:
    """A greedy baseline, filtered groups that are drawn again, a critic, parts of a reward."""
    rows, engine = prompts(), wb.engines.local("data/tiny-arith", lr=1e-3, device="cpu")
    given: dict[str, Any] = {"agent": Parts(), "group_size": 2, "max_tokens": 10, "kl_coef": 0.01}
    extra = {"dapo": {"rows": rows, "overlong_buffer": 4}, "ppo": {"critic_lr": 1e-3}}.get(recipe, {})
    if recipe == "gdpo":
        pipe = wb.recipes.grpo(engine, in_parts, **given)
        pipe = pipe.with_stage("advantage", Advantage(F.gdpo, parts=("length", "even")))
    else:
        pipe = getattr(wb.recipes, recipe)(engine, size, **given, **extra)
    run = wb.train_blocking(
        pipe, rows, steps=2, batch_size=3, run=tmp_path / "run", trace_freq=1, display=None, trackers=()
    )
    found, done = run.audit(), run.traces[2].batch
    assert found.agrees and not found.unaudited, found.disagreements[:3]
    assert "session" in done and len(episodes(done)) < len(done)
    assert {"advantages", "returns", "reward"} <= found.columns
    if recipe == "remax":
        assert "greedy" not in done.select_idxs([0]).batch or not done["greedy"].any()


def in_parts(response: str) -> dict[str, float]:
    return {"score": size(response), "length": float(len(response)), "even": float(len(response) % 2)}

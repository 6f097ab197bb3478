"""Several policies in one episode: a solver and a verifier, each with its engine, its rows, its reward and its gradient."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_parts import Adder, Script, Tags, call
from transformers import AutoTokenizer

import workbench as wb
from workbench.agents import AgentLoopBase, Calculator, SubAgent, ToolAgent, Transcript, TurnTokens
from workbench.base.errors import ForeignError, PipelineError, SettingError
from workbench.dataproto import DataProto
from workbench.recipes import grpo, multi_policy
from workbench.replay.rebuild import MissingStage, rebuilt
from workbench.runs.settings import written_down
from workbench.stages import EpisodeRollout, FilterGroups, OfPolicy, Pipeline

TINY = "data/tiny-arith"


class Checked(AgentLoopBase):
    """The solver answers, the verifier says what it thinks of the answer."""

    name = "checked"

    async def run(self, sampling_params: Any, *, raw_prompt: Any, **row: Any) -> Any:
        tokens, found = TurnTokens(self.tokenizer, roles=["user"]), []
        text = ""
        for policy in ("solver", "verifier"):
            more = [{"role": "user", "content": f"Is it right? {text}"}] if text else []
            said = Transcript(tokens.prompt([*raw_prompt, *more]), sampling_params["max_tokens"])
            sample = await self.generate(said.context, sampling_params, policy=policy)
            text = self.tokenizer.decode(sample.ids, skip_special_tokens=True) or "-"
            said.say(sample, text)
            found.append(replace(said.output(self.episode, said=text), policy=policy))
        return found[::-1]  # the solver's answer is the last: the episode's own


def solved(response: str) -> float:
    return float(len(response) % 5)


def judged(response: str, agent_extra: Any) -> float:
    assert agent_extra["said"] == response or response == ""
    return float(len(response) % 3)


def engines(**options: Any) -> tuple[Any, Any]:
    first, second = (wb.engines.local(TINY, lr=1e-3, device="cpu", **options) for _ in range(2))
    return first, second


def made(first: Any, second: Any, **settings: Any) -> Pipeline:
    given = {"group_size": 4, "max_tokens": 10, "kl_coef": 0.01, "agent": Checked(), **settings}
    pipe = multi_policy({"solver": grpo(first, solved, **given), "verifier": grpo(second, judged, **given)})
    return pipe.with_stage("rollout", deterministic=True)


def rows() -> Any:
    return wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=64)


def test_each_policy_has_its_rows_its_reward_and_its_advantages() -> None:
    first, second = engines()
    s = wb.Stepper(made(first, second), rows().batch(4)).run()
    b = s.batch
    assert list(b["policy"]) == ["verifier", "solver"] * 16 and list(b["session"]) == [n // 2 for n in range(32)]
    assert s.pipeline.names[1:6] == ("reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")
    assert s.pipeline.names[-1] == "update_verifier" and set(s.pipeline.learners()) == {"actor", "verifier"}
    texts = list(b["response_text"])
    assert b["reward"].tolist() == [len(t) % (3 if row % 2 == 0 else 5) for row, t in enumerate(texts)]
    for place, uid in enumerate(dict.fromkeys(b["uid"])):
        for side in (0, 1):
            mine = [row for row in range(8 * place, 8 * place + 8) if row % 2 == side]
            scores = b["reward"][mine].double()
            hand = (scores - scores.mean()) / (scores.std() + 1e-6)
            width = b["response_mask"][mine].double()
            assert torch.allclose(b["advantages"][mine].double(), hand[:, None] * width, atol=1e-5), uid
    metrics = s.trace.metrics
    assert {"critic/score/mean", "verifier/critic/score/mean", "actor/pg_loss", "verifier/pg_loss"} <= metrics.keys()
    assert metrics["critic/score/mean"] == pytest.approx(float(b["reward"][1::2].mean()))
    assert metrics["verifier/critic/score/mean"] == pytest.approx(float(b["reward"][::2].mean()))
    assert first.version == second.version == 1
    gap = ((b["rollout_log_probs"] - b["old_log_probs"]) * b["response_mask"]).abs()
    assert float(gap.max()) < 1e-4  # each row by the policy that sampled it


def test_a_policys_update_does_not_depend_on_the_others_rows() -> None:
    s = wb.Stepper(made(*engines()), rows().batch(4)).run(until="advantage_verifier")
    start, moved = s.batch, []
    other = torch.tensor([name == "verifier" for name in start["policy"]])
    changed = start.with_columns(
        {
            "advantages": torch.where(other[:, None], 7.0, start["advantages"]),
            "responses": torch.where(other[:, None], 5, start["responses"]),
            "input_ids": torch.where(other[:, None] & (start["attention_mask"] > 0), 5, start["input_ids"]),
        }
    )
    for batch in (start, changed, start.select_idxs((~other).nonzero()[:, 0])):
        first, second = engines()
        pipe = made(first, second)
        pipe["update_actor"](batch.with_columns({name: batch[name] for name in ("old_log_probs", "advantages")}))
        assert (first.version, second.version) == (1, 0)
        moved.append(first.compute_log_probs(start)["log_probs"])
        assert torch.equal(
            second.compute_log_probs(start)["log_probs"], engines()[1].compute_log_probs(start)["log_probs"]
        )
    assert torch.equal(moved[0], moved[1]) and torch.equal(moved[0], moved[2])
    assert not torch.equal(moved[0], engines()[0].compute_log_probs(start)["log_probs"])


def test_a_run_moves_both_and_is_recorded(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"batch_size": 4, "trace_freq": 1, "save_freq": 2, "display": None, "trackers": ()}
    first, second = engines()
    before = [one.snapshot()["weights"] for one in (first, second)]
    run = wb.train_blocking(
        made(first, second), rows(), steps=3, run=tmp_path / "run", eval_rows=rows()[:4], test_freq=3, **plan
    )
    after = [one.snapshot()["weights"] for one in (first, second)]
    for old, new in zip(before, after, strict=True):
        assert any(not torch.equal(old[name], new[name]) for name in old)
    assert any(not torch.equal(after[0][name], after[1][name]) for name in after[0])
    wb.train_blocking(made(*engines()), rows(), steps=2, run=tmp_path / "cut", **plan)
    resumed = wb.train_blocking(made(*engines()), rows(), steps=3, run=tmp_path / "cut", resume="auto", **plan)
    assert not wb.compare(run.traces[3], resumed.traces[3]).columns
    again = wb.load_run(run.path).stepper(3).run()
    assert not wb.compare(run.traces[3], again.trace).columns
    found = run.audit()
    assert found.agrees, found.disagreements[:3]
    assert {"advantages", "reward"} <= found.columns


# --- a verifier as a tool --------------------------------------------------------------------------


def test_a_sub_agent_of_another_policy_is_stepped() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    solver = Script(tokenizer, [call("check", task="5?"), "5"])
    verifier = Script(tokenizer, ["yes, 5"])
    tool = SubAgent(ToolAgent(), name="check", description="Says whether an answer is right.", policy="verifier")
    agent = ToolAgent([tool, Adder()], parser=Tags())
    stage = EpisodeRollout(
        solver, agent=agent, group_size=1, policies={"verifier": verifier}, policy="solver",
        sampling=wb.SamplingSettings(max_tokens=100),
    )  # fmt: skip
    batch = DataProto.from_single_dict({"raw_prompt": [[{"role": "user", "content": "2 and 3?"}]], "uid": ["a"]})
    s = wb.Stepper([stage], batch).run()
    assert list(s.batch["policy"]) == ["verifier", "solver"] and len(verifier.requests) == 1
    solver.write, e = ["5"], s.episode(1).back(to=1)
    assert e.next_role == "tool" and len(e.outputs) == 1
    e.run()
    assert e.outputs[0].policy == "verifier" and list(e.batch["policy"]) == ["verifier", "solver"]
    assert "policies" in stage.settings() and "policies" not in EpisodeRollout(solver, agent=agent).settings()


def test_what_is_refused() -> None:
    first, second = engines()
    given: dict[str, Any] = {"group_size": 2, "max_tokens": 10, "kl_coef": 0, "agent": Checked()}
    one = grpo(first, solved, **given)
    with pytest.raises(SettingError, match="two or more"):
        multi_policy({"solver": one})
    with pytest.raises(SettingError, match="another engine for each"):
        multi_policy({"solver": one, "verifier": grpo(first, judged, **given)})
    with pytest.raises(SettingError, match="the rollout of policy 'verifier'.*group_size"):
        multi_policy({"solver": one, "verifier": grpo(second, judged, **{**given, "group_size": 3})})
    with pytest.raises(SettingError, match="filter_groups"):
        OfPolicy(FilterGroups([]), "solver")
    with pytest.raises(SettingError, match="names other than"):
        EpisodeRollout(first, agent=Checked(), policies={"actor": second})
    only = made(first, second).with_stage("rollout", policies={"judge": second})
    with pytest.raises((ForeignError, SettingError), match="verifier"):
        only["rollout"](rows().batch(2))
    batch = DataProto.from_single_dict({"policy": ["solver"], "uid": ["a"]})
    with pytest.raises(PipelineError, match="no row of policy 'verifier'"):
        OfPolicy(made(first, second)["reward"].stage, "verifier")(batch)


class SolvesAgain(Checked):
    """The verifier answers the question by itself, as a check on the solver's answer."""

    name = "solves_again"

    async def run(self, sampling_params: Any, *, raw_prompt: Any, **row: Any) -> Any:
        prompt, found = TurnTokens(self.tokenizer).prompt(raw_prompt), []
        for policy in ("verifier", "solver"):
            said = Transcript(prompt, sampling_params["max_tokens"])
            sample = await self.generate(prompt, sampling_params, policy=policy)
            said.say(sample, self.tokenizer.decode(sample.ids, skip_special_tokens=True))
            found.append(replace(said.output(self.episode), policy=policy))
        return found


@pytest.mark.slow
def test_solver_and_verifier_both_learn_arithmetic(tmp_path: Path) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256)
    held_out = wb.rows("data/arith/test.parquet", max_prompt_length=256, limit=128)
    solver, verifier = (wb.engines.local(TINY, lr=3e-4) for _ in range(2))
    given: dict[str, Any] = {"group_size": 8, "max_tokens": 32, "kl_coef": 0, "agent": SolvesAgain()}
    pipe = multi_policy({"solver": grpo(solver, **given), "verifier": grpo(verifier, **given)})
    before = wb.evaluate(solver, held_out, max_tokens=32, batch_size=256).mean
    wb.train_blocking(pipe, rows, steps=10, batch_size=8, seed=1, run=tmp_path / "run", display=None, trackers=())
    for engine in (solver, verifier):
        assert wb.evaluate(engine, held_out, max_tokens=32, batch_size=256).mean > before + 0.25


def test_a_pipeline_with_sub_agents_and_policies_is_made_again_from_its_record() -> None:
    inner = ToolAgent([Calculator()], parser="hermes", history="template")
    tool = SubAgent(inner, name="check", description="Checks.", system="You check.", policy="verifier", max_tokens=20)
    given: dict[str, Any] = {"group_size": 2, "max_tokens": 40, "kl_coef": 0}
    given["agent"] = ToolAgent([tool], parser="hermes", compact_at=30, max_sequences=3)
    first, second = engines()
    pipe = multi_policy({"solver": grpo(first, **given), "verifier": grpo(second, **given)})
    records = json.loads(json.dumps(written_down(pipe)))
    again = rebuilt(records, {"actor": first, "verifier": second}, lambda record: None)
    assert not any(isinstance(stage, MissingStage) for stage in again)
    assert [repr(one.settings()) for one in again] == [repr(one.settings()) for one in pipe]
    assert again["rollout"].loops.describe() == pipe["rollout"].loops.describe()


def test_each_policy_may_be_an_adapter_of_the_same_model() -> None:
    pytest.importorskip("peft")
    first, second = engines(lora_rank=4)
    before = [one.snapshot("memory")["weights"] for one in (first, second)]
    s = wb.Stepper(made(first, second), rows().batch(4)).run()
    after = [one.snapshot("memory")["weights"] for one in (first, second)]
    for old, new in zip(before, after, strict=True):
        moved = [name for name, value in new.items() if not torch.equal(value, old[name])]
        assert moved and all("lora" in name for name in moved)
    assert (first.version, second.version) == (1, 1) and s.trace.names[-1] == "update_verifier"

"""The rows of the seed documents, one case each: what they describe happens, here and now, on the tiny worlds.

Nothing of it is skipped where the documents are (../shared/seeds), and all of it where they are not.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch
from support.models import make_shaped_model, make_vision_model
from support.pictures import geometry
from support.remote import Server, serving

import workbench as wb
from workbench import functional as F
from workbench import rewards as r
from workbench.agents import AgentLoopBase, AgentLoopOutput, Calculator, ToolAgent
from workbench.base.errors import OutOfMemory
from workbench.compat.verl_reward import reward_from
from workbench.rewards import Status
from workbench.rewards.judge import parse

sys.path += [str(Path(__file__).parents[1] / name) for name in ("cluster", "compat")]
SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SEEDS.is_dir(), reason=f"no seed documents at {SEEDS}"),
]
TINY, TRAIN = "data/tiny-arith", "data/arith/train.parquet"
MAIN = "python3 -m verl.trainer.main_ppo data.train_batch_size=2 data.max_response_length=12 "
MAIN += f"data.train_files={TRAIN} actor_rollout_ref.model.path={TINY} actor_rollout_ref.rollout.n=2 "
CASES: dict[str, Callable[..., None]] = {}


def case(row: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def kept(function: Callable[..., None]) -> Callable[..., None]:
        CASES[row] = function
        return function

    return kept


@functools.cache
def engine() -> Any:
    return wb.engines.local(TINY, device="cpu", lr=1e-3)


def rows(number: int = 8) -> Any:
    return wb.rows(TRAIN, max_prompt_length=256, limit=number)


def stepped(pipe: Any = None, **settings: Any) -> Any:
    """A step of two prompts."""
    pipe = pipe or wb.recipes.grpo(engine(), group_size=2, max_tokens=12, **settings)
    return wb.Stepper(pipe, rows().batch(2)).run()


def opened(command: str, **changes: Any) -> tuple[Any, ...]:
    return wb.compat.verl(MAIN + command).open(engine=engine(), **changes)


def scores(reward: Any, *records: Any) -> list[Any]:
    return [one.score for one in r.dry_run({"it": reward}, list(records)).judged["it"]]


@case("8 phases stepped")
def _(tmp_path: Path) -> None:
    pipe = wb.recipes.ppo(engine(), max_tokens=8, kl_coef=0.01)
    seen = [phase.stage for phase in stepped(pipe).trace]
    wanted = (
        "rollout",
        "reward",
        "old_log_prob",
        "ref_log_prob",
        "values",
        "advantage",
        "update_critic",
        "update_actor",
    )
    assert set(wanted) <= set(seen)


@case("DataProto")
def _(tmp_path: Path) -> None:
    made = wb.DataProto.from_dict({"a": torch.arange(4)}, {"b": ["x", "y", "z", "w"]})
    parts = made.split(2)
    assert len(made) == 4 and "b" in repr(made) and wb.DataProto.concat(parts)["a"].tolist() == [0, 1, 2, 3]


@case("Batch of 4 (±0.7071)")
def _(tmp_path: Path) -> None:
    score, groups, mask = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4, 1)
    assert F.grpo(score, groups, mask)[0][:, 0].tolist() == pytest.approx([0.7071, -0.7071] * 2, abs=1e-4)
    assert F.rloo(score, groups, mask)[0][:, 0].tolist() == [1, -1, 1, -1]


@case("GRPO quick start")
def _(tmp_path: Path) -> None:
    pipe, data, _, how = opened('algorithm.adv_estimator=grpo trainer.logger=\'["console","tensorboard"]\'', steps=2)
    run = wb.train_blocking(pipe, data, display=None, **{**how, "run": tmp_path / "run"})
    assert run.summary["steps"] == 2 and {"reward/mean", "response_length/mean"} & set(run.rows[-1])


@case("PPO, GAE, warm-up")
def _(tmp_path: Path) -> None:
    settings = f"algorithm.adv_estimator=gae critic.model.path={TINY} critic.optim.lr=1e-5 trainer.critic_warmup=2"
    pipe, data, _, how = opened(settings, steps=2)
    run = wb.train_blocking(pipe, data, display=None, **{**how, "run": tmp_path / "run"})
    first, second = (row for row in run.rows if row["training/global_step"] > 0)
    assert first["critic/lr"] > 0 and "actor/grad_norm" not in first and "actor/grad_norm" in second


@case("RLOO, ReMax, RF++, comparison")
def _(tmp_path: Path) -> None:
    for name in ("rloo", "remax", "reinforce_plus_plus"):
        made = wb.recipes.by_name(name)(engine(), max_tokens=8)
        assert stepped(made).trace.metrics["actor/grad_norm"] >= 0, name


@case("KL kinds, in reward and loss")
def _(tmp_path: Path) -> None:
    for kind in ("kl", "abs", "mse", "low_var_kl"):
        assert F.kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), kind).tolist() == [[0, 0]]
    inside = "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive"
    assert "actor/reward_kl_penalty" in stepped(opened(inside)[0]).trace.metrics


@case("Tuning table, FAQ as checks")
def _(tmp_path: Path) -> None:
    """A tool loop, made: the same call in each turn."""

    class Stuck:
        def __init__(self) -> None:
            self.tokenizer, self.version = engine().tokenizer, 0

        async def sample(self, request: Any) -> Any:
            text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call><|im_end|>'
            ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            return wb.engines.Sample(ids, (-1.0,) * len(ids), "stop", 0)

    from workbench.replay.diagnosis import diagnosed, gathered
    from workbench.stages import EpisodeRollout

    agent = ToolAgent([Calculator()], max_assistant_turns=4, tools_in="system", parser="hermes")
    sampler: Any = Stuck()
    rollout = EpisodeRollout(sampler, agent=agent, group_size=4, sampling=wb.SamplingSettings(max_tokens=400))
    batch = rollout(wb.rows(TRAIN, limit=4).batch(4)).batch
    found = diagnosed(gathered([{"training/global_step": 1}], {1: batch})).findings
    assert "the model repeats the same tool call" in [one.cause for one in found]


@case("LoRA")
def _(tmp_path: Path, shape: str = "60m") -> None:
    """A model in bfloat16 opens with adapters and takes a step, beside a tiny one; of half a billion weights below."""
    make_shaped_model(tmp_path / "m", shape, dtype="bfloat16")
    lora: dict[str, Any] = {"device": "cpu", "lora_rank": 16, "lora_alpha": 32, "lr": 1e-3}
    large = wb.engines.local(tmp_path / "m", base_dtype="bfloat16", **lora)
    assert large.describe()["lora_rank"] == 16
    pipe = wb.recipes.grpo(large, lambda response: float(len(response)), group_size=2, max_tokens=4)
    short = wb.rows([{"prompt": "w5 w6", "answer": "w7"}])
    before, step = large.state_id, wb.Stepper(pipe, short.batch(1)).run()
    assert step.trace.metrics["actor/grad_norm"] > 0 and large.state_id != before
    tiny = wb.engines.local(TINY, **lora)
    assert stepped(wb.recipes.grpo(tiny, group_size=2, max_tokens=6)).trace.metrics["actor/grad_norm"] >= 0


@case("Scorers")
def _(tmp_path: Path) -> None:
    truths = [2, 2.0, "2 ", None, "", True, [2]]
    found = scores(r.gsm8k, *({"response": "#### 2", "ground_truth": truth} for truth in truths))
    assert [one.value for one in found[:3]] == [1, 1, 1]
    assert {one.status for one in found[3:]} == {Status.NOT_APPLICABLE} and r.gsm8k.compute_score("#### 2", 2) == 1
    assert scores(r.math_verify, {"response": "\\boxed{\\frac14}", "ground_truth": "0.25"})[0].value == 1


@case("Custom reward function")
def _(tmp_path: Path) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return float(ground_truth in solution_str)

    def trl(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(a in c) for a, c in zip(answer, completions, strict=True)]

    row = {"response": "it is 2", "ground_truth": "2", "answer": "2"}
    assert [scores(one, row)[0].value for one in (compute_score, trl)] == [1, 1]


@case("naive/batch/prime/dapo")
def _(tmp_path: Path) -> None:
    from workbench.rewards.managers import MANAGERS

    assert {"naive", "batch", "prime", "dapo"} <= set(MANAGERS)
    for name in ("naive", "prime"):
        reward = reward_from({"reward_manager.name": name}, tokenizer=engine().tokenizer)
        assert stepped(reward=reward).trace["reward"].metrics


@case("num_workers, async")
def _(tmp_path: Path) -> None:
    async def scored(response: str) -> float:
        return 1.0

    assert scores(scored, {"response": "x"})[0].value == 1
    assert "num_workers=2" in repr(reward_from({"num_workers": 2}, tokenizer=engine().tokenizer))


@case("DisRM, GenRM")
def _(tmp_path: Path) -> None:
    model = r.RewardModel(wb.engines.classifier("data/tiny-reward-model", device="cpu"))
    both = r.Rubric({"rm": model, "rule": r.gsm8k}, weights={"rm": 0.1})
    score = stepped(reward=both).batch["score"][0]
    assert {"rm", "rule"} <= set(score.parts)


@case("Sandbox Fusion")
def _(tmp_path: Path) -> None:
    block = {"sandbox_fusion.url": "http://127.0.0.1:9/run_code", "sandbox_fusion.max_concurrent": 2}
    made = reward_from({**block, "reward_manager.name": "prime"}, tokenizer=engine().tokenizer)
    assert "127.0.0.1:9" in json.dumps(made.settings(), default=str) + repr(made)


@case("RM+rule+sandbox+prime")
def _(tmp_path: Path) -> None:
    block = {
        "reward_model.enable": True,
        "reward_model.model_path": "data/tiny-reward-model",
        "reward_model.rollout.name": "hf",
    }
    made = reward_from({**block, "reward_manager.name": "prime"}, tokenizer=engine().tokenizer)
    assert stepped(reward=made).batch["reward"].isfinite().all()


@case("Ray attach, pools, groups, two nodes")
def _(tmp_path: Path) -> None:
    cluster = local_cluster()
    pools = cluster.hold({"global": [2]})
    assert [one.size for one in pools.values()] == [2]
    cluster.release("global")


@case("vLLM rollout, sync")
def _(tmp_path: Path) -> None:
    """The sampler is vLLM; the learner computes the same log-probs before and after a push."""
    with wb.engines.vllm(TINY, max_model_len=256, kv_cache_memory_mb=64, stall_seconds=600.0) as sampler:
        both = wb.engines.paired(engine(), sampler)
        pipe = wb.recipes.grpo(both, group_size=2, max_tokens=8)
        for _ in range(2):
            assert stepped(pipe).trace.metrics["training/rollout_probs_diff_max"] < 1e-3


@case("FSDP, offload")
def _(tmp_path: Path) -> None:
    from workbench.engines.fsdp_engine.group import local_group

    group = local_group(2, device="cpu", threads=1)
    learner = wb.engines.fsdp(TINY, on=group, device="cpu", offload="all", lr=1e-3)
    both = wb.engines.paired(learner, wb.engines.local(TINY, device="cpu"))
    assert stepped(wb.recipes.grpo(both, group_size=2, max_tokens=6)).trace.metrics["actor/grad_norm"] >= 0
    group.close()


@case("Async rollout")
def _(tmp_path: Path) -> None:
    both = wb.engines.paired(engine(), wb.engines.local(TINY, device="cpu"))
    pipe = wb.recipes.grpo(both, group_size=2, max_tokens=6)
    run = wb.train_blocking(
        pipe, rows(), steps=3, batch_size=2, run=tmp_path / "run", max_lag=2, display=None, max_rollout_kl=None
    )
    assert max(row.get("training/policy_lag/max", 0) for row in run.rows) <= 2


@case("SGLang by HTTP")
def _(tmp_path: Path) -> None:
    with serving(Server("sglang")) as server:
        remote: Any = wb.engines.remote(server.url, TINY)  # type: ignore[attr-defined]
        sample = wb.base.runtime.run(remote.sample(wb.engines.Request((60, 61), wb.SamplingSettings(max_tokens=4), 1)))
    assert len(sample.ids) == len(sample.log_probs) > 0


@case("Agent loops, formats")
def _(tmp_path: Path) -> None:
    class Mine(AgentLoopBase):
        async def run(self, sampling_params: Any, **kwargs: Any) -> AgentLoopOutput:
            prompt = self.tokenizer("a b")["input_ids"]
            sample = await self.generate(prompt, sampling_params)
            return AgentLoopOutput(tuple(prompt), sample.ids, (1,) * len(sample.ids), sample.log_probs)

    assert "turns" in stepped(agent=Mine()).batch


@case("Tools, limits, calc_reward")
def _(tmp_path: Path) -> None:
    settings = "actor_rollout_ref.rollout.multi_turn.enable=True tool_config.max_tool_calls=2 tool_config.timeout=7"
    (calls, limit) = (row for row in wb.compat.verl(MAIN + settings).rows if row.key.startswith("tool_config"))
    assert "max_tool_calls" in calls.becomes and "seconds_per_call" in limit.becomes


@case("BaseInteraction")
def _(tmp_path: Path) -> None:
    class Once(wb.BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return True, "", 1.0, {}

    agent = ToolAgent(interactions=[Once({"name": "once"})])
    data = wb.rows([{"prompt": "hi", "extra_info": {"interaction_kwargs": {"name": "once"}}}] * 2)
    pipe = wb.recipes.grpo(engine(), group_size=2, max_tokens=8, agent=agent)
    assert wb.Stepper(pipe, data.batch(2)).run().batch["reward"].tolist() == [1] * 4


@case("Layered, tool-assisted")
def _(tmp_path: Path) -> None:
    scored = r.episodes.episode()
    assert scores(scored, {"response": "#### 2", "ground_truth": "2"})[0].value == 1


@case("Checkpoints, resume")
def _(tmp_path: Path) -> None:
    def trained(steps: int, **settings: Any) -> Any:
        pipe = wb.recipes.grpo(wb.engines.local(TINY, device="cpu", lr=1e-3), group_size=2, max_tokens=6)
        where = {"batch_size": 2, "run": tmp_path / "run", "display": None, "save_freq": 1}
        return wb.train_blocking(pipe, rows(), steps=steps, **where, **settings)

    trained(1)
    assert trained(2, resume="auto").summary["steps"] == 2
    assert wb.engines.local(tmp_path / "run/checkpoints/step_000002/actor", device="cpu").version >= 0


@case("Sample logging")
def _(tmp_path: Path) -> None:
    pipe = wb.recipes.grpo(engine(), group_size=2, max_tokens=6)
    how = {"batch_size": 2, "run": tmp_path / "run", "display": None}
    run = wb.train_blocking(pipe, rows(), eval_rows=rows(2), steps=1, test_freq=1, **how)
    assert [path.name for path in sorted((tmp_path / "run/val").glob("*.parquet"))][-1] == "step_000001.parquet"
    assert len(run.val(1)) == 4  # sampled and greedy


@case("Offline evaluation")
def _(tmp_path: Path) -> None:
    made = wb.evaluate(engine(), rows(2), samples=2, max_tokens=6)
    made.save(tmp_path / "samples.parquet")
    assert wb.evaluate_file(tmp_path / "samples.parquet").batch["reward"].tolist() == made.batch["reward"].tolist()


@case("Mini-batches, padding-free")
def _(tmp_path: Path) -> None:
    both = stepped(ppo_mini_batch_size=1, ppo_epochs=2)
    assert both.trace["update_actor"].metrics


@case("Parquet schema, report")
def _(tmp_path: Path) -> None:
    import pandas as pd

    record = {"prompts": "1+1?", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}
    pd.DataFrame([record]).to_parquet(tmp_path / "case.parquet")
    report = str(wb.rows(tmp_path / "case.parquet").report(engine().tokenizer))
    assert "prompts → prompt" in report and "ground truths: text: 1" in report


@case("Multimodal rows")
def _(tmp_path: Path) -> None:
    """Trained, on a model that sees."""
    geometry(tmp_path / "geo.parquet")
    make_vision_model(tmp_path / "model")
    eyes = wb.engines.local(tmp_path / "model", device="cpu", lr=1e-2)
    pipe = wb.recipes.grpo(eyes, lambda response: float(len(response) % 5), group_size=3, max_tokens=5)
    data = wb.rows(tmp_path / "geo.parquet", max_prompt_length=32)
    before = eyes.state_id
    run = wb.train_blocking(pipe, data, steps=1, batch_size=2, run=tmp_path / "run", display=None)
    assert run.rows[-1]["actor/grad_norm"] > 0 and eyes.state_id != before


@case("Mixing")
def _(tmp_path: Path) -> None:
    parts = [
        wb.rows([{"prompt": f"{name}{n}", "answer": "1", "data_source": name} for n in range(20)]) for name in "ab"
    ]
    mixed = wb.datasets.mix(parts, weights=[0.75, 0.25])
    drawn = [row for step in range(1, 6) for row in mixed.batch(8, step=step)["data_source"]]
    assert 0.6 < drawn.count("a") / len(drawn) < 0.9


@case("Curriculum, growing")
def _(tmp_path: Path) -> None:
    parts = [wb.rows([{"prompt": f"{name}{n}", "answer": "1", "data_source": name} for n in range(4)]) for name in "ab"]
    staged = wb.datasets.stages([(parts[0], 1), (parts[1], None)])
    assert [set(staged.batch(2, step=step)["data_source"]) for step in (1, 2)] == [{"a"}, {"b"}]


@case("Seeds' scripts and yaml")
def _(tmp_path: Path) -> None:
    from test_seeds_commands import LACKS, NOT_OURS, blocks

    found = [(key, text) for key, text in blocks() if key not in NOT_OURS]
    assert len(found) >= 20
    for key, text in found:
        job = wb.compat.verl(text, command=0 if text.count("main_ppo") > 1 else None)
        assert [row.key for row in job.refused] == LACKS.get(key, []), key


@case("Reasoning RM (002)")
def _(tmp_path: Path) -> None:
    import math

    found = [math.exp(-2 * abs(predicted - 4) / 4) for predicted in range(5)]
    assert found == pytest.approx([0.1353, 0.2231, 0.3679, 0.6065, 1.0], abs=1e-4)
    verdict = parse("<think>a < b</think><score>3</score>", Verdict)
    assert (verdict.think, verdict.score) == ("a < b", 3)


class Verdict(pydantic.BaseModel):
    """The document's: what it thought, and a score of 0 to 4."""

    think: str
    score: int = pydantic.Field(ge=0, le=4)


@case("runtime_env, timeline, nsight")
def _(tmp_path: Path) -> None:
    """Seen in the workers: the variable, the call in the timeline, and the profiler that started them."""
    import cluster_things as things

    cluster = local_cluster(tmp_path)
    group = cluster.ranks(things.thing, 1, name="seen", word="w")
    assert group.call("env", "TEST_API_KEY") == [things.CANARY]
    cluster.timeline.save(tmp_path / "timeline.json")
    assert any(
        "env" in json.dumps(event) for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    )
    group.close()
    profiled = cluster.ranks(things.thing, 1, name="profiled", word="w", nsight="default")
    assert profiled.call("who")[0][0] == 0
    assert "profile" in (tmp_path / "nsys.log").read_text()
    profiled.close()
    things.close()


@case("Megatron / Ulysses")
def _(tmp_path: Path) -> None:
    name = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    (row,) = (row for row in wb.compat.verl(f"{MAIN}{name}=2").rows if row.key == name)
    assert row.becomes == "FsdpSettings.mesh" and "`tp`" in row.why


def local_cluster(bin_folder: Path | None = None) -> Any:
    """Four CPUs of this machine; with a folder, where an `nsys` stands on the path that notes how it is called."""
    import cluster_things as things

    if bin_folder is not None:
        things.close()
        script = bin_folder / "nsys"
        strip = 'shift; while [ "${1#-}" != "$1" ]; do case "$1" in --*) shift;; *) shift 2;; esac; done; exec "$@"\n'
        script.write_text(f'#!/bin/sh\necho "$@" >> {bin_folder}/nsys.log\n{strip}')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        own = Path(sys.executable).parent  # nsys starts the `python` of the path
        os.environ["PATH"] = os.pathsep.join([str(bin_folder), str(own), os.environ["PATH"]])
    return wb.cluster(**things.SETTINGS)


@pytest.mark.parametrize("row", CASES)
def test_a_row_of_the_documents(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    CASES[row](tmp_path)


@pytest.mark.long
def test_half_a_billion_weights_open_with_adapters_on_this_machine_and_take_a_step(tmp_path: Path) -> None:
    CASES["LoRA"](tmp_path, "0.5b")


def test_each_row_of_the_table_has_a_case() -> None:
    assert len(CASES) == 37


def test_the_advice_of_memory_that_ran_out_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The FAQ's third question, met on purpose in the update: the step is where it was, and the lower setting goes on."""
    learner = wb.engines.local(TINY, device="cpu", lr=1e-3, micro_batch_tokens=256)
    stepper = wb.Stepper(wb.recipes.grpo(learner, group_size=2, max_tokens=8), rows().batch(2)).run(until="advantage")

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as machine:
        machine.setattr("workbench.engines.local_engine.scoring.outputs", full)
        with pytest.raises(OutOfMemory, match="phase 'update_actor'.*lower micro_batch_tokens"):
            stepper.next()
    lower = wb.engines.local(TINY, device="cpu", lr=1e-3, micro_batch_tokens=128)
    assert stepped(wb.recipes.grpo(lower, group_size=2, max_tokens=8)).trace["update_actor"].metrics
    assert stepper.run().trace["update_actor"].metrics

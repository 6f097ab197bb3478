"""Routing replay: experts that a sampler's routers chose are recorded, and used again where rows are scored and learned."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.architectures import VOCABULARY, make
from support.shards import counts, difference

import workbench as wb
from workbench.agents import ToolAgent
from workbench.base import runtime
from workbench.base.errors import EngineError, SettingError
from workbench.dataproto import DataProto
from workbench.engines import local
from workbench.engines.local_engine.forward import experts_of
from workbench.engines.protocol import Request, SamplingSettings
from workbench.stages.filtering import joined
from workbench.stages.log_prob import LogProb
from workbench.stages.rollout import columns_of
from workbench.testing.engines import LikelihoodLoss


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("mixtral", tmp_path_factory.mktemp("models") / "mixtral")


def sampled(engine: Any, prompts: int = 6, each: int = 4) -> DataProto:
    """Rows of random prompts and what the engine says to them."""
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(torch.randint(4, VOCABULARY, (8 + n,), generator=generator).tolist()) for n in range(prompts)]
    asked = [prompt for prompt in drawn for _ in range(each)]
    settings = SamplingSettings(max_tokens=20, ignore_eos=True)
    requests = [Request(prompt, settings, number) for number, prompt in enumerate(asked)]
    samples = runtime.run_all(lambda number: engine.sample(requests[number]), range(len(requests)))
    columns = columns_of(asked, samples, 0)
    return DataProto({name: one for name, one in columns.items() if isinstance(one, torch.Tensor)})


def chosen_by(engine: Any, row: DataProto) -> torch.Tensor:
    """[S + T, L, k]: what the model's own forward gives its experts for one row."""
    seen: list[torch.Tensor] = []
    hooks = [
        one.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
        for one in experts_of(engine._model).values()
    ]
    ids = row["input_ids"][row["attention_mask"].bool()][None]
    with torch.no_grad():
        engine._model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1)


def test_what_is_recorded_is_the_routers_choice_for_every_token_but_the_last(mixture: Path) -> None:
    engine = local(mixture, device="cpu", routing_replay=True)
    rows = sampled(engine, 3, 2)
    engine.compute_log_probs(rows)
    assert engine.examine().paths == engine.selfcheck.paths  # the model's own forward is not replayed
    assert rows["routed_experts"].shape == (6, 30, 2, 2)
    for number in range(len(rows)):
        row = rows.slice(number, number + 1)
        inside = row["attention_mask"].bool()
        recorded, padding = row["routed_experts"][inside], row["routed_experts"][~inside]
        own = chosen_by(engine, row).sort(-1).values
        assert bool((recorded[:-1].sort(-1).values == own[:-1]).all())
        assert bool((recorded[-1] == -1).all()) and bool((padding == -1).all())


def test_a_sampler_in_bfloat16_and_a_trainer_in_float32_are_nearer_with_it(mixture: Path) -> None:
    rows = sampled(local(mixture, device="cpu", dtype="bfloat16", routing_replay=True))
    mask, gaps = rows["response_mask"].bool(), []
    for on in (False, True):
        trainer = local(mixture, device="cpu", routing_replay=on)
        found = trainer.compute_log_probs(rows)["log_probs"]
        gaps.append((found - rows["rollout_log_probs"]).abs()[mask])
    own, replayed = gaps
    assert float(replayed.max()) < 0.06  # nats
    assert float(own.max()) > 4 * float(replayed.max())  # some tokens went to other experts
    assert float(replayed.mean()) < float(own.mean())


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_given_experts_are_used_padded_and_packed_and_in_gradients(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path / name)
    if name == "granitemoe" and Version(transformers.__version__) < Version("5.13"):
        with pytest.raises(
            EngineError, match=r"common form.*found none in transformers 5\..*pip install -U transformers"
        ):
            local(folder, device="cpu", routing_replay=True)
        return
    rows = sampled(local(folder, device="cpu"), 2, 2)
    shape = (*rows["input_ids"].shape, 2, 4)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(1)).topk(2).indices.short()
    given = rows.with_columns({"routed_experts": drawn})
    engines = [local(folder, device="cpu", routing_replay=True, pack=pack) for pack in ("yes", "no")]
    again = local(folder, device="cpu", routing_replay=True, gradient_checkpointing=True)
    scores = [engine.compute_log_probs(given)["log_probs"] for engine in engines]
    assert float((scores[0] - scores[1]).abs().max()) < 2e-5
    assert float((scores[0] - engines[0].compute_log_probs(rows)["log_probs"]).abs().max()) > 0.1
    wholes = [engine.gradient(given, LikelihoodLoss(), counts(rows)) for engine in (*engines, again)]
    assert difference(wholes[0], wholes[1]) < 2e-5 and difference(wholes[0], wholes[2]) < 2e-5


def test_without_the_setting_nothing_is_recorded_or_replayed(mixture: Path) -> None:
    plain, recording = local(mixture, device="cpu"), local(mixture, device="cpu", routing_replay=True)
    rows, told = sampled(plain, 2, 2), sampled(recording, 2, 2)
    assert "routed_experts" not in rows and torch.equal(rows["responses"], told["responses"])
    other = told.with_columns({"routed_experts": 3 - told["routed_experts"].clamp(min=0)})
    assert torch.equal(plain.compute_log_probs(other)["log_probs"], plain.compute_log_probs(rows)["log_probs"])


def test_a_critic_chooses_its_own_experts(mixture: Path) -> None:
    policy = local(mixture, device="cpu", routing_replay=True)
    rows = sampled(policy, 2, 2)
    other = rows.with_columns({"routed_experts": (3 - rows["routed_experts"]).clamp(max=3)})
    critic = policy.critic(lr=1e-2)
    critic.learn(rows, LikelihoodLoss(("values",)), counts(rows))
    values = [critic.compute_log_probs(one, ("values",))["values"] for one in (rows, other)]
    assert torch.equal(*values) and bool(values[0].any())
    assert difference(policy.compute_log_probs(rows), policy.compute_log_probs(other)) > 0


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(EngineError, match=r"routing_replay with Qwen2ForCausalLM; expected layers of experts"):
        local("data/tiny-arith", device="cpu", routing_replay=True)


def test_rows_that_do_not_say_how_they_were_routed_are_not_learned(mixture: Path) -> None:
    learner = local(mixture, device="cpu", routing_replay=True)
    rows = sampled(local(mixture, device="cpu"), 1, 1)
    told = (
        r"learning with routing_replay; expected rows with the column 'routed_experts'; found rows without it; sample"
    )
    for learn in (learner.learn, learner.probe, learner.gradient):
        with pytest.raises(EngineError, match=told):
            learn(rows, LikelihoodLoss(), counts(rows))
    assert learner.critic().learn(rows, LikelihoodLoss(("values",)), counts(rows))


@pytest.mark.parametrize("kind", ["agents' episodes", "given targets"])
def test_pipelines_whose_rows_are_not_routed_are_refused_before_work_starts(
    kind: str, mixture: Path, tmp_path: Path
) -> None:
    learner = local(mixture, device="cpu", routing_replay=True)
    rows = wb.rows("data/arith/train.parquet", limit=4)
    agents = functools.partial(wb.recipes.grpo, agent=ToolAgent())
    pipe = (wb.recipes.sft if kind == "given targets" else agents)(learner)
    with pytest.raises(
        SettingError,
        match=f"routing_replay needs rows that record the experts.*; found {kind}; set routing_replay=False",
    ):
        wb.train_blocking(pipe, rows, steps=1, batch_size=2, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sampler_that_cannot_record_says_so(mixture: Path) -> None:
    engine = local(mixture, device="cpu", routing_replay=True, decode="no cache")
    with pytest.raises(EngineError, match=r"sampling with routing_replay; expected decode='shared prompts'"):
        sampled(engine, 1, 1)


def test_the_policys_log_probs_are_replayed_and_its_references_are_not(mixture: Path) -> None:
    policy = local(mixture, device="cpu", routing_replay=True)
    rows = sampled(policy, 2, 2)
    other = rows.with_columns({"routed_experts": (3 - rows["routed_experts"]).clamp(max=3)})
    stages = LogProb(policy), LogProb(policy.reference(), name="ref_log_prob", column="ref_log_prob")
    gaps = [stage(other).batch[stage.column] - rows["rollout_log_probs"] for stage in stages]
    assert float(gaps[0].abs().max()) > 0.1 and float(gaps[1].abs().max()) < 1e-5


def test_parts_of_other_widths_are_joined(mixture: Path) -> None:
    engine = local(mixture, device="cpu", routing_replay=True)
    first, second = sampled(engine, 1, 2), sampled(engine, 2, 1)  # prompts of 8, and of 8 and 9 tokens
    whole = joined([first, second])
    assert whole["routed_experts"].shape == (4, 29, 2, 2)
    assert torch.equal(whole["routed_experts"][:2, 1:], first["routed_experts"])
    assert bool((whole["routed_experts"][:2, 0] == 0).all()) and bool((whole["attention_mask"][:2, 0] == 0).all())

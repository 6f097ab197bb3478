"""Every recipe: a pipeline that runs on the real tiny model, changes its weights, and is the algorithm that it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.base.errors import SettingError
from workbench.rewards import Reward

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"overlong_buffer": 4},
    "ppo": {},
    "rloo": {"group_size": 2},
    "remax": {"group_size": 2},
    "reinforce_plus_plus": {},
    "gspo": {},
    "cispo": {},
    "gpg": {},
    "maxrl": {},
    "opo": {},
}


def varied(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def make(name: str, model: Any, **more: Any) -> tuple[wb.Pipeline, wb.datasets.Rows]:
    """Of a model's folder; or of an engine, where nothing is learnt."""
    engine = wb.engines.local(model, lr=1e-3, device="cpu") if isinstance(model, str) else model
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    settings = {"max_tokens": 12, **RECIPES[name], **more}
    if name == "dapo":
        settings.setdefault("rows", rows)
    return getattr(wb.recipes, name)(engine, Reward(varied, in_process=True), **settings), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_of_it(name: str, tiny: str) -> None:
    pipe, rows = make(name, tiny)
    before = pipe.learners()["actor"].snapshot()["weights"]
    s = wb.Stepper(pipe, rows.batch(4)).run()
    after = pipe.learners()["actor"].snapshot()["weights"]
    assert any(not torch.equal(before[key], after[key]) for key in before)
    metrics = s.trace.metrics
    assert metrics["actor/grad_norm"] > 0 and all(value == value for value in metrics.values())
    assert s.batch["advantages"].abs().sum() > 0
    assert len(set(s.batch["uid"])) == 4 and name in dir(wb.recipes)
    # back over everything, and on again: the same numbers
    again = s.back(to="rollout").run()
    for key, value in metrics.items():
        assert key.startswith("timing") or again.trace.metrics[key] == value, key


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if one in ("dapo", "ppo", "remax") else pytest.mark.long) for one in RECIPES],
)
@pytest.mark.slow
def test_it_trains_and_any_step_can_be_had_again(name: str, tiny: str, tmp_path: Path) -> None:
    pipe, rows = make(name, tiny)
    run = wb.train_blocking(pipe, rows, steps=2, batch_size=4, run=tmp_path / "r", trackers=(), trace_freq=1)
    found = run.engine(2).snapshot()["weights"]
    wanted = pipe.learners()["actor"].snapshot()["weights"]
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    for step in (1, 2):
        recorded = run.traces[step]
        assert recorded.names == pipe.names and len(recorded.batch) > 0
        assert torch.isfinite(recorded.batch["advantages"]).all()


@pytest.mark.slow
def test_what_makes_each_of_them(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    settings = {name: {stage.name: stage.settings() for stage in make(name, engine)[0]} for name in RECIPES}
    assert settings["dr_grpo"]["update_actor"]["loss_scale_factor"] == 12.0
    assert settings["dr_grpo"]["advantage"]["norm_by_std"] is False
    assert settings["gspo"]["update_actor"]["loss_mode"] == "gspo" and "ref_log_prob" not in settings["gspo"]
    assert settings["dapo"]["update_actor"]["clip_ratio_high"] == 0.28 and "filter_groups" in settings["dapo"]
    assert settings["remax"]["rollout"]["greedy_baseline"] is True and "baseline" in settings["remax"]
    assert settings["reinforce_plus_plus"]["update_actor"]["kl_coef"] == 0.0
    assert "kl_controller" in settings["reinforce_plus_plus"]["advantage"]
    for name in ("rloo", "opo", "gpg", "remax"):
        assert settings[name]["advantage"]["estimator"].__name__ == name


@pytest.mark.slow
def test_the_kl_is_in_the_reward_or_in_the_loss(tiny: str) -> None:
    """verl's `algorithm.use_kl_in_reward` and `actor.use_kl_loss`, for every recipe."""
    engine = wb.engines.local(tiny, device="cpu")
    for name in ("grpo", "gspo", "ppo", "reinforce_plus_plus"):
        for inside in (True, False):
            pipe, _ = make(name, engine, kl_in_reward=inside, kl_coef=0.01)
            of_reward, of_loss = pipe["advantage"].settings(), pipe["update_actor"].settings()
            assert ("kl_controller" in of_reward) is inside and of_loss["kl_coef"] == (0.0 if inside else 0.01), name
            assert not inside or of_reward["kl_type"] == "k1"
    with pytest.raises(SettingError, match="kl_target; expected kl_in_reward=True"):
        make("ppo", tiny, kl_in_reward=False, kl_target=0.1)


@pytest.mark.slow
def test_remax_compares_with_the_greedy_response(tiny: str) -> None:
    pipe, rows = make("remax", tiny)
    s = wb.Stepper(pipe, rows.batch(3)).run(until="reward")
    assert len(s.batch) == 9 and s.batch["greedy"].tolist() == [False, False, True] * 3
    greedy = {
        uid: float(r) for uid, r, g in zip(s.batch["uid"], s.batch["reward"], s.batch["greedy"], strict=True) if g
    }
    again = wb.Stepper(pipe, rows.batch(3, seed=5)).run(until="rollout").batch
    same = [text for text, g in zip(again["response_text"], again["greedy"], strict=True) if g]
    assert len(set(same)) == 3  # another seed orders other prompts; greedy rows are the prompt's own
    s.run(until="advantage")
    assert len(s.batch) == 6 and s.batch.meta_info["group_size"] == 2
    for row in range(6):
        baseline = greedy[s.batch["uid"][row]]
        assert float(s.batch["reward_baselines"][row]) == baseline
        expected = float(s.batch["reward"][row]) - baseline
        assert float(s.batch["advantages"][row, 0]) == pytest.approx(expected)


@pytest.mark.slow
def test_dapo_replaces_groups_without_signal(tiny: str) -> None:
    engine = wb.engines.local(tiny, device="cpu")
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    dull = {rows.batch(4)["uid"][1], rows.batch(4)["uid"][2]}

    def judge(response: str, uid: str) -> float:
        return 1.0 if uid in dull else varied(response)

    def run(**settings: Any) -> wb.Stepper:
        pipe = wb.recipes.dapo(engine, Reward(judge, in_process=True), group_size=4, max_tokens=12, **settings)
        return wb.Stepper(pipe, rows.batch(4)).run(until="filter_groups")

    dropped = run()
    assert dropped.trace.metrics["filter_groups/dropped"] == 2 and len(dropped.batch) == 8
    filled = run(rows=rows)
    metrics = filled.trace.metrics
    assert metrics["train/num_gen_batches"] >= 2 and metrics["filter_groups/kept"] == 4 and len(filled.batch) == 16
    told = filled.trace["filter_groups"].dropped
    assert told is not None and dull <= set(told["uid"]) and not set(told["uid"]) & set(filled.batch["uid"])
    sampled = 16 * metrics["train/num_gen_batches"]
    assert len(told) == sampled - 16 and all(len(text) for text in told["response_text"]), (
        "all others, with their texts"
    )
    assert dropped.trace["filter_groups"].dropped is None, "its `rows` tell"
    assert not dull & set(filled.batch["uid"]) and filled.batch.meta_info["step"] == 1
    twice = run(rows=rows)
    assert torch.equal(filled.batch["input_ids"], twice.batch["input_ids"])
    mask = filled.batch["response_mask"].bool()
    assert torch.equal(filled.batch["input_ids"][:, -mask.shape[1] :][mask], filled.batch["responses"][mask])


@pytest.mark.slow
def test_a_step_without_any_signal_changes_nothing(tiny: str) -> None:
    rows = wb.rows("data/arith/train.parquet", max_prompt_length=256, limit=16)
    engine = wb.engines.local(tiny, device="cpu", weight_decay=0.0)
    pipe = wb.recipes.dapo(engine, Reward(lambda response: 1.0, in_process=True), rows=rows, group_size=2, max_tokens=8)
    s = wb.Stepper(pipe, rows.batch(2)).run()
    assert s.trace.metrics["train/num_gen_batches"] == 4 and len(s.batch) == 4
    assert float(s.batch["advantages"].abs().sum()) == 0.0
    told = s.trace["filter_groups"].dropped
    assert told is not None and len(told) == 12, "three further batches, thrown away"


def test_overlong_answers_are_penalised_softly(tiny: str) -> None:
    mask = torch.tensor([[1] * length + [0] * (10 - length) for length in (6, 7, 8, 10)])
    reward = torch.ones(4)
    batch = wb.DataProto(
        {
            "response_mask": mask,
            "reward": reward,
            "scored": torch.tensor([True, True, True, True]),
            "token_level_scores": torch.zeros(4, 10),
        }
    )
    out = wb.stages.Overlong(10, 4, penalty=2.0)(batch).batch
    assert out["reward"].tolist() == [1.0, 0.5, 0.0, -1.0] and out["reward/overlong"].tolist() == [
        0.0,
        -0.5,
        -1.0,
        -2.0,
    ]
    assert out["token_level_scores"].sum(-1).tolist() == [0.0, -0.5, -1.0, -2.0]
    with pytest.raises(SettingError, match="overlong buffer"):
        wb.stages.Overlong(10, 11)


def test_an_episodes_length_is_all_of_its_response() -> None:
    own = torch.tensor(
        [[1, 1, 0, 0, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0, 0, 0]]
    )  # 2 + 4 of a tool + 2; 2 + 2 + 1
    there = torch.tensor([[0, 1, 1] + [1] * 8 + [0] * 2, [1, 1, 1] + [1] * 5 + [0] * 5])
    zeros = torch.zeros(2, 10)
    batch = wb.DataProto(
        {"response_mask": own, "attention_mask": there, "reward": torch.ones(2), "token_level_scores": zeros}
        | {"scored": torch.tensor([True, True])}
    )
    out = wb.stages.Overlong(10, 4)(batch).batch
    assert out["reward/overlong"].tolist() == [-0.5, 0.0]  # 8 of 10 tokens, though 4 are the model's; 5 of 10
    assert out["token_level_scores"][0].nonzero().tolist() == [[7]]
    scorer = wb.rewards.shaping.overlong(max_response_length=10, buffer=4)
    assert scorer(list(range(8))).value == -0.5  # the reward function counts the same
